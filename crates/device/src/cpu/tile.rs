//! Products of a few rows with a tile of keys, for attention and for index scores.

use crate::cpu::dispatch::{LANES, by_isa};

/// Keys in a tile, and columns that are computed together.
pub(crate) const TILE: usize = 64;
/// Rows that are computed together.
pub(crate) const ROWS: usize = 4;
/// Vectors in a tile's row.
const VECTORS: usize = TILE / LANES;
/// Terms summed before their sum is added to the result.
pub(crate) const CHUNK: usize = 64;

/// `sum_i a[r][i] * b[i * stride + c]` for [`ROWS`] rows and [`TILE`] columns: fused multiply-adds
/// from zero, `i` ascending.
#[inline(always)]
pub(crate) fn product(a: [&[f32]; ROWS], b: &[f32], stride: usize) -> [[f32; TILE]; ROWS] {
    let n = a[0].len();
    let mut acc = [[[0.0f32; LANES]; VECTORS]; ROWS];
    let a = [&a[0][..n], &a[1][..n], &a[2][..n], &a[3][..n]];
    for i in 0..n {
        let b: &[[f32; LANES]; VECTORS] = tile_row(&b[i * stride..][..TILE]);
        for r in 0..ROWS {
            let factor = a[r][i];
            for v in 0..VECTORS {
                for l in 0..LANES {
                    acc[r][v][l] = factor.mul_add(b[v][l], acc[r][v][l]);
                }
            }
        }
    }
    let mut out = [[0.0f32; TILE]; ROWS];
    for r in 0..ROWS {
        for v in 0..VECTORS {
            out[r][v * LANES..][..LANES].copy_from_slice(&acc[r][v]);
        }
    }
    out
}

/// A row of a tile as vectors.
#[inline(always)]
fn tile_row(row: &[f32]) -> &[[f32; LANES]; VECTORS] {
    match row.as_chunks::<LANES>().0.first_chunk::<VECTORS>() {
        Some(row) => row,
        None => &[[0.0; LANES]; VECTORS],
    }
}

/// Dot products of [`ROWS`] rows with the [`TILE`] keys of `keys` (`[dim, TILE]`): chunks of
/// [`CHUNK`] terms, whose sums are added in ascending order.
#[inline(always)]
pub(crate) fn dots(rows: [&[f32]; ROWS], keys: &[f32]) -> [[f32; TILE]; ROWS] {
    let dim = rows[0].len();
    let mut total = [[0.0f32; TILE]; ROWS];
    for at in (0..dim).step_by(CHUNK) {
        let n = CHUNK.min(dim - at);
        let part = rows.map(|row| &row[at..at + n]);
        let sums = product(part, &keys[at * TILE..], TILE);
        for r in 0..ROWS {
            for c in 0..TILE {
                total[r][c] += sums[r][c];
            }
        }
    }
    total
}

/// [`ROWS`] rows from `first` on out of `rows` rows of `width`; the last one repeated past the end.
#[inline(always)]
pub(crate) fn take(x: &[f32], width: usize, first: usize, rows: usize) -> [&[f32]; ROWS] {
    std::array::from_fn(|r| &x[(first + r).min(rows - 1) * width..][..width])
}

by_isa! {
    /// `out[d * TILE + j] = rows[j * stride + d]` for [`TILE`] rows of `width`.
    pub(crate) fn transpose(rows: &[f32], stride: usize, width: usize, out: &mut [f32]) {
        for at in (0..width).step_by(LANES) {
            let n = LANES.min(width - at);
            for from in (0..TILE).step_by(LANES) {
                let mut square = [[0.0f32; LANES]; LANES];
                for j in 0..LANES {
                    square[j][..n].copy_from_slice(&rows[(from + j) * stride + at..][..n]);
                }
                for d in 0..n {
                    let out = &mut out[(at + d) * TILE + from..][..LANES];
                    for j in 0..LANES {
                        out[j] = square[j][d];
                    }
                }
            }
        }
    }
}
