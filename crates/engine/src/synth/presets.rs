//! Configurations of synthetic checkpoints.

use super::tokenizer::{self, NOISE};
use super::{Preset, SynthError};
use crate::config::ModelConfig;
use deepseek_recipe_core::special_tokens::SpecialToken;
use serde_json::{Value, json};

/// The configuration of `preset`. Engram sizes that follow from the tokenizer are not final yet.
pub fn config(preset: Preset) -> Result<ModelConfig, SynthError> {
    let (text, vision) = match preset {
        Preset::Tiny => (tiny(), small_tower()),
        Preset::Bench => (bench(), json!({"num_hidden_layers": 0})),
        Preset::FlashLayers(layers) => (flash(layers)?, flash_tower()),
    };
    let vocab = text["vocab_size"].as_u64().unwrap_or_default() as usize;
    let mut file = json!({
        "architectures": [ModelConfig::ARCHITECTURE],
        "model_type": ModelConfig::MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer::special_id(vocab, SpecialToken::Image.default_str()),
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "vision_config": vision,
    });
    file["text_config"] = with_common(text, vocab);
    Ok(ModelConfig::from_json(file.to_string().as_bytes())?)
}

/// Adds what all presets have in common.
fn with_common(mut text: Value, vocab: usize) -> Value {
    let common = json!({
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": true,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": vocab,
        "dspark_block_size": 5,
        "dspark_noise_token_id": tokenizer::special_id(vocab, NOISE),
    });
    if let (Some(text), Value::Object(common)) = (text.as_object_mut(), common) {
        for (name, value) in common {
            text.entry(name).or_insert(value);
        }
    }
    text
}

fn yarn(original: usize) -> Value {
    json!({
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": original,
    })
}

fn tiny() -> Value {
    json!({
        "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
        "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 32, "max_position_embeddings": 4096, "rope_scaling": yarn(256),
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 5], "index_source_layer_ids": [2, 5, 7],
        "index_n_heads": 8, "index_head_dim": 32, "index_topk": 32,
        "candidate_source_layer_id": 5, "candidate_topk_blocks": 64, "candidate_block_size": 8,
        "engram_layer_ids": [1, 4], "engram_max_ngram_size": 4, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_vocab_size": 97,
        "num_nextn_predict_layers": 3, "dspark_target_layer_ids": [4, 5, 7],
        "dspark_markov_rank": 32, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
    })
}

fn small_tower() -> Value {
    json!({
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 2, "intermediate_size": 96, "patch_size": 4, "rope_theta": 10000.0,
        "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 256,
    })
}

/// Sized for measuring: of the bytes that a decoded token reads, about 60% are fp8 and 40% fp4.
fn bench() -> Value {
    json!({
        "vocab_size": 8192, "hidden_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 32, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1024, "o_lora_rank": 512, "o_groups": 8,
        "moe_intermediate_size": 2048, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "sliding_window": 128, "max_position_embeddings": 65536, "rope_scaling": yarn(4096),
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [2, 10], "index_source_layer_ids": [2, 10, 14],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 10, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "engram_layer_ids": [1, 6], "engram_max_ngram_size": 4, "engram_n_heads": 2,
        "engram_head_dim": 64, "engram_vocab_size": 10007,
        "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [15, 16, 17],
        "dspark_markov_rank": 64, "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2,
    })
}

/// The released widths on `layers` layers: window-only ones, an encoder of ratio 2 with its
/// sources, and a decoder of ratio 1 that reads the KV of its first layer.
fn flash(layers: usize) -> Result<Value, SynthError> {
    if !(6..=40).contains(&layers) {
        return Err(SynthError::Layers { found: layers });
    }
    let windows = if layers < 8 { 1 } else { 2 };
    let encoder = (layers - windows) / 2;
    let start = windows + encoder;
    let decoder = layers - start;
    let mut ratios = vec![0; windows];
    ratios.extend(vec![2; encoder]);
    ratios.extend(vec![1; decoder]);
    ratios.extend([0; 3]);
    // As released: a source every 6 encoder layers, a selecting layer every 4 decoder layers; in a
    // short decoder the last layer selects, so that one layer chooses among candidates.
    let mut sources: Vec<usize> = (windows..start).step_by(6).collect();
    sources.push(start);
    let mut selecting = sources.clone();
    selecting.extend((start + 4..layers).step_by(4));
    if decoder <= 4 {
        selecting.push(layers - 1);
    }
    let engram = if layers < 18 { [1, start - 1] } else { [1, 14.min(start - 1)] };
    Ok(json!({
        "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": layers,
        "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
        "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6,
        "sliding_window": 128, "max_position_embeddings": 1048576, "rope_scaling": yarn(65536),
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources, "index_source_layer_ids": selecting,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": start, "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "engram_layer_ids": engram, "engram_max_ngram_size": 4, "engram_n_heads": 8,
        "engram_head_dim": 256, "engram_vocab_size": 1009,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    }))
}

fn flash_tower() -> Value {
    json!({
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024,
        "num_attention_heads": 16, "intermediate_size": 2816, "patch_size": 14,
        "rope_theta": 10000.0, "downsample_ratio": 3, "max_image_tokens": 1024,
        "min_pixels": 295936,
    })
}
