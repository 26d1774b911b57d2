//! A probe that keeps what a pass computed.

use crate::cache::Caches;
use crate::config::TextConfig;
use crate::model::{Batch, CandidateRole, Indexer, Probe, Scratch};
use deepinfer_device::formats::{decode_row, round_row};
use deepinfer_device::ops::Result;
use deepinfer_device::{Device, Element, RowFormat};

/// Rows that a layer stores, or rounds to a stored form.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Values in a row.
    pub width: usize,
    /// Stored form.
    pub format: RowFormat,
    /// `[rows, width]`: as computed, before they are rounded.
    pub computed: Vec<f32>,
    /// `[rows, row bytes]`; empty for rows that are not stored.
    pub stored: Vec<u8>,
}

impl Rows {
    /// What readers see: `[rows, width]`.
    pub fn decoded(&self) -> Vec<f32> {
        let mut out = self.computed.clone();
        if self.stored.is_empty() {
            out.chunks_mut(self.width.max(1)).for_each(|row| round_row(self.format, row));
        }
        let bytes = self.format.row_bytes(self.width).max(1);
        for (row, out) in self.stored.chunks(bytes).zip(out.chunks_mut(self.width.max(1))) {
            decode_row(self.format, row, out);
        }
        out
    }
}

/// Values of one layer, rows in order; empty where the layer has no such thing.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerRecord {
    /// `[rows, S, H]`: streams that the layer starts from.
    pub before: Vec<f32>,
    /// `[rows, S, H]`: streams after the n-gram memory.
    pub after_memory: Vec<f32>,
    /// `[rows, k]`: chosen compressed rows.
    pub selected: Vec<u32>,
    /// `[rows, blocks]`: published candidate blocks.
    pub candidates: Vec<u32>,
    /// `[rows, H]`.
    pub attention_out: Vec<f32>,
    /// `[rows, k]`.
    pub experts: Vec<u32>,
    /// `[rows, k]`.
    pub expert_weights: Vec<f32>,
    /// `[rows, H]`.
    pub experts_out: Vec<f32>,
    /// `[rows, S, H]`.
    pub streams: Vec<f32>,
    /// `[rows, S]`.
    pub pre: Vec<f32>,
    /// Window keys.
    pub window: Option<Rows>,
    /// Compressed rows of the groups that the pass completes.
    pub compressed: Option<Rows>,
    /// Their index keys.
    pub keys: Option<Rows>,
    /// Index queries, a row for each head.
    pub queries: Option<Rows>,
}

/// Keeps everything of one pass through the layers, or through the draft stages.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorder {
    /// Number of the first layer in `layers`.
    pub first: usize,
    pub layers: Vec<LayerRecord>,
    /// Window keys of the draft stages, of the rows of the pass.
    pub context: Vec<Rows>,
    /// `[outputs, H]`.
    pub hidden: Vec<f32>,
    /// `[rows, targets * H]`.
    pub features: Vec<f32>,
    sizes: Sizes,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    hidden: usize,
    streams: usize,
    head_dim: usize,
    candidate_blocks: usize,
    experts_per_token: usize,
    features: usize,
}

impl Recorder {
    pub fn new(c: &TextConfig) -> Self {
        Self {
            layers: vec![LayerRecord::default(); c.num_hidden_layers],
            sizes: Sizes {
                hidden: c.hidden_size,
                streams: c.hc_mult,
                head_dim: c.head_dim,
                candidate_blocks: c.candidate_topk_blocks,
                experts_per_token: c.num_experts_per_tok,
                features: c.dspark_target_layer_ids.len() * c.hidden_size,
            },
            ..Self::default()
        }
    }

    /// For the draft stages.
    pub fn drafts(c: &TextConfig) -> Self {
        let mut recorder = Self::new(c);
        recorder.first = c.num_hidden_layers;
        recorder.layers = vec![LayerRecord::default(); c.num_nextn_predict_layers];
        recorder.sizes.experts_per_token = c.dspark_num_experts_per_tok;
        recorder.sizes.features = 0;
        recorder
    }

    /// For the draft stages' keys of a pass: no layer is kept.
    pub fn keys(c: &TextConfig) -> Self {
        Self { first: c.num_hidden_layers, layers: Vec::new(), ..Self::new(c) }
    }

    /// One past the last layer.
    pub fn end(&self) -> usize {
        self.first + self.layers.len()
    }

    /// `[rows, H]`: embeddings, as the first layer finds them in stream 0.
    pub fn start(&self) -> Vec<f32> {
        let (h, s) = (self.sizes.hidden, self.sizes.streams);
        let before = self.layers.first().map_or(&[][..], |layer| &layer.before);
        before.chunks(s * h).flat_map(|row| &row[..h]).copied().collect()
    }

    fn layer(&mut self, l: usize) -> &mut LayerRecord {
        &mut self.layers[l - self.first]
    }
}

pub(super) fn acts<D: Device>(d: &D, buffer: &D::Buffer<D::Act>, len: usize) -> Result<Vec<f32>> {
    let mut out = vec![0.0; len];
    d.download_act(buffer, 0, &mut out)?;
    Ok(out)
}

pub(super) fn plain<D: Device, E: Element>(
    d: &D,
    buffer: &D::Buffer<E>,
    len: usize,
) -> Result<Vec<E>> {
    let mut out = vec![E::default(); len];
    d.download(buffer, 0, &mut out)?;
    Ok(out)
}

impl<D: Device> Probe<D> for Recorder {
    fn before_layer(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let width = self.sizes.streams * self.sizes.hidden;
        self.layer(l).before = acts(d, &s.streams, rows * width)?;
        Ok(())
    }

    fn after_memory(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let width = self.sizes.streams * self.sizes.hidden;
        self.layer(l).after_memory = acts(d, &s.streams, rows * width)?;
        Ok(())
    }

    fn published(
        &mut self,
        d: &D,
        l: usize,
        caches: &mut Caches<D>,
        batch: &Batch<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        // The session's only slot owns the pages from 0 on, in order: rows lie in order.
        let layer = self.layer(l);
        for (paged, computed, to) in [
            (caches.compressed(l), &s.latent, &mut layer.compressed),
            (caches.index_keys(l), &s.key, &mut layer.keys),
        ] {
            let Some(paged) = paged else { continue };
            let (width, format, n) = (paged.width, paged.format, batch.rows / paged.ratio);
            let stored = plain(d, paged.cache, n * format.row_bytes(width))?;
            let computed = acts(d, computed, n * width)?;
            *to = Some(Rows { width, format, computed, stored });
        }
        Ok(())
    }

    fn window_keys(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let (width, format) = (self.sizes.head_dim, s.formats.window);
        let computed = acts(d, &s.kv, rows * width)?;
        let stored = plain(d, &s.fresh, rows * format.row_bytes(width))?;
        let keys = Rows { width, format, computed, stored };
        if l < self.end() {
            self.layer(l).window = Some(keys);
        } else {
            self.context.push(keys);
        }
        Ok(())
    }

    fn index_queries(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let (width, format) = (indexer.dim, s.formats.index);
        let computed = acts(d, &s.index_q, rows * indexer.heads * width)?;
        self.layer(l).queries = Some(Rows { width, format, computed, stored: Vec::new() });
        Ok(())
    }

    fn selected(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        self.layer(l).selected = plain(d, &s.selected, rows * indexer.k)?;
        if let CandidateRole::Publish(_) = indexer.role {
            let blocks = rows * self.sizes.candidate_blocks;
            self.layer(l).candidates = plain(d, &s.candidates, blocks)?;
        }
        Ok(())
    }

    fn attention_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.layer(l).attention_out = acts(d, &s.y, rows * self.sizes.hidden)?;
        Ok(())
    }

    fn routed(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let len = rows * self.sizes.experts_per_token;
        self.layer(l).experts = plain(d, &s.expert_ids, len)?;
        self.layer(l).expert_weights = plain(d, &s.expert_weights, len)?;
        Ok(())
    }

    fn experts_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.layer(l).experts_out = acts(d, &s.y, rows * self.sizes.hidden)?;
        Ok(())
    }

    fn after_layer(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let n = self.sizes;
        self.layer(l).streams = acts(d, &s.streams, rows * n.streams * n.hidden)?;
        self.layer(l).pre = plain(d, &s.mix.pre, rows * n.streams)?;
        if l + 1 == self.end() && n.features > 0 {
            self.features = acts(d, &s.features, rows * n.features)?;
        }
        Ok(())
    }

    fn hidden(&mut self, d: &D, outputs: usize, hidden: &mut D::Buffer<D::Act>) -> Result<()> {
        self.hidden = acts(d, hidden, outputs * self.sizes.hidden)?;
        Ok(())
    }
}
