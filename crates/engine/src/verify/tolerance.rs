//! How far results may lie from the reference.
//!
//! The reference was repeated with other roundings of the same arithmetic (f64 products, other
//! summation orders, another implementation); tolerances are some ten times what those runs differ
//! by. With rounded caches a difference of 1e-6 may move a value over a rounding boundary, and then
//! one element of a cache row moves by a whole step.

use super::Variant;

/// Bounds for devices that store activations in bf16: of what a layer, or a sublayer, adds, when it
/// starts from the reference's values. Errors are relative to the root mean square of that update.
pub(super) mod rounded {
    /// Root mean square of the errors: a layer rounds the streams, 1.2 to 3.3 times as large as
    /// what it adds to them, three times, each time by 1.7e-3 (8 bits of precision). Measured on few
    /// numbers it scatters: [`CHANCE`] of its standard errors are allowed on top.
    pub const RMS: f64 = 1e-2;
    /// Mean of the errors, with signs: rounding to the nearest has none, so that it is chance that
    /// is left, which is allowed on top: [`CHANCE`] standard errors of the mean.
    pub const BIAS: f64 = 1e-3;
    /// Standard errors.
    pub const CHANCE: f64 = 4.0;
    /// One number's error: so many times [`RMS`], and [`ULPS`] of the number itself, before or after
    /// the layer, whichever is larger: what it starts from is rounded as well.
    pub const PEAK: f64 = 4.0;
    /// Two roundings to bf16 by half a unit in the last place, at its largest.
    pub const ULPS: f64 = 1.0 / 128.0;
    /// Share of the chosen rows, blocks and experts that must be the reference's.
    pub const OVERLAP: f64 = 0.98;
    /// Distance between the mean negative log likelihoods of two runs, in nats.
    pub const NLL: f64 = 1e-2;
}

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
    /// seen.
    pub fn forced(variant: Variant) -> Self {
        match variant {
            Variant::F32 => Self::exact(),
            Variant::Quantized => Self {
                cache_outside: 5e-3,
                outside: 2e-2,
                rms: 1e-2,
                score: 1e-2,
                ..Self::free(Variant::Quantized)
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
