//! Weight matrices in stored form: reading rows, and the encoders that make checkpoints.

use super::rows::{fp4_scale, fp8_scale};
use super::{amax, e2m1, e4m3, ue8m0};
use crate::tensor::{Format, StoredMatrix};
use half::bf16;

/// Columns (and, for tiles, rows) that share a scale.
pub const GROUP: usize = 32;

/// Reads row `r` of a matrix as f32. Exact, unless a scale beyond 2^118 takes a value out of range.
///
/// # Panics
/// If the row does not exist, or `out` is not `m.cols` long.
pub fn dequantize_matrix_row(m: &StoredMatrix, r: usize, out: &mut [f32]) {
    assert!(r < m.rows, "row {r} of {m:?}");
    assert_eq!(out.len(), m.cols, "a row of {m:?}");
    let row = m.row(r);
    match m.format {
        Format::F32 => {
            for (v, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *v = f32::from_le_bytes(*bytes);
            }
        }
        Format::Bf16 => {
            for (v, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *v = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        Format::Fp8Block32 | Format::Fp8Row32 => {
            let groups = out.chunks_mut(GROUP).zip(row.chunks(GROUP));
            for ((out, codes), scale) in groups.zip(m.row_scales(r)) {
                let scale = ue8m0::decode(*scale);
                for (v, code) in out.iter_mut().zip(codes) {
                    *v = e4m3::decode(*code) * scale;
                }
            }
        }
        Format::Fp4Row32 => {
            let groups = out.chunks_mut(GROUP).zip(row.chunks(GROUP / 2));
            for ((out, codes), scale) in groups.zip(m.row_scales(r)) {
                e2m1::decode_scaled(codes, ue8m0::decode(*scale), out);
            }
        }
    }
}

/// Rounds a row-major f32 matrix to `format`: the values and the scales, as they lie in a
/// checkpoint. A scale is the least power of two that brings the largest magnitude of its group to
/// 448 (fp8; magnitudes below 1e-4 count as 1e-4) or 6 (fp4).
///
/// # Panics
/// If `x` is not `rows * cols` long.
pub fn encode_matrix(format: Format, x: &[f32], rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>) {
    assert_eq!(x.len(), rows * cols, "a matrix of {rows} x {cols}");
    let mut data = vec![0; rows * format.row_bytes(cols)];
    let (scale_rows, groups) = format.scale_shape(rows, cols).unwrap_or((0, 0));
    let mut scales = vec![0; scale_rows * groups];
    if x.is_empty() {
        return (data, scales);
    }
    match format {
        Format::F32 => {
            for (v, bytes) in x.iter().zip(data.chunks_exact_mut(4)) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
        Format::Bf16 => {
            for (v, bytes) in x.iter().zip(data.chunks_exact_mut(2)) {
                bytes.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
            }
        }
        Format::Fp8Block32 => {
            let tiles = x.chunks(GROUP * cols).zip(scales.chunks_exact_mut(groups));
            for (tile_rows, scales) in tiles {
                for (g, scale) in scales.iter_mut().enumerate() {
                    let of_group =
                        |row: &'_ [f32]| amax(&row[g * GROUP..cols.min((g + 1) * GROUP)]);
                    let magnitudes: Vec<f32> = tile_rows.chunks(cols).map(of_group).collect();
                    *scale = fp8_scale(amax(&magnitudes));
                }
            }
            encode_fp8(x, cols, |r| &scales[r / GROUP * groups..][..groups], &mut data);
        }
        Format::Fp8Row32 => {
            row_scales(x, cols, fp8_scale, &mut scales);
            encode_fp8(x, cols, |r| &scales[r * groups..][..groups], &mut data);
        }
        Format::Fp4Row32 => {
            row_scales(x, cols, fp4_scale, &mut scales);
            let rows = x.chunks(cols).zip(data.chunks_mut(format.row_bytes(cols)));
            for ((row, bytes), scales) in rows.zip(scales.chunks_exact(groups)) {
                let groups = row.chunks(GROUP).zip(bytes.chunks_mut(GROUP / 2));
                for ((group, bytes), scale) in groups.zip(scales) {
                    e2m1::encode_scaled(group, ue8m0::decode(*scale), bytes);
                }
            }
        }
    }
    (data, scales)
}

/// One scale for each row and group of columns.
fn row_scales(x: &[f32], cols: usize, scale: fn(f32) -> u8, out: &mut [u8]) {
    let groups = x.chunks(cols).flat_map(|row| row.chunks(GROUP));
    for (group, byte) in groups.zip(out) {
        *byte = scale(amax(group));
    }
}

/// E4M3 codes of rows, given the scale bytes of each row.
fn encode_fp8<'a>(x: &[f32], cols: usize, scales: impl Fn(usize) -> &'a [u8], out: &mut [u8]) {
    for (r, (row, codes)) in x.chunks(cols).zip(out.chunks_mut(cols)).enumerate() {
        let groups = row.chunks(GROUP).zip(codes.chunks_mut(GROUP));
        for ((row, codes), scale) in groups.zip(scales(r)) {
            let scale = ue8m0::decode(*scale);
            for (v, code) in row.iter().zip(codes) {
                *code = e4m3::encode(v / scale);
            }
        }
    }
}
