//! Bytes of caches, from a configuration alone.

use deepinfer::cache::{CacheFormat, Geometry};
use deepinfer::config::TextConfig;
use deepinfer_device::RowFormat;

/// What caches take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheBytes {
    /// Compressed rows and index keys, on average.
    pub per_token: f64,
    /// Window rings of all layers and draft stages, pending compressor rows.
    pub per_sequence: u64,
    /// Tokens are held in pages of this many.
    pub page_tokens: usize,
}

impl CacheBytes {
    /// Bytes on a CPU.
    pub fn new(c: &TextConfig, format: CacheFormat) -> Self {
        let formats = format.row_formats(RowFormat::F32);
        let geometry = Geometry::new(c, c.dspark_block_size + 1);
        let ring = geometry.ring_len * formats.window.row_bytes(c.head_dim);
        let ratios = || c.kv_source_layer_ids.iter().map(|&l| c.compress_ratios[l]);
        let row = formats.compressed.row_bytes(c.head_dim) + formats.index.row_bytes(c.index_head_dim);
        let pending: usize = ratios()
            .filter(|&ratio| ratio > 1)
            .map(|ratio| geometry.pending_len(ratio) * 2 * c.head_dim * size_of::<f32>())
            .sum();
        Self {
            per_token: ratios().map(|ratio| row as f64 / ratio as f64).sum(),
            per_sequence: ((c.num_hidden_layers + c.num_nextn_predict_layers) * ring + pending) as u64,
            page_tokens: geometry.page_tokens,
        }
    }
}
