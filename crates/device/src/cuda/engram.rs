//! The n-gram memory: the gated update of the streams. Rows are gathered in `rows`.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use crate::ops::{Result, StreamShape};
use half::bf16;

pub(super) fn update(
    cuda: &Cuda,
    streams: &mut Buffer<bf16>,
    kv: &Buffer<bf16>,
    weight: &Buffer<f32>,
    image: &Buffer<u8>,
    shape: &StreamShape,
    rows: usize,
) -> Result<()> {
    let StreamShape { streams: count, hidden, norm_eps, .. } = *shape;
    let args = args![
        streams.head(rows * count * hidden),
        kv.head(rows * (count + 1) * hidden),
        weight.head(count * hidden),
        image.head(rows),
        u32_of(count),
        u32_of(hidden),
        norm_eps,
    ];
    cuda.launch("engram_update", "engram_update", [rows, count, 1], 256, 0, args)
}
