//! Attention over selected rows, the window and the sink.

use crate::cpu::Cpu;
use crate::cpu::dispatch::{LANES, by_isa, tree};
use crate::cpu::math::exp;
use crate::cpu::paged::{paged_row, sequence_of};
use crate::cpu::scratch::{Loan, take};
use crate::cpu::stored::decode;
use crate::cpu::tile::{ROWS, TILE, add_dots, product, rows_from};
use crate::cpu::transpose::transpose;
use crate::ops::{ABSENT, Attention};
use crate::tensor::RowFormat;

/// What a head has seen so far: the largest score, the sum of exponentials relative to it, and the
/// factors that bring the earlier sums and the new piece to that largest score. The weighted sum of
/// values stands in the output row.
#[derive(Clone, Copy)]
struct Seen {
    top: f32,
    sum: f32,
    old: f32,
    new: f32,
}

impl Seen {
    const NOTHING: Self = Self { top: f32::NEG_INFINITY, sum: 0.0, old: 0.0, new: 0.0 };
}

/// A piece of keys in panels of [`TILE`] columns of a row, `head_dim` cut up; a panel holds all keys
/// of the piece and stays in the nearest cache while the heads go over it.
struct Scratch {
    /// By panel: `[TILE keys, TILE columns]`.
    values: Loan,
    /// By panel: `[TILE columns, TILE keys]`.
    keys: Loan,
    /// `[heads, TILE]`: dot products, then weights.
    scores: Loan,
    seen: Vec<Seen>,
}

pub(crate) fn attend(cpu: &Cpu, args: &Attention<'_, Cpu>, out: &mut [f32]) {
    let Attention { heads, head_dim, .. } = *args;
    let rows = args.map.rows;
    if rows == 0 {
        return;
    }
    // A row's heads are shared out only where rows are few and do not divide among the threads:
    // each share reads the row's keys anew.
    let (groups, threads) = (heads.div_ceil(ROWS), cpu.threads());
    let even = rows.is_multiple_of(threads) || rows >= 4 * threads;
    let shares = if even { 1 } else { threads.min(groups) };
    let share = groups.div_ceil(shares) * ROWS;
    let tasks: Vec<(usize, &mut [f32])> = out[..rows * heads * head_dim]
        .chunks_mut(heads * head_dim)
        .flat_map(|row| row.chunks_mut(share * head_dim))
        .enumerate()
        .collect();
    let shares = heads.div_ceil(share);
    cpu.for_each_with(
        tasks,
        || Scratch::new(heads.min(share), head_dim),
        |scratch, (task, out)| {
            attend_row(cpu, args, task / shares, task % shares * share, scratch, out);
        },
    );
}

impl Scratch {
    fn new(heads: usize, head_dim: usize) -> Self {
        let panels = head_dim.next_multiple_of(TILE);
        Self {
            values: take(TILE * panels),
            keys: take(TILE * panels),
            scores: take(heads * TILE),
            seen: vec![Seen::NOTHING; heads],
        }
    }
}

/// Attention of the heads from `first_head` on, as many as `out` has room for.
fn attend_row(
    cpu: &Cpu,
    args: &Attention<'_, Cpu>,
    row: usize,
    first_head: usize,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let Attention { heads, head_dim, .. } = *args;
    let isa = cpu.isa();
    let count = out.len() / head_dim;
    let q = &args.q[(row * heads + first_head) * head_dim..][..count * head_dim];
    let Scratch { values, keys, scores, seen } = scratch;
    let (scores, seen) = (&mut scores[..count * TILE], &mut seen[..count]);
    seen.fill(Seen::NOTHING);
    out.fill(0.0);
    let row_keys = RowKeys::new(args, row);
    for from in (0..row_keys.count).step_by(TILE) {
        let n = TILE.min(row_keys.count - from);
        for j in 0..n {
            let (format, bytes) = row_keys.get(from + j);
            decode(isa, format, bytes, head_dim, TILE * TILE, &mut values[j * TILE..]);
        }
        let size = TILE * TILE;
        for (values, keys) in values.chunks_exact(size).zip(keys.chunks_exact_mut(size)) {
            transpose(isa, values, TILE, TILE, keys);
        }
        score_piece(isa, q, keys, n, args.scale, scores, seen);
        add_piece(isa, scores, values, n, seen, out);
    }
    finish(isa, &args.sink[first_head..][..count], seen, out);
}

/// The keys of a query in order: selected rows, then the window.
struct RowKeys<'a> {
    args: &'a Attention<'a, Cpu>,
    row: usize,
    sequence: usize,
    selected: usize,
    count: usize,
}

impl<'a> RowKeys<'a> {
    fn new(args: &'a Attention<'a, Cpu>, row: usize) -> Self {
        let map = args.map;
        let selected = args.selected.as_ref().map_or(0, |selected| {
            let indices = &selected.indices[row * selected.k..][..selected.k];
            indices.iter().position(|i| *i == ABSENT).unwrap_or(selected.k)
        });
        let window = map.window_to[row].saturating_sub(map.window_from[row]) as usize;
        let sequence = sequence_of(map, row);
        Self { args, row, sequence, selected, count: selected + window }
    }

    fn get(&self, i: usize) -> (RowFormat, &'a [u8]) {
        let (map, window) = (self.args.map, &self.args.window);
        match &self.args.selected {
            Some(selected) if i < self.selected => {
                let index = selected.indices[self.row * selected.k + i] as usize;
                (selected.keys.format, paged_row(&selected.keys, map, self.sequence, index))
            }
            _ => {
                let position = map.window_from[self.row] + (i - self.selected) as u32;
                let fresh_from = map.fresh_from[self.sequence];
                let bytes = window.format.row_bytes(self.args.head_dim);
                let (rows, at) = if position < fresh_from {
                    let slot = map.slot[self.sequence] as usize;
                    (window.ring, slot * window.ring_len + position as usize % window.ring_len)
                } else {
                    let first = map.first_row[self.sequence] as usize;
                    (window.fresh, first + (position - fresh_from) as usize)
                };
                (window.format, &rows[at * bytes..][..bytes])
            }
        }
    }
}

by_isa! {
    /// The weights of a piece of `n` keys for all heads, and what the heads have seen with it.
    fn score_piece(
        q: &[f32],
        keys: &[f32],
        n: usize,
        scale: f32,
        scores: &mut [f32],
        seen: &mut [Seen],
    ) {
        let scores = scores.as_chunks_mut::<TILE>().0;
        let heads = scores.len();
        let dim = q.len() / heads;
        scores.fill([0.0; TILE]);
        for (panel, keys) in keys.chunks_exact(TILE * TILE).enumerate() {
            let columns = panel * TILE..dim.min((panel + 1) * TILE);
            for head in (0..heads).step_by(ROWS) {
                let rows = rows_from(q, dim, head, heads).map(|row| &row[columns.clone()]);
                add_dots(rows, keys, &mut scores[head..heads.min(head + ROWS)]);
            }
        }
        for (scores, seen) in scores.iter_mut().zip(seen) {
            let (top, sum) = exponentials(scores, n, scale);
            let both = if top > seen.top { top } else { seen.top };
            // Before the first piece this is e^-inf, exactly 0, unless that piece has no number.
            let (old, new) = (exp(seen.top - both), exp(top - both));
            *seen = Seen { top: both, sum: sum.mul_add(new, seen.sum * old), old, new };
        }
    }
}

by_isa! {
    /// Adds the weighted values of a piece of `n` keys to `out` (`[heads, dim]`, not yet divided).
    fn add_piece(weights: &[f32], values: &[f32], n: usize, seen: &[Seen], out: &mut [f32]) {
        let heads = seen.len();
        let dim = out.len() / heads;
        for (panel, values) in values.chunks_exact(TILE * TILE).enumerate() {
            let columns = panel * TILE..dim.min((panel + 1) * TILE);
            for head in (0..heads).step_by(ROWS) {
                let rows = rows_from(weights, TILE, head, heads).map(|row| &row[..n]);
                let sums = product(rows, values);
                for (r, sums) in sums.iter().enumerate().take(heads - head) {
                    let Seen { old, new, .. } = seen[head + r];
                    let out = &mut out[(head + r) * dim..][columns.clone()];
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = sum.mul_add(new, *out * old);
                    }
                }
            }
        }
    }
}

/// Turns the first `n` dot products into exponentials relative to the largest score; returns that
/// score and their sum: lane `j % 16`, ascending, then the tree.
#[inline(always)]
fn exponentials(x: &mut [f32; TILE], n: usize, scale: f32) -> (f32, f32) {
    let mut tops = [f32::NEG_INFINITY; LANES];
    for from in (0..TILE).step_by(LANES) {
        for l in 0..LANES {
            let score = if from + l < n { x[from + l] * scale } else { f32::NEG_INFINITY };
            x[from + l] = score;
            tops[l] = if score > tops[l] { score } else { tops[l] };
        }
    }
    let mut top = tops[0];
    for l in 1..LANES {
        top = if tops[l] > top { tops[l] } else { top };
    }
    let mut sums = [0.0f32; LANES];
    for from in (0..TILE).step_by(LANES) {
        for l in 0..LANES {
            // Past `n` this is e^-inf, exactly 0.
            let e = exp(x[from + l] - top);
            x[from + l] = e;
            sums[l] += e;
        }
    }
    (top, tree(sums))
}

by_isa! {
    /// Takes the sink into the sum, and divides.
    fn finish(sink: &[f32], seen: &[Seen], out: &mut [f32]) {
        let dim = out.len() / seen.len();
        for (head, out) in out.chunks_exact_mut(dim).enumerate() {
            let Seen { top, sum, .. } = seen[head];
            let both = if sink[head] > top { sink[head] } else { top };
            let old = exp(top - both);
            let total = sum.mul_add(old, exp(sink[head] - both));
            for x in out.iter_mut() {
                *x = *x * old / total;
            }
        }
    }
}
