//! Residual streams: start, collapse, mixing coefficients, update, mean.

use crate::cpu::Cpu;
use crate::cpu::dispatch::by_isa;
use crate::cpu::math::{exp, sigmoid};
use crate::cpu::norm::inverse_rms;
use crate::ops::StreamShape;
use rayon::prelude::*;

/// Channels that are worked on together.
const BLOCK: usize = 64;

pub(crate) fn start(cpu: &Cpu, x: &[f32], shape: &StreamShape, rows: usize, streams: &mut [f32]) {
    let StreamShape { streams: count, hidden, .. } = *shape;
    cpu.for_rows(streams, count * hidden, rows, count * hidden, |first, out| {
        for (i, stream) in out.chunks_exact_mut(hidden).enumerate() {
            stream.copy_from_slice(&x[(first + i / count) * hidden..][..hidden]);
        }
    });
}

pub(crate) fn collapse(
    cpu: &Cpu,
    streams: &[f32],
    pre: &[f32],
    shape: &StreamShape,
    rows: usize,
    out: &mut [f32],
) {
    let StreamShape { streams: count, hidden, .. } = *shape;
    cpu.for_rows(out, hidden, rows, 2 * count * hidden, |first, out| {
        let n = out.len() / hidden;
        let streams = &streams[first * count * hidden..][..n * count * hidden];
        collapse_rows(cpu.isa(), streams, &pre[first * count..][..n * count], hidden, out);
    });
}

by_isa! {
    fn collapse_rows(streams: &[f32], pre: &[f32], hidden: usize, out: &mut [f32]) {
        let rows = out.len() / hidden;
        let count = pre.len() / rows;
        for row in 0..rows {
            let streams = &streams[row * count * hidden..][..count * hidden];
            let pre = &pre[row * count..][..count];
            for (block, out) in out[row * hidden..][..hidden].chunks_mut(BLOCK).enumerate() {
                let mut acc = [0.0f32; BLOCK];
                for s in 0..count {
                    let x = &streams[s * hidden + block * BLOCK..][..out.len()];
                    for c in 0..x.len() {
                        acc[c] = pre[s].mul_add(x[c], acc[c]);
                    }
                }
                out.copy_from_slice(&acc[..out.len()]);
            }
        }
    }
}

/// The coefficients of one site, from `products`, the `(2 + S) * S` products of each row with the
/// site's function.
pub(crate) fn mix(
    cpu: &Cpu,
    streams: &[f32],
    products: &[f32],
    base: &[f32],
    scale: &[f32],
    shape: &StreamShape,
    rows: usize,
    pre: &mut [f32],
    post: &mut [f32],
    comb: &mut [f32],
) {
    let s = shape.streams;
    let (width, outputs) = (s * shape.hidden, (2 + s) * s);
    let work = 2 * width + 4 * shape.iterations * s * s;
    let run = |first: usize, pre: &mut [f32], post: &mut [f32], comb: &mut [f32]| {
        let n = pre.len() / s;
        let streams = &streams[first * width..][..n * width];
        let products = &products[first * outputs..][..n * outputs];
        mix_rows(
            cpu.isa(),
            streams,
            products,
            &base[..outputs],
            &scale[..3],
            shape,
            pre,
            post,
            comb,
        );
    };
    if rows == 0 {
        return;
    }
    let (pre, post) = (&mut pre[..rows * s], &mut post[..rows * s]);
    let comb = &mut comb[..rows * s * s];
    let block = cpu.rows_per_task(rows, work);
    if block >= rows {
        return run(0, pre, post, comb);
    }
    cpu.pool().install(|| {
        pre.par_chunks_mut(block * s)
            .zip(post.par_chunks_mut(block * s))
            .zip(comb.par_chunks_mut(block * s * s))
            .enumerate()
            .for_each(|(i, ((pre, post), comb))| run(i * block, pre, post, comb));
    });
}

by_isa! {
    fn mix_rows(
        streams: &[f32],
        products: &[f32],
        base: &[f32],
        scale: &[f32],
        shape: &StreamShape,
        pre: &mut [f32],
        post: &mut [f32],
        comb: &mut [f32],
    ) {
        let s = shape.streams;
        let (width, outputs) = (s * shape.hidden, (2 + s) * s);
        for row in 0..pre.len() / s {
            let factor = inverse_rms(&streams[row * width..][..width], shape.norm_eps);
            let products = &products[row * outputs..][..outputs];
            let (pre, post) = (&mut pre[row * s..][..s], &mut post[row * s..][..s]);
            let comb = &mut comb[row * s * s..][..s * s];
            for i in 0..s {
                let x = (products[i] * factor).mul_add(scale[0], base[i]);
                pre[i] = sigmoid(x) + shape.hc_eps;
                let x = (products[s + i] * factor).mul_add(scale[1], base[s + i]);
                post[i] = 2.0 * sigmoid(x);
            }
            for i in 0..s * s {
                comb[i] = (products[2 * s + i] * factor).mul_add(scale[2], base[2 * s + i]);
            }
            sinkhorn(comb, s, shape.iterations, shape.hc_eps);
        }
    }
}

/// Makes a matrix of logits nearly doubly stochastic. Sums are taken in ascending order.
#[inline(always)]
fn sinkhorn(m: &mut [f32], n: usize, iterations: usize, eps: f32) {
    for row in m.chunks_exact_mut(n) {
        let mut top = f32::NEG_INFINITY;
        for x in row.iter() {
            top = if *x <= top { top } else { *x };
        }
        let mut sum = 0.0f32;
        for x in row.iter_mut() {
            *x = exp(*x - top);
            sum += *x;
        }
        for x in row.iter_mut() {
            *x = *x / sum + eps;
        }
    }
    divide_columns(m, n, eps);
    for _ in 1..iterations {
        for row in m.chunks_exact_mut(n) {
            let mut sum = 0.0f32;
            for x in row.iter() {
                sum += *x;
            }
            for x in row.iter_mut() {
                *x /= sum + eps;
            }
        }
        divide_columns(m, n, eps);
    }
}

#[inline(always)]
fn divide_columns(m: &mut [f32], n: usize, eps: f32) {
    for j in 0..n {
        let mut sum = 0.0f32;
        for i in 0..n {
            sum += m[i * n + j];
        }
        for i in 0..n {
            m[i * n + j] /= sum + eps;
        }
    }
}

pub(crate) fn update(
    cpu: &Cpu,
    streams: &mut [f32],
    y: &[f32],
    post: &[f32],
    comb: &[f32],
    shape: &StreamShape,
    rows: usize,
) {
    let StreamShape { streams: s, hidden, .. } = *shape;
    cpu.for_rows(streams, s * hidden, rows, 2 * s * s * hidden, |first, streams| {
        let n = streams.len() / (s * hidden);
        let y = &y[first * hidden..][..n * hidden];
        let (post, comb) = (&post[first * s..][..n * s], &comb[first * s * s..][..n * s * s]);
        update_rows(cpu.isa(), streams, y, post, comb, hidden, &mut vec![[0.0; BLOCK]; s]);
    });
}

by_isa! {
    /// `old` holds the streams' previous values of a block of channels.
    fn update_rows(
        streams: &mut [f32],
        y: &[f32],
        post: &[f32],
        comb: &[f32],
        hidden: usize,
        old: &mut [[f32; BLOCK]],
    ) {
        let s = old.len();
        for (row, streams) in streams.chunks_exact_mut(s * hidden).enumerate() {
            let y = &y[row * hidden..][..hidden];
            let (post, comb) = (&post[row * s..][..s], &comb[row * s * s..][..s * s]);
            for at in (0..hidden).step_by(BLOCK) {
                let n = BLOCK.min(hidden - at);
                for i in 0..s {
                    old[i][..n].copy_from_slice(&streams[i * hidden + at..][..n]);
                }
                for j in 0..s {
                    let mut acc = [0.0f32; BLOCK];
                    for c in 0..n {
                        acc[c] = post[j] * y[at + c];
                    }
                    for i in 0..s {
                        let factor = comb[i * s + j];
                        for c in 0..BLOCK {
                            acc[c] = factor.mul_add(old[i][c], acc[c]);
                        }
                    }
                    streams[j * hidden + at..][..n].copy_from_slice(&acc[..n]);
                }
            }
        }
    }
}

pub(crate) fn mean(
    cpu: &Cpu,
    streams: &[f32],
    shape: &StreamShape,
    rows: usize,
    out: &mut [f32],
    out_width: usize,
    column: usize,
) {
    let StreamShape { streams: s, hidden, .. } = *shape;
    assert!(column + hidden <= out_width, "columns {column}..{} of {out_width}", column + hidden);
    cpu.for_rows(out, out_width, rows, s * hidden, |first, out| {
        for (i, out) in out.chunks_exact_mut(out_width).enumerate() {
            let streams = &streams[(first + i) * s * hidden..][..s * hidden];
            let out = &mut out[column..column + hidden];
            out.copy_from_slice(&streams[..hidden]);
            for stream in streams[hidden..].chunks_exact(hidden) {
                out.iter_mut().zip(stream).for_each(|(sum, x)| *sum += x);
            }
            out.iter_mut().for_each(|sum| *sum /= s as f32);
        }
    });
}
