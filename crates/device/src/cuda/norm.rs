//! Root mean square normalization.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use crate::ops::Result;
use half::bf16;

pub(super) fn rms_norm(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    weight: &Buffer<f32>,
    eps: f32,
    width: usize,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let args = args![
        x.head(rows * width),
        weight.head(width),
        eps,
        u32_of(width),
        out.head(rows * width),
    ];
    cuda.launch("rms_norm", "rms_norm", [rows, 1, 1], 256, 0, args)
}
