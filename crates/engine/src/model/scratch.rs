//! Buffers that one step works in: allocated once, sized by the limits of a step, never by context.

use super::batch::Limits;
use crate::cache::RowFormats;
use crate::config::TextConfig;
use deepinfer_device::ops::{Mix, Result, StreamShape};
use deepinfer_device::{Device, Element};

/// Work space of [`super::Model::forward`]. `T` is the most rows a step may have, `O` the most
/// output rows.
pub struct Scratch<D: Device> {
    /// Sizes of the streams.
    pub shape: StreamShape,
    /// Formats of the caches.
    pub formats: RowFormats,
    /// `[T, S, H]`: the residual streams.
    pub streams: D::Buffer<D::Act>,
    /// Where streams go when rows are dropped.
    pub streams_kept: D::Buffer<D::Act>,
    /// Coefficients of the last hyper-connection site.
    pub mix: Mix<D>,
    /// `[T, S]`: where `mix.pre` goes when rows are dropped.
    pub pre_kept: D::Buffer<f32>,
    /// `[T, S]`: (1, 0, ...) in every row.
    pub pre_start: D::Buffer<f32>,
    /// `[T, H]`: collapsed streams, before the norm.
    pub collapsed: D::Buffer<D::Act>,
    /// `[T, H]`: input of a sublayer.
    pub x: D::Buffer<D::Act>,
    /// `[T, H]`: output of a sublayer.
    pub y: D::Buffer<D::Act>,
    /// `[T, q_lora]`.
    pub q_low: D::Buffer<D::Act>,
    /// `[T, q_lora]`: the same after its norm; the indexer reads it too.
    pub qr: D::Buffer<D::Act>,
    /// `[T, heads, head_dim]`.
    pub q: D::Buffer<D::Act>,
    /// `[T, head_dim]`.
    pub kv_raw: D::Buffer<D::Act>,
    /// `[T, head_dim]`.
    pub kv: D::Buffer<D::Act>,
    /// `[T, window row bytes]`: window keys of this step as stored.
    pub fresh: D::Buffer<u8>,
    /// `[T, head_dim]`: what groups are pooled from. A branch of its own, as all that follows.
    pub group_values: D::Buffer<D::Act>,
    /// `[T, head_dim]`.
    pub group_scores: D::Buffer<D::Act>,
    /// `[T, head_dim]`: pooled groups.
    pub pooled: D::Buffer<D::Act>,
    /// `[T, head_dim]`: normalized groups.
    pub latent: D::Buffer<D::Act>,
    /// `[T, index_dim]`.
    pub key_raw: D::Buffer<D::Act>,
    /// `[T, index_dim]`.
    pub key: D::Buffer<D::Act>,
    /// `[T, widest row]`: compressed rows or index keys as stored.
    pub encoded: D::Buffer<u8>,
    /// `[T, index heads, index_dim]`.
    pub index_q: D::Buffer<D::Act>,
    /// `[T, index heads]`.
    pub index_weights: D::Buffer<f32>,
    /// `[T, selected_k]`: chosen compressed rows, read by all layers up to the next choice.
    pub selected: D::Buffer<u32>,
    /// Where they go when rows are dropped.
    pub selected_kept: D::Buffer<u32>,
    /// Width of `selected`.
    pub selected_k: usize,
    /// `[T, candidate blocks]`.
    pub candidates: D::Buffer<u32>,
    /// Where they go when rows are dropped.
    pub candidates_kept: D::Buffer<u32>,
    candidate_blocks: usize,
    /// `[T, heads, head_dim]`.
    pub attended: D::Buffer<D::Act>,
    /// `[T, groups * o_lora]`.
    pub o_low: D::Buffer<D::Act>,
    /// `[T, experts]`.
    pub gate: D::Buffer<f32>,
    /// `[T, experts a token]`.
    pub expert_ids: D::Buffer<u32>,
    /// `[T, experts a token]`.
    pub expert_weights: D::Buffer<f32>,
    /// `[T, hash columns * table width]`.
    pub memory: D::Buffer<D::Act>,
    /// `[T, (S + 1) * H]`.
    pub memory_kv: D::Buffer<D::Act>,
    /// `[T, targets * H]`: what drafts are made from.
    pub features: D::Buffer<D::Act>,
    /// Where features go when rows are dropped.
    pub features_kept: D::Buffer<D::Act>,
    /// `[O, vocab]`.
    pub logits: D::Buffer<f32>,
}

impl<D: Device> Scratch<D> {
    /// Allocates everything for steps within `limits`.
    pub fn new(device: &D, c: &TextConfig, formats: RowFormats, limits: &Limits) -> Result<Self> {
        let t = limits.rows;
        let shape = StreamShape {
            streams: c.hc_mult,
            hidden: c.hidden_size,
            iterations: c.hc_sinkhorn_iters,
            hc_eps: c.hc_eps,
            norm_eps: c.rms_norm_eps,
        };
        let (h, s) = (shape.hidden, shape.streams);
        let heads = c.num_attention_heads * c.head_dim;
        let act = |per_row: usize| device.alloc::<D::Act>(t * per_row);
        let f32s = |per_row: usize| device.alloc::<f32>(t * per_row);
        let experts = c.n_routed_experts.max(c.dspark_n_routed_experts);
        let slots = c.num_experts_per_tok.max(c.dspark_num_experts_per_tok);
        let features = c.dspark_target_layer_ids.len() * h;
        let memory = c.hash_columns() * c.engram_head_dim;
        let widest =
            formats.compressed.row_bytes(c.head_dim).max(formats.index.row_bytes(c.index_head_dim));
        let mut start = vec![0.0f32; t * s];
        start.iter_mut().step_by(s).for_each(|x| *x = 1.0);
        let mut pre_start = f32s(s)?;
        device.upload(&start, &mut pre_start, 0)?;
        Ok(Self {
            shape,
            formats,
            streams: act(s * h)?,
            streams_kept: act(s * h)?,
            mix: Mix { pre: f32s(s)?, post: f32s(s)?, comb: f32s(s * s)? },
            pre_kept: f32s(s)?,
            pre_start,
            collapsed: act(h)?,
            x: act(h)?,
            y: act(h)?,
            q_low: act(c.q_lora_rank)?,
            qr: act(c.q_lora_rank)?,
            q: act(heads)?,
            kv_raw: act(c.head_dim)?,
            kv: act(c.head_dim)?,
            fresh: device.alloc(t * formats.window.row_bytes(c.head_dim))?,
            group_values: act(c.head_dim)?,
            group_scores: act(c.head_dim)?,
            pooled: act(c.head_dim)?,
            latent: act(c.head_dim)?,
            key_raw: act(c.index_head_dim)?,
            key: act(c.index_head_dim)?,
            encoded: device.alloc(t * widest)?,
            index_q: act(c.index_n_heads * c.index_head_dim)?,
            index_weights: f32s(c.index_n_heads)?,
            selected: device.alloc(t * c.index_topk)?,
            selected_kept: device.alloc(t * c.index_topk)?,
            selected_k: c.index_topk,
            candidates: device.alloc(t * c.candidate_topk_blocks)?,
            candidates_kept: device.alloc(t * c.candidate_topk_blocks)?,
            candidate_blocks: c.candidate_topk_blocks,
            attended: act(heads)?,
            o_low: act(c.o_groups * c.o_lora_rank)?,
            gate: f32s(experts)?,
            expert_ids: device.alloc(t * slots)?,
            expert_weights: f32s(slots)?,
            memory: act(memory)?,
            memory_kv: act(if memory > 0 { (s + 1) * h } else { 0 })?,
            features: act(features)?,
            features_kept: act(features)?,
            logits: device.alloc(limits.outputs * c.vocab_size)?,
        })
    }

    /// The first site collapses stream 0.
    pub fn reset_pre(&mut self, device: &D, rows: usize) -> Result<()> {
        device.copy(&self.pre_start, 0, &mut self.mix.pre, 0, rows * self.shape.streams)
    }

    /// Keeps `rows` rows of the streams, their coefficients, the sublayer input and the features;
    /// with `choices`, also of the chosen compressed rows.
    pub fn keep_rows(
        &mut self,
        device: &D,
        keep: &D::Buffer<u32>,
        rows: usize,
        feature_width: usize,
        choices: bool,
    ) -> Result<()> {
        let (s, h) = (self.shape.streams, self.shape.hidden);
        let kept = Keep { device, keep, rows };
        kept.only(&mut self.streams, s * h, &mut self.streams_kept)?;
        kept.only(&mut self.mix.pre, s, &mut self.pre_kept)?;
        kept.only(&mut self.x, h, &mut self.collapsed)?;
        kept.only(&mut self.features, feature_width, &mut self.features_kept)?;
        if choices {
            let (k, blocks) = (self.selected_k, self.candidate_blocks);
            kept.only(&mut self.selected, k, &mut self.selected_kept)?;
            kept.only(&mut self.candidates, blocks, &mut self.candidates_kept)?;
        }
        Ok(())
    }
}

/// Rows that go on.
pub(super) struct Keep<'a, D: Device> {
    pub(super) device: &'a D,
    /// Their numbers.
    pub(super) keep: &'a D::Buffer<u32>,
    pub(super) rows: usize,
}

impl<D: Device> Keep<'_, D> {
    /// Leaves only them in `x`, rows of `width`. Buffers stay where they are: recorded steps know
    /// them by their addresses.
    pub(super) fn only<E: Element>(
        &self,
        x: &mut D::Buffer<E>,
        width: usize,
        spare: &mut D::Buffer<E>,
    ) -> Result<()> {
        self.device.gather_rows(x, width, self.keep, self.rows, spare)?;
        self.device.copy(spare, 0, x, 0, self.rows * width)
    }
}
