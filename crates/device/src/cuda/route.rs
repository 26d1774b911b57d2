//! Choosing experts.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::{Result, Routing};

pub(super) fn route(
    _cuda: &Cuda,
    _args: &Routing<'_, Cuda>,
    _rows: usize,
    _ids: &mut Buffer<u32>,
    _weights: &mut Buffer<f32>,
) -> Result<()> {
    missing("route")
}
