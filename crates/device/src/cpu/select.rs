//! Choice of compressed rows by index score.

use crate::cpu::Cpu;
use crate::cpu::best::{Best, entry, rank};
use crate::cpu::dispatch::by_isa;
use crate::cpu::paged::{paged_row, sequence_of, visible};
use crate::cpu::scratch::{Loan, take};
use crate::cpu::stored::decode;
use crate::cpu::tile::{CHUNK, ROWS, TILE, add_dots, rows_from};
use crate::cpu::transpose::transpose;
use crate::ops::{ABSENT, CandidateShape, Candidates, Selection};

/// Queries of a sequence that share the reading of keys.
const GROUP: usize = 16;
/// Visible rows from which on a single query is worth sharing out.
const SHARED: usize = 2048;

/// Part of the work: queries and the range of their visible rows, or of their candidate blocks.
struct Task {
    rows: std::ops::Range<usize>,
    part: usize,
    parts: usize,
}

/// What a task found for one query.
struct Found {
    row: usize,
    best: Best,
    blocks: Option<BlockMaxima>,
}

pub(crate) fn select(
    cpu: &Cpu,
    args: &Selection<'_, Cpu>,
    candidates: Candidates<'_, Cpu>,
    out: &mut [u32],
) {
    let k = args.k;
    let (publish, within) = match candidates {
        Candidates::All => (None, None),
        Candidates::Publish(shape, blocks) => (Some((shape, &mut blocks[..])), None),
        Candidates::Within(shape, blocks) => (None, Some((shape, &blocks[..]))),
    };
    let shape = publish.as_ref().map(|(shape, _)| *shape);
    let tasks = tasks(cpu, args, within.is_some());
    let found = cpu.map(&tasks, |task| match within {
        Some((shape, blocks)) => scan_blocks(cpu, args, shape, blocks, task),
        None => scan_rows(cpu, args, shape, task),
    });
    let mut found: Vec<Found> = found.into_iter().flatten().collect();
    found.sort_by_key(|part| part.row);
    let mut found = found.into_iter().peekable();
    let mut publish = publish;
    for row in 0..args.map.rows {
        let mut best = Best::new(k);
        let mut blocks = shape.map(|shape| Best::new(shape.blocks));
        while let Some(part) = found.next_if(|part| part.row == row) {
            best.extend(part.best);
            if let (Some(all), Some(some)) = (&mut blocks, part.blocks) {
                all.extend(some.best);
            }
        }
        best.write_ascending(&mut out[row * k..][..k]);
        if let (Some((shape, out)), Some(blocks)) = (&mut publish, blocks) {
            blocks.write_ascending(&mut out[row * shape.blocks..][..shape.blocks]);
        }
    }
}

/// Cuts the queries into tasks: groups of one sequence, or parts of one query where there are few.
fn tasks(cpu: &Cpu, args: &Selection<'_, Cpu>, alone: bool) -> Vec<Task> {
    let map = args.map;
    let mut tasks = Vec::new();
    if map.rows < 2 * cpu.threads() && cpu.threads() > 1 {
        for row in 0..map.rows {
            let work = visible(map, row, args.keys.ratio);
            let parts = if work < SHARED { 1 } else { cpu.threads() };
            tasks.extend((0..parts).map(|part| Task { rows: row..row + 1, part, parts }));
        }
        return tasks;
    }
    let most = if alone { 1 } else { GROUP.min(map.rows.div_ceil(2 * cpu.threads())).max(1) };
    let mut first = 0;
    while first < map.rows {
        let sequence = sequence_of(map, first);
        let end = (first..map.rows).find(|r| sequence_of(map, *r) != sequence).unwrap_or(map.rows);
        let rows = end - first;
        // As many groups for each thread: one that is left over would keep the others waiting.
        let group = match rows.div_ceil(most) {
            1 => rows,
            groups => rows.div_ceil(groups.next_multiple_of(cpu.threads())),
        };
        while first < end {
            let rows = first..(first + group).min(end);
            first = rows.end;
            tasks.push(Task { rows, part: 0, parts: 1 });
        }
    }
    // The longest first.
    tasks.sort_by_key(|task| {
        std::cmp::Reverse(task.rows.len() * visible(map, task.rows.start, args.keys.ratio))
    });
    tasks
}

/// Keys of a tile, decoded.
struct Keys {
    rows: Loan,
    /// `[width, TILE]`.
    columns: Loan,
    width: usize,
}

impl Keys {
    fn new(width: usize) -> Self {
        Self { rows: take(TILE * width), columns: take(TILE * width), width }
    }

    /// Reads compressed rows `indices` (at most [`TILE`]) of a sequence.
    fn read(
        &mut self,
        cpu: &Cpu,
        args: &Selection<'_, Cpu>,
        sequence: usize,
        indices: impl Iterator<Item = usize>,
    ) {
        for (row, index) in self.rows.chunks_exact_mut(self.width).zip(indices) {
            let bytes = paged_row(&args.keys, args.map, sequence, index);
            decode(cpu.isa(), args.keys.format, bytes, self.width, TILE, row);
        }
        transpose(cpu.isa(), &self.rows, self.width, self.width, &mut self.columns);
    }

    /// Scores of a query against all keys of the tile.
    fn scores(&self, cpu: &Cpu, args: &Selection<'_, Cpu>, row: usize) -> [f32; TILE] {
        let (heads, width) = (args.heads, self.width);
        let q = &args.q[row * heads * width..][..heads * width];
        let mut scores = [0.0; TILE];
        score(cpu.isa(), q, &args.weights[row * heads..][..heads], &self.columns, &mut scores);
        scores
    }
}

/// Looks at all visible rows of a task's queries, or at one part of them.
fn scan_rows(
    cpu: &Cpu,
    args: &Selection<'_, Cpu>,
    shape: Option<CandidateShape>,
    task: &Task,
) -> Vec<Found> {
    let map = args.map;
    let sequence = sequence_of(map, task.rows.start);
    let align = shape.map_or(TILE, |shape| shape.block_size);
    // Parts are cut between blocks, so that a block's maximum belongs to one part.
    let bounds = |row: usize| {
        let visible = visible(map, row, args.keys.ratio);
        let part = visible.div_ceil(task.parts).next_multiple_of(align);
        ((part * task.part).min(visible), (part * (task.part + 1)).min(visible), visible)
    };
    let mut found: Vec<Found> = task
        .rows
        .clone()
        .map(|row| Found {
            row,
            best: Best::new(args.k),
            blocks: shape.map(|shape| BlockMaxima::new(shape, bounds(row).2)),
        })
        .collect();
    let from = task.rows.clone().map(|row| bounds(row).0).min().unwrap_or(0);
    let to = task.rows.clone().map(|row| bounds(row).1).max().unwrap_or(0);
    let mut keys = Keys::new(args.keys.width);
    for start in (from..to).step_by(TILE) {
        keys.read(cpu, args, sequence, start..to.min(start + TILE));
        for found in &mut found {
            let n = TILE.min(bounds(found.row).1.saturating_sub(start));
            if n == 0 {
                continue;
            }
            let scores = keys.scores(cpu, args, found.row);
            for (j, score) in scores[..n].iter().enumerate() {
                let rank = rank(*score);
                found.best.push(entry(rank, start + j));
                if let Some(blocks) = &mut found.blocks {
                    blocks.push(rank, start + j);
                }
            }
        }
    }
    for blocks in found.iter_mut().filter_map(|found| found.blocks.as_mut()) {
        blocks.flush();
    }
    found
}

/// Looks at the visible rows of a query's candidate blocks, or at one part of the blocks.
fn scan_blocks(
    cpu: &Cpu,
    args: &Selection<'_, Cpu>,
    shape: CandidateShape,
    blocks: &[u32],
    task: &Task,
) -> Vec<Found> {
    let mut keys = Keys::new(args.keys.width);
    let scan = |row: usize| {
        let sequence = sequence_of(args.map, row);
        let visible = visible(args.map, row, args.keys.ratio);
        let blocks = &blocks[row * shape.blocks..][..shape.blocks];
        let count = blocks.iter().position(|b| *b == ABSENT).unwrap_or(shape.blocks);
        let part = count.div_ceil(task.parts);
        let (from, to) = ((part * task.part).min(count), (part * (task.part + 1)).min(count));
        let mut indices = blocks[from..to].iter().flat_map(|block| {
            let first = *block as usize * shape.block_size;
            first..(first + shape.block_size).min(visible)
        });
        let mut best = Best::new(args.k);
        let mut tile = Vec::with_capacity(TILE);
        loop {
            tile.clear();
            tile.extend(indices.by_ref().take(TILE));
            if tile.is_empty() {
                return Found { row, best, blocks: None };
            }
            keys.read(cpu, args, sequence, tile.iter().copied());
            let scores = keys.scores(cpu, args, row);
            for (index, score) in tile.iter().zip(scores) {
                best.push(entry(rank(score), *index));
            }
        }
    };
    task.rows.clone().map(scan).collect()
}

/// Running maxima of blocks, for rows that come in ascending order.
struct BlockMaxima {
    block_size: usize,
    best: Best,
    /// Block of the last visible row: it is always kept.
    last: usize,
    open: Option<(usize, u32)>,
}

impl BlockMaxima {
    fn new(shape: CandidateShape, visible: usize) -> Self {
        let last = visible.saturating_sub(1) / shape.block_size;
        Self { block_size: shape.block_size, best: Best::new(shape.blocks), last, open: None }
    }

    fn push(&mut self, rank: u32, row: usize) {
        let block = row / self.block_size;
        match &mut self.open {
            Some((open, top)) if *open == block => *top = rank.max(*top),
            _ => {
                self.flush();
                self.open = Some((block, rank));
            }
        }
    }

    fn flush(&mut self) {
        if let Some((block, top)) = self.open.take() {
            let top = if block == self.last { u32::MAX } else { top };
            self.best.push(entry(top, block));
        }
    }
}

by_isa! {
    /// `sum_h relu(q_h . key) * weight_h` for [`TILE`] keys.
    fn score(q: &[f32], weights: &[f32], keys: &[f32], out: &mut [f32; TILE]) {
        let heads = weights.len();
        let width = q.len() / heads;
        let mut sums = [0.0f32; TILE];
        for head in (0..heads).step_by(ROWS) {
            let mut dots = [[0.0f32; TILE]; ROWS];
            let rows = rows_from(q, width, head, heads);
            for at in (0..width).step_by(CHUNK) {
                let n = CHUNK.min(width - at);
                add_dots(rows.map(|row| &row[at..at + n]), &keys[at * TILE..], &mut dots);
            }
            for (dots, weight) in dots.iter().zip(&weights[head..]) {
                for j in 0..TILE {
                    // NaN stays.
                    let dot = if dots[j] < 0.0 { 0.0 } else { dots[j] };
                    sums[j] = dot.mul_add(*weight, sums[j]);
                }
            }
        }
        *out = sums;
    }
}
