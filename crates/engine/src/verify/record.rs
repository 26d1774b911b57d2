//! A probe that keeps what a pass computed.

use crate::config::TextConfig;
use crate::model::{CandidateRole, Indexer, Probe, Scratch};
use deepinfer_device::ops::Result;
use deepinfer_device::{Device, Element};

/// Values of one layer, rows in order; empty where the layer has no such thing.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerRecord {
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
}

/// Keeps everything of one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorder {
    pub layers: Vec<LayerRecord>,
    /// `[rows, H]`: embeddings, as the first layer finds them in stream 0.
    pub start: Vec<f32>,
    /// `[outputs, H]`.
    pub hidden: Vec<f32>,
    /// `[rows, targets * H]`.
    pub features: Vec<f32>,
    sizes: Sizes,
}

#[derive(Clone, Debug, Default)]
struct Sizes {
    hidden: usize,
    streams: usize,
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
                candidate_blocks: c.candidate_topk_blocks,
                experts_per_token: c.num_experts_per_tok,
                features: c.dspark_target_layer_ids.len() * c.hidden_size,
            },
            ..Self::default()
        }
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
        if l == 0 {
            let (h, n) = (self.sizes.hidden, self.sizes.streams);
            let streams = acts(d, &s.streams, rows * n * h)?;
            self.start = streams.chunks_exact(n * h).flat_map(|row| &row[..h]).copied().collect();
        }
        Ok(())
    }

    fn after_memory(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let width = self.sizes.streams * self.sizes.hidden;
        self.layers[l].after_memory = acts(d, &s.streams, rows * width)?;
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
        self.layers[l].selected = plain(d, &s.selected, rows * indexer.k)?;
        if let CandidateRole::Publish(_) = indexer.role {
            let blocks = rows * self.sizes.candidate_blocks;
            self.layers[l].candidates = plain(d, &s.candidates, blocks)?;
        }
        Ok(())
    }

    fn attention_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.layers[l].attention_out = acts(d, &s.y, rows * self.sizes.hidden)?;
        Ok(())
    }

    fn routed(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let len = rows * self.sizes.experts_per_token;
        self.layers[l].experts = plain(d, &s.expert_ids, len)?;
        self.layers[l].expert_weights = plain(d, &s.expert_weights, len)?;
        Ok(())
    }

    fn experts_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.layers[l].experts_out = acts(d, &s.y, rows * self.sizes.hidden)?;
        Ok(())
    }

    fn after_layer(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let n = &self.sizes;
        self.layers[l].streams = acts(d, &s.streams, rows * n.streams * n.hidden)?;
        self.layers[l].pre = plain(d, &s.mix.pre, rows * n.streams)?;
        if l + 1 == self.layers.len() {
            self.features = acts(d, &s.features, rows * n.features)?;
        }
        Ok(())
    }

    fn hidden(&mut self, d: &D, outputs: usize, hidden: &mut D::Buffer<D::Act>) -> Result<()> {
        self.hidden = acts(d, hidden, outputs * self.sizes.hidden)?;
        Ok(())
    }
}
