//! Pooling groups of tokens, and the state of unfinished groups.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use crate::ops::Result;
use half::bf16;

/// Threads of a block.
const THREADS: usize = 256;

pub(super) fn pool_groups(
    cuda: &Cuda,
    values: &Buffer<bf16>,
    scores: &Buffer<bf16>,
    pending: &Buffer<f32>,
    members: &Buffer<u32>,
    ratio: usize,
    width: usize,
    groups: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let args = args![
        values.head(0),
        scores.head(0),
        pending.head(0),
        members.head(groups * ratio),
        u32_of(ratio),
        u32_of(width),
        out.head(groups * width),
    ];
    let blocks = [groups, width.div_ceil(THREADS), 1];
    cuda.launch("pool_groups", "pool_groups", blocks, THREADS, 0, args)
}

pub(super) fn store_pending(
    cuda: &Cuda,
    values: &Buffer<bf16>,
    scores: &Buffer<bf16>,
    indices: &Buffer<u64>,
    width: usize,
    rows: usize,
    pending: &mut Buffer<f32>,
) -> Result<()> {
    let args = args![
        values.head(rows * width),
        scores.head(rows * width),
        indices.head(rows),
        u32_of(width),
        pending.head(0),
    ];
    cuda.launch("store_pending", "store_pending", [rows, 1, 1], THREADS, 0, args)
}
