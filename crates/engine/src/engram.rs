//! The front end of Engram: which table rows a token gathers.
//!
//! Nothing of it is in the checkpoint. The rows follow from the tokenizer (its compressed
//! vocabulary), seeded multipliers and consecutive primes; a wrong constant would load, and give
//! noise. So sizes are checked against the configuration before anything is hashed.

mod hash;
mod numpy_random;
mod token_map;

pub use hash::{Hasher, LayerHash};
pub use token_map::TokenMap;

use crate::config::TextConfig;
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;

/// Why the front end does not fit the checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum EngramError {
    /// The tokenizer is not the one that the model was trained with.
    #[error(
        "engram: the compressed vocabulary of tokenizer.json has {computed} ids, but config.json \
         says engram_compressed_vocab_size {stated}; every hash depends on it: use the tokenizer of \
         this checkpoint"
    )]
    CompressedVocab {
        /// Size of the map.
        computed: usize,
        /// What the configuration says.
        stated: usize,
    },
    /// The bucket sizes do not add up to the table.
    #[error(
        "engram: the buckets of layer {layer} have {computed} rows in all, but config.json says \
         engram_num_embeddings {stated}"
    )]
    TableRows {
        /// Layer id.
        layer: usize,
        /// Sum of the primes.
        computed: u64,
        /// What the configuration says.
        stated: u64,
    },
    /// A table that no machine holds.
    #[error("engram: engram_vocab_size {rows} is too large; it must be at most {most}")]
    TableSize {
        /// Least rows of a column.
        rows: u64,
        /// The most.
        most: u64,
    },
    /// The padding token has no compressed id.
    #[error(
        "engram: engram_pad_token_id {pad} is not a token of tokenizer.json, which has {tokens}"
    )]
    Pad {
        /// The id.
        pad: u32,
        /// Tokens of the tokenizer.
        tokens: usize,
    },
}

/// Token map and hash functions of a model.
#[derive(Clone, Debug)]
pub struct Engram {
    /// Compressed ids.
    pub map: TokenMap,
    /// Hash functions.
    pub hasher: Hasher,
}

impl Engram {
    /// The front end of a model with Engram layers; `None` for one without. The token map comes
    /// from the user's cache directory where it can.
    pub fn new(config: &TextConfig, tokenizer: &Tokenizer) -> Result<Option<Self>, EngramError> {
        if config.engram_layer_ids.is_empty() {
            return Ok(None);
        }
        let map = TokenMap::cached(tokenizer, Settings::get().cache_dir.as_deref());
        let (computed, stated) = (map.size(), config.engram_compressed_vocab_size);
        if computed != stated {
            return Err(EngramError::CompressedVocab { computed, stated });
        }
        // Validated to be there where Engram layers are.
        let pad = config.engram_pad_token_id.unwrap_or_default();
        let tokens = map.ids().len();
        let pad = map.get(pad).ok_or(EngramError::Pad { pad, tokens })?;
        let hasher = Hasher::new(config, pad)?;
        Ok(Some(Self { map, hasher }))
    }

    /// Compressed id of token `id`. Ids that the model can choose but the tokenizer does not have
    /// count as padding.
    pub fn compress(&self, id: u32) -> u32 {
        self.map.get(id).unwrap_or(self.hasher.pad())
    }
}
