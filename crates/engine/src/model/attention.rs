//! Sparse attention over one key-value vector a position, shared by all heads.
//!
//! A query sees the last positions through a window cache of its layer, and, in compressed layers,
//! the compressed rows that an indexer chose ([`super::select`]) among those that the layer's
//! source published ([`Source::publish`]).

use super::batch::{Batch, RowSet};
use super::scratch::Scratch;
use super::select::Indexer;
use crate::cache::Caches;
use deepinfer_device::Device;
use deepinfer_device::ops::{Attention as Attend, PagedRows, Result, Selected, WindowRows};

/// Sizes that every layer shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// H.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of a head and of a key.
    pub head_dim: usize,
    /// Rotated dims, the last of a head.
    pub rope_dims: usize,
    /// Width of the query bottleneck.
    pub q_lora: usize,
    /// Groups of the output projection.
    pub groups: usize,
    /// Width of a group's output bottleneck.
    pub o_lora: usize,
    /// Norm epsilon.
    pub eps: f32,
}

/// Weights of one layer's attention.
pub struct Attention<D: Device> {
    /// Sizes.
    pub shape: AttentionShape,
    /// `[q_lora, H]`.
    pub wq_a: D::Matrix,
    /// `[q_lora]`.
    pub q_norm: D::Buffer<f32>,
    /// `[heads * head_dim, q_lora]`.
    pub wq_b: D::Matrix,
    /// `[head_dim, H]`.
    pub wkv: D::Matrix,
    /// `[head_dim]`.
    pub kv_norm: D::Buffer<f32>,
    /// `[heads]`.
    pub sink: D::Buffer<f32>,
    /// `[groups * o_lora, heads * head_dim / groups]`.
    pub wo_a: D::Matrix,
    /// `[H, groups * o_lora]`.
    pub wo_b: D::Matrix,
    /// Which layer's compressed rows are read; `None` for window-only layers.
    pub reads: Option<usize>,
    /// Present in layers that own compressed rows.
    pub source: Option<Source<D>>,
    /// Present in layers that choose compressed rows.
    pub indexer: Option<Indexer<D>>,
}

impl<D: Device> Attention<D> {
    /// The bottleneck of the queries of the current rows: `scratch.qr`, which the indexer reads, too.
    pub fn narrow(&self, device: &D, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let c = &self.shape;
        device.linear(&s.x, &self.wq_a, rows, &mut s.q_low)?;
        device.rms_norm(&s.q_low, &self.q_norm, c.eps, c.q_lora, rows, &mut s.qr)
    }

    /// Queries of the current rows from `scratch.qr`: `scratch.q`, rotated.
    pub fn queries(&self, device: &D, set: &RowSet<D>, s: &mut Scratch<D>) -> Result<()> {
        let (c, rows) = (&self.shape, set.map.rows);
        let angles = set.angles(self.reads.is_some());
        device.linear(&s.qr, &self.wq_b, rows, &mut s.q)?;
        device.rope(&mut s.q, angles, c.heads, c.head_dim, c.rope_dims, false, rows)
    }

    /// Window keys of the current rows: `scratch.fresh`, encoded.
    pub fn keys(&self, device: &D, set: &RowSet<D>, s: &mut Scratch<D>) -> Result<()> {
        let rows = set.map.rows;
        device.linear(&s.x, &self.wkv, rows, &mut s.kv_raw)?;
        self.window_keys(device, set, rows, s)
    }

    /// Norm, rotation and rounding of `scratch.kv_raw` into `scratch.fresh`.
    pub fn window_keys(
        &self,
        device: &D,
        set: &RowSet<D>,
        rows: usize,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let c = &self.shape;
        let angles = set.angles(self.reads.is_some());
        device.rms_norm(&s.kv_raw, &self.kv_norm, c.eps, c.head_dim, rows, &mut s.kv)?;
        device.rope(&mut s.kv, angles, 1, c.head_dim, c.rope_dims, false, rows)?;
        device.encode_rows(&s.kv, c.head_dim, s.formats.window, rows, &mut s.fresh)
    }

    /// Attention proper, then the new window rows enter layer `layer`'s rings: queries of this
    /// step must still see what those slots held. `scratch.y` = the sublayer's output.
    pub fn attend(
        &self,
        device: &D,
        caches: &mut Caches<D>,
        layer: usize,
        set: &RowSet<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let rows = set.map.rows;
        let keys = self.reads.and_then(|owner| caches.compressed(owner));
        self.attend_rows(device, &caches.windows[layer], caches.ring_len, keys, set, s)?;
        let width = s.formats.window.row_bytes(self.shape.head_dim);
        let ring = &mut caches.windows[layer];
        let stored = device
            .beside(rows, || device.scatter_rows(&s.fresh, width, &set.ring_rows, rows, ring))?;
        self.output(device, set, s)?;
        device.join(stored)
    }

    /// Attention over a ring, `scratch.fresh` and the rows of `keys` that `scratch.selected` names:
    /// `scratch.attended`.
    pub fn attend_rows(
        &self,
        device: &D,
        ring: &D::Buffer<u8>,
        ring_len: usize,
        keys: Option<PagedRows<'_, D>>,
        set: &RowSet<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let c = &self.shape;
        let indices = &s.selected;
        let selected = keys.map(|keys| Selected { indices, k: s.selected_k, keys });
        let args = Attend {
            q: &s.q,
            heads: c.heads,
            head_dim: c.head_dim,
            map: &set.map,
            window: WindowRows { ring, ring_len, fresh: &s.fresh, format: s.formats.window },
            selected,
            sink: &self.sink,
            scale: (c.head_dim as f32).powf(-0.5),
        };
        device.attend(&args, &mut s.attended)
    }

    /// The output projection of `scratch.attended`: `scratch.y`.
    pub fn output(&self, device: &D, set: &RowSet<D>, s: &mut Scratch<D>) -> Result<()> {
        let (c, rows) = (&self.shape, set.map.rows);
        let angles = set.angles(self.reads.is_some());
        device.rope(&mut s.attended, angles, c.heads, c.head_dim, c.rope_dims, true, rows)?;
        device.grouped_linear(&s.attended, &self.wo_a, c.groups, rows, &mut s.o_low)?;
        device.linear(&s.o_low, &self.wo_b, rows, &mut s.y)
    }
}

/// Weights that turn a layer's input into compressed rows and index keys.
pub struct Source<D: Device> {
    /// Tokens in a group.
    pub ratio: usize,
    /// `[head_dim, H]`.
    pub wkv: D::Matrix,
    /// `[head_dim, H]`, for ratios above 1.
    pub wgate: Option<D::Matrix>,
    /// `[head_dim]`.
    pub norm: D::Buffer<f32>,
    /// `[index_dim, head_dim]`.
    pub wk: D::Matrix,
    /// `[index_dim]`.
    pub k_norm: D::Buffer<f32>,
    /// Width of a compressed row.
    pub head_dim: usize,
    /// Width of an index key.
    pub index_dim: usize,
    /// Rotated dims, the last of a row.
    pub rope_dims: usize,
    /// Norm epsilon.
    pub eps: f32,
}

impl<D: Device> Source<D> {
    /// Compresses `scratch.x` of all rows and stores the rows of every group that this step
    /// completes; unfinished groups stay pending.
    pub fn publish(
        &self,
        device: &D,
        layer: usize,
        caches: &mut Caches<D>,
        batch: &Batch<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let groups = batch.groups(self.ratio);
        let rows = batch.rows_now();
        let source = caches.source_mut(layer);

        device.linear(&s.x, &self.wkv, rows, &mut s.group_values)?;
        if let (Some(wgate), Some(pending)) = (&self.wgate, &mut source.pending) {
            let (r, d) = (self.ratio, self.head_dim);
            device.linear(&s.x, wgate, rows, &mut s.group_scores)?;
            device.pool_groups(
                &s.group_values,
                &s.group_scores,
                pending,
                &groups.members,
                r,
                d,
                groups.count,
                &mut s.pooled,
            )?;
            let (values, scores) = (&s.group_values, &s.group_scores);
            device.store_pending(values, scores, &groups.pending_rows, d, rows, pending)?;
        }
        let pooled = if self.ratio > 1 { &s.pooled } else { &s.group_values };
        let (count, eps) = (groups.count, self.eps);
        device.rms_norm(pooled, &self.norm, eps, self.head_dim, count, &mut s.latent)?;

        device.linear(&s.latent, &self.wk, count, &mut s.key_raw)?;
        device.rms_norm(&s.key_raw, &self.k_norm, eps, self.index_dim, count, &mut s.key)?;
        device.rope(&mut s.key, &groups.angles, 1, self.index_dim, self.rope_dims, false, count)?;
        let format = s.formats.index;
        device.encode_rows(&s.key, self.index_dim, format, count, &mut s.encoded)?;
        let width = format.row_bytes(self.index_dim);
        device.scatter_rows(&s.encoded, width, &groups.cache_rows, count, &mut source.keys)?;

        let latent = &mut s.latent;
        device.rope(latent, &groups.angles, 1, self.head_dim, self.rope_dims, false, count)?;
        let format = s.formats.compressed;
        device.encode_rows(&s.latent, self.head_dim, format, count, &mut s.encoded)?;
        let width = format.row_bytes(self.head_dim);
        device.scatter_rows(&s.encoded, width, &groups.cache_rows, count, &mut source.rows)
    }
}
