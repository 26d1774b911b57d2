//! From logits to tokens.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::{Buffer, Plain};
use crate::ops::{ABSENT, BiasEntry, PenaltyRow, Result, SampleRow, TokenCount};
use std::collections::HashMap;

/// Threads of a block.
const THREADS: usize = 256;
/// Threads of the block that finds a row's survivors.
const FILTER_THREADS: usize = 1024;
/// Tokens that a thread draws noise for.
const DRAWS: usize = 16;

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

pub(super) fn sample(
    cuda: &Cuda,
    logits: &Buffer<f32>,
    vocab: usize,
    rows: &[SampleRow],
    tokens: &mut Buffer<u32>,
) -> Result<()> {
    let count = rows.len();
    let rows: Vec<Row> = rows.iter().map(Row::from).collect();
    let mut scratch = cuda.scratch();
    let logits = logits.head(count * vocab);
    let tokens = tokens.head(count);
    let params = scratch.put(&rows)?;
    // The largest logit and its token, and two cuts of a rank and an id each.
    let survivors = scratch.take::<u32>(6 * count)?;
    let best = scratch.take::<u64>(count)?;
    let vocab_arg = u32_of(vocab);
    let filter = args![logits, vocab_arg, params, survivors, best];
    cuda.launch("sample", "sample_filter", [count, 1, 1], FILTER_THREADS, 0, filter)?;
    if rows.iter().any(|row| row.temperature > 0.0) {
        let blocks = [count, vocab.div_ceil(DRAWS * THREADS), 1];
        let draw = args![logits, vocab_arg, params, survivors, best];
        cuda.launch("sample", "sample_draw", blocks, THREADS, 0, draw)?;
    }
    let last = args![params, survivors, best, u32_of(count), tokens];
    cuda.launch("sample", "sample_tokens", [count.div_ceil(THREADS), 1, 1], THREADS, 0, last)
}
