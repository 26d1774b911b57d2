//! Points at which a caller may look at a step's values, or replace them: for comparisons with
//! references.

use super::batch::Batch;
use super::scratch::Scratch;
use super::select::Indexer;
use crate::cache::Caches;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// Called at fixed points of a step, in order. Every method does nothing by default. `rows` is the
/// number of rows that walk through the layer at that point.
pub trait Probe<D: Device> {
    /// Before anything of a layer: `s.streams`, `s.mix.pre`.
    fn before_layer(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// After a layer's n-gram memory: `s.streams`.
    fn after_memory(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// After a source layer has stored its compressed rows and index keys: `s.latent` and `s.key`
    /// hold them as computed.
    fn published(
        &mut self,
        _d: &D,
        _layer: usize,
        _caches: &mut Caches<D>,
        _batch: &Batch<D>,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// Window keys of the step's rows: `s.kv` as computed, `s.fresh` as stored. For draft stages,
    /// the keys of the step's features in [`Model::forward`](super::Model::forward), those of the
    /// block in [`Model::draft_block`](super::Model::draft_block).
    fn window_keys(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// Index queries, before they are rounded to the format of index keys: `s.index_q`.
    fn index_queries(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _indexer: &Indexer<D>,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// After an indexer's choice: `s.selected`, `s.candidates`.
    fn selected(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _indexer: &Indexer<D>,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// Output of the attention sublayer: `s.y`.
    fn attention_out(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// After the choice of experts: `s.expert_ids`, `s.expert_weights`.
    fn routed(&mut self, _d: &D, _layer: usize, _rows: usize, _s: &mut Scratch<D>) -> Result<()> {
        Ok(())
    }
    /// Output of the experts sublayer: `s.y`.
    fn experts_out(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// At a layer's end: `s.streams`, `s.mix.pre`.
    fn after_layer(
        &mut self,
        _d: &D,
        _layer: usize,
        _rows: usize,
        _s: &mut Scratch<D>,
    ) -> Result<()> {
        Ok(())
    }
    /// The normalized hidden state of the output rows, `[outputs, H]`.
    fn hidden(&mut self, _d: &D, _outputs: usize, _hidden: &mut D::Buffer<D::Act>) -> Result<()> {
        Ok(())
    }
}

/// Looks at nothing.
pub struct NoProbe;
impl<D: Device> Probe<D> for NoProbe {}
