//! Routed and shared experts.

use super::memory::Buffer;
use super::stored::Matrix;
use super::{Cuda, missing};
use crate::ops::Result;
use crate::tensor::{Expert, StoredMatrix};
use half::bf16;

/// The routed experts of one layer.
pub struct Experts {
    _experts: Vec<Expert<Matrix>>,
}

impl Experts {
    pub(super) fn new(cuda: &Cuda, stored: Vec<Expert<StoredMatrix>>) -> Result<Self> {
        let place = |e: &Expert<StoredMatrix>| {
            let [w1, w3, w2] = [&e.w1, &e.w3, &e.w2].map(|m| cuda.store(m));
            Ok(Expert { w1: w1?, w3: w3?, w2: w2? })
        };
        Ok(Self { _experts: stored.iter().map(place).collect::<Result<_>>()? })
    }
}

pub(super) fn experts_forward(
    _cuda: &Cuda,
    _x: &Buffer<bf16>,
    _experts: &Experts,
    _shared: &Expert<Matrix>,
    _ids: &Buffer<u32>,
    _weights: &Buffer<f32>,
    _k: usize,
    _limit: f32,
    _rows: usize,
    _out: &mut Buffer<bf16>,
) -> Result<()> {
    missing("experts_forward")
}
