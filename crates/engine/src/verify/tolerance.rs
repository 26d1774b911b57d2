//! How far results may lie from the reference.
//!
//! The reference was repeated with other roundings of the same arithmetic (f64 products, other
//! summation orders, another implementation); tolerances are some ten times what those runs differ
//! by. With rounded caches a difference of 1e-6 may move a value over a rounding boundary, and then
//! one element of a cache row moves by a whole step.

use super::Variant;
use deepinfer_device::RowFormat;

/// Allowed differences, absolute, of values of order 1 (logits of standard deviation 1.5, streams of
/// root-mean-square 2 to 8).
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerances {
    pub streams: f64,
    pub sublayer: f64,
    pub pre: f64,
    pub hidden: f64,
    pub logits: f64,
    pub weights: f64,
    pub cache_rows: f64,
    pub features: f64,
    pub draft_hidden: f64,
    pub confidence: f64,
    /// Share of cache elements that may lie outside, on the other side of a rounding boundary.
    pub cache_outside: f64,
    /// Share of other numbers that may lie outside.
    pub outside: f64,
    /// Limit of the relative root-mean-square error.
    pub rms: f64,
    /// Error of a selection score, relative to the largest score of its row: choices that differ
    /// are compared where the scores differ by more.
    pub score: f64,
}

impl Tolerances {
    /// Free runs: nothing is forced, differences add up over layers.
    pub fn free(variant: Variant) -> Self {
        match variant {
            Variant::F32 => Self::exact(),
            Variant::Quantized => Self {
                streams: 2e-2,
                sublayer: 2e-2,
                pre: 5e-3,
                hidden: 1e-2,
                logits: 5e-3,
                weights: 5e-3,
                cache_rows: 5e-3,
                features: 2e-2,
                draft_hidden: 3e-2,
                confidence: 3e-2,
                cache_outside: 2e-3,
                ..Self::exact()
            },
        }
    }

    /// Forced runs: every layer starts from the reference's values, so that one layer's error is
    /// seen. `stored` is what the device keeps exact rows in: the precision of its activations.
    pub fn forced(variant: Variant, stored: RowFormat) -> Self {
        match (variant, stored) {
            (Variant::F32, RowFormat::F32) => Self::exact(),
            (Variant::Quantized, RowFormat::F32) => Self {
                cache_outside: 5e-3,
                outside: 2e-2,
                rms: 1e-2,
                score: 1e-2,
                ..Self::free(Variant::Quantized)
            },
            // bf16 activations: 8 bits of precision, rounded several times in a layer.
            _ => Self {
                streams: 1e-1,
                sublayer: 1e-1,
                pre: 3e-2,
                hidden: 1e-1,
                logits: 2e-1,
                weights: 3e-2,
                cache_rows: 5e-2,
                features: 1e-1,
                draft_hidden: 2e-1,
                confidence: 5e-1,
                cache_outside: 5e-2,
                outside: 2e-2,
                rms: 3e-2,
                score: 5e-2,
            },
        }
    }

    fn exact() -> Self {
        Self {
            streams: 2e-3,
            sublayer: 2e-3,
            pre: 1e-3,
            hidden: 1e-3,
            logits: 1e-3,
            weights: 1e-3,
            cache_rows: 1e-3,
            features: 2e-3,
            draft_hidden: 2e-3,
            confidence: 5e-3,
            cache_outside: 0.0,
            outside: 0.0,
            rms: f64::INFINITY,
            score: 1e-5,
        }
    }
}
