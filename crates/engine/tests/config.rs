//! `config.json`: what is read, and what is refused with which words.

#![recursion_limit = "256"]

mod files;

use deepinfer::config::{ConfigError, ModelConfig};
use files::{checkpoints, json, testdata};
use serde_json::{Value, json};

fn original() -> Value {
    json(&testdata("tiny-a/config.json"))
}

fn read(value: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(value.to_string().as_bytes())
}

/// tiny-a's file with `text_config.field` changed.
fn with(field: &str, value: Value) -> Value {
    let mut file = original();
    file["text_config"][field] = value;
    file
}

/// The error's message, which must contain every one of `words`.
#[track_caller]
fn refused(file: &Value, words: &[&str]) -> ConfigError {
    let error = read(file).expect_err("a refusal");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    error
}

/// The configuration of the released Flash model, as published.
fn released() -> Value {
    let mut ratios = vec![0; 2];
    ratios.extend([2; 18]);
    ratios.extend([1; 20]);
    ratios.extend([0; 3]);
    json!({
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "dtype": "bfloat16", "transformers_version": "5.6.0",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120,
            "moe_intermediate_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 64,
            "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
            "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu",
            "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": false,
            "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": true,
            "tie_word_embeddings": false, "max_position_embeddings": 1048576,
            "rope_theta": 10000,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6,
            "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true,
            "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_ratios": ratios,
            "compress_rope_theta": 160000, "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32,
            "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
            "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
            "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
            "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
            "num_nextn_predict_layers": 3, "dspark_block_size": 5,
            "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
            "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
            "dspark_num_experts_per_tok": 3,
        },
        "vision_config": {
            "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024,
            "num_attention_heads": 16, "intermediate_size": 2816, "patch_size": 14,
            "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024,
            "min_pixels": 295936, "max_wh_ratio": null,
        },
    })
}

#[test]
fn the_released_configuration_is_read() {
    let config = read(&released()).unwrap();
    let text = &config.text_config;
    assert_eq!((config.bos_token_id, config.eos_token_id.as_slice()), (Some(0), &[1][..]));
    assert_eq!(text.rms_norm_eps, 1e-20);
    assert_eq!(text.decoder_start(), Some(20));
    assert_eq!((text.hash_columns(), text.hc_mix(), text.group_width()), (24, 24, 4096));
    assert_eq!(
        [0, 1, 2, 7, 8, 19, 20, 39].map(|layer| text.kv_source(layer)),
        [None, None, Some(2), Some(2), Some(8), Some(14), Some(20), Some(20)]
    );
    assert_eq!(
        [0, 13, 23, 24, 27, 39].map(|layer| text.index_source(layer)),
        [None, Some(8), Some(20), Some(24), Some(24), Some(36)]
    );
    assert_eq!(text.kv_source(40), None, "a draft stage has no compressed KV");
    assert_eq!(
        [20, 24, 25, 36].map(|layer| text.uses_candidates(layer)),
        [false, true, false, true]
    );
    assert_eq!([1, 2, 14].map(|layer| text.engram_index(layer)), [Some(0), None, Some(1)]);
    assert!(config.has_vision() && text.has_drafts());
}

#[test]
fn a_configuration_survives_writing() {
    for folder in checkpoints() {
        let config = read(&json(&folder.join("config.json"))).unwrap();
        let again = ModelConfig::from_json(config.to_json().as_bytes()).unwrap();
        assert_eq!(format!("{config:?}"), format!("{again:?}"));
    }
}

/// Sizes and switches that differ from every known checkpoint, within the rules.
#[test]
fn other_shapes_are_accepted() {
    for (field, value) in [
        ("hidden_size", json!(192)),
        ("index_topk", json!(13)),
        ("num_experts_per_tok", json!(3)),
        ("compress_ratios", json!([0, 0, 3, 3, 3, 1, 1, 1, 0, 0, 0])),
        ("compress_ratios", json!([0, 0, 128, 128, 128, 1, 1, 1, 0, 0, 0])),
        ("compress_ratios", json!([0, 0, 2, 2, 2, 3, 3, 3, 0, 0, 0])),
        ("engram_max_ngram_size", json!(2)),
        ("candidate_source_layer_id", json!(-1)),
        ("candidate_source_layer_id", json!(null)),
        ("engram_layer_ids", json!([])),
        ("rms_norm_eps", json!(0.0)),
        ("hc_mult", json!(2)),
        ("use_cache", json!(false)),
        ("some_new_switch", json!(false)),
        ("q_head_norm", json!(false)),
        ("n_group", json!(1)),
    ] {
        let mut file = with(field, value.clone());
        if field.starts_with("engram") {
            file["text_config"].as_object_mut().unwrap().remove("engram_num_embeddings");
        }
        let config = read(&file).unwrap_or_else(|error| panic!("{field} {value}: {error}"));
        if field == "candidate_source_layer_id" {
            assert_eq!(config.text_config.candidate_source_layer_id, None);
            assert!(!config.text_config.uses_candidates(7));
        }
    }
    let mut file = with("compress_ratios", json!([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    for field in ["kv_source_layer_ids", "index_source_layer_ids"] {
        file["text_config"][field] = json!([]);
    }
    file["text_config"]["candidate_source_layer_id"] = json!(null);
    let config = read(&file).unwrap();
    assert_eq!((config.text_config.decoder_start(), config.text_config.kv_source(3)), (None, None));

    let mut file = original();
    file.as_object_mut().unwrap().remove("quantization_config");
    assert!(read(&file).unwrap().quantization_config.is_none());

    let mut file = original();
    file["eos_token_id"] = json!([1, 5]);
    file["text_config"].as_object_mut().unwrap().remove("eos_token_id");
    assert_eq!(read(&file).unwrap().eos_token_id, [1, 5]);

    let scaling = json!({
        "type": "yarn", "factor": 4.0, "beta_fast": 4, "beta_slow": 1,
        "original_max_position_embeddings": 32
    });
    assert!(read(&with("rope_scaling", scaling)).is_ok());
}

/// Fields of parts that a model lacks may hold anything that they hold elsewhere, or null.
#[test]
fn sizes_of_absent_parts_count_as_absent() {
    let mut file = original();
    for field in ["engram_layer_ids", "kv_source_layer_ids", "index_source_layer_ids"] {
        file["text_config"][field] = json!([]);
    }
    for (field, value) in [
        ("compress_ratios", json!([0, 0, 0, 0, 0, 0, 0, 0])),
        ("num_nextn_predict_layers", json!(0)),
        ("candidate_source_layer_id", json!(-1)),
        ("engram_max_ngram_size", json!(1u64 << 60)),
        ("engram_n_heads", json!(1u64 << 60)),
        ("index_topk", json!(1u64 << 60)),
        ("candidate_topk_blocks", json!(1u64 << 60)),
        ("dspark_block_size", json!(1u64 << 60)),
        ("dspark_target_layer_ids", json!([99])),
        ("dspark_noise_token_id", json!(null)),
        ("engram_num_embeddings", json!(null)),
    ] {
        file["text_config"][field] = value;
    }
    file["vision_config"] = json!(null);
    let config = read(&file).unwrap();
    let text = &config.text_config;
    assert_eq!((text.hash_columns(), text.index_topk, text.candidate_topk_blocks), (0, 0, 0));
    assert_eq!((text.dspark_block_size, text.dspark_target_layer_ids.len()), (0, 0));
    assert!(!config.has_vision());
}

#[test]
fn other_models_are_refused_by_name() {
    for found in [json!("deepseek_v4"), json!("deepseek_v42"), json!(null)] {
        let mut file = original();
        file["model_type"] = found.clone();
        let found = found.as_str().unwrap_or("\"\"");
        let error = refused(&file, &["model_type", found, "\"deepseek_v41\""]);
        assert!(matches!(error, ConfigError::ModelType { .. }));
    }
    for found in [json!(["DeepseekV4ForCausalLM"]), json!([]), json!(null)] {
        let mut file = original();
        file["architectures"] = found.clone();
        let error = refused(&file, &["architectures", "DeepseekV41ForCausalLM"]);
        assert!(matches!(error, ConfigError::Architecture { .. }));
    }
    refused(&with("model_type", json!("deepseek_v4_text")), &["text_config.model_type"]);
    // A V4 file has no text_config; the message is about the model, not about that field.
    refused(
        &json!({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}),
        &["deepseek_v4"],
    );
}

#[test]
fn missing_and_mistyped_fields_are_named() {
    for field in ["hidden_size", "swiglu_limit", "rope_scaling", "max_position_embeddings"] {
        let mut file = original();
        file["text_config"].as_object_mut().unwrap().remove(field);
        let error = refused(&file, &["missing field", field]);
        assert!(matches!(error, ConfigError::Json { .. }));
    }
    refused(&with("hidden_size", json!("wide")), &["wide"]);
    refused(&with("hidden_size", json!(-1)), &["-1"]);
    refused(&with("candidate_source_layer_id", json!(-2)), &["candidate_source_layer_id -2"]);
    let error = ModelConfig::from_json(b"{\"model_type\": ").unwrap_err();
    assert!(error.to_string().contains("line 1"), "{error}");
}

#[test]
fn quantizations_that_are_not_the_released_one_are_refused() {
    for (field, value) in [
        ("quant_method", json!("awq")),
        ("fmt", json!("e5m2")),
        ("weight_block_size", json!([128, 128])),
        ("scale_fmt", json!("float32")),
        ("expert_dtype", json!("fp8")),
        ("activation_scheme", json!("static")),
    ] {
        let mut file = original();
        file["quantization_config"][field] = value.clone();
        let value = value.to_string().replace(',', ", ");
        let error = refused(&file, &[&format!("quantization_config.{field}"), &value]);
        assert!(matches!(error, ConfigError::Unsupported { .. }));
    }
}

/// A flag that is on and that this engine does not implement stops it, by name.
#[test]
fn unknown_switches_are_refused_by_name() {
    for (field, value) in [
        ("q_head_norm", json!(true)),
        ("attention_sink_bias", json!(0.5)),
        ("layer_norm_kind", json!("deep")),
        ("extra_layers", json!([3])),
    ] {
        let error = refused(&with(field, value), &[&format!("text_config.{field}")]);
        assert!(matches!(error, ConfigError::UnknownField { .. }));
    }
    for (field, value) in [
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("n_group", json!(8)),
        ("num_hash_layers", json!(3)),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("greedy")),
        ("norm_topk_prob", json!(false)),
        ("num_key_value_heads", json!(2)),
        ("n_shared_experts", json!(2)),
    ] {
        let words = [&*format!("text_config.{field}"), &*value.to_string()];
        let error = refused(&with(field, value.clone()), &words);
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{field}");
    }
    let mut file = original();
    file["text_config"]["rope_scaling"]["mscale"] = json!(1.2);
    refused(&file, &["text_config.rope_scaling.mscale", "1.2"]);
    file = original();
    file["text_config"]["rope_scaling"]["rope_type"] = json!("linear");
    refused(&file, &["rope_type", "linear", "yarn"]);
    file = original();
    file["vision_config"]["window_attention"] = json!(true);
    refused(&file, &["vision_config.window_attention"]);
}

#[test]
fn layer_lists_must_fit_together() {
    let error = refused(&with("compress_ratios", json!([0, 0, 2, 2, 2, 1, 1, 1])), &["8", "11"]);
    assert!(matches!(error, ConfigError::RatioCount { found: 8, layers: 8, drafts: 3 }));

    let error = refused(&with("index_source_layer_ids", json!([2, 7])), &["layer 5", "[2, 7]"]);
    assert!(matches!(error, ConfigError::KvSourceDoesNotSelect { layer: 5, .. }));

    // A compressed layer before every source, and one whose nearest source has another ratio.
    let error = refused(
        &with("compress_ratios", json!([0, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0])),
        &["layer 1", "ratio 2"],
    );
    assert!(matches!(error, ConfigError::NoKvSource { layer: 1, source_layer: None, .. }));
    let error = refused(
        &with("compress_ratios", json!([0, 0, 2, 2, 3, 1, 1, 1, 0, 0, 0])),
        &["layer 4", "ratio 3", "layer 2 of ratio 2"],
    );
    assert!(matches!(error, ConfigError::NoKvSource { ratio: 3, source_layer: Some((2, 2)), .. }));

    // Inside the decoder: another ratio, and a second source.
    for ratio in [0, 2] {
        let ratios = json!([0, 0, 2, 2, 2, 1, ratio, 1, 0, 0, 0]);
        let error = refused(&with("compress_ratios", ratios), &["layer 6", "layer 5"]);
        assert!(matches!(error, ConfigError::AfterDecoderStart { layer: 6, start: 5, .. }));
    }
    let error = refused(&with("kv_source_layer_ids", json!([2, 5, 7])), &["layer 7", "KV source"]);
    assert!(matches!(error, ConfigError::AfterDecoderStart { layer: 7, start: 5, .. }));

    refused(&with("compress_ratios", json!([0, 0, 2, 2, 2, 1, 1, 1, 0, 2, 0])), &["draft stage 1"]);
    refused(&with("kv_source_layer_ids", json!([5, 2])), &["kv_source_layer_ids", "ascending"]);
    refused(&with("kv_source_layer_ids", json!([2, 2, 5])), &["ascending"]);
    refused(&with("index_source_layer_ids", json!([1, 2, 5])), &["layer 1", "ratio is 0"]);
    refused(&with("index_source_layer_ids", json!([2, 5, 8])), &["8", "num_hidden_layers (8)"]);
    refused(&with("candidate_source_layer_id", json!(6)), &["6", "[2, 5, 7]"]);
    refused(
        &with("candidate_source_layer_id", json!(2)),
        &["candidate_source_layer_id", "layer 5"],
    );
}

#[test]
fn numbers_out_of_range_are_refused_with_their_limits() {
    for (field, value, words) in [
        ("o_groups", json!(3), &["num_attention_heads", "4", "o_groups (3)"][..]),
        ("hidden_size", json!(0), &["hidden_size", "0", "1"]),
        ("hidden_size", json!(1u64 << 60), &["hidden_size"]),
        ("num_hidden_layers", json!(100_000), &["num_hidden_layers", "100000", "4096"]),
        ("num_experts_per_tok", json!(9), &["9", "1 to 8"]),
        ("qk_rope_head_dim", json!(15), &["15", "multiple of 2"]),
        ("qk_rope_head_dim", json!(96), &["96", "64"]),
        ("head_dim", json!(60), &["60", "multiple of 32"]),
        ("index_head_dim", json!(20), &["20", "multiple of 32"]),
        ("index_topk", json!(0), &["index_topk"]),
        ("candidate_block_size", json!(0), &["candidate_block_size"]),
        ("candidate_topk_blocks", json!(null), &["candidate_topk_blocks", "0"]),
        ("engram_layer_ids", json!([1, 8]), &["engram_layer_ids", "8"]),
        ("engram_num_embeddings", json!([630]), &["engram_num_embeddings", "[630]", "[1, 4]"]),
        ("engram_max_ngram_size", json!(1), &["engram_max_ngram_size", "1"]),
        ("engram_pad_token_id", json!(608), &["engram_pad_token_id", "608", "vocab_size"]),
        ("engram_compressed_vocab_size", json!(609), &["609", "608"]),
        ("dspark_noise_token_id", json!(608), &["dspark_noise_token_id", "608"]),
        ("dspark_target_layer_ids", json!([8]), &["dspark_target_layer_ids", "8"]),
        ("dspark_num_experts_per_tok", json!(5), &["5", "4"]),
        ("dspark_block_size", json!(0), &["dspark_block_size"]),
        ("bos_token_id", json!(3), &["bos_token_id", "0", "3"]),
        ("swiglu_limit", json!(0.0), &["swiglu_limit", "positive"]),
        ("rms_norm_eps", json!(-1e-6), &["rms_norm_eps"]),
        ("sliding_window", json!(0), &["sliding_window"]),
        ("compress_ratios", json!([0, 0, 5000, 5000, 5000, 1, 1, 1, 0, 0, 0]), &["5000", "4096"]),
        (
            "compress_ratios",
            json!([0, 0, 67, 67, 67, 71, 71, 71, 0, 0, 0]),
            &["67, 71", "common multiple of at most 4096"],
        ),
        ("compress_rope_theta", json!(1.0), &["compress_rope_theta", "1"]),
        ("engram_pad_token_id", json!(null), &["engram_pad_token_id", "absent"]),
        ("dspark_noise_token_id", json!(null), &["dspark_noise_token_id", "absent"]),
    ] {
        let error = refused(&with(field, value.clone()), words);
        assert!(matches!(error, ConfigError::OutOfRange { .. }), "{field} {value}: {error:?}");
    }
    for (field, value) in [("image_token_id", 608), ("eos_token_id", 700)] {
        let mut file = original();
        file[field] = json!(value);
        file["text_config"].as_object_mut().unwrap().remove(field);
        refused(&file, &[field, &value.to_string(), "vocab_size (608)"]);
    }
    let mut file = original();
    file["vision_config"]["hidden_size"] = json!(68);
    refused(&file, &["vision_config.hidden_size", "68", "num_attention_heads (2)"]);
    file = original();
    file["image_token_id"] = json!(null);
    refused(&file, &["image_token_id", "vision"]);
}
