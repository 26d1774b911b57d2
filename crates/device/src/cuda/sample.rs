//! From logits to tokens.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::{Buffer, Plain, Ptr};
use crate::ops::{ABSENT, BiasEntry, PenaltyRow, Result, SampleRow, TokenCount};
use std::collections::HashMap;

/// Threads of a block.
const THREADS: usize = 256;
/// Threads of the block that finishes a row.
const LAST_THREADS: usize = 1024;
/// Buckets of a row's logits.
const BUCKETS: usize = 2048;
/// Tokens of a row that can be listed for the last block.
const LISTED: usize = 4096;
/// Words of what is known about a row's filters.
const EDGE_WORDS: usize = 10;
/// Most blocks that share a row, and blocks that a multiprocessor runs at a time.
const MOST_SLICES: usize = 64;
const BLOCKS: usize = 5;

pub(super) fn penalize(
    cuda: &Cuda,
    logits: &mut Buffer<f32>,
    vocab: usize,
    penalties: &[PenaltyRow],
    counts: &[TokenCount],
) -> Result<()> {
    if counts.is_empty() {
        return Ok(());
    }
    let mut scratch = cuda.scratch();
    let args = args![
        logits.head(penalties.len() * vocab),
        u32_of(vocab),
        scratch.put(penalties)?,
        scratch.put(counts)?,
        u32_of(counts.len()),
    ];
    cuda.launch("penalize", "penalize", [counts.len().div_ceil(THREADS), 1, 1], THREADS, 0, args)
}

pub(super) fn add_bias(
    cuda: &Cuda,
    logits: &mut Buffer<f32>,
    vocab: usize,
    entries: &[BiasEntry],
) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    // Entries of one logit are added in order, by one thread.
    let mut last: HashMap<(u32, u32), usize> = HashMap::new();
    let mut first = Vec::new();
    let mut later = vec![ABSENT; entries.len()];
    for (i, entry) in entries.iter().enumerate() {
        match last.insert((entry.row, entry.token), i) {
            None => first.push(u32_of(i)),
            Some(before) => later[before] = u32_of(i),
        }
    }
    let rows = entries.iter().map(|entry| entry.row as usize + 1).max().unwrap_or(0);
    let mut scratch = cuda.scratch();
    let args = args![
        logits.head(rows * vocab),
        u32_of(vocab),
        scratch.put(entries)?,
        scratch.put(&later)?,
        scratch.put(&first)?,
        u32_of(first.len()),
    ];
    cuda.launch("add_bias", "add_bias", [first.len().div_ceil(THREADS), 1, 1], THREADS, 0, args)
}

pub(super) fn mask_logits(
    cuda: &Cuda,
    logits: &mut Buffer<f32>,
    vocab: usize,
    mask_rows: &[u32],
    mask: &[u32],
) -> Result<()> {
    let Some(last) = mask_rows.iter().max() else { return Ok(()) };
    let mut scratch = cuda.scratch();
    let args = args![
        logits.head((*last as usize + 1) * vocab),
        u32_of(vocab),
        scratch.put(mask_rows)?,
        scratch.put(&mask[..mask_rows.len() * vocab.div_ceil(32)])?,
    ];
    let blocks = [mask_rows.len(), vocab.div_ceil(THREADS), 1];
    cuda.launch("mask_logits", "mask_logits", blocks, THREADS, 0, args)
}

/// A [`SampleRow`] as the kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Row {
    seed: u64,
    /// Kept probability in steps of 2^-32.
    mass: u64,
    position: u32,
    sample: u32,
    top_k: u32,
    /// Whether `mass` counts.
    by_mass: u32,
    /// 0: the largest logit.
    temperature: f32,
    /// Least weight relative to the best token's; 0: off.
    least: f32,
}

// SAFETY: `repr(C)` with 2 * 8 + 6 * 4 bytes.
unsafe impl Plain for Row {}

impl From<&SampleRow> for Row {
    fn from(row: &SampleRow) -> Self {
        Self {
            seed: row.seed,
            // Negative numbers count as 0.
            mass: (row.top_p * 4_294_967_296.0) as u64,
            position: row.position,
            sample: row.sample,
            top_k: row.top_k,
            by_mass: u32::from(row.top_p < 1.0),
            // NaN counts as 0.
            temperature: row.temperature.max(0.0),
            least: if row.min_p > 0.0 { row.min_p.min(1.0) } else { 0.0 },
        }
    }
}

impl Row {
    /// Whether noise is drawn.
    fn is_drawn(&self) -> bool {
        self.temperature > 0.0
    }

    /// Whether top-k or top-p drops tokens.
    fn has_filters(&self, vocab: usize) -> bool {
        let by_count = self.top_k > 0 && (self.top_k as usize) < vocab;
        self.is_drawn() && (by_count || self.by_mass != 0)
    }
}

pub(super) fn sample(
    cuda: &Cuda,
    logits: &Buffer<f32>,
    vocab: usize,
    rows: &[SampleRow],
    tokens: &mut Buffer<u32>,
) -> Result<()> {
    let count = rows.len();
    if count == 0 {
        return Ok(());
    }
    let rows: Vec<Row> = rows.iter().map(Row::from).collect();
    let drawn = rows.iter().any(Row::is_drawn);
    let filters = rows.iter().any(|row| row.has_filters(vocab));
    let mut scratch = cuda.scratch();
    let (logits, tokens) = (logits.head(count * vocab), tokens.head(count));
    let vocab_arg = u32_of(vocab);
    // The blocks that run at a time share the rows. Results do not depend on how many do.
    let at_once = BLOCKS * cuda.info().multiprocessors;
    let most = MOST_SLICES.min(vocab.div_ceil(4 * THREADS)).max(1);
    let slices = (at_once / count).clamp(1, most);
    let blocks = [count, slices, 1];
    let best = scratch.take::<u64>(count * slices)?;
    // Pointers to nothing where no row needs them.
    let mut take = |words: usize, wanted: bool| match wanted {
        true => scratch.take::<u32>(words),
        false => Ok(Ptr::NULL),
    };
    let counts = take(count * BUCKETS, filters)?;
    let masses = take(2 * count * BUCKETS, filters)?;
    let edges = take(count * EDGE_WORDS, filters)?;
    let listed = take(count, filters)?;
    let list = take(count * LISTED, filters)?;
    let noisy = take(2 * count * slices, drawn)?;
    let params = if drawn { scratch.put(&rows)? } else { Ptr::NULL };
    let operation = "sample";
    let args = args![logits, vocab_arg, best, counts, masses, listed];
    cuda.launch(operation, "sample_best", blocks, THREADS, 0, args)?;
    if filters {
        let args = args![logits, vocab_arg, params, best, counts, masses];
        cuda.launch(operation, "sample_buckets", blocks, THREADS, 0, args)?;
    }
    if drawn {
        let args =
            args![logits, vocab_arg, params, best, counts, masses, edges, listed, list, noisy];
        cuda.launch(operation, "sample_draw", blocks, THREADS, 0, args)?;
    }
    let args =
        args![logits, vocab_arg, params, u32_of(slices), best, edges, listed, list, noisy, tokens];
    cuda.launch(operation, "sample_finish", [count, 1, 1], LAST_THREADS, 0, args)
}
