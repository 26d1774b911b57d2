//! Residual streams: start, collapse, mixing coefficients, update, mean.

use super::launch::{args, u32_of};
use super::memory::Buffer;
use super::{Cuda, linear};
use crate::ops::{Mix, MixWeights, Result, StreamShape};
use half::bf16;

/// Threads of a block.
const THREADS: usize = 256;
/// Most streams that the kernels hold.
const MAX_STREAMS: usize = 8;

/// Streams and width of a row, as kernels take them.
fn sizes(shape: &StreamShape) -> (u32, u32) {
    assert!((1..=MAX_STREAMS).contains(&shape.streams), "1 to 8 streams: {shape:?}");
    (u32_of(shape.streams), u32_of(shape.hidden))
}

pub(super) fn start(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    shape: &StreamShape,
    rows: usize,
    streams: &mut Buffer<bf16>,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let count = rows * shape.streams * shape.hidden;
    let args = args![x.head(rows * shape.hidden), s, h, count as u64, streams.head(count)];
    let blocks = [count.div_ceil(THREADS), 1, 1];
    cuda.launch("streams_start", "streams_start", blocks, THREADS, 0, args)
}

pub(super) fn collapse(
    cuda: &Cuda,
    streams: &Buffer<bf16>,
    pre: &Buffer<f32>,
    shape: &StreamShape,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let count = rows * shape.hidden;
    let streams = streams.head(count * shape.streams);
    let pre = pre.head(rows * shape.streams);
    let args = args![streams, pre, s, h, count as u64, out.head(count)];
    let (kernel, at_once) = match shape.hidden.is_multiple_of(8) {
        true => ("streams_collapse_8", 8),
        false => ("streams_collapse_1", 1),
    };
    let blocks = [count.div_ceil(THREADS * at_once), 1, 1];
    cuda.launch("streams_collapse", kernel, blocks, THREADS, 0, args)
}

pub(super) fn mix(
    cuda: &Cuda,
    streams: &Buffer<bf16>,
    weights: &MixWeights<Cuda>,
    shape: &StreamShape,
    rows: usize,
    out: &mut Mix<Cuda>,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let n = shape.streams;
    let (width, outputs) = (n * shape.hidden, (2 + n) * n);
    let streams = streams.head(rows * width);
    let mut scratch = cuda.scratch();
    let products = scratch.take::<f32>(rows * outputs)?;
    let function = &weights.function;
    linear::to_f32(cuda, "streams_mix", streams, function, 1.0, rows, products, &mut scratch)?;
    let args = args![
        streams,
        products,
        weights.base.head(outputs),
        weights.scale.head(3),
        s,
        h,
        u32_of(shape.iterations),
        shape.hc_eps,
        shape.norm_eps,
        out.pre.head(rows * n),
        out.post.head(rows * n),
        out.comb.head(rows * n * n),
    ];
    cuda.launch("streams_mix", "streams_mix", [rows, 1, 1], THREADS, 0, args)
}

pub(super) fn update(
    cuda: &Cuda,
    streams: &mut Buffer<bf16>,
    y: &Buffer<bf16>,
    post: &Buffer<f32>,
    comb: &Buffer<f32>,
    shape: &StreamShape,
    rows: usize,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let count = rows * shape.hidden;
    let args = args![
        streams.head(count * shape.streams),
        y.head(count),
        post.head(rows * shape.streams),
        comb.head(rows * shape.streams * shape.streams),
        s,
        h,
        count as u64,
    ];
    let (kernel, at_once) = match shape.hidden.is_multiple_of(8) && shape.streams <= 4 {
        true => ("streams_update_8", 8),
        false => ("streams_update_1", 1),
    };
    let blocks = [count.div_ceil(THREADS * at_once), 1, 1];
    cuda.launch("streams_update", kernel, blocks, THREADS, 0, args)
}

pub(super) fn mean(
    cuda: &Cuda,
    streams: &Buffer<bf16>,
    shape: &StreamShape,
    rows: usize,
    out: &mut Buffer<bf16>,
    out_width: usize,
    column: usize,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let end = column + shape.hidden;
    assert!(end <= out_width, "columns {column}..{end} of {out_width}");
    let count = rows * shape.hidden;
    let args = args![
        streams.head(count * shape.streams),
        s,
        h,
        count as u64,
        out.head(rows * out_width),
        out_width as u64,
        column as u64,
    ];
    let blocks = [count.div_ceil(THREADS), 1, 1];
    cuda.launch("streams_mean", "streams_mean", blocks, THREADS, 0, args)
}
