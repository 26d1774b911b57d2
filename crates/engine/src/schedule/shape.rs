//! Every number that scheduling depends on.

use crate::cache::Geometry;
use crate::config::ModelConfig;
use crate::drafting::CostCurve;
use crate::engine::{DraftMode, EngineConfig, EngineError, PrefillMode, PrefixCache};
use crate::request::Bounds;
use std::time::Duration;

/// Every number that scheduling depends on, derived from model and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Tokens in a page.
    pub page_tokens: usize,
    /// Pages in the pool.
    pub pages: usize,
    /// Most pages of one sequence.
    pub sequence_pages: usize,
    /// Most sequences that run at a time.
    pub max_seqs: usize,
    /// Most rows in a step.
    pub rows: usize,
    /// Most rows of a step whose logits are wanted.
    pub outputs: usize,
    /// Most rows of one prompt in a step.
    pub chunk: usize,
    /// Positions that a ring holds beyond a window.
    pub backtracking: usize,
    /// Tokens before a row that its n-grams reach back.
    pub context: usize,
    /// Rows that the decoder must run for the last one to be as if all had: layers of the decoder
    /// times (window - 1), plus 1.
    pub span: usize,
    /// How prompts are read.
    pub prefill: PrefillMode,
    /// Prompt tokens that the decoder runs for in [`PrefillMode::Compact`].
    pub keep: usize,
    /// Most tokens of one sequence.
    pub max_tokens: usize,
    /// Most tokens drafted ahead.
    pub drafts: usize,
    /// Whether drafts are made and verified as far as they pay off; else all are.
    pub adapt_drafts: bool,
    /// What steps cost, for that choice.
    pub costs: CostCurve,
    /// Whether prefixes are kept.
    pub prefix_cache: bool,
    /// Snapshots kept on the device.
    pub device_snapshots: usize,
    /// What cached bytes depend on besides the text.
    pub identity: Vec<u8>,
    /// Host memory for requests that lost their place.
    pub swap_bytes: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// The token of image positions.
    pub image_token: Option<u32>,
    /// Most requests that wait.
    pub max_queued_requests: usize,
    /// Most prompt tokens that wait.
    pub max_queued_tokens: usize,
    /// Longest wait for a first step.
    pub max_wait: Option<Duration>,
}

/// Most slots of either kind, rows of a step, and tokens of the pool: numbers of slots, rows and
/// pages fit into 32 bits, and sums of bytes into 64.
const MOST_SEQS: usize = 1 << 16;
const MOST_ROWS: usize = 1 << 20;
const MOST_TOKENS: usize = 1 << 36;

/// Outputs that a step has at least, where it has as many rows: as many rows of a prompt have their
/// log-probabilities computed at once.
const LEAST_OUTPUTS: usize = 32;

impl Shape {
    /// Derives and checks all numbers. `identity` names the checkpoint and the device.
    pub fn new(
        model: &ModelConfig,
        config: &EngineConfig,
        identity: &[u8],
    ) -> Result<Self, EngineError> {
        at_most("max_seqs", config.max_seqs, MOST_SEQS)?;
        at_most("device_snapshots", config.device_snapshots, MOST_SEQS)?;
        at_most("max_batch_tokens", config.max_batch_tokens, MOST_ROWS)?;
        at_most("kv_tokens", config.kv_tokens, MOST_TOKENS)?;
        let text = &model.text_config;
        let block = if text.num_nextn_predict_layers > 0 { text.dspark_block_size } else { 0 };
        let drafts = match config.draft {
            DraftMode::Off => 0,
            // A draft block runs as one step, too.
            DraftMode::Auto => {
                block.min(config.max_batch_tokens.saturating_sub(1) / config.max_seqs.max(1))
            }
            DraftMode::Fixed(n) if n <= block => n,
            DraftMode::Fixed(n) => {
                return Err(EngineError::DraftLength { wanted: n, block });
            }
        };
        let geometry = geometry(model);
        let (backtracking, page_tokens) = (geometry.backtracking, geometry.page_tokens);
        let window = text.sliding_window;
        let decoder_layers = text.decoder_start().map_or(0, |start| text.num_hidden_layers - start);
        let least_keep = window + backtracking;
        if config.prefill == PrefillMode::Compact || config.prefill == PrefillMode::Mask {
            at_least("keep_tokens", config.keep_tokens, least_keep)?;
        }
        at_least("max_seqs", config.max_seqs, 1)?;
        at_least("max_queued_requests", config.max_queued_requests, 1)?;
        at_least("prefill_chunk", config.prefill_chunk, 1)?;
        // Every running sequence decodes in every step, and a prompt goes on beside them.
        let least_rows = config.max_seqs * drafts.max(1) + 1;
        at_least("max_batch_tokens", config.max_batch_tokens, least_rows)?;
        let pages = config.kv_tokens / page_tokens;
        // Steps in flight may run past the end of a sequence that they finish.
        let slack = 2 * (drafts + 1);
        let (positions, value) = (text.max_position_embeddings, config.kv_tokens);
        if positions < slack + 2 {
            return Err(EngineError::TooFewPositions { positions, slack });
        }
        let least = (slack + 2).next_multiple_of(page_tokens);
        if value < least {
            return Err(EngineError::PoolTooSmall { value, least, page_tokens, slack });
        }
        let most = (pages * page_tokens).min(positions) - slack;
        let max_tokens = config.max_seq_tokens.map_or(most, |limit| limit.min(most));
        at_least("max_seq_tokens", max_tokens, 2)?;
        let identity = [
            identity,
            format!(
                "{:?} {} {} keep {} ring {} page {page_tokens} numerics {}",
                config.cache_format,
                config.prefill.name(),
                std::env::consts::ARCH,
                match config.prefill {
                    PrefillMode::Compact | PrefillMode::Mask => config.keep_tokens,
                    _ => 0,
                },
                geometry.ring_len,
                crate::engine::NUMERICS_VERSION,
            )
            .as_bytes(),
        ]
        .concat();
        let prefix_cache = config.prefix_cache != PrefixCache::Off;
        Ok(Self {
            page_tokens,
            pages,
            sequence_pages: geometry.pages_for(max_tokens + slack),
            max_seqs: config.max_seqs,
            rows: config.max_batch_tokens,
            outputs: (config.max_seqs * (drafts + 1))
                .max(LEAST_OUTPUTS)
                .min(config.max_batch_tokens),
            chunk: config.prefill_chunk.min(config.max_batch_tokens),
            backtracking,
            context: text.engram_max_ngram_size.saturating_sub(1),
            span: decoder_layers * (window - 1) + 1,
            prefill: config.prefill,
            keep: config.keep_tokens,
            max_tokens,
            drafts,
            adapt_drafts: config.draft == DraftMode::Auto,
            costs: CostCurve::default(),
            prefix_cache,
            device_snapshots: if prefix_cache { config.device_snapshots } else { 0 },
            identity,
            swap_bytes: config.swap_bytes,
            slot_bytes: 0,
            page_bytes: 0,
            ends: model.eos_token_id.clone(),
            vocab: text.vocab_size,
            image_token: model.image_token_id,
            max_queued_requests: config.max_queued_requests,
            max_queued_tokens: config.max_queued_tokens,
            max_wait: config.max_wait,
        })
    }

    /// What requests are checked against.
    pub fn bounds(&self, text: bool) -> Bounds {
        Bounds {
            vocab: self.vocab,
            max_tokens: self.max_tokens,
            image_token: self.image_token,
            prefill: self.prefill,
            text,
        }
    }

    /// Pages that `tokens` tokens need.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }
}

/// Sizes of the caches of an engine for `model`. They do not depend on whether it drafts, so that
/// cached prefixes serve either way.
pub fn geometry(model: &ModelConfig) -> Geometry {
    let text = &model.text_config;
    Geometry::new(text, text.dspark_block_size.max(5) + 1)
}

fn at_most(name: &'static str, value: usize, most: usize) -> Result<(), EngineError> {
    if value > most { Err(EngineError::TooLarge { name, value, most }) } else { Ok(()) }
}

fn at_least(name: &'static str, value: usize, least: usize) -> Result<(), EngineError> {
    if value < least { Err(EngineError::TooSmall { name, value, least }) } else { Ok(()) }
}
