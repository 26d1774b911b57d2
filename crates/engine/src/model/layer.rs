//! One layer of the backbone.

use super::attention::Attention;
use super::batch::Batch;
use super::experts::Experts;
use super::memory::Memory;
use super::probe::Probe;
use super::scratch::Scratch;
use super::streams::Site;
use super::{Model, select};
use crate::cache::Caches;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// Weights of one layer, and its part in the model.
pub struct Layer<D: Device> {
    /// Number of the layer.
    pub index: usize,
    pub(super) memory: Option<Memory<D>>,
    /// This layer's columns in the draft features: one for each time it is a draft target.
    pub(super) feature_columns: Vec<usize>,
    /// Number of a decoder layer, from the decoder's first: only the rows that it and later ones
    /// need go on from here. The first one publishes every row before.
    pub(super) depth: Option<usize>,
    pub(super) attention_site: Site<D>,
    pub(super) attention: Attention<D>,
    pub(super) experts_site: Site<D>,
    pub(crate) experts: Experts<D>,
}

impl<D: Device> Model<D> {
    pub(super) fn layer_forward(
        &self,
        device: &D,
        layer: &Layer<D>,
        caches: &mut Caches<D>,
        batch: &mut Batch<D>,
        s: &mut Scratch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<()> {
        let l = layer.index;
        if let Some(depth @ 1..) = layer.depth {
            batch.enter_decoder(device, depth, s)?;
        }
        let rows = batch.rows_now();
        probe.before_layer(device, l, rows, s)?;
        if let Some(memory) = &layer.memory {
            memory.update(device, batch, s)?;
            probe.after_memory(device, l, rows, s)?;
        }
        for &column in &layer.feature_columns {
            let width = batch.feature_width;
            device.streams_mean(&s.streams, &s.shape, rows, &mut s.features, width, column)?;
        }

        layer.attention_site.enter(device, rows, s)?;
        let mut published = None;
        if let Some(source) = &layer.attention.source {
            let branch = device.beside(rows, || source.publish(device, l, caches, batch, s))?;
            published = Some(branch);
            probe.published(device, l, caches, batch, s)?;
        }
        if layer.depth == Some(0) {
            batch.enter_decoder(device, 0, s)?;
        }
        let rows = batch.rows_now();
        let mixed = device.beside(rows, || layer.attention_site.mix(device, rows, s))?;
        let keys = device.beside(rows, || layer.attention.keys(device, batch.set(), s))?;
        probe.window_keys(device, l, rows, s)?;
        layer.attention.narrow(device, rows, s)?;
        if let Some(indexer) = &layer.attention.indexer {
            let queries =
                device.beside(rows, || layer.attention.queries(device, batch.set(), s))?;
            select::queries(device, indexer, l, batch.set(), s, probe)?;
            if let Some(branch) = published {
                device.join(branch)?;
            }
            select::select(device, indexer, caches, batch.set(), s)?;
            probe.selected(device, l, rows, indexer, s)?;
            device.join(queries)?;
        } else {
            layer.attention.queries(device, batch.set(), s)?;
            if let Some(branch) = published {
                device.join(branch)?;
            }
        }
        device.join(keys)?;
        layer.attention.attend(device, caches, l, batch.set(), s)?;
        probe.attention_out(device, l, rows, s)?;
        device.join(mixed)?;
        layer.attention_site.leave(device, rows, s)?;

        layer.experts_site.enter(device, rows, s)?;
        let mixed = device.beside(rows, || layer.experts_site.mix(device, rows, s))?;
        layer.experts.route(device, batch.set(), rows, s)?;
        probe.routed(device, l, rows, s)?;
        layer.experts.forward(device, rows, s)?;
        probe.experts_out(device, l, rows, s)?;
        device.join(mixed)?;
        layer.experts_site.leave(device, rows, s)?;
        probe.after_layer(device, l, rows, s)
    }
}
