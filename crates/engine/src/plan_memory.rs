//! How memory will be used, before anything is loaded.

mod available;

pub use available::available_memory;

use crate::cache::tiers::queue_bytes;
use crate::cache::{Geometry, RowFormats};
use crate::checkpoint::{Checkpoint, Dtype, Part};
use crate::config::TextConfig;
use crate::engine::{EngineConfig, EngineError, PrefixCache};
use crate::schedule::{Shape, geometry};
use crate::worker::limits;
use deepinfer_device::cuda::HOST_TABLE;
use deepinfer_device::{DeviceChoice, Format, RowFormat};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes of a GPU that are left alone: recorded steps, and what the driver takes for itself.
const GPU_RESERVE: u64 = 1 << 30;

/// Memory of an engine, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Stored weights by part, read in place from the mapped files. Not all of them need be in
    /// memory at a time.
    pub mapped_weights: BTreeMap<String, u64>,
    /// Weights that a GPU holds: not n-gram tables that stay in host memory, nor the vision tower.
    pub device_weights: u64,
    /// N-gram tables that a GPU reads from page-locked host memory, with their scales: they are
    /// copied there, and must be in memory whole. A CPU reads them in place.
    pub host_tables: u64,
    /// Bytes of a sequence whatever its length: rings and pending rows.
    pub sequence_bytes: u64,
    /// Bytes of a token in the page pool.
    pub token_bytes: f64,
    /// Tokens in a page.
    pub page_tokens: usize,
    /// Slots of running sequences.
    pub sequences: usize,
    /// Slots of prefix cache snapshots.
    pub snapshots: usize,
    /// Tokens that the page pool holds.
    pub pool_tokens: usize,
    /// Most tokens of one sequence.
    pub longest_sequence: usize,
    /// All slots.
    pub slot_pool_bytes: u64,
    /// All pages.
    pub page_pool_bytes: u64,
    /// Work space of a step: bounded by its rows, whatever the context.
    pub scratch_bytes: u64,
    /// Host memory for prefixes and for requests that lost their place, at most.
    pub host_cache_bytes: u64,
    /// Everything that is allocated at the start: slots, pages, scratch.
    pub allocated_bytes: u64,
}

/// There is not enough memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.told("lower kv_tokens, max_seqs, device_snapshots or max_batch_tokens"))]
pub struct DoesNotFit {
    /// Bytes wanted at the start.
    pub needed: u64,
    /// Of these, for weights in a device's own memory.
    pub weights: u64,
    /// Of these, for n-gram tables in page-locked host memory.
    pub tables: u64,
    /// Of these, for slots.
    pub slots: u64,
    /// Of these, for pages.
    pub pages: u64,
    /// Tokens in those pages.
    pub tokens: usize,
    /// Of these, for work space.
    pub scratch: u64,
    /// Bytes available.
    pub available: u64,
}

impl DoesNotFit {
    /// What is missing, with `advice` on what would take less, unless the weights alone are too
    /// much.
    pub fn told(&self, advice: &str) -> String {
        let sum = [
            (self.weights, "weights".to_owned()),
            (self.tables, "n-gram tables in page-locked host memory".to_owned()),
            (self.slots, "slots of sequences and snapshots".to_owned()),
            (self.pages, format!("pages for {} tokens", self.tokens)),
            (self.scratch, "work space".to_owned()),
        ];
        let parts = sum.iter().filter(|(bytes, _)| *bytes > 0);
        let parts: Vec<_> =
            parts.map(|(bytes, name)| format!("{} for {name}", size(*bytes))).collect();
        // Beside what a GPU keeps.
        let beside = if self.weights > 0 { " beside 1 GiB that is left alone" } else { "" };
        let advice = match (self.weights > self.available, self.tables > self.available) {
            (true, _) => "the weights alone do not fit",
            (_, true) => "a GPU reads them from there, whatever its own memory",
            (false, false) => advice,
        };
        format!(
            "{} needed ({}), {} available{beside}; {advice}",
            size(self.needed),
            parts.join(", "),
            size(self.available)
        )
    }
}

/// Bytes in words: `1234567` as `1.23 MB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 9.995 => format!("{value:.2} {}", UNITS[unit]),
        _ if value < 99.95 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

impl MemoryPlan {
    /// Plans an engine on the device of `config`. Work space is counted as a CPU stores it; a GPU
    /// takes less.
    pub fn new(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<Self, EngineError> {
        let model = checkpoint.config();
        let text = &model.text_config;
        let shape = Shape::new(model, config, &[])?;
        let geometry = geometry(model);
        let exact = match config.device.resolve() {
            DeviceChoice::Cuda(_) => RowFormat::Bf16,
            DeviceChoice::Cpu | DeviceChoice::Auto => RowFormat::F32,
        };
        let formats = config.cache_format.row_formats(exact);
        let (slot, page) = cache_bytes(text, &geometry, &formats);
        let mut mapped_weights = BTreeMap::new();
        let (mut device_weights, mut host_tables) = (0, 0);
        let tables = host_tables_of(checkpoint);
        for tensor in checkpoint.tensors() {
            match tables.get(tensor.name) {
                Some(bytes) => host_tables += bytes,
                None if tensor.part == Part::Vision => {}
                None => device_weights += tensor.bytes,
            }
            *mapped_weights.entry(part_name(tensor.part)).or_default() += tensor.bytes;
        }
        let slots = shape.max_seqs + shape.device_snapshots;
        let slot_pool_bytes = (slots * slot) as u64;
        let page_pool_bytes = (shape.pages * page) as u64;
        let scratch_bytes = scratch_bytes(text, &shape);
        Ok(Self {
            mapped_weights,
            device_weights,
            host_tables,
            sequence_bytes: slot as u64,
            token_bytes: page as f64 / geometry.page_tokens as f64,
            page_tokens: geometry.page_tokens,
            sequences: shape.max_seqs,
            snapshots: shape.device_snapshots,
            pool_tokens: shape.pages * shape.page_tokens,
            longest_sequence: shape.max_tokens,
            slot_pool_bytes,
            page_pool_bytes,
            scratch_bytes,
            host_cache_bytes: config.swap_bytes.saturating_add(match config.prefix_cache {
                PrefixCache::Off | PrefixCache::Device => 0,
                PrefixCache::Host => config.host_cache_bytes,
                PrefixCache::Disk(_) => {
                    config.host_cache_bytes.saturating_add(queue_bytes(config.host_cache_bytes))
                }
            }) as u64,
            allocated_bytes: slot_pool_bytes + page_pool_bytes + scratch_bytes,
        })
    }

    /// Checks the plan against `available` bytes of a machine that reads weights in place.
    pub fn check(&self, available: u64) -> Result<(), DoesNotFit> {
        self.check_with(0, available)
    }

    /// Checks the plan against `free` bytes of a GPU, weights included.
    pub fn check_gpu(&self, free: u64) -> Result<(), DoesNotFit> {
        self.check_with(self.device_weights, free.saturating_sub(GPU_RESERVE))
    }

    /// Tokens that a page pool holds which fills `free` bytes of a GPU that has its weights, at
    /// most what all sequences need at their longest, at least what was planned.
    pub fn tokens_that_fill(&self, free: u64, positions: usize) -> usize {
        let taken = GPU_RESERVE + self.slot_pool_bytes + self.scratch_bytes;
        let pages =
            free.saturating_sub(taken) / (self.token_bytes * self.page_tokens as f64) as u64;
        let most = self.sequences.saturating_mul(positions.next_multiple_of(self.page_tokens));
        (pages as usize).saturating_mul(self.page_tokens).min(most).max(self.pool_tokens)
    }

    fn check_with(&self, weights: u64, available: u64) -> Result<(), DoesNotFit> {
        let needed = self.allocated_bytes + weights;
        if needed <= available {
            return Ok(());
        }
        Err(DoesNotFit {
            needed,
            weights,
            tables: 0,
            slots: self.slot_pool_bytes,
            pages: self.page_pool_bytes,
            tokens: self.pool_tokens,
            scratch: self.scratch_bytes,
            available,
        })
    }

    /// Checks what a GPU reads from host memory against `available` bytes of that.
    pub fn check_tables(&self, available: u64) -> Result<(), DoesNotFit> {
        let needed = self.host_tables;
        if needed <= available {
            return Ok(());
        }
        let (weights, slots, pages, tokens, scratch) = (0, 0, 0, 0, 0);
        let tables = needed;
        Err(DoesNotFit { needed, weights, tables, slots, pages, tokens, scratch, available })
    }

    /// Checks the plan against the memory that this machine has available, where it says so.
    pub fn check_host(&self) -> Result<(), DoesNotFit> {
        available_memory().map_or(Ok(()), |available| self.check(available))
    }

    /// How many sequences of `tokens` tokens run at a time.
    pub fn sequences_of(&self, tokens: usize) -> usize {
        let pages = tokens.div_ceil(self.page_tokens).max(1);
        (self.pool_tokens / self.page_tokens / pages).min(self.sequences)
    }
}

/// Bytes of a slot and of a page.
fn cache_bytes(c: &TextConfig, geometry: &Geometry, formats: &RowFormats) -> (usize, usize) {
    let rings = c.num_hidden_layers + c.num_nextn_predict_layers;
    let mut slot = rings * geometry.ring_len * formats.window.row_bytes(c.head_dim);
    let mut page = 0;
    for &layer in &c.kv_source_layer_ids {
        let ratio = c.compress_ratios[layer];
        if ratio > 1 {
            slot += geometry.pending_len(ratio) * 2 * c.head_dim * 4;
        }
        let row =
            formats.compressed.row_bytes(c.head_dim) + formats.index.row_bytes(c.index_head_dim);
        page += geometry.rows_per_page(ratio) * row;
    }
    (slot, page)
}

/// Bytes of [`crate::model::Scratch`], [`crate::model::Batch`] and of drafting, counted from above.
fn scratch_bytes(c: &TextConfig, shape: &Shape) -> u64 {
    let limits = limits(shape);
    let (h, s) = (c.hidden_size, c.hc_mult);
    let heads = c.num_attention_heads * c.head_dim;
    let experts = c.n_routed_experts.max(c.dspark_n_routed_experts);
    let features = c.dspark_target_layer_ids.len() * h;
    let columns = c.hash_columns();
    let memory = columns * c.engram_head_dim;
    let row = 2 * s * h
        + 4 * h
        + (2 + s) * s
        + 2 * s
        + 2 * c.q_lora_rank
        + 2 * heads
        + 8 * c.head_dim
        + 4 * c.index_head_dim
        + c.index_n_heads * (c.index_head_dim + 1)
        + 2 * c.index_topk
        + 2 * c.candidate_topk_blocks
        + c.o_groups * c.o_lora_rank
        + experts
        + 4 * c.num_experts_per_tok.max(c.dspark_num_experts_per_tok)
        + memory
        + if memory > 0 { (s + 1) * h } else { 0 }
        + 2 * features
        + h
        + 2 * columns * c.engram_layer_ids.len()
        + 8 * c.qk_rope_head_dim
        + 32;
    let pages = 2 * limits.sequences * limits.pages;
    let drafts = match shape.drafts {
        0 => 0,
        _ => {
            let rows = limits.sequences * c.dspark_block_size;
            rows * (h + c.vocab_size) + limits.sequences * (2 * c.vocab_size + 3 * h)
        }
    };
    4 * (limits.rows * row + limits.outputs * c.vocab_size + pages + drafts) as u64
}

fn part_name(part: Part) -> String {
    format!("{part:?}").to_lowercase()
}

/// Bytes of the tensors that a GPU keeps in page-locked host memory, by name: large n-gram tables in
/// fp8 with a scale for each row, and these scales.
fn host_tables_of(checkpoint: &Checkpoint) -> BTreeMap<String, u64> {
    // The device pads rows to a multiple of so many values.
    const PADDED: u64 = 64;
    let mut tables = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let fp8 = tensor.part == Part::EngramTable && tensor.dtype == Dtype::F8_E4M3;
        let (true, Some(name), &[rows, cols]) =
            (fp8, tensor.name.strip_suffix(".weight"), tensor.shape)
        else {
            continue;
        };
        let scales = format!("{name}.scale");
        let (height, width) = (rows as usize, cols as usize);
        let by_row = Format::Fp8Row32.scale_shape(height, width);
        let by_row = by_row.map(|(rows, groups)| [rows as u64, groups as u64]);
        // A table without rows may claim any width.
        let Some(padded) = cols.checked_next_multiple_of(PADDED) else { continue };
        let bytes = rows.saturating_mul(padded);
        if bytes >= HOST_TABLE as u64
            && let Some(&[rows, groups]) = checkpoint.shape(&scales)
            && by_row == Some([rows, groups])
        {
            tables.insert(tensor.name.to_owned(), bytes);
            tables.insert(scales, rows * groups);
        }
    }
    tables
}
