//! Choosing compressed rows.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::{Candidates, Result, Selection};

pub(super) fn select(
    _cuda: &Cuda,
    _args: &Selection<'_, Cuda>,
    _candidates: Candidates<'_, Cuda>,
    _out: &mut Buffer<u32>,
) -> Result<()> {
    missing("select")
}
