//! Mixture of experts: gate, choice, weighted combination, and the shared expert.

use super::batch::RowSet;
use super::scratch::Scratch;
use deepinfer_device::ops::{Result, Routing};
use deepinfer_device::{Device, Expert};

/// Weights of one layer's experts.
pub struct Experts<D: Device> {
    /// `[experts, H]`.
    pub gate: D::Matrix,
    /// `[experts]`, for the choice only.
    pub bias: D::Buffer<f32>,
    /// The same for image rows.
    pub bias_image: Option<D::Buffer<f32>>,
    /// Routed experts.
    pub routed: D::Experts,
    /// Added for every token with weight 1.
    pub shared: Expert<D::Matrix>,
    /// How many routed experts there are.
    pub count: usize,
    /// How many a token uses.
    pub k: usize,
    /// Factor on the normalized weights.
    pub scale: f32,
    /// Clamp of gate and up projections.
    pub limit: f32,
}

impl<D: Device> Experts<D> {
    /// Chooses experts for `scratch.x`.
    pub fn route(
        &self,
        device: &D,
        set: &RowSet<D>,
        rows: usize,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        device.linear_f32(&s.x, &self.gate, 1.0, rows, &mut s.gate)?;
        let routing = Routing {
            scores: &s.gate,
            experts: self.count,
            k: self.k,
            bias: &self.bias,
            bias_image: self.bias_image.as_ref(),
            image: &set.image,
            scale: self.scale,
        };
        device.route(&routing, rows, &mut s.expert_ids, &mut s.expert_weights)
    }

    /// `scratch.y` = the weighted sum of the chosen experts and the shared one.
    pub fn forward(&self, device: &D, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        device.experts_forward(
            &s.x,
            &self.routed,
            &self.shared,
            &s.expert_ids,
            &s.expert_weights,
            self.k,
            self.limit,
            rows,
            &mut s.y,
        )
    }
}
