//! The n-gram memory: the gated update of the streams. Rows are gathered in `rows`.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::{Result, StreamShape};
use half::bf16;

pub(super) fn update(
    _cuda: &Cuda,
    _streams: &mut Buffer<bf16>,
    _kv: &Buffer<bf16>,
    _weight: &Buffer<f32>,
    _image: &Buffer<u8>,
    _shape: &StreamShape,
    _rows: usize,
) -> Result<()> {
    missing("engram_update")
}
