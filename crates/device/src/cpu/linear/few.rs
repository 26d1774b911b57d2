//! A few rows: each stored row is read once, and widened in registers for all of them.

use super::Rows;
use super::scales::{self, Tail};
use super::simd::{Decode, EXPANDED, Simd, dots};
use crate::cpu::lanes::LANES;
use crate::cpu::scratch;
use crate::formats::blocks::GROUP;
use crate::tensor::{Format, StoredMatrix};
use std::array::from_fn;
use std::ops::Range;

/// What [`dots`] needs besides the rows.
struct Product<'a, D, const M: usize> {
    decode: D,
    w: &'a StoredMatrix,
    x: [*const f32; M],
    rows: usize,
    first: usize,
    width: usize,
}

/// `out[i, j]` = row `i` of the (at most `M`) rows of `x` times row `n.start + j` of `w`; `R` stored rows at a
/// time.
///
/// # Safety
/// The processor has the instruction set; `x` is in the lane order of the format of `w`.
#[inline(always)]
pub(super) unsafe fn few<S, D, const STEPS: usize, const M: usize, const R: usize>(
    decode: D,
    x: &Rows,
    w: &StoredMatrix,
    n: Range<usize>,
    out: &mut [f32],
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    // Rows beyond the last are the last again; their results are dropped.
    let rows = x.len();
    let chunks = w.cols.div_ceil(STEPS * LANES);
    let product: Product<'_, D, M> = Product {
        decode,
        w,
        x: from_fn(|m| x.row(m.min(rows - 1)).as_ptr()),
        rows,
        first: n.start,
        width: n.len(),
    };
    if D::SCALES == 0 {
        // SAFETY: the caller's promise; there are no scales.
        unsafe { product.run::<S, STEPS, R, false>(n, |_| [std::ptr::null(); R], out) }
    } else if D::SCALES != EXPANDED {
        let scales = |rows: [usize; R]| rows.map(|row| w.row_scales(row).as_ptr());
        // SAFETY: the caller's promise; scales are read as they are stored.
        unsafe { product.run::<S, STEPS, R, true>(n, scales, out) }
    } else if w.format == Format::Fp8Block32 {
        let padded = x.row(0).len();
        let mut expanded = scratch::take(chunks * LANES);
        let mut scaled = scratch::take(rows * padded);
        let mut from = n.start;
        while from < n.end {
            let to = n.end.min((from + w.scale_row0) / GROUP * GROUP + GROUP - w.scale_row0);
            // The scale goes to the activations, once for a row of tiles, where that is exact.
            let bytes = w.row_scales(from);
            let exact = scales::are_moderate(bytes) && scales::are_exact(bytes, x.magnitudes);
            if exact {
                for (m, scaled) in scaled.chunks_mut(padded.max(1)).enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { scales::multiply::<S>(x.row(m), bytes, scaled) };
                }
            }
            // SAFETY: the caller's promise; one row of scales serves all these rows.
            unsafe {
                if exact {
                    let base = scaled.as_ptr();
                    let x = from_fn(|m| base.add(m.min(rows - 1) * padded));
                    let product: Product<'_, D, M> = Product { x, ..product };
                    product.run::<S, STEPS, R, false>(from..to, |_| [std::ptr::null(); R], out);
                } else {
                    scales::expand::<S>(w, from, 0..chunks, &mut expanded);
                    let scale = expanded.as_ptr().cast();
                    product.run::<S, STEPS, R, true>(from..to, |_| [scale; R], out);
                }
            }
            from = to;
        }
    } else {
        let values = chunks * LANES;
        let mut expanded = scratch::take(R * values);
        let scales = |rows: [usize; R]| {
            for (r, expanded) in rows.into_iter().zip(expanded.chunks_mut(values.max(1))) {
                // SAFETY: the caller's promise.
                unsafe { scales::expand::<S>(w, r, 0..chunks, expanded) };
            }
            from_fn(|i| expanded[i * values..].as_ptr().cast())
        };
        // SAFETY: the caller's promise; a row of expanded scales for each stored row.
        unsafe { product.run::<S, STEPS, R, true>(n, scales, out) }
    }
}

impl<D, const M: usize> Product<'_, D, M> {
    /// Rows `n`, `R` at a time: one of each of `R` parts that follow each other, so that memory is
    /// read in `R` long streams. `scales` says where the scales of rows are.
    #[inline(always)]
    unsafe fn run<S, const STEPS: usize, const R: usize, const SCALED: bool>(
        &self,
        n: Range<usize>,
        mut scales: impl FnMut([usize; R]) -> [*const u8; R],
        out: &mut [f32],
    ) where
        S: Simd,
        D: Decode<S, STEPS>,
    {
        let part = n.len().div_ceil(R);
        let chunks = self.w.cols / (STEPS * LANES);
        let mut tail = Tail::<R>::new();
        for r in 0..part {
            let rows: [usize; R] = from_fn(|i| (n.start + i * part + r).min(n.end - 1));
            let stored: [&[u8]; R] = rows.map(|row| self.w.row(row));
            let tail = tail.of(self.w, stored, D::BYTES);
            // What is wanted soon: each part's next row, or where it starts in the next rows.
            let ahead = if r + 1 < part { 1 } else { (R - 1) * part + 1 };
            // SAFETY: rows and tails cover the chunks; the caller vouches for scales and x.
            let sums = unsafe {
                dots::<S, D, STEPS, M, R, SCALED>(
                    self.decode,
                    self.x,
                    stored.map(<[u8]>::as_ptr),
                    scales(rows),
                    chunks,
                    tail,
                    ahead * self.w.row_stride,
                )
            };
            for (i, row) in rows.into_iter().enumerate() {
                // The last part may be shorter.
                if i * part + r < n.len() {
                    for m in 0..self.rows {
                        out[m * self.width + row - self.first] = sums[i][m];
                    }
                }
            }
        }
    }
}
