//! The tensors of a checkpoint: names, shapes, and which part of the model each belongs to.

use crate::config::ModelConfig;
use deepinfer_device::Format;

/// A tensor that a checkpoint of some configuration has. Quantized ones have scales beside them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name, without a leading `model.`.
    pub name: String,
    /// Shape in numbers, not bytes.
    pub shape: Vec<usize>,
    /// Stored form. `Bf16` and `F32` stand for either, except that `hc_*`, `attn_sink`, gate
    /// biases and Engram weights are released as `F32`.
    pub format: Format,
}

/// A part of the model, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Token embedding.
    Embedding,
    /// Attention projections, window and compressed KV.
    Attention,
    /// Index projections.
    Indexer,
    /// Routers.
    Router,
    /// Routed experts.
    Experts,
    /// Shared experts.
    SharedExperts,
    /// Engram projections and weights.
    Engram,
    /// Engram tables.
    EngramTable,
    /// Norms and residual-stream mixing.
    Streams,
    /// Final norm and head.
    Head,
    /// Draft stages.
    Draft,
    /// Vision tower, aligner and image markers.
    Vision,
    /// Anything else.
    Other,
}

impl Part {
    /// All parts, in the order of a report.
    pub const ALL: [Part; 13] = [
        Part::Embedding,
        Part::Attention,
        Part::Indexer,
        Part::Router,
        Part::Experts,
        Part::SharedExperts,
        Part::Engram,
        Part::EngramTable,
        Part::Streams,
        Part::Head,
        Part::Draft,
        Part::Vision,
        Part::Other,
    ];

    /// What a report calls the part.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Embedding => "embedding",
            Part::Attention => "attention",
            Part::Indexer => "indexer",
            Part::Router => "router",
            Part::Experts => "routed experts",
            Part::SharedExperts => "shared experts",
            Part::Engram => "engram",
            Part::EngramTable => "engram tables",
            Part::Streams => "norms and streams",
            Part::Head => "head",
            Part::Draft => "draft stages",
            Part::Vision => "vision",
            Part::Other => "other",
        }
    }

    /// The part and the layer (or draft stage) of the tensor `name`.
    pub fn of(name: &str) -> (Part, Option<usize>) {
        let mut fields = name.split('.');
        let first = fields.next().unwrap_or_default();
        let numbered = |fields: &mut std::str::Split<char>| fields.next()?.parse::<usize>().ok();
        match first {
            "embed" => (Part::Embedding, None),
            "head" | "norm" => (Part::Head, None),
            "vision" | "aligner" | "image_start" | "image_end" | "image_newline" => {
                (Part::Vision, None)
            }
            "mtp" => (Part::Draft, numbered(&mut fields)),
            "layers" => {
                let layer = numbered(&mut fields);
                let part = match (fields.next(), fields.next()) {
                    (Some("attn"), Some("indexer")) => Part::Indexer,
                    (Some("attn"), _) => Part::Attention,
                    (Some("ffn"), Some("gate")) => Part::Router,
                    (Some("ffn"), Some("experts")) => Part::Experts,
                    (Some("ffn"), Some("shared_experts")) => Part::SharedExperts,
                    (Some("engram"), Some("embed")) => Part::EngramTable,
                    (Some("engram"), _) => Part::Engram,
                    (Some(other), _) if other.starts_with("hc_") => Part::Streams,
                    (Some("attn_norm" | "ffn_norm"), _) => Part::Streams,
                    _ => Part::Other,
                };
                (part, layer)
            }
            _ => (Part::Other, None),
        }
    }
}

/// `name` without the leading `model.` that some files have.
pub fn plain_name(name: &str) -> &str {
    name.strip_prefix("model.").unwrap_or(name)
}

/// Every tensor of a checkpoint in the released layout, scales not listed. `engram_rows` has the
/// rows of each Engram table.
///
/// # Panics
/// If `config` was not validated, or `engram_rows` has fewer entries than `engram_layer_ids`.
pub fn tensors(config: &ModelConfig, engram_rows: &[u64]) -> Vec<TensorSpec> {
    let text = &config.text_config;
    let (vocab, hidden) = (text.vocab_size, text.hidden_size);
    let mut list = List { out: Vec::new(), prefix: String::new() };
    list.bf16("embed.weight", &[vocab, hidden]);
    for layer in 0..text.num_hidden_layers {
        list.prefix = format!("layers.{layer}.");
        block(&mut list, config, text.n_routed_experts);
        if text.is_kv_source(layer) {
            let ratio = text.compress_ratios[layer];
            list.bf16("attn.compressor.wkv.weight", &[text.head_dim, hidden]);
            if ratio > 1 {
                list.bf16("attn.compressor.wgate.weight", &[text.head_dim, hidden]);
            }
            list.bf16("attn.compressor.norm.weight", &[text.head_dim]);
        }
        if text.is_index_source(layer) {
            let width = text.index_n_heads * text.index_head_dim;
            list.fp8("attn.indexer.wq_b.weight", width, text.q_lora_rank);
            list.bf16("attn.indexer.weights_proj.weight", &[text.index_n_heads, hidden]);
            if text.is_kv_source(layer) {
                list.bf16("attn.indexer.wk.weight", &[text.index_head_dim, text.head_dim]);
                list.bf16("attn.indexer.k_norm.weight", &[text.index_head_dim]);
            }
        }
        if let Some(index) = text.engram_index(layer) {
            let rows = engram_rows[index] as usize;
            let columns = text.hash_columns() * text.engram_head_dim;
            list.add("engram.embed.weight", &[rows, text.engram_head_dim], Format::Fp8Row32);
            list.fp8("engram.wkv.weight", hidden * (text.hc_mult + 1), columns);
            list.f32("engram.q_weight", &[text.hc_mult, hidden]);
            list.f32("engram.k_weight", &[text.hc_mult, hidden]);
        }
    }
    for stage in 0..text.num_nextn_predict_layers {
        list.prefix = format!("mtp.{stage}.");
        block(&mut list, config, text.dspark_n_routed_experts);
        if stage == 0 {
            let features = hidden * text.dspark_target_layer_ids.len();
            list.fp8("main_proj.weight", hidden, features);
            list.bf16("main_norm.weight", &[hidden]);
        }
        if stage + 1 == text.num_nextn_predict_layers {
            let rank = text.dspark_markov_rank;
            list.bf16("norm.weight", &[hidden]);
            list.bf16("markov_head.embed.weight", &[vocab, rank]);
            list.bf16("markov_head.head.weight", &[vocab, rank]);
            list.bf16("confidence_head.proj.weight", &[1, hidden + rank]);
        }
    }
    list.prefix.clear();
    list.bf16("norm.weight", &[hidden]);
    list.bf16("head.weight", &[vocab, hidden]);
    if config.has_vision() {
        vision(&mut list, config);
    }
    list.out
}

/// What backbone layers and draft stages share.
fn block(list: &mut List, config: &ModelConfig, experts: usize) {
    let text = &config.text_config;
    let (hidden, streams) = (text.hidden_size, text.hc_mult);
    for site in ["attn", "ffn"] {
        list.bf16(&format!("{site}_norm.weight"), &[hidden]);
        list.f32(&format!("hc_{site}_fn"), &[text.hc_mix(), streams * hidden]);
        list.f32(&format!("hc_{site}_base"), &[text.hc_mix()]);
        list.f32(&format!("hc_{site}_scale"), &[3]);
    }
    let heads = text.num_attention_heads;
    let groups_rank = text.o_groups * text.o_lora_rank;
    list.f32("attn.attn_sink", &[heads]);
    list.fp8("attn.wq_a.weight", text.q_lora_rank, hidden);
    list.bf16("attn.q_norm.weight", &[text.q_lora_rank]);
    list.fp8("attn.wq_b.weight", heads * text.head_dim, text.q_lora_rank);
    list.fp8("attn.wkv.weight", text.head_dim, hidden);
    list.bf16("attn.kv_norm.weight", &[text.head_dim]);
    list.fp8("attn.wo_a.weight", groups_rank, text.group_width());
    list.fp8("attn.wo_b.weight", hidden, groups_rank);

    let width = text.moe_intermediate_size;
    list.bf16("ffn.gate.weight", &[experts, hidden]);
    list.f32("ffn.gate.bias", &[experts]);
    list.f32("ffn.gate.bias_vl", &[experts]);
    for expert in 0..experts {
        for (matrix, shape) in
            [("w1", [width, hidden]), ("w3", [width, hidden]), ("w2", [hidden, width])]
        {
            list.add(&format!("ffn.experts.{expert}.{matrix}.weight"), &shape, Format::Fp4Row32);
        }
    }
    list.fp8("ffn.shared_experts.w1.weight", width, hidden);
    list.fp8("ffn.shared_experts.w3.weight", width, hidden);
    list.fp8("ffn.shared_experts.w2.weight", hidden, width);
}

fn vision(list: &mut List, config: &ModelConfig) {
    let tower = &config.vision_config;
    let (width, hidden) = (tower.hidden_size, config.text_config.hidden_size);
    let patch = 3 * tower.patch_size * tower.patch_size;
    list.bf16("vision.patch_embed.proj.weight", &[width, patch]);
    list.bf16("vision.patch_embed.proj.bias", &[width]);
    for block in 0..tower.num_hidden_layers {
        list.prefix = format!("vision.blocks.{block}.");
        list.bf16("norm1.weight", &[width]);
        list.bf16("attn.wqkv.weight", &[3 * width, width]);
        list.bf16("attn.wqkv.bias", &[3 * width]);
        list.bf16("attn.wo.weight", &[width, width]);
        list.bf16("attn.wo.bias", &[width]);
        list.bf16("norm2.weight", &[width]);
        list.bf16("mlp.w1.weight", &[2 * tower.intermediate_size, width]);
        list.bf16("mlp.w2.weight", &[width, tower.intermediate_size]);
    }
    list.prefix.clear();
    list.bf16("vision.norm.weight", &[width]);
    let block_width = width * tower.downsample_ratio * tower.downsample_ratio;
    list.bf16("aligner.w1.weight", &[hidden, block_width]);
    list.bf16("aligner.w1.bias", &[hidden]);
    list.bf16("aligner.w2.weight", &[hidden, hidden]);
    list.bf16("aligner.w2.bias", &[hidden]);
    for marker in ["image_start", "image_end", "image_newline"] {
        list.bf16(marker, &[hidden]);
    }
}

struct List {
    out: Vec<TensorSpec>,
    prefix: String,
}

impl List {
    fn add(&mut self, name: &str, shape: &[usize], format: Format) {
        let name = format!("{}{name}", self.prefix);
        self.out.push(TensorSpec { name, shape: shape.to_vec(), format });
    }

    fn bf16(&mut self, name: &str, shape: &[usize]) {
        self.add(name, shape, Format::Bf16);
    }

    fn f32(&mut self, name: &str, shape: &[usize]) {
        self.add(name, shape, Format::F32);
    }

    fn fp8(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(name, &[rows, cols], Format::Fp8Block32);
    }
}
