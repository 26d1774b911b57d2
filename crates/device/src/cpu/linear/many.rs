//! Several rows: a block of stored rows is widened to f32 once, then multiplied in register tiles.

use super::Rows;
use super::scales::{self, Tail};
use super::simd::{Decode, EXPANDED, MAX_MR, MAX_NR, Simd};
use crate::cpu::lanes::LANES;
use crate::cpu::scratch;
use crate::formats::blocks::GROUP;
use crate::tensor::{Format, StoredMatrix};
use std::ops::Range;

/// Values that fill most of the first cache: a block of the columns of some rows of activations, and
/// of a tile of widened weights.
const NEAR: usize = 13 << 10;
/// Most columns of a block.
const DEPTH: usize = 1024;
/// Tiles of activation rows up to which each tile of weights is used up at once: neither it nor the
/// activations leave the first cache.
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
    let mut from = n.start;
    while from < n.end {
        // Tiles of fp8 share their scales: none is cut.
        let to = n.end.min((from + w.scale_row0) / GROUP * GROUP + GROUP - w.scale_row0);
        let columns = from - n.start..to - n.start;
        // SAFETY: the caller's promise.
        unsafe { band::<S, D, STEPS>(decode, x, w, from, columns, n.len(), out) };
        from = to;
    }
}

/// The same for columns `columns` of the `width` of `out`; the first of them is row `first` of `w`.
#[inline(always)]
unsafe fn band<S, D, const STEPS: usize>(
    decode: D,
    x: &Rows,
    w: &StoredMatrix,
    first: usize,
    columns: Range<usize>,
    width: usize,
    out: &mut [f32],
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    let (rows, stored) = (x.len(), first..first + columns.len());
    let (row_tiles, tiles) = (rows.div_ceil(S::MR), stored.len().div_ceil(S::NR));
    let few = row_tiles <= FEW_TILES;
    // Tiles of weights that are widened before they are used.
    let group = if few { 1 } else { tiles };

    let chunk = STEPS * LANES;
    let chunks = w.cols.div_ceil(chunk);
    let near = if few { NEAR / (rows + S::NR) } else { DEPTH };
    let blocks = w.cols.div_ceil(near.min(DEPTH)).max(1);
    let depth = chunks.div_ceil(blocks).max(1);

    let tile_len = S::MR * S::NR * LANES;
    // Sums are added up 16 at a time.
    let room = tiles.next_multiple_of(LANES / S::NR) * tile_len;
    let mut panel = scratch::take(group * S::NR * depth * chunk);
    let mut sums = scratch::take(row_tiles * room);
    if chunks == 0 {
        sums.fill(0.0);
    }
    // Rows of a tile of fp8 share their scales.
    let shared = w.format == Format::Fp8Block32;
    let expanded_len = if D::SCALES == EXPANDED { depth * LANES } else { 0 };
    let mut expanded = scratch::take(S::NR * expanded_len);

    let row_tile = |i: usize| i * rows / row_tiles..(i + 1) * rows / row_tiles;
    let mut from = 0;
    while from < chunks {
        let block = from..chunks.min(from + depth);
        let (steps, start) = (block.len() * STEPS, block.start * chunk);
        let panel_len = S::NR * steps * LANES;
        let mut t = 0;
        while t < tiles {
            let now = t..tiles.min(t + group);
            for t in now.clone() {
                let to = panel[(t - now.start) * panel_len..][..panel_len].as_mut_ptr();
                // Rows that fill up the last tile are the last again; nobody reads their sums.
                let mut stored_rows = [0; MAX_NR];
                let mut scale = [std::ptr::null(); MAX_NR];
                for j in 0..S::NR {
                    let r = (first + t * S::NR + j).min(stored.end - 1);
                    stored_rows[j] = r;
                    if D::SCALES == 1 {
                        scale[j] = w.row_scales(r)[block.start..].as_ptr();
                    } else if D::SCALES == EXPANDED {
                        let to = if shared { 0 } else { j * expanded_len };
                        let to = &mut expanded[to..][..expanded_len];
                        if !shared || t + j == 0 {
                            // SAFETY: the caller's promise.
                            unsafe { scales::expand::<S>(w, r, block.clone(), to) };
                        }
                        scale[j] = to.as_ptr().cast();
                    }
                }
                // SAFETY: the caller's promise; `to` holds a tile of the block.
                unsafe {
                    if D::SCALES == 0 {
                        widen::<S, D, STEPS, false>(decode, w, stored_rows, &block, scale, to);
                    } else {
                        widen::<S, D, STEPS, true>(decode, w, stored_rows, &block, scale, to);
                    }
                }
            }
            // What is widened next: the next tiles, the next block, or the rows after these.
            let (next, next_block) = if now.end < tiles {
                (first + now.end * S::NR, block.clone())
            } else if block.end < chunks {
                (first, block.end..chunks.min(block.end + depth))
            } else {
                (stored.end, 0..depth.min(chunks))
            };
            let mut ahead = 0;
            for i in 0..row_tiles {
                let row_tile = row_tile(i);
                while ahead * row_tiles < (i + 1) * group * S::NR {
                    if next + ahead < w.rows {
                        // SAFETY: prefetching never faults.
                        unsafe { prefetch::<S, D, STEPS>(w, next + ahead, &next_block) };
                    }
                    ahead += 1;
                }
                let mut xs = [std::ptr::null(); MAX_MR];
                for (m, xs) in xs.iter_mut().enumerate() {
                    let m = (row_tile.start + m).min(row_tile.end - 1);
                    *xs = x.row(m)[start..].as_ptr();
                }
                for t in now.clone() {
                    let w = panel[(t - now.start) * panel_len..].as_ptr();
                    let sums = sums[i * room + t * tile_len..][..tile_len].as_mut_ptr();
                    // SAFETY: the caller's promise; every pointer covers `steps` steps, `sums` a
                    // tile.
                    unsafe { S::tile(row_tile.len(), &xs, w, steps, from == 0, sums) };
                }
            }
            t = now.end;
        }
        from = block.end;
    }
    for i in 0..row_tiles {
        for (m, row) in row_tile(i).enumerate() {
            let sums = &sums[i * room + m * S::NR * LANES..(i + 1) * room];
            let out = &mut out[row * width..][columns.clone()];
            for (out, sums) in out.chunks_mut(LANES).zip(sums.chunks(LANES / S::NR * tile_len)) {
                assert!(sums.len() >= (LANES / S::NR - 1) * tile_len + S::NR * LANES);
                // SAFETY: the vectors lie in `sums`; the caller has the instruction set.
                let totals = unsafe { S::trees(sums.as_ptr(), tile_len) };
                out.copy_from_slice(&totals[..out.len()]);
            }
        }
    }
}

/// Chunks `block` of a tile of rows `rows` as f32: `[steps, NR, 16]` at `out`, in lane order. `SCALED`
/// multiplies by the scales at `scales`, one pointer a row.
#[inline(always)]
unsafe fn widen<S, D, const STEPS: usize, const SCALED: bool>(
    decode: D,
    w: &StoredMatrix,
    rows: [usize; MAX_NR],
    block: &Range<usize>,
    scales: [*const u8; MAX_NR],
    out: *mut f32,
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    let whole = block.end.min(w.cols / (STEPS * LANES));
    let mut codes = [std::ptr::null(); MAX_NR];
    for j in 0..S::NR {
        codes[j] = w.row(rows[j])[block.start * D::BYTES..].as_ptr();
    }
    // SAFETY: chunks lie in rows, or in their tails; the caller's pointers cover the block, and it has
    // the instruction set.
    unsafe {
        for c in 0..whole - block.start {
            for j in 0..S::NR {
                let (codes, scale) = (codes[j].add(c * D::BYTES), scales[j]);
                let out = out.add((c * STEPS * S::NR + j) * LANES);
                widen_chunk::<S, D, STEPS, SCALED>(decode, codes, scale, c, out);
            }
        }
        if whole < block.end {
            for j in 0..S::NR {
                let mut tail = Tail::<1>::new();
                if let Some([codes]) = tail.of(w, [w.row(rows[j])], D::BYTES) {
                    let c = whole - block.start;
                    let out = out.add((c * STEPS * S::NR + j) * LANES);
                    widen_chunk::<S, D, STEPS, SCALED>(decode, codes, scales[j], c, out);
                }
            }
        }
    }
}

/// A chunk of [`widen`] for one row.
#[inline(always)]
unsafe fn widen_chunk<S, D, const STEPS: usize, const SCALED: bool>(
    decode: D,
    codes: *const u8,
    scales: *const u8,
    c: usize,
    out: *mut f32,
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    // SAFETY: as for `widen`.
    unsafe {
        let weights = if SCALED {
            decode.weights(codes, scales.add(c * D::SCALES))
        } else {
            decode.codes(codes)
        };
        for s in 0..STEPS {
            S::store(out.add(s * S::NR * LANES), weights[s]);
        }
    }
}

/// Tells the processor that chunks `block` of row `r` are wanted soon.
#[inline(always)]
unsafe fn prefetch<S, D, const STEPS: usize>(w: &StoredMatrix, r: usize, block: &Range<usize>)
where
    S: Simd,
    D: Decode<S, STEPS>,
{
    const LINE: usize = 64;
    let row = w.row(r);
    let bytes = block.start * D::BYTES..row.len().min(block.end * D::BYTES);
    let last = bytes.end.saturating_sub(1);
    // SAFETY: prefetching never faults.
    unsafe {
        for at in bytes.step_by(LINE) {
            S::prefetch(row.as_ptr().wrapping_add(at));
        }
        // Rows start anywhere in a line.
        S::prefetch(row.as_ptr().wrapping_add(last));
        if D::SCALES == 1 {
            S::prefetch(w.row_scales(r).as_ptr().wrapping_add(block.start));
        }
    }
}
