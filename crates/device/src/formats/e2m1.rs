//! E2M1: sign, 2 exponent bits, 1 mantissa bit; two codes a byte, the even column in the low nibble.

/// The largest value.
pub const MAX: f32 = 6.0;

/// The value of each 4-bit code.
pub const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of the code in the low nibble; exact.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize & 15]
}

/// The nearest code, ties to even, saturating at 6. The sign survives when the magnitude becomes 0.
/// There is no code for NaN: it gives a zero.
#[inline]
pub fn encode(x: f32) -> u8 {
    let sign = (x.to_bits() >> 28) as u8 & 8;
    let m = x.abs();
    // Midpoints between neighbours; a tie goes up where the upper code is even.
    let code = (m > 0.25) as u8
        + (m >= 0.75) as u8
        + (m > 1.25) as u8
        + (m >= 1.75) as u8
        + (m > 2.5) as u8
        + (m >= 3.5) as u8
        + (m > 5.0) as u8;
    sign | code
}

/// Stores the codes of `x` two a byte; the last high nibble is 0 if the length is odd.
#[inline]
pub(super) fn encode_scaled(x: &[f32], scale: f32, out: &mut [u8]) {
    for (pair, byte) in x.chunks(2).zip(out) {
        let high = pair.get(1).map_or(0, |v| encode(v / scale));
        *byte = encode(pair[0] / scale) | high << 4;
    }
}

/// Reads `out.len()` codes times `scale`.
#[inline]
pub(super) fn decode_scaled(bytes: &[u8], scale: f32, out: &mut [f32]) {
    for (pair, byte) in out.chunks_mut(2).zip(bytes) {
        pair[0] = decode(*byte) * scale;
        if let Some(high) = pair.get_mut(1) {
            *high = decode(byte >> 4) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives() {
        for code in 0..16u8 {
            assert_eq!(encode(decode(code)), code);
        }
    }

    #[test]
    fn ties_go_to_the_even_code_and_large_values_saturate() {
        for code in 0..7u8 {
            let middle = (decode(code) + decode(code + 1)) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(encode(middle), even);
            assert_eq!(encode(middle.next_down()), code);
            assert_eq!(encode(middle.next_up()), code + 1);
            assert_eq!(encode(-middle), even | 8);
        }
        for x in [6.0, 7.0, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (7, 15));
        }
        assert_eq!(encode(f32::NAN) & 7, 0);
    }
}
