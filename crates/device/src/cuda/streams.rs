//! Residual streams: start, collapse, mixing coefficients, update, mean.

use super::launch::{args, u32_of};
use super::memory::Buffer;
use super::{Cuda, linear, norm};
use crate::ops::{Mix, MixWeights, Result, StreamShape};
use half::bf16;

/// Threads of a block.
const THREADS: usize = 256;
/// Threads of a block that mixes a row, where rows are few.
const MANY_THREADS: usize = 1024;
/// Rows up to which they are.
const FEW_ROWS: usize = 16;
/// The widest row that is collapsed and normalized at once.
const MAX_NORM: usize = 8192;
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

pub(super) fn collapse_norm(
    cuda: &Cuda,
    streams: &Buffer<bf16>,
    pre: &Buffer<f32>,
    weight: &Buffer<f32>,
    shape: &StreamShape,
    rows: usize,
    collapsed: &mut Buffer<bf16>,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let (s, h) = sizes(shape);
    let hidden = shape.hidden;
    if !hidden.is_multiple_of(8) || hidden > MAX_NORM {
        collapse(cuda, streams, pre, shape, rows, collapsed)?;
        return norm::rms_norm(cuda, collapsed, weight, shape.norm_eps, hidden, rows, out);
    }
    let count = rows * hidden;
    let args = args![
        streams.head(count * shape.streams),
        pre.head(rows * shape.streams),
        weight.head(hidden),
        shape.norm_eps,
        s,
        h,
        out.head(count),
    ];
    let kernel = "streams_collapse_norm";
    cuda.launch(kernel, kernel, [rows, 1, 1], THREADS, 0, args)
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
    let threads = if rows <= FEW_ROWS { MANY_THREADS } else { THREADS };
    cuda.launch("streams_mix", "streams_mix", [rows, 1, 1], threads, 0, args)
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

#[cfg(test)]
mod tests {
    use crate::ops::{Device, StreamShape};
    use half::bf16;

    #[test]
    fn collapsing_and_norm_at_once_give_the_same_bits() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        for (hidden, streams, rows) in [(5120, 4, 3), (40, 3, 129), (8192, 2, 1), (8200, 2, 2)] {
            let shape =
                StreamShape { streams, hidden, iterations: 1, hc_eps: 1e-6, norm_eps: 1e-5 };
            let value = |i: usize| (((i * 2_654_435_761) >> 7) % 1009) as f32 / 300.0 - 1.6;
            let values = |n: usize| (0..n).map(value).collect::<Vec<f32>>();
            let mut x = cuda.alloc::<bf16>(rows * streams * hidden).expect("fits");
            let (mut pre, mut weight) = (
                cuda.alloc::<f32>(rows * streams).expect("fits"),
                cuda.alloc::<f32>(hidden).expect("fits"),
            );
            cuda.upload_act(&values(rows * streams * hidden), &mut x, 0).expect("uploads");
            cuda.upload(&values(rows * streams), &mut pre, 0).expect("uploads");
            cuda.upload(&values(hidden), &mut weight, 0).expect("uploads");
            let mut collapsed = cuda.alloc::<bf16>(rows * hidden).expect("fits");
            let mut outs = [0, 1].map(|_| cuda.alloc::<bf16>(rows * hidden).expect("fits"));
            cuda.streams_collapse_norm(
                &x,
                &pre,
                &weight,
                &shape,
                rows,
                &mut collapsed,
                &mut outs[0],
            )
            .expect("runs");
            cuda.streams_collapse(&x, &pre, &shape, rows, &mut collapsed).expect("runs");
            cuda.rms_norm(&collapsed, &weight, 1e-5, hidden, rows, &mut outs[1]).expect("runs");
            let [a, b] = outs.map(|out| {
                let mut bits = vec![bf16::ZERO; rows * hidden];
                cuda.download(&out, 0, &mut bits).expect("downloads");
                bits.into_iter().map(bf16::to_bits).collect::<Vec<_>>()
            });
            assert!(a == b && a.iter().any(|x| *x != 0), "{hidden} x {streams}");
        }
    }
}
