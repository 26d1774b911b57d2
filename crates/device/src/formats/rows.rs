//! Rows of a cache: values, then the scales of their groups. A row whose width is not a multiple of
//! the group ends in a shorter group.
//!
//! A group that holds a NaN gets a NaN scale, so all of it reads as NaN.

use super::{amax, at_least, e2m1, e4m3, ue8m0};
use crate::tensor::RowFormat;
use half::bf16;

/// The scale byte of a group.
#[inline]
fn scale_byte(format: RowFormat, group: &[f32]) -> u8 {
    let amax = amax(group);
    match format {
        RowFormat::F32 | RowFormat::Bf16 => 0,
        RowFormat::Fp8x32 => fp8_scale(amax),
        RowFormat::Nvfp4x16 => e4m3::encode(at_least(amax, 6.0 * 2f32.powi(-9)) / e2m1::MAX),
        RowFormat::Mxfp4x32 => fp4_scale(amax),
    }
}

/// UE8M0 scale of E4M3 values: the least power of two that brings `amax` to 448 or below, with
/// `amax` taken as at least 1e-4.
#[inline]
pub(super) fn fp8_scale(amax: f32) -> u8 {
    ue8m0::encode_ceil(at_least(amax, 1e-4) / e4m3::MAX)
}

/// UE8M0 scale of E2M1 values: the least power of two that brings `amax` to 6 or below, at least
/// 2^-126.
#[inline]
pub(super) fn fp4_scale(amax: f32) -> u8 {
    ue8m0::encode_ceil(at_least(amax, 6.0 * f32::MIN_POSITIVE) / e2m1::MAX)
}

/// Values in a group, bytes of the values of a row, and the reader of a scale byte.
#[inline]
fn layout(format: RowFormat, width: usize) -> (usize, usize, fn(u8) -> f32) {
    match format {
        RowFormat::F32 => (1, width * 4, ue8m0::decode),
        RowFormat::Bf16 => (1, width * 2, ue8m0::decode),
        RowFormat::Fp8x32 => (32, width, ue8m0::decode),
        RowFormat::Nvfp4x16 => (16, width.div_ceil(2), e4m3::decode),
        RowFormat::Mxfp4x32 => (32, width.div_ceil(2), ue8m0::decode),
    }
}

/// Rounds a row to `format` and stores it.
///
/// # Panics
/// If `out` is not `format.row_bytes(x.len())` long.
pub fn encode_row(format: RowFormat, x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), format.row_bytes(x.len()), "a row of {} values", x.len());
    let (group, value_bytes, scale_value) = layout(format, x.len());
    match format {
        RowFormat::F32 => {
            for (v, bytes) in x.iter().zip(out.chunks_exact_mut(4)) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
        RowFormat::Bf16 => {
            for (v, bytes) in x.iter().zip(out.chunks_exact_mut(2)) {
                bytes.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
            }
        }
        RowFormat::Fp8x32 => {
            let (codes, scales) = out.split_at_mut(value_bytes);
            for ((x, codes), scale) in x.chunks(group).zip(codes.chunks_mut(group)).zip(scales) {
                *scale = scale_byte(format, x);
                let scale = scale_value(*scale);
                for (v, code) in x.iter().zip(codes) {
                    *code = e4m3::encode(v / scale);
                }
            }
        }
        RowFormat::Nvfp4x16 | RowFormat::Mxfp4x32 => {
            let (codes, scales) = out.split_at_mut(value_bytes);
            for ((x, codes), scale) in x.chunks(group).zip(codes.chunks_mut(group / 2)).zip(scales)
            {
                *scale = scale_byte(format, x);
                e2m1::encode_scaled(x, scale_value(*scale), codes);
            }
        }
    }
}

/// Reads a stored row of `out.len()` values.
///
/// # Panics
/// If `bytes` is not `format.row_bytes(out.len())` long.
pub fn decode_row(format: RowFormat, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), format.row_bytes(out.len()), "a row of {} values", out.len());
    let (group, value_bytes, scale_value) = layout(format, out.len());
    match format {
        RowFormat::F32 => {
            for (v, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *v = f32::from_le_bytes(*bytes);
            }
        }
        RowFormat::Bf16 => {
            for (v, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *v = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        RowFormat::Fp8x32 => {
            let (codes, scales) = bytes.split_at(value_bytes);
            for ((out, codes), scale) in out.chunks_mut(group).zip(codes.chunks(group)).zip(scales)
            {
                let scale = scale_value(*scale);
                for (v, code) in out.iter_mut().zip(codes) {
                    *v = e4m3::decode(*code) * scale;
                }
            }
        }
        RowFormat::Nvfp4x16 | RowFormat::Mxfp4x32 => {
            let (codes, scales) = bytes.split_at(value_bytes);
            for ((out, codes), scale) in
                out.chunks_mut(group).zip(codes.chunks(group / 2)).zip(scales)
            {
                e2m1::decode_scaled(codes, scale_value(*scale), out);
            }
        }
    }
}

/// Rounds a row in place to what reading it back from `format` gives. F32 and bf16 rows, the
/// `exact` formats, are left alone.
pub fn round_row(format: RowFormat, x: &mut [f32]) {
    let (group, _, scale_value) = layout(format, x.len());
    match format {
        RowFormat::F32 | RowFormat::Bf16 => {}
        RowFormat::Fp8x32 => {
            for x in x.chunks_mut(group) {
                let scale = scale_value(scale_byte(format, x));
                for v in x {
                    *v = e4m3::decode(e4m3::encode(*v / scale)) * scale;
                }
            }
        }
        RowFormat::Nvfp4x16 | RowFormat::Mxfp4x32 => {
            for x in x.chunks_mut(group) {
                let scale = scale_value(scale_byte(format, x));
                for v in x {
                    *v = e2m1::decode(e2m1::encode(*v / scale)) * scale;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [RowFormat; 5] = [
        RowFormat::F32,
        RowFormat::Bf16,
        RowFormat::Fp8x32,
        RowFormat::Nvfp4x16,
        RowFormat::Mxfp4x32,
    ];

    #[test]
    fn a_nan_spoils_its_group_only() {
        for format in FORMATS {
            let mut x = [6.0; 64];
            x[40] = f32::NAN;
            let mut bytes = vec![0; format.row_bytes(64)];
            encode_row(format, &x, &mut bytes);
            let mut back = [0.0; 64];
            decode_row(format, &bytes, &mut back);
            assert!(back[40].is_nan(), "{format:?}");
            assert_eq!(back[..32], [6.0; 32], "{format:?}");
        }
    }

    #[test]
    fn short_last_groups_and_odd_widths() {
        for format in FORMATS {
            for width in [0, 1, 2, 15, 17, 31, 33, 47, 63] {
                let x: Vec<f32> = (0..width).map(|i| (i as f32 - 7.0) * 0.5).collect();
                let mut bytes = vec![0; format.row_bytes(width)];
                encode_row(format, &x, &mut bytes);
                let mut back = vec![0.0; width];
                decode_row(format, &bytes, &mut back);
                let mut rounded = x.clone();
                round_row(format, &mut rounded);
                assert_eq!(back, rounded, "{format:?} of {width}");
            }
        }
    }
}
