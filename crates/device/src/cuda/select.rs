//! Choosing compressed rows.

use super::Cuda;
use super::launch::{Arg, MAX_BLOCKS_YZ};
use super::memory::{Buffer, Ptr};
use super::paged;
use crate::error::DeviceError;
use crate::ops::{Candidates, Result, Selection};
use crate::tensor::RowFormat;

/// Scores that are kept at a time: as many queries share a pass as have room.
const SCORES: usize = 16 << 20;
/// Keys of a block that computes scores.
const TILE: usize = 256;
/// Queries of such a block.
const GROUP: usize = 16;
/// Blocks a multiprocessor of that kernel.
const BLOCKS: usize = 4;
/// Entries that one block chooses among at a time.
const SEGMENT: usize = 16384;
/// Threads of a block that chooses.
const SORTERS: usize = 1024;
/// Most blocks of a query that take maxima.
const MAXIMA_BLOCKS: usize = 512;
/// Threads of the small kernels.
const THREADS: usize = 256;
/// The widest key that the kernels take.
const MAX_WIDTH: usize = 128;
/// Heads and width of queries that a kernel for one query at a time takes.
const ONE_HEADS: usize = 32;
const ONE_WIDTH: usize = 128;
/// Least blocks of a query in that kernel, where there are keys for them.
const ONE_BLOCKS: usize = 8;

/// The members of the kernels' argument that differ between launches.
#[derive(Clone, Copy)]
struct Best {
    out: Ptr,
    found_ranks: Ptr,
    found: Ptr,
    k: usize,
    segments: usize,
    of_maxima: bool,
}

pub(super) fn select(
    cuda: &Cuda,
    args: &Selection<'_, Cuda>,
    candidates: Candidates<'_, Cuda>,
    out: &mut Buffer<u32>,
) -> Result<()> {
    let Selection { heads, map, keys, k, .. } = args;
    let (heads, k, rows, width) = (*heads, *k, map.rows, keys.width);
    let operation = "select";
    if width > MAX_WIDTH {
        let limit = format!("keys of {width} values, and its kernels take up to {MAX_WIDTH}");
        return Err(DeviceError::Limit { operation, limit });
    }
    if rows == 0 {
        return Ok(());
    }
    let (shape, publish, within) = match candidates {
        Candidates::All => (None, None, None),
        Candidates::Publish(shape, to) => (Some(shape), Some(to.head(rows * shape.blocks)), None),
        Candidates::Within(shape, from) => {
            (Some(shape), None, Some(from.head(rows * shape.blocks)))
        }
    };
    let (block_size, block_count) = shape.map_or((1, 0), |s| (s.block_size.max(1), s.blocks));
    let all = map.max_pages * keys.rows_per_page;
    let longest = if within.is_some() { block_count * block_size } else { all };
    let stride = longest.max(1).next_multiple_of(32);
    let pass = (SCORES / stride).clamp(1, rows.min(MAX_BLOCKS_YZ));
    let pass = if pass > GROUP { pass - pass % GROUP } else { pass };
    let maxima_stride = if publish.is_some() { stride.div_ceil(block_size) } else { 0 };

    let mut scratch = cuda.scratch();
    let counts = scratch.take::<u32>(if within.is_some() { rows } else { 0 })?;
    let ranks = scratch.take::<u32>(pass * stride)?;
    let maxima = scratch.take::<u32>(pass * maxima_stride)?;
    let mut best_of = |length: usize, k: usize, out: Ptr, of_maxima: bool| -> Result<Best> {
        let segments = length.div_ceil(SEGMENT);
        let kept = if segments > 1 { pass * segments * k.min(SEGMENT) } else { 0 };
        let (found_ranks, found) = (scratch.take::<u32>(kept)?, scratch.take::<u32>(kept)?);
        Ok(Best { out, found_ranks, found, k, segments, of_maxima })
    };
    let best_rows = best_of(stride, k, out.head(rows * k), false)?;
    let best_blocks = match publish {
        Some(to) => Some(best_of(maxima_stride, block_count, to, true)?),
        None => None,
    };

    let q = args.q.head(rows * heads * width);
    let weights = args.weights.head(rows * heads);
    let keys_slots = paged::slots(keys, map);
    let slots = |first_row: usize, rows: usize, best: Best, second: bool| {
        let mut slots = vec![
            q.slot(),
            weights.slot(),
            map.sequence.head(map.rows).slot(),
            map.position.head(map.rows).slot(),
        ];
        slots.extend(keys_slots);
        slots.extend([
            within.unwrap_or(Ptr::NULL).slot(),
            counts.slot(),
            ranks.slot(),
            stride as u64,
            maxima.slot(),
            maxima_stride as u64,
            first_row as u64,
            rows as u64,
            heads as u64,
            width as u64,
            keys.ratio.max(1) as u64,
            block_size as u64,
            block_count as u64,
            u64::from(width.is_multiple_of(8)),
            best.out.slot(),
            best.found_ranks.slot(),
            best.found.slot(),
            best.k as u64,
            best.segments as u64,
            u64::from(best.of_maxima),
            u64::from(second),
        ]);
        slots
    };
    if within.is_some() {
        let blocks = [rows.div_ceil(THREADS / 32), 1, 1];
        let slots = slots(0, rows, best_rows, false);
        cuda.launch(operation, "select_counts", blocks, THREADS, 0, &slots)?;
    }
    // No two queries share keys, and the keys have the released format.
    let alone = rows == map.sequences || within.is_some();
    let one =
        alone && (keys.format, width) == (RowFormat::Mxfp4x32, ONE_WIDTH) && heads <= ONE_HEADS;
    let kernel = match (one, width.is_multiple_of(8)) {
        (true, _) => "select_scores_one",
        (false, true) => "select_scores",
        (false, false) => "select_scores_ragged",
    };
    let tiles = stride.div_ceil(TILE).min(BLOCKS * cuda.info().multiprocessors);
    for first in (0..rows).step_by(pass) {
        let count = pass.min(rows - first);
        let plain = slots(first, count, best_rows, false);
        let blocks = match one {
            true => [tiles.min((tiles / count).max(ONE_BLOCKS)), count, 1],
            false => [tiles, count.div_ceil(GROUP), 1],
        };
        cuda.launch(operation, kernel, blocks, TILE, 0, &plain)?;
        if publish.is_some() {
            let blocks = [maxima_stride.div_ceil(THREADS).min(MAXIMA_BLOCKS), count, 1];
            cuda.launch(operation, "select_maxima", blocks, THREADS, 0, &plain)?;
        }
        for best in [Some(best_rows), best_blocks].into_iter().flatten().filter(|b| b.k > 0) {
            let blocks = [best.segments, count, 1];
            let first_round = slots(first, count, best, false);
            cuda.launch(operation, "select_best", blocks, SORTERS, 0, &first_round)?;
            if best.segments > 1 {
                let second = slots(first, count, best, true);
                cuda.launch(operation, "select_best", [1, count, 1], SORTERS, 0, &second)?;
            }
        }
    }
    Ok(())
}
