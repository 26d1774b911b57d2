//! Attention over selected rows, the window and the sink.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::{Attention, Result};
use half::bf16;

pub(super) fn attend(
    _cuda: &Cuda,
    _args: &Attention<'_, Cuda>,
    _out: &mut Buffer<bf16>,
) -> Result<()> {
    missing("attend")
}
