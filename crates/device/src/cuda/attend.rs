//! Attention over selected rows, the window and the sink.
//!
//! Three ways share the work differently and give the same bits: see `kernels/attend.cu`.

use super::Cuda;
use super::launch::{Arg, MAX_BLOCKS_YZ};
use super::memory::{Buffer, Ptr};
use super::paged;
use crate::error::DeviceError;
use crate::ops::{Attention, Result};
use crate::tensor::RowFormat;
use half::bf16;

/// Keys in a piece.
const PIECE: usize = 64;
/// Threads of a block, and of one for 64 heads.
const THREADS: usize = 256;
const THREADS_64: usize = 512;
/// The widest head that the kernels take.
const MAX_DIM: usize = 512;
/// Heads of this width take the narrow kernel.
const NARROW: usize = 256;
/// Most bytes of partial results.
const MAX_PARTIAL: usize = 64 << 20;

/// How the work is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shares {
    /// A block a piece and 16 heads, then a merge.
    Pieces,
    /// A block for 16 heads.
    Heads16,
    /// A block for 64 heads of the widest kind.
    Heads64,
}

pub(super) fn attend(
    cuda: &Cuda,
    args: &Attention<'_, Cuda>,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    attend_by(cuda, args, shares(cuda, args), out)
}

/// Pieces of a row, at most: the window's keys are in the ring or among the step's rows.
fn pieces(args: &Attention<'_, Cuda>) -> usize {
    let selected = args.selected.as_ref().map_or(0, |selected| selected.k);
    (selected + args.window.ring_len + args.map.rows).div_ceil(PIECE)
}

fn shares(cuda: &Cuda, args: &Attention<'_, Cuda>) -> Shares {
    let Attention { heads, head_dim, .. } = *args;
    let (rows, processors) = (args.map.rows, cuda.info().multiprocessors);
    let partial = rows * pieces(args) * heads * head_dim * size_of::<f32>();
    if 2 * rows * heads.div_ceil(16) <= processors && partial <= MAX_PARTIAL {
        Shares::Pieces
    } else if head_dim == MAX_DIM && heads.is_multiple_of(64) && 8 * rows >= 3 * processors {
        Shares::Heads64
    } else {
        Shares::Heads16
    }
}

fn attend_by(
    cuda: &Cuda,
    args: &Attention<'_, Cuda>,
    shares: Shares,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let Attention { heads, head_dim: dim, map, window, .. } = args;
    let (heads, dim, rows) = (*heads, *dim, map.rows);
    let operation = "attend";
    if dim > MAX_DIM || !dim.is_multiple_of(16) {
        let limit = format!("heads of {dim}, and its kernels take multiples of 16 up to {MAX_DIM}");
        return Err(DeviceError::Limit { operation, limit });
    }
    let split = shares == Shares::Pieces;
    let pieces = if split { pieces(args) } else { 0 };
    let mut scratch = cuda.scratch();
    let partial = scratch.take::<f32>(rows * pieces * heads * dim)?;
    let seen = scratch.take::<u64>(rows * pieces * heads)?;
    let (k, keys) = match &args.selected {
        Some(selected) => (selected.k, paged::slots(&selected.keys, map)),
        None => (0, [0; 7]),
    };
    let row_bytes = window.format.row_bytes(dim);
    let is_exact = |format| matches!(format, RowFormat::F32 | RowFormat::Bf16);
    let exact = is_exact(window.format)
        || args.selected.as_ref().is_some_and(|selected| is_exact(selected.keys.format));
    let kernel = match (shares, exact) {
        (Shares::Heads64, false) => "attend_64",
        (Shares::Heads64, true) => "attend_64_exact",
        (_, false) if dim <= NARROW => "attend_16_narrow",
        (_, true) if dim <= NARROW => "attend_16_narrow_exact",
        (_, false) => "attend_16",
        (_, true) => "attend_16_exact",
    };
    // With 64 heads, a whole piece is in shared memory.
    let (width, threads, shared) = match shares {
        Shares::Heads64 => (64, THREADS_64, PIECE * MAX_DIM * size_of::<bf16>()),
        Shares::Heads16 | Shares::Pieces => (16, THREADS, 0),
    };
    // As many rows as a grid has.
    for first in (0..rows).step_by(MAX_BLOCKS_YZ) {
        let count = MAX_BLOCKS_YZ.min(rows - first);
        let indices = args.selected.as_ref().map_or(Ptr::NULL, |selected| {
            selected.indices.range(first * selected.k, count * selected.k)
        });
        let mut slots = vec![
            args.q.range(first * heads * dim, count * heads * dim).slot(),
            args.sink.head(heads).slot(),
            out.range(first * heads * dim, count * heads * dim).slot(),
            map.sequence.range(first, count).slot(),
            map.window_from.range(first, count).slot(),
            map.window_to.range(first, count).slot(),
            map.fresh_from.head(map.sequences).slot(),
            map.first_row.head(map.sequences).slot(),
            map.slot.head(map.sequences).slot(),
            indices.slot(),
        ];
        slots.extend(keys);
        slots.extend([
            window.ring.head(0).slot(),
            window.fresh.head(0).slot(),
            row_bytes as u64,
            partial.slot(),
            seen.slot(),
            (args.scale * std::f32::consts::LOG2_E).slot(),
            heads as u64,
            dim as u64,
            k as u64,
            window.ring_len as u64,
            paged::format_number(window.format).slot(),
            paged::alignment(row_bytes).slot(),
            pieces as u64,
        ]);
        let blocks = [heads.div_ceil(width), count, pieces.max(1)];
        cuda.launch(operation, kernel, blocks, threads, shared, &slots)?;
        if split {
            cuda.launch(operation, "attend_merge", [heads, count, 1], THREADS, 0, &slots)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::encode_row;
    use crate::ops::{ABSENT, Device, PagedRows, RowMap, Selected, WindowRows};
    use crate::tensor::Element;

    fn put<E: Element>(cuda: &Cuda, values: &[E]) -> Buffer<E> {
        let mut buffer = cuda.alloc(values.len()).expect("fits");
        cuda.upload(values, &mut buffer, 0).expect("uploads");
        buffer
    }

    fn values(seed: u32, len: usize) -> Vec<f32> {
        let word = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed) >> 7;
        (0..len).map(|i| (word(i).wrapping_mul(0x85eb_ca6b) >> 24) as f32 / 64.0 - 2.0).collect()
    }

    fn stored(seed: u32, rows: usize, width: usize, format: RowFormat) -> Vec<u8> {
        let mut out = vec![0; rows * format.row_bytes(width)];
        let values = values(seed, rows * width);
        for (x, out) in values.chunks(width).zip(out.chunks_mut(format.row_bytes(width))) {
            encode_row(format, x, out);
        }
        out
    }

    #[test]
    fn all_shares_give_the_same_bits() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        for (heads, dim, k) in [(64, 512, 512), (64, 320, 100), (128, 512, 7)] {
            let (rows, window, ring_len) = (5usize, 128usize, 134usize);
            let (first, pages) = (600usize, 40usize);
            let format = RowFormat::Fp8x32;
            let positions: Vec<u32> = (0..rows).map(|i| (first + i) as u32).collect();
            let map = RowMap::<Cuda> {
                rows,
                sequences: 1,
                sequence: put(&cuda, &vec![0u32; rows]),
                window_from: put(
                    &cuda,
                    &positions.iter().map(|p| p + 1 - window as u32).collect::<Vec<_>>(),
                ),
                window_to: put(&cuda, &positions.iter().map(|p| p + 1).collect::<Vec<_>>()),
                position: put(&cuda, &positions),
                fresh_from: put(&cuda, &[first as u32]),
                first_row: put(&cuda, &[0u32]),
                slot: put(&cuda, &[0u32]),
                pages: put(&cuda, &(0..pages as u32).rev().collect::<Vec<_>>()),
                max_pages: pages,
            };
            let mut indices: Vec<u32> = (0..rows).flat_map(|_| 0..k as u32).collect();
            indices[2 * k - k / 3..2 * k].fill(ABSENT);
            let indices = put(&cuda, &indices);
            let cache = put(&cuda, &stored(3, pages * 16, dim, RowFormat::Nvfp4x16));
            let keys = PagedRows {
                cache: &cache,
                format: RowFormat::Nvfp4x16,
                width: dim,
                rows_per_page: 16,
                ratio: 1,
            };
            let q: Vec<bf16> =
                values(7, rows * heads * dim).into_iter().map(bf16::from_f32).collect();
            let args = Attention {
                q: &put(&cuda, &q),
                heads,
                head_dim: dim,
                map: &map,
                window: WindowRows {
                    ring: &put(&cuda, &stored(1, ring_len, dim, format)),
                    ring_len,
                    fresh: &put(&cuda, &stored(2, rows, dim, format)),
                    format,
                },
                selected: Some(Selected { indices: &indices, k, keys }),
                sink: &put(&cuda, &values(9, heads)),
                scale: 1.0 / (dim as f32).sqrt(),
            };
            let run = |shares| {
                let mut out = cuda.alloc::<bf16>(rows * heads * dim).expect("fits");
                attend_by(&cuda, &args, shares, &mut out).expect("runs");
                let mut host = vec![bf16::ZERO; rows * heads * dim];
                cuda.download(&out, 0, &mut host).expect("downloads");
                host.into_iter().map(bf16::to_bits).collect::<Vec<_>>()
            };
            let pieces = run(Shares::Pieces);
            assert!(pieces == run(Shares::Heads16), "{heads} x {dim}: 16 heads a block");
            if dim == MAX_DIM {
                assert!(pieces == run(Shares::Heads64), "{heads} x {dim}: 64 heads a block");
            }
        }
    }
}
