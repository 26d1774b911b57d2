//! Products of a few rows with a tile of keys, for attention and for index scores.

use crate::cpu::dispatch::LANES;

/// Keys in a tile, and columns that are computed together.
pub(crate) const TILE: usize = 64;
/// Rows that are computed together.
pub(crate) const ROWS: usize = 4;
/// Vectors in a tile's row.
const VECTORS: usize = TILE / LANES;
/// Terms summed before their sum is added to the result.
pub(crate) const CHUNK: usize = 64;

/// `sum_i a[r][i] * b[i * TILE + c]` for [`ROWS`] rows and [`TILE`] columns: fused multiply-adds
/// from zero, `i` ascending.
#[inline(always)]
pub(crate) fn product(a: [&[f32]; ROWS], b: &[f32]) -> [[f32; TILE]; ROWS] {
    let n = a[0].len();
    let mut acc = [[[0.0f32; LANES]; VECTORS]; ROWS];
    let a = [&a[0][..n], &a[1][..n], &a[2][..n], &a[3][..n]];
    for (i, b) in b.as_chunks::<TILE>().0[..n].iter().enumerate() {
        let b: &[[f32; LANES]; VECTORS] = tile_row(b);
        for r in 0..ROWS {
            let factor = a[r][i];
            for v in 0..VECTORS {
                for l in 0..LANES {
                    acc[r][v][l] = factor.mul_add(b[v][l], acc[r][v][l]);
                }
            }
        }
    }
    // Constant indices only, so that the sums above stay in registers.
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
fn tile_row(row: &[f32; TILE]) -> &[[f32; LANES]; VECTORS] {
    match row.as_chunks::<LANES>().0.first_chunk::<VECTORS>() {
        Some(row) => row,
        None => &[[0.0; LANES]; VECTORS],
    }
}

/// Adds to `totals` the dot products of [`ROWS`] rows with the [`TILE`] keys of `keys`
/// (`[terms, TILE]`, at most [`CHUNK`] terms). A longer dot product is the sum of its chunks in
/// ascending order.
#[inline(always)]
pub(crate) fn add_dots(rows: [&[f32]; ROWS], keys: &[f32], totals: &mut [[f32; TILE]]) {
    let sums = product(rows, keys);
    for (total, sums) in totals.iter_mut().zip(&sums) {
        for j in 0..TILE {
            total[j] += sums[j];
        }
    }
}

/// [`ROWS`] rows from `first` on out of `rows` rows of `width`; the last one repeated past the end.
#[inline(always)]
pub(crate) fn rows_from(x: &[f32], width: usize, first: usize, rows: usize) -> [&[f32]; ROWS] {
    std::array::from_fn(|r| &x[(first + r).min(rows - 1) * width..][..width])
}
