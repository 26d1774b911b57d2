//! Pooling groups of tokens, and the state of unfinished groups.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::Result;
use half::bf16;

pub(super) fn pool_groups(
    _cuda: &Cuda,
    _values: &Buffer<bf16>,
    _scores: &Buffer<bf16>,
    _pending: &Buffer<f32>,
    _members: &Buffer<u32>,
    _ratio: usize,
    _width: usize,
    _groups: usize,
    _out: &mut Buffer<bf16>,
) -> Result<()> {
    missing("pool_groups")
}

pub(super) fn store_pending(
    _cuda: &Cuda,
    _values: &Buffer<bf16>,
    _scores: &Buffer<bf16>,
    _indices: &Buffer<u64>,
    _width: usize,
    _rows: usize,
    _pending: &mut Buffer<f32>,
) -> Result<()> {
    missing("store_pending")
}
