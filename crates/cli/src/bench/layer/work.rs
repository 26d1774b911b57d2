//! What a layer must read and multiply.

use deepinfer::checkpoint::layout::{Part, TensorSpec};
use deepinfer::config::TextConfig;
use deepinfer::synth::{self, Plan};

/// Weights of a layer or draft stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weights {
    /// Bytes that every step reads, the n-gram memory left out.
    pub bytes: u64,
    /// Bytes of one routed expert.
    pub expert_bytes: u64,
    /// Bytes of the n-gram memory's projection.
    pub memory_bytes: u64,
    /// Numbers that every row is multiplied with, the n-gram memory left out.
    pub weights: u64,
    /// Numbers of one routed expert.
    pub expert_weights: u64,
    /// Numbers of the n-gram memory's projection.
    pub memory_weights: u64,
}

impl Weights {
    /// Those of the tensors whose names begin with `prefix`.
    pub fn of(plan: &Plan, prefix: &str, experts: usize) -> Self {
        let streams = plan.config.text_config.hc_mult;
        let mut all = Self::default();
        for spec in plan.specs.iter().filter(|spec| spec.name.starts_with(prefix)) {
            let (bytes, weights) = (stored_bytes(spec, streams), numbers(spec));
            let name = &spec.name[prefix.len()..];
            if name.starts_with("ffn.experts.") {
                all.expert_bytes += bytes;
                all.expert_weights += weights;
            } else if name.starts_with("engram.") {
                if Part::of(&spec.name).0 != Part::EngramTable {
                    all.memory_bytes += bytes;
                    all.memory_weights += weights;
                }
            } else if !OUTSIDE.iter().any(|outside| name.starts_with(outside)) {
                all.bytes += bytes;
                all.weights += weights;
            }
        }
        all.expert_bytes /= experts.max(1) as u64;
        all.expert_weights /= experts.max(1) as u64;
        all
    }
}

/// Tensors that are listed with a draft stage and run once for all of them.
const OUTSIDE: [&str; 5] = ["main_proj", "main_norm", "norm.", "markov_head", "confidence_head"];

/// Bytes of a tensor with its scales.
pub fn stored_bytes(spec: &TensorSpec, streams: usize) -> u64 {
    synth::stored(spec, streams, 0).iter().map(synth::StoredTensor::bytes).sum()
}

/// Numbers of a matrix; 0 for others.
fn numbers(spec: &TensorSpec) -> u64 {
    match spec.shape[..] {
        [rows, cols] => (rows * cols) as u64,
        _ => 0,
    }
}

/// Cache rows that a row of a step reads in a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reach {
    /// Window keys.
    pub window: usize,
    /// Chosen compressed rows.
    pub chosen: usize,
    /// Index keys that are scored.
    pub scored: usize,
}

impl Reach {
    /// Of the row at `position` in layer `layer`.
    pub fn of(c: &TextConfig, layer: usize, position: usize) -> Self {
        let window = c.sliding_window.min(position + 1);
        let ratio = c.compress_ratios[layer];
        if ratio == 0 {
            return Self { window, ..Self::default() };
        }
        let visible = (position + 1) / ratio;
        let scored = match c.is_index_source(layer) {
            true if c.uses_candidates(layer) => {
                visible.min(c.candidate_topk_blocks * c.candidate_block_size)
            }
            true => visible,
            false => 0,
        };
        Self { window, chosen: c.index_topk.min(visible), scored }
    }

    /// Of a row of a draft block.
    pub fn of_draft(c: &TextConfig, position: usize) -> Self {
        let window = c.sliding_window.min(position) + c.dspark_block_size;
        Self { window, ..Self::default() }
    }

    /// Operations of attention and index scores, two for each product.
    pub fn operations(&self, c: &TextConfig) -> f64 {
        let attention = 2 * (self.window + self.chosen) * c.num_attention_heads * c.head_dim;
        let scores = self.scored * c.index_n_heads * c.index_head_dim;
        2.0 * (attention + scores) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer::synth::{Options, Preset, plan};

    /// The figures of the released model that follow from its sizes alone.
    #[test]
    fn a_released_layer_reads_282_megabytes() {
        let plan = plan(&Options::new(Preset::FlashLayers(6))).expect("valid sizes");
        let c = &plan.config.text_config;
        let w = Weights::of(&plan, "layers.4.", c.n_routed_experts);
        let all = w.bytes + c.num_experts_per_tok as u64 * w.expert_bytes;
        assert!((282.0..283.5).contains(&(all as f64 / 1e6)), "{all}");
        let last = c.max_position_embeddings - 1;
        let source = Reach::of(c, 3, last);
        assert_eq!(source, Reach { window: 128, chosen: 512, scored: 1 << 20 });
        assert_eq!(Reach::of(c, 1, last).scored, 1 << 19);
        assert_eq!(Reach::of(c, 5, last).scored, 16384);
        assert_eq!(Reach::of(c, 0, 9), Reach { window: 10, chosen: 0, scored: 0 });
        let stage = Weights::of(&plan, "mtp.2.", c.dspark_n_routed_experts);
        assert_eq!(stage.expert_bytes, w.expert_bytes);
        assert!(stage.bytes < w.bytes);
    }
}
