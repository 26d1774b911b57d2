//! The rules that a configuration must obey.

use super::rules::{
    ascending, below, equal, known_only, merge, multiple, not_negative, out_of_range, positive,
    range, section_type, within,
};
use super::{ConfigError, ModelConfig, RopeScaling, TextConfig, VisionConfig};
use serde::Deserialize;
use serde_json::Value;

/// The fields that say which model this is.
#[derive(Deserialize)]
pub(super) struct Family {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    model_type: Option<String>,
}

impl Family {
    pub(super) fn check(self) -> Result<(), ConfigError> {
        let found = self.model_type.unwrap_or_default();
        if found != ModelConfig::MODEL_TYPE {
            let expected = ModelConfig::MODEL_TYPE;
            return Err(ConfigError::ModelType { field: "model_type", found, expected });
        }
        let found = self.architectures.unwrap_or_default();
        if found != [ModelConfig::ARCHITECTURE] {
            return Err(ConfigError::Architecture { found, expected: ModelConfig::ARCHITECTURE });
        }
        Ok(())
    }
}

/// Bounds that keep every product of two sizes, and their bytes, inside 64 bits.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;
/// Tokens of a cache page, which whole groups of every ratio fill.
const MAX_PAGE: usize = 4096;
const MAX_EXPERTS: usize = 1 << 16;

impl ModelConfig {
    /// Checks every rule. [`ModelConfig::from_json`] has already called it.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let family = Family {
            architectures: Some(self.architectures.clone()),
            model_type: Some(self.model_type.clone()),
        };
        family.check()?;
        let text = &self.text_config;
        section_type("text_config.model_type", &text.model_type, "deepseek_v41_text")?;
        let vision_type = &self.vision_config.model_type;
        section_type("vision_config.model_type", vision_type, "deepseek_v41_vision")?;
        self.check_other_fields()?;
        self.check_quantization()?;
        text.check_sizes()?;
        text.check_layers()?;
        text.check_candidates()?;
        text.rope_scaling.check()?;
        text.check_engram()?;
        text.check_drafts()?;
        self.vision_config.check()?;
        self.check_token_ids()
    }

    /// Token ids stand at the top, in `text_config`, or in both places; afterwards, at the top.
    pub(super) fn merge_token_ids(&mut self) -> Result<(), ConfigError> {
        let text = &self.text_config;
        merge("bos_token_id", &mut self.bos_token_id, &text.bos_token_id)?;
        merge("pad_token_id", &mut self.pad_token_id, &text.pad_token_id)?;
        let listed = |ids: &[u32]| Some(ids.to_vec()).filter(|ids| !ids.is_empty());
        let mut eos = listed(&self.eos_token_id);
        merge("eos_token_id", &mut eos, &listed(&text.eos_token_id))?;
        self.eos_token_id = eos.unwrap_or_default();
        Ok(())
    }

    fn check_token_ids(&self) -> Result<(), ConfigError> {
        let vocab = self.text_config.vocab_size;
        let mut ids: Vec<(&str, u32)> = Vec::new();
        ids.extend(self.bos_token_id.map(|id| ("bos_token_id", id)));
        ids.extend(self.pad_token_id.map(|id| ("pad_token_id", id)));
        ids.extend(self.image_token_id.map(|id| ("image_token_id", id)));
        ids.extend(self.eos_token_id.iter().map(|&id| ("eos_token_id", id)));
        for (field, id) in ids {
            below(field, id as usize, vocab, "vocab_size")?;
        }
        if self.has_vision() && self.image_token_id.is_none() {
            return Err(out_of_range("image_token_id", "absent", "given with a vision tower"));
        }
        Ok(())
    }

    fn check_other_fields(&self) -> Result<(), ConfigError> {
        known_only("", &self.other)?;
        known_only("text_config.", &self.text_config.other)?;
        known_only("text_config.rope_scaling.", &self.text_config.rope_scaling.other)?;
        known_only("vision_config.", &self.vision_config.other)?;
        match &self.quantization_config {
            Some(quantization) => known_only("quantization_config.", &quantization.other),
            None => Ok(()),
        }
    }

    fn check_quantization(&self) -> Result<(), ConfigError> {
        let Some(q) = &self.quantization_config else { return Ok(()) };
        let field = |name: &str| format!("quantization_config.{name}");
        equal(&field("quant_method"), q.quant_method.as_str(), "fp8")?;
        equal(&field("fmt"), q.fmt.as_deref().unwrap_or("e4m3"), "e4m3")?;
        let scheme = q.activation_scheme.as_deref().unwrap_or("dynamic");
        equal(&field("activation_scheme"), scheme, "dynamic")?;
        equal(&field("weight_block_size"), q.weight_block_size.as_slice(), &[32, 32][..])?;
        equal(&field("scale_fmt"), q.scale_fmt.as_str(), "ue8m0")?;
        equal(&field("expert_dtype"), q.expert_dtype.as_str(), "fp4")
    }
}

impl TextConfig {
    /// Sizes of parts that the model lacks reserve nothing and are not checked.
    pub(super) fn forget_absent_parts(&mut self) {
        if self.engram_layer_ids.is_empty() {
            self.engram_num_embeddings.clear();
            (self.engram_max_ngram_size, self.engram_n_heads, self.engram_head_dim) = (0, 0, 0);
            (self.engram_vocab_size, self.engram_compressed_vocab_size) = (0, 0);
            self.engram_pad_token_id = None;
        }
        if self.index_source_layer_ids.is_empty() {
            (self.index_n_heads, self.index_head_dim, self.index_topk) = (0, 0, 0);
        }
        if self.candidate_source_layer_id.is_none() {
            (self.candidate_topk_blocks, self.candidate_block_size) = (0, 0);
        }
        if !self.has_drafts() {
            self.dspark_target_layer_ids.clear();
            (self.dspark_block_size, self.dspark_markov_rank) = (0, 0);
            (self.dspark_n_routed_experts, self.dspark_num_experts_per_tok) = (0, 0);
            self.dspark_noise_token_id = None;
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        equal("text_config.num_key_value_heads", self.num_key_value_heads, 1)?;
        equal("text_config.n_shared_experts", self.n_shared_experts, 1)?;
        equal("text_config.scoring_func", self.scoring_func.as_str(), "sqrtsoftplus")?;
        equal("text_config.topk_method", self.topk_method.as_str(), "noaux_tc")?;
        equal("text_config.norm_topk_prob", self.norm_topk_prob, true)?;
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("head_dim", self.head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("q_lora_rank", self.q_lora_rank),
            ("o_lora_rank", self.o_lora_rank),
            ("o_groups", self.o_groups),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("sliding_window", self.sliding_window),
        ] {
            within(field, size, 1, MAX_SIZE)?;
        }
        within("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS)?;
        within("num_nextn_predict_layers", self.num_nextn_predict_layers, 0, MAX_LAYERS)?;
        within("n_routed_experts", self.n_routed_experts, 1, MAX_EXPERTS)?;
        within("hc_mult", self.hc_mult, 1, 64)?;
        within("hc_sinkhorn_iters", self.hc_sinkhorn_iters, 1, 10_000)?;
        within("max_position_embeddings", self.max_position_embeddings, 1, 1 << 31)?;
        within("num_experts_per_tok", self.num_experts_per_tok, 1, self.n_routed_experts)?;
        multiple("head_dim", self.head_dim, 32)?;
        multiple("qk_rope_head_dim", self.qk_rope_head_dim, 2)?;
        within("qk_rope_head_dim", self.qk_rope_head_dim, 2, self.head_dim)?;
        if !self.num_attention_heads.is_multiple_of(self.o_groups) {
            let rule = format!("a multiple of o_groups ({})", self.o_groups);
            return Err(out_of_range("num_attention_heads", self.num_attention_heads, rule));
        }
        for (field, value) in [
            ("routed_scaling_factor", self.routed_scaling_factor as f64),
            ("swiglu_limit", self.swiglu_limit as f64),
            ("rope_theta", self.rope_theta),
            ("compress_rope_theta", self.compress_rope_theta),
        ] {
            positive(field, value)?;
        }
        // YaRN divides by its logarithm.
        if self.compress_rope_theta == 1.0 {
            return Err(out_of_range(
                "text_config.compress_rope_theta",
                1,
                "another number than 1",
            ));
        }
        not_negative("rms_norm_eps", self.rms_norm_eps as f64)?;
        not_negative("hc_eps", self.hc_eps as f64)
    }

    fn check_layers(&self) -> Result<(), ConfigError> {
        let (layers, drafts) = (self.num_hidden_layers, self.num_nextn_predict_layers);
        let found = self.compress_ratios.len();
        if found != layers + drafts {
            return Err(ConfigError::RatioCount { found, layers, drafts });
        }
        if let Some(stage) = self.compress_ratios[layers..].iter().position(|&ratio| ratio != 0) {
            let ratio = self.compress_ratios[layers + stage];
            let field = format!("compress_ratios[{}] (draft stage {stage})", layers + stage);
            return Err(out_of_range(&field, ratio, "0"));
        }
        for &ratio in &self.compress_ratios {
            within("compress_ratios", ratio, 0, MAX_PAGE)?;
        }
        if self.common_group() > MAX_PAGE {
            let rule = format!("ratios with a common multiple of at most {MAX_PAGE}");
            let found = format!("{:?}", self.compress_ratios);
            return Err(out_of_range("text_config.compress_ratios", found, rule));
        }
        for (field, ids) in [
            ("kv_source_layer_ids", &self.kv_source_layer_ids),
            ("index_source_layer_ids", &self.index_source_layer_ids),
        ] {
            ascending(field, ids, layers)?;
            if let Some(&layer) = ids.iter().find(|&&layer| self.compress_ratios[layer] == 0) {
                return Err(out_of_range(
                    field,
                    format!("{ids:?}"),
                    format!("without layer {layer}, whose compression ratio is 0"),
                ));
            }
        }
        for &layer in &self.kv_source_layer_ids {
            if !self.is_index_source(layer) {
                let index_sources = self.index_source_layer_ids.clone();
                return Err(ConfigError::KvSourceDoesNotSelect { layer, index_sources });
            }
        }
        self.check_decoder()?;
        self.check_sources()?;
        if !self.index_source_layer_ids.is_empty() {
            for (field, size) in [
                ("index_n_heads", self.index_n_heads),
                ("index_head_dim", self.index_head_dim),
                ("index_topk", self.index_topk),
            ] {
                within(field, size, 1, MAX_SIZE)?;
            }
            multiple("index_head_dim", self.index_head_dim, 32)?;
            within("qk_rope_head_dim", self.qk_rope_head_dim, 2, self.index_head_dim)?;
        }
        Ok(())
    }

    fn check_decoder(&self) -> Result<(), ConfigError> {
        let Some(start) = self.decoder_start() else { return Ok(()) };
        for layer in start + 1..self.num_hidden_layers {
            let ratio = self.compress_ratios[layer];
            let what = if ratio != 1 {
                format!("compression ratio {ratio}")
            } else if self.is_kv_source(layer) {
                "a KV source".to_owned()
            } else {
                continue;
            };
            return Err(ConfigError::AfterDecoderStart { layer, what, start });
        }
        Ok(())
    }

    fn check_sources(&self) -> Result<(), ConfigError> {
        for layer in 0..self.num_hidden_layers {
            let ratio = self.compress_ratios[layer];
            if ratio == 0 {
                continue;
            }
            let source = self.kv_source(layer);
            let Some(kv_source) = source.filter(|&id| self.compress_ratios[id] == ratio) else {
                let source_layer = source.map(|id| (id, self.compress_ratios[id]));
                return Err(ConfigError::NoKvSource { layer, ratio, source_layer });
            };
            // A KV source selects, so the nearest selecting layer is never before it.
            let index_source = self.index_source(layer).unwrap_or(kv_source);
            if self.kv_source(index_source) != Some(kv_source) {
                return Err(ConfigError::IndexSourceOfOtherKv { layer, kv_source, index_source });
            }
        }
        Ok(())
    }

    fn check_candidates(&self) -> Result<(), ConfigError> {
        let Some(source) = self.candidate_source_layer_id else { return Ok(()) };
        let field = "candidate_source_layer_id";
        if !self.is_index_source(source) {
            let rule = format!(
                "one of index_source_layer_ids {:?}, or -1 or null",
                self.index_source_layer_ids
            );
            return Err(out_of_range(field, source, rule));
        }
        let later = self.index_source_layer_ids.iter().copied().filter(|&layer| layer > source);
        for layer in later {
            if self.kv_source(layer) != self.kv_source(source) {
                let rule = format!("after every KV source that layer {layer} does not share");
                return Err(out_of_range(field, source, rule));
            }
        }
        within("candidate_topk_blocks", self.candidate_topk_blocks, 1, MAX_SIZE)?;
        within("candidate_block_size", self.candidate_block_size, 1, MAX_SIZE)
    }

    fn check_engram(&self) -> Result<(), ConfigError> {
        if self.engram_layer_ids.is_empty() {
            return Ok(());
        }
        let layers = self.engram_layer_ids.len();
        ascending("engram_layer_ids", &self.engram_layer_ids, self.num_hidden_layers)?;
        let tables = self.engram_num_embeddings.len();
        if tables != 0 && tables != layers {
            let found = format!("{:?}", self.engram_num_embeddings);
            let rule =
                format!("one number for each of engram_layer_ids {:?}", self.engram_layer_ids);
            return Err(out_of_range("engram_num_embeddings", found, rule));
        }
        // Every column needs a prime, found by trial division.
        within("engram_max_ngram_size", self.engram_max_ngram_size, 2, 16)?;
        within("engram_n_heads", self.engram_n_heads, 1, 64)?;
        within("engram_head_dim", self.engram_head_dim, 1, 1 << 16)?;
        multiple("engram_head_dim", self.engram_head_dim, 32)?;
        within("engram_vocab_size", self.engram_vocab_size as usize, 2, 1 << 32)?;
        let compressed = self.engram_compressed_vocab_size;
        within("engram_compressed_vocab_size", compressed, 1, self.vocab_size)?;
        self.token("engram_pad_token_id", self.engram_pad_token_id)
    }

    fn check_drafts(&self) -> Result<(), ConfigError> {
        if !self.has_drafts() {
            return Ok(());
        }
        within("dspark_block_size", self.dspark_block_size, 1, 1024)?;
        within("dspark_markov_rank", self.dspark_markov_rank, 1, MAX_SIZE)?;
        within("dspark_n_routed_experts", self.dspark_n_routed_experts, 1, MAX_EXPERTS)?;
        let experts = self.dspark_n_routed_experts;
        within("dspark_num_experts_per_tok", self.dspark_num_experts_per_tok, 1, experts)?;
        within("dspark_target_layer_ids (count)", self.dspark_target_layer_ids.len(), 1, 4096)?;
        for &layer in &self.dspark_target_layer_ids {
            let layers = self.num_hidden_layers;
            below("text_config.dspark_target_layer_ids", layer, layers, "num_hidden_layers")?;
        }
        self.token("dspark_noise_token_id", self.dspark_noise_token_id)
    }

    /// A token that the model needs.
    fn token(&self, name: &str, id: Option<u32>) -> Result<(), ConfigError> {
        let field = format!("text_config.{name}");
        match id {
            Some(id) => below(&field, id as usize, self.vocab_size, "vocab_size"),
            None => Err(out_of_range(&field, "absent", "a token id")),
        }
    }
}

impl RopeScaling {
    fn check(&self) -> Result<(), ConfigError> {
        let old_name = self.other.get("type").and_then(Value::as_str);
        let names = [Some(self.rope_type.as_str()).filter(|name| !name.is_empty()), old_name];
        if names == [None, None] {
            return Err(out_of_range("text_config.rope_scaling.rope_type", "absent", "yarn"));
        }
        for name in names.into_iter().flatten() {
            equal("text_config.rope_scaling.rope_type", name, "yarn")?;
        }
        positive("rope_scaling.factor", self.factor)?;
        positive("rope_scaling.beta_slow", self.beta_slow)?;
        positive("rope_scaling.beta_fast", self.beta_fast)?;
        if self.beta_fast < self.beta_slow {
            let rule = format!("at least beta_slow ({})", self.beta_slow);
            return Err(out_of_range("text_config.rope_scaling.beta_fast", self.beta_fast, rule));
        }
        let original = self.original_max_position_embeddings;
        within("rope_scaling.original_max_position_embeddings", original, 1, 1 << 31)
    }
}

impl VisionConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if self.num_hidden_layers == 0 {
            return Ok(());
        }
        let field = |name: &str| format!("vision_config.{name}");
        for (name, size, most) in [
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("num_attention_heads", self.num_attention_heads, self.hidden_size),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("patch_size", self.patch_size, 1024),
            ("downsample_ratio", self.downsample_ratio, 64),
            ("max_image_tokens", self.max_image_tokens, MAX_SIZE),
            ("min_pixels", self.min_pixels, 1 << 40),
        ] {
            range(&field(name), size, 1, most)?;
        }
        // A head's angles: half for rows, half for columns, each an angle for two elements.
        if !self.hidden_size.is_multiple_of(4 * self.num_attention_heads) {
            let rule =
                format!("a multiple of 4 x num_attention_heads ({})", self.num_attention_heads);
            return Err(out_of_range(&field("hidden_size"), self.hidden_size, rule));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(out_of_range(&field("rope_theta"), self.rope_theta, "positive"));
        }
        Ok(())
    }
}
