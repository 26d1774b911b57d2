//! Mixture of experts: rows grouped by expert, weights in stored form.
//!
//! Two passes over units of work that all threads share: first `h = silu(min(w1 x, limit)) *
//! clamp(w3 x)` for every row and expert it uses, then, for a few output columns at a time,
//! `w2 h` of all experts and their sum. Every expert's weights are read once for all its rows.

use super::linear::{Columns, Rows, Weight, block, pieces};
use super::{Cpu, lanes, math, scratch};
use crate::error::DeviceError;
use crate::tensor::{Expert, Format, StoredMatrix};
use std::ops::Range;

/// Rows that share one pass over the weights: bounds the working memory.
const ROW_BLOCK: usize = 512;

/// The routed experts of one layer.
#[derive(Clone, Debug)]
pub struct Experts(Vec<Expert<Weight>>);

impl Experts {
    /// Accepts experts of equal shapes.
    pub fn new(stored: Vec<Expert<StoredMatrix>>) -> Result<Self, DeviceError> {
        let weights = |e: Expert<StoredMatrix>| {
            Ok(Expert { w1: Weight::new(e.w1)?, w3: Weight::new(e.w3)?, w2: Weight::new(e.w2)? })
        };
        let experts: Vec<_> =
            stored.into_iter().map(weights).collect::<Result<_, DeviceError>>()?;
        for expert in &experts {
            check(expert, &experts[0])?;
        }
        Ok(Self(experts))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The three projections fit together and have the hidden size of `other`.
fn check(expert: &Expert<Weight>, other: &Expert<Weight>) -> Result<(), DeviceError> {
    let (hidden, inner) = (other.w1.cols(), expert.w1.rows());
    let wrong = [
        ("w1", &expert.w1, (inner, hidden)),
        ("w3", &expert.w3, (inner, hidden)),
        ("w2", &expert.w2, (hidden, inner)),
    ]
    .into_iter()
    .find(|(_, w, shape)| (w.rows(), w.cols()) != *shape);
    match wrong {
        None => Ok(()),
        Some((name, w, (rows, cols))) => Err(DeviceError::Unsupported {
            device: "cpu",
            format: format!("{:?}", w.stored().format),
            rows: w.rows(),
            cols: w.cols(),
            reason: format!("{name} of an expert must be {rows} x {cols} here"),
        }),
    }
}

/// The rows that one expert serves.
struct Group<'a> {
    expert: &'a Expert<Weight>,
    /// Rows of `x`.
    rows: &'a [u32],
    /// Place of the first of them among all (row, expert) pairs, which are sorted by expert.
    first: usize,
}

/// `out = sum_slot weights[slot] * expert(x) + shared(x)`, slots ascending, the shared expert last;
/// `expert(x) = w2 (silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit))`. `x` and `out` are
/// `[rows, hidden]`, `ids` and `weights` `[rows, k]`.
///
/// # Panics
/// If a slice is shorter than that, or an id names no expert.
pub fn experts_forward(
    cpu: &Cpu,
    x: &[f32],
    experts: &Experts,
    shared: &Expert<Weight>,
    ids: &[u32],
    weights: &[f32],
    k: usize,
    limit: f32,
    rows: usize,
    out: &mut [f32],
) {
    let hidden = shared.w1.cols();
    let (ids, weights) = (&ids[..rows * k], &weights[..rows * k]);
    let (x, out) = (&x[..rows * hidden], &mut out[..rows * hidden]);
    if hidden == 0 {
        return;
    }
    for from in (0..rows).step_by(ROW_BLOCK) {
        let to = rows.min(from + ROW_BLOCK);
        let (slots, values) = (from * k..to * k, from * hidden..to * hidden);
        let (x, out) = (&x[values.clone()], &mut out[values]);
        forward(cpu, x, experts, shared, &ids[slots.clone()], &weights[slots], k, limit, out);
    }
}

fn forward(
    cpu: &Cpu,
    x: &[f32],
    experts: &Experts,
    shared: &Expert<Weight>,
    ids: &[u32],
    weights: &[f32],
    k: usize,
    limit: f32,
    out: &mut [f32],
) {
    let (hidden, rows) = (shared.w1.cols(), x.len() / shared.w1.cols().max(1));
    // Pairs of a row and an expert, by expert; the shared expert's come last. `place[slot]` is
    // where the pair of a slot went.
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|slot| ids[*slot as usize]);
    let mut place = vec![0; ids.len()];
    for (at, slot) in order.iter().enumerate() {
        place[*slot as usize] = at;
    }
    let pair_row: Vec<u32> =
        order.iter().map(|slot| slot / k as u32).chain(0..rows as u32).collect();
    let mut groups = Vec::new();
    let mut first = 0;
    for same in order.chunk_by(|a, b| ids[*a as usize] == ids[*b as usize]) {
        let expert = &experts.0[ids[same[0] as usize] as usize];
        groups.push(Group { expert, rows: &pair_row[first..first + same.len()], first });
        first += same.len();
    }
    groups.push(Group { expert: shared, rows: &pair_row[first..], first });

    // One copy of x for each lane order in use, and rows of h wide enough for any expert.
    let mut formats: Vec<Format> = Vec::new();
    for group in &groups {
        for w in [&group.expert.w1, &group.expert.w3] {
            if !formats.contains(&w.stored().format) {
                formats.push(w.stored().format);
            }
        }
    }
    let h_width =
        groups.iter().map(|g| padded(&g.expert.w2)).max().expect("the shared expert is there");
    let x_values: usize = formats.iter().map(|f| rows * lanes::padded(*f, hidden)).sum();

    let mut memory = scratch::take(x_values + pair_row.len() * h_width);
    let (arranged, h) = memory.split_at_mut(x_values);
    let mut rest = arranged;
    let mut copies = Vec::new();
    for format in formats {
        let width = lanes::padded(format, hidden);
        let (copy, tail) = rest.split_at_mut(rows * width);
        for (x, to) in x.chunks(hidden).zip(copy.chunks_mut(width)) {
            lanes::arrange(format, x, to);
        }
        copies.push((format, &*copy));
        rest = tail;
    }
    inner(cpu, &groups, &copies, limit, h, h_width);
    outer(cpu, &groups, h, h_width, weights, &place, k, out, hidden);
}

/// Values in a row of the input of `w`, in lane order.
fn padded(w: &Weight) -> usize {
    lanes::padded(w.stored().format, w.cols())
}

/// First pass: `h` of every pair, in the lane order of the expert's `w2`.
fn inner(
    cpu: &Cpu,
    groups: &[Group],
    copies: &[(Format, &[f32])],
    limit: f32,
    h: &mut [f32],
    h_width: usize,
) {
    let isa = cpu.isa();
    let copy_for = |w: &Weight| {
        let format = w.stored().format;
        let copy = copies.iter().find(|(f, _)| *f == format).expect("a copy for every format");
        (copy.1, padded(w))
    };
    let tasks: Vec<(&Group, Range<usize>)> = groups
        .iter()
        .flat_map(|group| pieces(group.expert.w1.stored(), false).map(move |n| (group, n)))
        .collect();
    let work = groups.iter().map(|g| 2 * g.rows.len() * g.expert.w1.rows() * g.expert.w1.cols());
    let columns = Columns::new(h, h_width);
    cpu.for_each(work.sum(), &tasks, |(group, n)| {
        let Expert { w1, w3, w2 } = group.expert;
        let rows = group.rows.len();
        let mut memory = scratch::take(2 * rows * n.len());
        let (gate, up) = memory.split_at_mut(rows * n.len());
        for (w, out) in [(w1, &mut *gate), (w3, &mut *up)] {
            let (copy, width) = copy_for(w);
            block(isa, &Rows::gathered(copy, group.rows, width), w.stored(), n.clone(), out);
        }
        for (g, u) in gate.iter_mut().zip(&*up) {
            *g = activation(*g, *u, limit);
        }
        let (format, last) = (w2.stored().format, n.end == w2.cols());
        let chunk = lanes::chunk(format);
        for (i, values) in gate.chunks(n.len()).enumerate() {
            let padding = if last { padded(w2) - w2.cols() } else { 0 };
            let padding = std::iter::repeat_n(&0.0, padding);
            for (c, v) in values.iter().chain(padding).enumerate() {
                let c = n.start + c;
                let at = c - c % chunk + lanes::place(format, c % chunk);
                // SAFETY: each task has columns of its own, and so places of its own.
                unsafe { columns.write(group.first + i, at, std::slice::from_ref(v)) };
            }
        }
    });
}

/// `silu(min(gate, limit)) * clamp(up, -limit, limit)`; NaN stays NaN.
#[inline(always)]
fn activation(gate: f32, up: f32, limit: f32) -> f32 {
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    math::silu(gate) * up
}

/// Second pass: `out[row] = sum_slot weights[slot] * (w2 h) + shared`, some columns at a time.
fn outer(
    cpu: &Cpu,
    groups: &[Group],
    h: &[f32],
    h_width: usize,
    weights: &[f32],
    place: &[usize],
    k: usize,
    out: &mut [f32],
    hidden: usize,
) {
    let isa = cpu.isa();
    let pairs = h.len() / h_width;
    let rows = out.len() / hidden;
    let shared = &groups[groups.len() - 1];
    let tasks: Vec<Range<usize>> = pieces(shared.expert.w2.stored(), false).collect();
    let work = groups.iter().map(|g| g.rows.len() * g.expert.w2.rows() * g.expert.w2.cols());
    let columns = Columns::new(out, hidden);
    cpu.for_each(work.sum(), &tasks, |n| {
        let width = n.len();
        let mut memory = scratch::take((pairs + 1) * width);
        let (y, sum) = memory.split_at_mut(pairs * width);
        for group in groups {
            let w2 = &group.expert.w2;
            let x =
                Rows::strided(&h[group.first * h_width..], group.rows.len(), h_width, padded(w2));
            let y = &mut y[group.first * width..][..group.rows.len() * width];
            block(isa, &x, w2.stored(), n.clone(), y);
        }
        for row in 0..rows {
            sum.fill(0.0);
            let slots = row * k..(row + 1) * k;
            for (weight, at) in weights[slots.clone()].iter().zip(&place[slots]) {
                for (sum, y) in sum.iter_mut().zip(&y[at * width..][..width]) {
                    *sum += weight * y;
                }
            }
            let y = &y[(shared.first + row) * width..][..width];
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
            // SAFETY: each task has columns of its own.
            unsafe { columns.write(row, n.start, sum) };
        }
    });
}
