//! Rotary position embedding of adjacent pairs.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use crate::ops::Result;
use half::bf16;

pub(super) fn rope(
    cuda: &Cuda,
    x: &mut Buffer<bf16>,
    angles: &Buffer<f32>,
    heads: usize,
    head_dim: usize,
    rope_dims: usize,
    inverse: bool,
    rows: usize,
) -> Result<()> {
    assert!(rope_dims <= head_dim && rope_dims.is_multiple_of(2), "{rope_dims} of {head_dim}");
    let pairs = rows * heads * (rope_dims / 2);
    let args = args![
        x.head(rows * heads * head_dim),
        angles.head(rows * rope_dims),
        u32_of(heads),
        u32_of(head_dim),
        u32_of(rope_dims),
        if inverse { -1.0f32 } else { 1.0 },
        pairs as u64,
    ];
    cuda.launch("rope", "rope", [pairs.div_ceil(256), 1, 1], 256, 0, args)
}
