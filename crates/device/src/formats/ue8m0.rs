//! UE8M0: a power of two as its biased exponent. Byte b is 2^(b - 127), 255 is NaN.

/// The value of a byte; exact (byte 0 is a subnormal f32).
#[inline]
pub fn decode(byte: u8) -> f32 {
    let bits = ((byte as u32) << 23).max(0x0040_0000);
    f32::from_bits(if byte == 255 { f32::NAN.to_bits() } else { bits })
}

/// The byte of the smallest power of two that is at least `x`, which is not negative. Found on the
/// bits of `x`, without a logarithm. Values up to 2^-127 give byte 0, values above 2^127 (infinity
/// too) give 254, NaN gives 255.
#[inline]
pub fn encode_ceil(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 {
        return 255;
    }
    if bits <= 0x0040_0000 {
        return 0;
    }
    ((bits + 0x007F_FFFF) >> 23).min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives() {
        for byte in 0..=255u8 {
            let x = decode(byte);
            assert_eq!(encode_ceil(x), byte);
            if byte < 255 {
                assert_eq!((x as f64).log2(), byte as f64 - 127.0);
                assert_eq!(encode_ceil(x.next_up()), byte.saturating_add(1).min(254));
            }
        }
        assert_eq!(encode_ceil(0.0), 0);
        assert_eq!(encode_ceil(f32::INFINITY), 254);
    }
}
