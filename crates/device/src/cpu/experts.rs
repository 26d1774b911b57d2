//! Mixture of experts: rows grouped by expert, weights in stored form.
//!
//! Two passes over units of work that all threads share: first `h = silu(min(w1 x, limit)) *
//! clamp(w3 x)` for every row and expert it uses, then, for a few output columns at a time,
//! `w2 h` of all experts and their sum. Every expert's weights are read once for all its rows.

use super::dispatch::by_isa;
use super::linear::{Columns, Magnitudes, Rows, Weight, apart, block, pieces};
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
    let h_width = apart(h_width);
    let x_values: usize = formats.iter().map(|f| rows * apart(lanes::padded(*f, hidden))).sum();

    let mut memory = scratch::take(x_values + pair_row.len() * h_width);
    let (arranged, h) = memory.split_at_mut(x_values);
    let mut rest = arranged;
    let mut copies = Vec::new();
    for format in formats {
        let width = lanes::padded(format, hidden);
        let (copy, tail) = rest.split_at_mut(rows * apart(width));
        for (x, to) in x.chunks(hidden).zip(copy.chunks_mut(apart(width))) {
            lanes::arrange(format, x, &mut to[..width]);
        }
        let magnitudes = Magnitudes::wanted(cpu.isa(), format, copy, apart(width), width);
        copies.push(Copied { format, rows: copy, width, magnitudes });
        rest = tail;
    }
    inner(cpu, &groups, &copies, limit, h, h_width);
    outer(cpu, &groups, h, h_width, weights, &place, k, out, hidden);
}

/// The rows of `x` in a lane order.
struct Copied<'a> {
    format: Format,
    rows: &'a [f32],
    width: usize,
    magnitudes: Magnitudes,
}

/// Values in a row of the input of `w`, in lane order.
fn padded(w: &Weight) -> usize {
    lanes::padded(w.stored().format, w.cols())
}

/// First pass: `h` of every pair, in the lane order of the expert's `w2`.
fn inner(
    cpu: &Cpu,
    groups: &[Group],
    copies: &[Copied],
    limit: f32,
    h: &mut [f32],
    h_width: usize,
) {
    let isa = cpu.isa();
    let copy_for = |w: &Weight| {
        let format = w.stored().format;
        copies.iter().find(|copy| copy.format == format).expect("a copy for every format")
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
            let Copied { rows, width, magnitudes, .. } = *copy_for(w);
            let x = Rows::gathered(rows, group.rows, apart(width), width, magnitudes);
            block(isa, &x, w.stored(), n.clone(), out);
        }
        activate(isa, gate, up, limit);
        let (format, last) = (w2.stored().format, n.end == w2.cols());
        let chunk = lanes::chunk(format);
        let end = if last { padded(w2) } else { n.end };
        let place = |c: usize| c - c % chunk + lanes::place(format, c % chunk);
        let places: Vec<usize> = (n.start..end).map(place).collect();
        for (i, values) in gate.chunks(n.len()).enumerate() {
            let padding = std::iter::repeat_n(&0.0, end - n.end);
            for (v, at) in values.iter().chain(padding).zip(&places) {
                // SAFETY: each task has columns of its own, and so places of its own.
                unsafe { columns.write(group.first + i, *at, std::slice::from_ref(v)) };
            }
        }
    });
}

by_isa! {
    /// [`activation`] of every pair, in place of the gate.
    fn activate(gate: &mut [f32], up: &[f32], limit: f32) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = activation(*gate, *up, limit);
        }
    }
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
    let inputs: Vec<Rows> = groups
        .iter()
        .map(|group| {
            let (w2, rows) = (&group.expert.w2, group.rows.len());
            let h = &h[group.first * h_width..][..rows * h_width];
            let magnitudes = Magnitudes::wanted(isa, w2.stored().format, h, h_width, padded(w2));
            Rows::strided(h, rows, h_width, padded(w2), magnitudes)
        })
        .collect();
    let tasks: Vec<Range<usize>> = pieces(shared.expert.w2.stored(), false).collect();
    let work = groups.iter().map(|g| g.rows.len() * g.expert.w2.rows() * g.expert.w2.cols());
    let columns = Columns::new(out, hidden);
    cpu.for_each(work.sum(), &tasks, |n| {
        let width = n.len();
        let mut memory = scratch::take((pairs + 1) * width);
        let (y, sum) = memory.split_at_mut(pairs * width);
        for (group, x) in groups.iter().zip(&inputs) {
            let y = &mut y[group.first * width..][..group.rows.len() * width];
            block(isa, x, group.expert.w2.stored(), n.clone(), y);
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
