//! E4M3FN: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, 0x7F and 0xFF are NaN.

/// The largest finite value.
pub const MAX: f32 = 448.0;

/// The value of every code.
pub(crate) const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u8);
        code += 1;
    }
    values
};

const fn value(code: u8) -> f32 {
    let exponent = (code >> 3 & 15) as u32;
    let mantissa = (code & 7) as u32;
    let magnitude = if code & 0x7F == 0x7F {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of a code; exact.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// The nearest code, ties to even, saturating: infinities and all beyond 448 give 448. NaN gives
/// NaN. The sign of a zero survives.
#[inline]
pub fn encode(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    if x.is_nan() {
        return sign | 0x7F;
    }
    let magnitude = x.abs().min(MAX);
    let code = if magnitude < 1.0 / 64.0 {
        // Subnormals are multiples of 2^-9; 8 of them are the least normal, whose code is 8.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives() {
        for code in 0..=255u8 {
            let x = decode(code);
            assert_eq!(encode(x), code, "{code:#x} is {x}");
            assert_eq!(x.is_sign_negative(), code & 0x80 != 0);
            assert_eq!(x.is_nan(), code & 0x7F == 0x7F);
        }
        assert_eq!(decode(0x7E), MAX);
        assert_eq!(decode(0x01), 1.0 / 512.0);
        assert_eq!(decode(0xB8), -1.0);
    }

    #[test]
    fn ties_go_to_the_even_code_and_large_values_saturate() {
        for code in 0..0x7Eu8 {
            let middle = (decode(code) + decode(code + 1)) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(encode(middle), even);
            assert_eq!(encode(middle.next_down()), code);
            assert_eq!(encode(middle.next_up()), code + 1);
            assert_eq!(encode(-middle), even | 0x80);
        }
        for x in [448.0, 449.0, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (0x7E, 0xFE));
        }
    }
}
