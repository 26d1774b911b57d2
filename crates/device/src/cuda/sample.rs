//! From logits to tokens.

use super::memory::Buffer;
use super::{Cuda, missing};
use crate::ops::{BiasEntry, PenaltyRow, Result, SampleRow, TokenCount};

pub(super) fn penalize(
    _cuda: &Cuda,
    _logits: &mut Buffer<f32>,
    _vocab: usize,
    _penalties: &[PenaltyRow],
    _counts: &[TokenCount],
) -> Result<()> {
    missing("penalize")
}

pub(super) fn add_bias(
    _cuda: &Cuda,
    _logits: &mut Buffer<f32>,
    _vocab: usize,
    _entries: &[BiasEntry],
) -> Result<()> {
    missing("add_bias")
}

pub(super) fn mask_logits(
    _cuda: &Cuda,
    _logits: &mut Buffer<f32>,
    _vocab: usize,
    _mask_rows: &[u32],
    _mask: &[u32],
) -> Result<()> {
    missing("mask_logits")
}

pub(super) fn sample(
    _cuda: &Cuda,
    _logits: &Buffer<f32>,
    _vocab: usize,
    _rows: &[SampleRow],
    _tokens: &mut Buffer<u32>,
) -> Result<()> {
    missing("sample")
}
