//! Reading rows of quantized caches, vectorized: the values of [`crate::formats::decode_row`].

use crate::cpu::dispatch::by_isa;
use crate::cpu::tile::TILE;
use crate::cpu::{Isa, scratch};
use crate::formats::{decode_row, e4m3, ue8m0};
use crate::tensor::RowFormat;

/// Values that one step widens.
const STEP: usize = 32;
/// Steps in a row of a tile.
const STEPS: usize = TILE / STEP;

/// Reads a stored row of `width` values. Every [`TILE`] of them start `stride` after the last.
pub(crate) fn decode(
    isa: Isa,
    format: RowFormat,
    bytes: &[u8],
    width: usize,
    stride: usize,
    out: &mut [f32],
) {
    match format {
        RowFormat::Fp8x32 if width.is_multiple_of(STEP) => {
            decode_fp8(isa, bytes, width, stride, out);
        }
        RowFormat::Nvfp4x16 if width.is_multiple_of(STEP) => {
            decode_nvfp4(isa, bytes, width, stride, out);
        }
        RowFormat::Mxfp4x32 if width.is_multiple_of(STEP) => {
            decode_mxfp4(isa, bytes, width, stride, out);
        }
        _ if stride == TILE => decode_row(format, bytes, &mut out[..width]),
        _ => {
            let mut row = scratch::take(width);
            decode_row(format, bytes, &mut row);
            for (panel, columns) in row.chunks(TILE).enumerate() {
                out[panel * stride..][..columns.len()].copy_from_slice(columns);
            }
        }
    }
}

/// Where step `i` of a row is written.
#[inline(always)]
fn place(out: &mut [f32], stride: usize, i: usize) -> &mut [f32] {
    &mut out[i / STEPS * stride + i % STEPS * STEP..][..STEP]
}

/// E4M3 by arithmetic on the bits.
#[inline(always)]
fn widen_e4m3(code: u8) -> f32 {
    let code = u32::from(code);
    let (sign, magnitude) = ((code & 0x80) << 24, code & 0x7f);
    // Exponent bias 7 becomes 127. Below the least normal, 2^-6, the mantissa counts multiples of
    // 2^-9: put on top of 2^-6, which is taken off again.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let small = f32::from_bits((magnitude << 20) + (121 << 23)) - 1.0 / 64.0;
    let value = if magnitude < 8 { small } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | sign)
}

/// E2M1 in the low four bits, by arithmetic.
#[inline(always)]
fn widen_e2m1(code: u8) -> f32 {
    let code = u32::from(code);
    let (sign, magnitude) = ((code & 8) << 28, code & 7);
    let normal = f32::from_bits((magnitude << 22) + (126 << 23));
    let small = f32::from_bits((magnitude << 22) + (127 << 23)) - 1.0;
    let value = if magnitude < 2 { small } else { normal };
    f32::from_bits(value.to_bits() | sign)
}

/// Sixteen bytes of codes as 32 values, the low nibble first.
#[inline(always)]
fn widen_pairs(codes: &[u8; 16]) -> [f32; STEP] {
    let (mut low, mut high) = ([0.0f32; 16], [0.0f32; 16]);
    for i in 0..16 {
        low[i] = widen_e2m1(codes[i] & 15);
        high[i] = widen_e2m1(codes[i] >> 4);
    }
    let mut out = [0.0f32; STEP];
    for i in 0..16 {
        out[2 * i] = low[i];
        out[2 * i + 1] = high[i];
    }
    out
}

by_isa! {
    fn decode_fp8(bytes: &[u8], width: usize, stride: usize, out: &mut [f32]) {
        let (codes, scales) = bytes.split_at(width);
        for (i, (codes, scale)) in codes.as_chunks::<STEP>().0.iter().zip(scales).enumerate() {
            let scale = ue8m0::decode(*scale);
            let out = place(out, stride, i);
            for c in 0..STEP {
                out[c] = widen_e4m3(codes[c]) * scale;
            }
        }
    }
}

by_isa! {
    fn decode_nvfp4(bytes: &[u8], width: usize, stride: usize, out: &mut [f32]) {
        let (codes, scales) = bytes.split_at(width / 2);
        let groups = codes.as_chunks::<16>().0.iter().zip(scales.as_chunks::<2>().0);
        for (i, (codes, scales)) in groups.enumerate() {
            let values = widen_pairs(codes);
            let scales = scales.map(|scale| e4m3::VALUES[scale as usize]);
            let out = place(out, stride, i);
            for c in 0..STEP {
                out[c] = values[c] * scales[c / 16];
            }
        }
    }
}

by_isa! {
    fn decode_mxfp4(bytes: &[u8], width: usize, stride: usize, out: &mut [f32]) {
        let (codes, scales) = bytes.split_at(width / 2);
        for (i, (codes, scale)) in codes.as_chunks::<16>().0.iter().zip(scales).enumerate() {
            let values = widen_pairs(codes);
            let scale = ue8m0::decode(*scale);
            let out = place(out, stride, i);
            for c in 0..STEP {
                out[c] = values[c] * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_and_scale_reads_as_in_the_formats() {
        for format in [RowFormat::Fp8x32, RowFormat::Nvfp4x16, RowFormat::Mxfp4x32] {
            let width = 256;
            let mut bytes = vec![0u8; format.row_bytes(width)];
            for turn in 0..512usize {
                let scales = match format {
                    RowFormat::Fp8x32 => width,
                    _ => width / 2,
                };
                for (i, byte) in bytes.iter_mut().enumerate() {
                    let step = if i < scales { i + turn } else { 37 * i + turn / 2 };
                    *byte = step as u8;
                }
                let (mut want, mut spread) = (vec![0.0f32; width], vec![0.0f32; 4 * width]);
                decode_row(format, &bytes, &mut want);
                for isa in Isa::available() {
                    let stride = [TILE, 3 * TILE][turn % 2];
                    decode(isa, format, &bytes, width, stride, &mut spread);
                    let got = spread.chunks(stride).flat_map(|panel| &panel[..TILE]);
                    for (i, (got, want)) in got.zip(&want).enumerate() {
                        let same = got.to_bits() == want.to_bits();
                        assert!(
                            same || (got.is_nan() && want.is_nan()),
                            "{isa:?} {format:?} {i}: {got} is not {want}"
                        );
                    }
                }
            }
        }
    }
}
