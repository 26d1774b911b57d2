//! What a sequence remembers: window rings, compressed rows and index keys in pages, pending
//! compressor rows.
//!
//! Everything a rejected draft wrote is either invisible to later queries (visibility follows from
//! positions) or overwritten when the position runs again; rings are longer than a window by
//! [`Geometry::backtracking`], so that nothing still visible is overwritten.

mod geometry;
pub mod pages;
pub mod prefix;
mod snapshot;
pub mod tiers;

pub use geometry::{CacheFormat, Geometry, RowFormats};
pub use snapshot::Snapshot;

use crate::config::TextConfig;
use deepinfer_device::Device;
use deepinfer_device::ops::{PagedRows, Result};

/// Caches of every sequence, on the device.
pub struct Caches<D: Device> {
    /// Sizes.
    pub geometry: Geometry,
    /// Stored forms.
    pub formats: RowFormats,
    /// Slots in every ring.
    pub slots: usize,
    /// Pages in every pool.
    pub pages: usize,
    /// Positions in a window ring.
    pub ring_len: usize,
    /// A layer: `[slots * ring_len, window row bytes]`.
    pub windows: Vec<D::Buffer<u8>>,
    /// A draft stage: the same.
    pub draft_windows: Vec<D::Buffer<u8>>,
    sources: Vec<Option<SourceCache<D>>>,
}

/// What a layer that owns compressed rows keeps.
pub struct SourceCache<D: Device> {
    /// Tokens in a group.
    pub ratio: usize,
    /// `[pages * rows_per_page, compressed row bytes]`.
    pub rows: D::Buffer<u8>,
    /// `[pages * rows_per_page, index key bytes]`.
    pub keys: D::Buffer<u8>,
    /// `[slots * pending_len, 2, head_dim]`, for ratios above 1.
    pub pending: Option<D::Buffer<f32>>,
}

impl<D: Device> Caches<D> {
    /// Allocates caches for `slots` sequences and `pages` pages.
    pub fn new(
        device: &D,
        config: &TextConfig,
        format: CacheFormat,
        geometry: Geometry,
        slots: usize,
        pages: usize,
    ) -> Result<Self> {
        let formats = format.row_formats(device.exact_rows());
        let window_bytes = formats.window.row_bytes(config.head_dim);
        let ring = || device.alloc::<u8>(slots * geometry.ring_len * window_bytes);
        let sources = (0..config.num_hidden_layers)
            .map(|layer| {
                if !config.kv_source_layer_ids.contains(&layer) {
                    return Ok(None);
                }
                let ratio = config.compress_ratios[layer];
                let rows = pages * geometry.rows_per_page(ratio);
                let pending = slots * geometry.pending_len(ratio) * 2 * config.head_dim;
                Ok(Some(SourceCache {
                    ratio,
                    rows: device.alloc(rows * formats.compressed.row_bytes(config.head_dim))?,
                    keys: device.alloc(rows * formats.index.row_bytes(config.index_head_dim))?,
                    pending: (ratio > 1).then(|| device.alloc(pending)).transpose()?,
                }))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            formats,
            slots,
            pages,
            ring_len: geometry.ring_len,
            windows: (0..config.num_hidden_layers).map(|_| ring()).collect::<Result<_>>()?,
            draft_windows: (0..config.num_nextn_predict_layers)
                .map(|_| ring())
                .collect::<Result<_>>()?,
            sources,
            geometry,
        })
    }

    /// The compressed rows that layer `owner` publishes.
    pub fn compressed(&self, owner: usize) -> Option<PagedRows<'_, D>> {
        let source = self.sources[owner].as_ref()?;
        Some(PagedRows {
            cache: &source.rows,
            format: self.formats.compressed,
            width: self.geometry.head_dim,
            rows_per_page: self.geometry.rows_per_page(source.ratio),
            ratio: source.ratio,
        })
    }

    /// The index keys that layer `owner` publishes.
    pub fn index_keys(&self, owner: usize) -> Option<PagedRows<'_, D>> {
        let source = self.sources[owner].as_ref()?;
        Some(PagedRows {
            cache: &source.keys,
            format: self.formats.index,
            width: self.geometry.index_dim,
            rows_per_page: self.geometry.rows_per_page(source.ratio),
            ratio: source.ratio,
        })
    }

    /// Caches of a source layer.
    ///
    /// # Panics
    /// If `layer` owns no compressed rows.
    pub fn source_mut(&mut self, layer: usize) -> &mut SourceCache<D> {
        self.sources[layer].as_mut().expect("the layer owns compressed rows")
    }
}
