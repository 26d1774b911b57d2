//! Sizes and stored forms of the caches.

use crate::config::TextConfig;
use deepinfer_device::RowFormat;
use serde::Serialize;

/// How cache rows are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheFormat {
    /// As the model was released: fp8 windows, nvfp4 compressed rows, mxfp4 index keys.
    #[default]
    Released,
    /// As computed; for comparisons with references that do not round.
    Exact,
}

impl CacheFormat {
    /// Row formats, where `exact` is what the device keeps rows in as computed.
    pub fn row_formats(self, exact: RowFormat) -> RowFormats {
        match self {
            CacheFormat::Released => RowFormats {
                window: RowFormat::Fp8x32,
                compressed: RowFormat::Nvfp4x16,
                index: RowFormat::Mxfp4x32,
            },
            CacheFormat::Exact => RowFormats { window: exact, compressed: exact, index: exact },
        }
    }
}

/// Stored forms of the three kinds of cache rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFormats {
    /// Window keys, and draft keys.
    pub window: RowFormat,
    /// Compressed rows.
    pub compressed: RowFormat,
    /// Index keys (and the rounding of index queries).
    pub index: RowFormat,
}

/// Sizes of the caches, derived from the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    /// Tokens in a page: a multiple of every ratio.
    pub page_tokens: usize,
    /// Positions in a window ring.
    pub ring_len: usize,
    /// How many positions a sequence may step back (rejected drafts), at most.
    pub backtracking: usize,
    /// Distinct ratios of the layers that own compressed rows, ascending.
    pub ratios: Vec<usize>,
    /// Width of window and compressed rows.
    pub head_dim: usize,
    /// Width of index keys.
    pub index_dim: usize,
}

impl Geometry {
    /// Sizes for `config`, with room to reject `backtracking - 1` drafts.
    pub fn new(config: &TextConfig, backtracking: usize) -> Self {
        let mut ratios: Vec<usize> =
            config.kv_source_layer_ids.iter().map(|&l| config.compress_ratios[l]).collect();
        ratios.sort_unstable();
        ratios.dedup();
        Self {
            page_tokens: 128usize.next_multiple_of(config.common_group()),
            ring_len: config.sliding_window + backtracking,
            backtracking,
            ratios,
            head_dim: config.head_dim,
            index_dim: config.index_head_dim,
        }
    }

    /// Compressed rows in a page.
    pub fn rows_per_page(&self, ratio: usize) -> usize {
        self.page_tokens / ratio
    }

    /// Positions in a ring of pending compressor rows: an unfinished group, and what may be
    /// stepped back over.
    pub fn pending_len(&self, ratio: usize) -> usize {
        ratio + self.backtracking - 1
    }

    /// Pages that `tokens` tokens need.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }
}
