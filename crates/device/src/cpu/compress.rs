//! Pooling of a group of tokens into one compressed row.

use crate::cpu::Cpu;
use crate::cpu::dispatch::{LANES, by_isa};
use crate::cpu::math::exp;

/// Set in a member index: the row lies in the pending rows.
const PENDING: u32 = 1 << 31;

pub(crate) fn pool_groups(
    cpu: &Cpu,
    values: &[f32],
    scores: &[f32],
    pending: &[f32],
    members: &[u32],
    ratio: usize,
    width: usize,
    groups: usize,
    out: &mut [f32],
) {
    cpu.for_rows(out, width, groups, 40 * ratio * width, |first, out| {
        let members = &members[first * ratio..];
        let mut rows = Vec::with_capacity(ratio);
        for (group, out) in members.chunks_exact(ratio).zip(out.chunks_exact_mut(width)) {
            rows.clear();
            rows.extend(group.iter().map(|member| {
                let row = (member & !PENDING) as usize;
                if member & PENDING == 0 {
                    (&values[row * width..][..width], &scores[row * width..][..width])
                } else {
                    pending[row * 2 * width..][..2 * width].split_at(width)
                }
            }));
            pool(cpu.isa(), &rows, out);
        }
    });
}

by_isa! {
    /// `out[c] = sum_j softmax_j(score_j[c]) * value_j[c]`: exponentials of the distance to the
    /// largest score, their sum and the weighted sum in order of the members, one division.
    fn pool(rows: &[(&[f32], &[f32])], out: &mut [f32]) {
        for (chunk, out) in out.chunks_mut(LANES).enumerate() {
            let (at, n) = (chunk * LANES, out.len());
            let mut top = [f32::NEG_INFINITY; LANES];
            for (_, scores) in rows {
                let scores = &scores[at..at + n];
                for c in 0..n {
                    // NaN stays: it must not pass for a score.
                    top[c] = if scores[c] <= top[c] { top[c] } else { scores[c] };
                }
            }
            let mut sum = [0.0f32; LANES];
            let mut acc = [0.0f32; LANES];
            for (values, scores) in rows {
                let (values, scores) = (&values[at..at + n], &scores[at..at + n]);
                for c in 0..n {
                    let e = exp(scores[c] - top[c]);
                    sum[c] += e;
                    acc[c] = e.mul_add(values[c], acc[c]);
                }
            }
            for c in 0..n {
                out[c] = acc[c] / sum[c];
            }
        }
    }
}

pub(crate) fn store_pending(
    values: &[f32],
    scores: &[f32],
    indices: &[u64],
    width: usize,
    rows: usize,
    pending: &mut [f32],
) {
    for (row, index) in indices[..rows].iter().enumerate() {
        if *index == u64::MAX {
            continue;
        }
        let slot = &mut pending[*index as usize * 2 * width..][..2 * width];
        slot[..width].copy_from_slice(&values[row * width..][..width]);
        slot[width..].copy_from_slice(&scores[row * width..][..width]);
    }
}
