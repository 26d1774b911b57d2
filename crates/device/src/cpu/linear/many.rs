//! Many rows: a block of stored rows is widened to f32 once, then multiplied in register tiles.

use super::Rows;
use super::scales::{self, Tail};
use super::simd::{Decode, MAX_MR, Simd};
use crate::cpu::lanes::{LANES, tree};
use crate::cpu::scratch;
use crate::formats::blocks::GROUP;
use crate::tensor::{Format, StoredMatrix};
use std::array::from_fn;
use std::ops::Range;

/// Values of a row that are multiplied before the next stored row: the activations of a tile stay
/// in the first cache, the widened weights in the second.
const DEPTH: usize = 1024;
/// Tiles of activation rows up to which each tile of weights is used up at once: it need not leave
/// the first cache.
const FEW_TILES: usize = 3;

/// `out[i, j]` = row `i` of `x` times row `n.start + j` of `w`, in register tiles.
///
/// # Safety
/// The processor has the instruction set; `x` is in the lane order of the format of `w`.
#[inline(always)]
pub(super) unsafe fn many<S, D, const STEPS: usize>(
    decode: D,
    x: &Rows,
    w: &StoredMatrix,
    n: Range<usize>,
    out: &mut [f32],
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    let (rows, width) = (x.len(), n.len());
    let (row_tiles, tiles) = (rows.div_ceil(S::MR), width.div_ceil(S::NR));
    let chunks = w.cols.div_ceil(STEPS * LANES);
    // Tiles of weights that are widened before they are used.
    let group = if row_tiles <= FEW_TILES { 1 } else { tiles };
    let depth = DEPTH / (STEPS * LANES);
    let tile_len = S::MR * S::NR * LANES;
    let mut panel = scratch::take(group * S::NR * depth * STEPS * LANES);
    let mut sums = scratch::take(row_tiles * tiles * tile_len);
    let mut expanded = scratch::take(depth * D::SCALES);
    if chunks == 0 {
        sums.fill(0.0);
    }
    for from in (0..chunks).step_by(depth) {
        let block = from..chunks.min(from + depth);
        let steps = block.len() * STEPS;
        for start in (0..tiles).step_by(group) {
            let stored = (n.start + start * S::NR)..n.end.min(n.start + (start + group) * S::NR);
            let filled = stored.len() * steps * LANES;
            for (r, to) in stored.zip(panel.chunks_exact_mut(steps * LANES)) {
                // SAFETY: the caller's promise; `to` holds the block, and so does `expanded`.
                unsafe {
                    // A row of tiles shares its scales.
                    let shared = w.format == Format::Fp8Block32
                        && r > n.start
                        && !(r + w.scale_row0).is_multiple_of(GROUP);
                    if !shared {
                        scales::expand::<S>(w, r, block.clone(), D::SCALES, &mut expanded);
                    }
                    widen::<S, D, STEPS>(decode, w, r, block.clone(), &expanded, to);
                }
            }
            // Rows that fill up the last tile: any finite values do.
            panel[filled..group * S::NR * steps * LANES].fill(0.0);
            for i in 0..row_tiles {
                let count = S::MR.min(rows - i * S::MR);
                let x: [*const f32; MAX_MR] = from_fn(|m| {
                    let row = x.row(i * S::MR + m.min(count - 1));
                    row[block.start * STEPS * LANES..].as_ptr()
                });
                for t in start..tiles.min(start + group) {
                    let w = panel[(t - start) * S::NR * steps * LANES..].as_ptr();
                    let sums = sums[(i * tiles + t) * tile_len..][..tile_len].as_mut_ptr();
                    // SAFETY: the caller's promise; every pointer covers `steps` steps, `sums` a
                    // tile.
                    unsafe { S::tile(count, &x, w, steps, from == 0, sums) };
                }
            }
        }
    }
    for i in 0..rows {
        for j in 0..width {
            let at =
                (i / S::MR * tiles + j / S::NR) * S::MR * S::NR + i % S::MR * S::NR + j % S::NR;
            out[i * width + j] = tree(sums.as_chunks::<LANES>().0[at]);
        }
    }
}

/// Chunks `block` of row `r` as f32, in lane order, given their expanded scales.
#[inline(always)]
unsafe fn widen<S, D, const STEPS: usize>(
    decode: D,
    w: &StoredMatrix,
    r: usize,
    block: Range<usize>,
    expanded: &[f32],
    out: &mut [f32],
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    let row = w.row(r);
    let mut tail = Tail::<1>::new();
    let tail = tail.of(w, [row], D::BYTES);
    let whole = w.cols / (STEPS * LANES);
    let first = block.start;
    for (c, out) in block.zip(out.chunks_exact_mut(STEPS * LANES)) {
        // SAFETY: chunk `c` lies in the row, or in the tail; the caller has the instruction set.
        unsafe {
            let codes = match tail {
                Some([start]) if c == whole => start,
                _ => row.as_ptr().add(c * D::BYTES),
            };
            let scale = expanded.as_ptr().add((c - first) * D::SCALES);
            for (w, out) in
                decode.weights(codes, scale).into_iter().zip(out.chunks_exact_mut(LANES))
            {
                S::store(out.as_mut_ptr(), w);
            }
        }
    }
}
