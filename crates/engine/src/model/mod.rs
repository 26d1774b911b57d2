//! DeepSeek-V4.1, written once over [`Device`], straight down.
//!
//! A token's way through [`Model::forward`]: embedding -> encoder layers -> boundary (every token's
//! compressed row and index key are published, most prompt tokens stop here) -> decoder layers (each
//! with the rows that matter from there on, `kept`) -> head. A layer is: n-gram memory where
//! present, attention, experts; each of the last two reads a weighted sum of the residual streams
//! and mixes its output back into them ([`streams`]). [`draft`] proposes tokens from what the
//! decoder saw.

mod attention;
mod batch;
pub mod draft;
mod experts;
mod kept;
mod layer;
mod load;
mod memory;
mod probe;
mod random;
mod rope;
mod scratch;
mod select;
pub mod streams;

pub use batch::{Batch, Limits};
pub use layer::Layer;
pub use load::LoadError;
pub use probe::{NoProbe, Probe};
pub use scratch::Scratch;
pub use select::{CandidateRole, Indexer};

use crate::cache::Caches;
use crate::config::ModelConfig;
use crate::engram::Engram;
use crate::plan::StepPlan;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;
use rope::Rope;

/// A loaded model. Immutable; everything that changes is in [`Caches`], [`Batch`] and [`Scratch`].
pub struct Model<D: Device> {
    /// What the checkpoint says.
    pub config: ModelConfig,
    embed: D::Matrix,
    layers: Vec<Layer<D>>,
    norm: D::Buffer<f32>,
    head: D::Matrix,
    /// Draft stages, if the checkpoint has them.
    pub draft: Option<draft::DraftModel<D>>,
    engram: Option<Engram>,
    rope: Rope,
}

impl<D: Device> Model<D> {
    /// Runs one step: reads and extends `caches`, leaves the logits of the plan's output rows in
    /// `scratch.logits`, in plan order, `[outputs, vocab]` f32. Returns the number of outputs.
    ///
    /// The caller ensures that the plan fits the limits of `scratch`, that its pages and slots
    /// belong to their sequences, and that earlier positions have been run.
    pub fn forward(
        &self,
        device: &D,
        plan: &StepPlan,
        caches: &mut Caches<D>,
        batch: &mut Batch<D>,
        scratch: &mut Scratch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<usize> {
        batch.prepare(device, self, plan)?;
        self.memory_prefetch(device, batch);
        batch.replay(device, batch.key(), |batch| {
            self.start(device, batch, scratch)?;
            for layer in &self.layers {
                self.layer_forward(device, layer, caches, batch, scratch, probe)?;
            }
            if let Some(draft) = &self.draft {
                draft.publish(device, self.layers.len(), caches, batch, scratch, probe)?;
            }
            self.output(device, batch, scratch, probe)
        })?;
        Ok(batch.outputs)
    }

    /// Embeddings become the streams; the first collapse takes stream 0.
    fn start(&self, device: &D, batch: &Batch<D>, scratch: &mut Scratch<D>) -> Result<()> {
        let s = scratch;
        device.embed(&self.embed, &batch.tokens, batch.rows, &mut s.x)?;
        device.scatter_rows(
            &batch.image_embeddings,
            self.config.text_config.hidden_size,
            &batch.image_rows,
            batch.image_count,
            &mut s.x,
        )?;
        device.streams_start(&s.x, &s.shape, batch.rows, &mut s.streams)?;
        s.reset_pre(device, batch.rows)
    }

    /// Collapse, norm and head for the rows whose logits are wanted.
    fn output(
        &self,
        device: &D,
        batch: &Batch<D>,
        scratch: &mut Scratch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<()> {
        let s = scratch;
        let (hidden, rows) = (self.config.text_config.hidden_size, batch.rows_now());
        device.streams_collapse(&s.streams, &s.mix.pre, &s.shape, rows, &mut s.collapsed)?;
        device.gather_rows(&s.collapsed, hidden, &batch.output_rows, batch.outputs, &mut s.x)?;
        let eps = s.shape.norm_eps;
        device.rms_norm(&s.x, &self.norm, eps, hidden, batch.outputs, &mut s.y)?;
        probe.hidden(device, batch.outputs, &mut s.y)?;
        device.linear_f32(&s.y, &self.head, 1.0, batch.outputs, &mut s.logits)
    }

    /// Layers of the backbone.
    pub fn layers(&self) -> &[Layer<D>] {
        &self.layers
    }

    /// The n-gram front end, in models with n-gram memories.
    pub fn engram(&self) -> Option<&Engram> {
        self.engram.as_ref()
    }
}
