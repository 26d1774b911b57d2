//! Root mean square normalization.

use crate::cpu::Cpu;
use crate::cpu::dispatch::{by_isa, dot};

pub(crate) fn rms_norm(
    cpu: &Cpu,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    width: usize,
    rows: usize,
    out: &mut [f32],
) {
    let weight = &weight[..width];
    cpu.for_rows(out, width, rows, 4 * width, |first, out| {
        let x = &x[first * width..][..out.len()];
        norm_rows(cpu.isa(), x, weight, eps, out);
    });
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

by_isa! {
    fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let factor = inverse_rms(x, eps);
            for i in 0..width {
                out[i] = x[i] * factor * weight[i];
            }
        }
    }
}
