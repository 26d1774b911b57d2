//! The order in which a linear layer sums its products.
//!
//! `y = sum_k x[k] * w[k]` runs over 16 lanes. Columns are taken in chunks; inside a chunk each
//! column belongs to one lane, and a lane takes its columns in ascending order:
//! `acc[lane] = fma(x[k], w[k], acc[lane])`, from 0. Columns beyond the last, up to a whole chunk,
//! count as `x = w = 0`. The lanes are added by halves ([`tree`]). `w[k]` is the dequantized weight.
//!
//! The chunk and the lane of a column depend on the stored format alone; they are those that a
//! 512-bit register gives for free when codes are widened in place:
//!
//! | format | chunk | lane of column c of a chunk |
//! |---|---|---|
//! | f32, bf16 | 16 | c |
//! | fp8 | 64 | 4 * (c / 16) + c / 2 % 4 |
//! | fp4 | 32 | 4 * (c % 4) + c / 8 |
//!
//! Values "in lane order" are permuted so that step `s` of a chunk (the s-th column of every lane)
//! is 16 adjacent values, and padded with zeros to whole chunks.

pub(crate) use super::dispatch::{LANES, tree};
use crate::tensor::Format;

/// Columns in a chunk.
pub(crate) const fn chunk(format: Format) -> usize {
    match format {
        Format::F32 | Format::Bf16 => 16,
        Format::Fp8Block32 | Format::Fp8Row32 => 64,
        Format::Fp4Row32 => 32,
    }
}

/// Values in a row of `cols` columns in lane order.
pub(crate) const fn padded(format: Format, cols: usize) -> usize {
    cols.next_multiple_of(chunk(format))
}

/// Where column `c` of a chunk is in lane order: `16 * step + lane`.
#[inline(always)]
pub(crate) const fn place(format: Format, c: usize) -> usize {
    match format {
        Format::F32 | Format::Bf16 => c,
        Format::Fp8Block32 | Format::Fp8Row32 => {
            let (lane, step) = (4 * (c / 16) + c / 2 % 4, 2 * (c / 8 % 2) + c % 2);
            LANES * step + lane
        }
        Format::Fp4Row32 => {
            let (lane, step) = (4 * (c % 4) + c / 8, c / 4 % 2);
            LANES * step + lane
        }
    }
}

/// Puts a row into lane order; `out` is `padded(format, x.len())` long.
pub(crate) fn arrange(format: Format, x: &[f32], out: &mut [f32]) {
    match format {
        Format::F32 | Format::Bf16 => {
            out[..x.len()].copy_from_slice(x);
            out[x.len()..].fill(0.0);
        }
        Format::Fp8Block32 | Format::Fp8Row32 => arrange_chunks::<64>(Format::Fp8Block32, x, out),
        Format::Fp4Row32 => arrange_chunks::<32>(Format::Fp4Row32, x, out),
    }
}

#[inline(always)]
fn arrange_chunks<const N: usize>(format: Format, x: &[f32], out: &mut [f32]) {
    let (whole, rest) = x.as_chunks::<N>();
    let mut chunks = out.as_chunks_mut::<N>().0.iter_mut();
    for (x, out) in whole.iter().zip(&mut chunks) {
        for c in 0..N {
            out[place(format, c)] = x[c];
        }
    }
    if let Some(out) = chunks.next() {
        *out = [0.0; N];
        for (c, v) in rest.iter().enumerate() {
            out[place(format, c)] = *v;
        }
    }
}

/// The sum over two rows in lane order.
#[inline(always)]
pub(crate) fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        for l in 0..LANES {
            acc[l] = x[l].mul_add(w[l], acc[l]);
        }
    }
    tree(acc)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Format; 5] =
        [Format::F32, Format::Bf16, Format::Fp8Block32, Format::Fp4Row32, Format::Fp8Row32];

    #[test]
    fn lanes_take_their_columns_in_ascending_order() {
        for format in FORMATS {
            let n = chunk(format);
            let mut column = vec![None; n];
            for c in 0..n {
                assert_eq!(column[place(format, c)].replace(c), None, "{format:?}");
            }
            for lane in 0..LANES {
                let of_lane: Vec<_> = column.iter().skip(lane).step_by(LANES).collect();
                assert!(of_lane.is_sorted(), "{format:?}");
            }
        }
    }

    #[test]
    fn rows_are_padded_with_zeros() {
        for format in FORMATS {
            for cols in [0, 1, 16, 31, 33, 64, 72, 100] {
                let x: Vec<f32> = (0..cols).map(|c| c as f32 + 1.0).collect();
                let mut out = vec![f32::NAN; padded(format, cols)];
                arrange(format, &x, &mut out);
                let n = chunk(format);
                for (i, x) in x.iter().enumerate() {
                    assert_eq!(out[i / n * n + place(format, i % n)], *x);
                }
                assert_eq!(out.iter().filter(|v| **v == 0.0).count(), out.len() - cols);
            }
        }
    }
}
