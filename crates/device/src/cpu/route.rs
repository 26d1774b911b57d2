//! Choice of experts.

use crate::cpu::Cpu;
use crate::cpu::dispatch::by_isa;
use crate::cpu::math::softplus;
use crate::ops::Routing;

pub(crate) fn route(
    cpu: &Cpu,
    args: &Routing<'_, Cpu>,
    rows: usize,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let Routing { experts, k, .. } = *args;
    assert!(k <= experts, "{k} of {experts} experts");
    cpu.for_rows2((ids, k), (weights, k), rows, 60 * experts, |first, ids, weights| {
        let mut s = vec![0.0; experts];
        let mut best = Vec::with_capacity(k + 1);
        let rows = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (i, (ids, weights)) in rows.enumerate() {
            let row = first + i;
            affinities(cpu.isa(), &args.scores[row * experts..][..experts], &mut s);
            let image = args.image[row] != 0;
            let bias = args.bias_image.filter(|_| image).unwrap_or(args.bias);
            choose(&s, &bias[..experts], k, &mut best);
            let mut sum = 0.0f32;
            for (_, id) in &best {
                sum += s[*id as usize];
            }
            for (slot, (_, id)) in best.iter().enumerate() {
                ids[slot] = *id;
                weights[slot] = s[*id as usize] / (sum + 1e-20) * args.scale;
            }
        }
    });
}

by_isa! {
    /// `sqrt(softplus(score))`.
    fn affinities(scores: &[f32], out: &mut [f32]) {
        for (out, score) in out.iter_mut().zip(scores) {
            *out = softplus(*score).sqrt();
        }
    }
}

/// The `k` largest `s + bias`, largest first; the lower id on ties; NaN after all numbers.
fn choose(s: &[f32], bias: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
    best.clear();
    for (id, (s, bias)) in s.iter().zip(bias).enumerate() {
        let value = s + bias;
        let value = if value.is_nan() { f32::NEG_INFINITY } else { value };
        if best.len() == k && best.last().is_some_and(|worst| value <= worst.0) {
            continue;
        }
        let at = best.partition_point(|other| other.0 >= value);
        best.insert(at, (value, id as u32));
        best.truncate(k);
    }
}
