//! Attention over selected rows, the window and the sink.

use crate::cpu::Cpu;
use crate::cpu::dispatch::{LANES, by_isa, tree};
use crate::cpu::math::exp;
use crate::cpu::paged::{paged_row, sequence_of};
use crate::cpu::tile::{ROWS, TILE, dots, product, take, transpose};
use crate::formats::decode_row;
use crate::ops::{ABSENT, Attention};
use crate::tensor::RowFormat;

/// What a head has seen so far: the largest score and the sum of exponentials relative to it. The
/// weighted sum of values stands in the output row.
#[derive(Clone, Copy)]
struct Seen {
    top: f32,
    sum: f32,
}

/// Scratch of a task.
struct Scratch {
    /// Keys of a piece, `[TILE, stride]`; columns from `head_dim` to `stride` stay zero.
    values: Vec<f32>,
    /// The same keys, `[head_dim, TILE]`.
    keys: Vec<f32>,
    seen: Vec<Seen>,
    stride: usize,
}

pub(crate) fn attend(cpu: &Cpu, args: &Attention<'_, Cpu>, out: &mut [f32]) {
    let Attention { heads, head_dim, .. } = *args;
    let rows = args.map.rows;
    if rows == 0 {
        return;
    }
    // A row's heads are shared out only where there are too few rows for the threads: each share
    // reads the row's keys anew.
    let groups = heads.div_ceil(ROWS);
    let shares = (2 * cpu.threads()).div_ceil(rows).min(cpu.threads()).min(groups);
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
        let stride = head_dim.next_multiple_of(TILE);
        Self {
            values: vec![0.0; TILE * stride],
            keys: vec![0.0; TILE * head_dim],
            seen: vec![Seen { top: f32::NEG_INFINITY, sum: 0.0 }; heads],
            stride,
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
    let count = out.len() / head_dim;
    let q = &args.q[(row * heads + first_head) * head_dim..][..count * head_dim];
    let seen = &mut scratch.seen[..count];
    seen.fill(Seen { top: f32::NEG_INFINITY, sum: 0.0 });
    out.fill(0.0);
    let keys = RowKeys::new(args, row);
    for from in (0..keys.count).step_by(TILE) {
        let n = TILE.min(keys.count - from);
        for j in 0..n {
            let (format, bytes) = keys.get(from + j);
            decode_row(format, bytes, &mut scratch.values[j * scratch.stride..][..head_dim]);
        }
        transpose(cpu.isa(), &scratch.values, scratch.stride, head_dim, &mut scratch.keys);
        let first = from == 0;
        piece(
            cpu.isa(),
            q,
            &scratch.keys,
            &scratch.values,
            scratch.stride,
            n,
            args.scale,
            first,
            seen,
            out,
        );
    }
    finish(cpu.isa(), &args.sink[first_head..][..count], seen, out);
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
    /// Adds a piece of `n` keys to `out` (`[heads, dim]`, sums of values not yet divided).
    fn piece(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        stride: usize,
        n: usize,
        scale: f32,
        first: bool,
        seen: &mut [Seen],
        out: &mut [f32],
    ) {
        let heads = seen.len();
        let dim = out.len() / heads;
        for head in (0..heads).step_by(ROWS) {
            let count = ROWS.min(heads - head);
            let mut weights = dots(take(q, dim, head, heads), keys);
            let mut old = [0.0f32; ROWS];
            let mut new = [0.0f32; ROWS];
            for r in 0..count {
                let (top, sum) = exponentials(&mut weights[r], n, scale);
                let seen = &mut seen[head + r];
                if first {
                    (old[r], new[r]) = (0.0, 1.0);
                    *seen = Seen { top, sum };
                } else {
                    let both = if top > seen.top { top } else { seen.top };
                    (old[r], new[r]) = (exp(seen.top - both), exp(top - both));
                    *seen = Seen { top: both, sum: sum.mul_add(new[r], seen.sum * old[r]) };
                }
            }
            let weights: [&[f32]; ROWS] = std::array::from_fn(|r| &weights[r][..n]);
            for at in (0..dim).step_by(TILE) {
                let sums = product(weights, &values[at..], stride);
                let columns = TILE.min(dim - at);
                for r in 0..count {
                    let out = &mut out[(head + r) * dim + at..][..columns];
                    for c in 0..columns {
                        out[c] = sums[r][c].mul_add(new[r], out[c] * old[r]);
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
            let Seen { top, sum } = seen[head];
            let both = if sink[head] > top { sink[head] } else { top };
            let old = exp(top - both);
            let total = sum.mul_add(old, exp(sink[head] - both));
            for x in out.iter_mut() {
                *x = *x * old / total;
            }
        }
    }
}
