//! Residual streams: single-pass hyper-connections (mHC).
//!
//! A site collapses the streams with the coefficients that the PREVIOUS site computed, and hands
//! its own on to the next one. That is the single pass: collapse before mix.

use super::scratch::Scratch;
use deepinfer_device::Device;
use deepinfer_device::ops::{MixWeights, Result};

/// Weights around one sublayer.
pub struct Site<D: Device> {
    /// How the streams mix.
    pub mix: MixWeights<D>,
    /// Norm of the sublayer's input, `[H]`.
    pub norm: D::Buffer<f32>,
}

impl<D: Device> Site<D> {
    /// `scratch.x` = the normalized input of the sublayer.
    pub fn enter(&self, device: &D, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        device.streams_collapse_norm(
            &s.streams,
            &s.mix.pre,
            &self.norm,
            &s.shape,
            rows,
            &mut s.collapsed,
            &mut s.x,
        )
    }

    /// `scratch.mix` = this site's coefficients. Runs after [`Site::enter`], which reads the old
    /// ones.
    pub fn mix(&self, device: &D, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        device.streams_mix(&s.streams, &self.mix, &s.shape, rows, &mut s.mix)
    }

    /// Adds the sublayer's output `scratch.y` to the streams.
    pub fn leave(&self, device: &D, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        device.streams_update(&mut s.streams, &s.y, &s.mix, &s.shape, rows)
    }
}
