//! `config.json` of a DeepSeek-V4.1 checkpoint, typed.
//!
//! Field names are those of the file. Nothing has a built-in value: a field that the model needs
//! and the file lacks is an error. [`ModelConfig::from_json`] returns validated configurations
//! only, so the helpers below may rely on every rule of [`ModelConfig::validate`]. Fields of parts
//! that the model lacks (Engram, index, candidates, drafts) count as absent: 0, or empty.

mod error;
mod rules;
mod validate;

pub use error::ConfigError;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The whole file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Must name [`ModelConfig::ARCHITECTURE`].
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Must be [`ModelConfig::MODEL_TYPE`].
    #[serde(default)]
    pub model_type: String,
    /// Token that starts a text. The files repeat it in `text_config`; either place will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation: a number or a list in the file.
    #[serde(default, with = "one_or_many")]
    pub eos_token_id: Vec<u32>,
    /// Padding token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// Token that all positions of an image span carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_token_id: Option<u32>,
    /// `None`: a plain bf16 or f32 checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization_config: Option<QuantizationConfig>,
    /// The language model.
    pub text_config: TextConfig,
    /// The vision tower; [`VisionConfig::num_hidden_layers`] 0 means none.
    #[serde(default, deserialize_with = "null_is_default")]
    pub vision_config: VisionConfig,
    /// Fields that this type does not list.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// How weights are stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuantizationConfig {
    /// `fp8`.
    pub quant_method: String,
    /// `e4m3` where present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fmt: Option<String>,
    /// `dynamic` where present. Activations are not quantized here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_scheme: Option<String>,
    /// `[32, 32]`.
    pub weight_block_size: Vec<usize>,
    /// `ue8m0`.
    pub scale_fmt: String,
    /// `fp4`.
    pub expert_dtype: String,
    /// Fields that this type does not list.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The language model and its draft stages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TextConfig {
    /// `deepseek_v41_text` where present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
    /// See [`ModelConfig::bos_token_id`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// See [`ModelConfig::eos_token_id`].
    #[serde(default, with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub eos_token_id: Vec<u32>,
    /// See [`ModelConfig::pad_token_id`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of one residual stream.
    pub hidden_size: usize,
    /// Backbone layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// 1: one vector a position is the key and the value of every head.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The last dimensions of a head that RoPE turns.
    pub qk_rope_head_dim: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Rank of the output projection, one group.
    pub o_lora_rank: usize,
    /// Groups of heads in the output projection.
    pub o_groups: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Experts of a backbone layer.
    pub n_routed_experts: usize,
    /// Experts chosen a token.
    pub num_experts_per_tok: usize,
    /// 1.
    pub n_shared_experts: usize,
    /// `sqrtsoftplus`.
    pub scoring_func: String,
    /// `noaux_tc`.
    pub topk_method: String,
    /// `true`.
    pub norm_topk_prob: bool,
    /// Factor of the normalized expert weights.
    pub routed_scaling_factor: f32,
    /// Clamp inside every expert.
    pub swiglu_limit: f32,
    /// Epsilon of every RMSNorm of the language model.
    pub rms_norm_eps: f32,
    /// Positions that a window holds, the own one included.
    pub sliding_window: usize,
    /// Compression ratio of each layer, then of each draft stage; 0 = window only.
    pub compress_ratios: Vec<usize>,
    /// Layers that own a compressed KV.
    pub kv_source_layer_ids: Vec<usize>,
    /// Layers that select compressed rows.
    pub index_source_layer_ids: Vec<usize>,
    /// Index heads.
    #[serde(default, deserialize_with = "null_is_default")]
    pub index_n_heads: usize,
    /// Width of an index head.
    #[serde(default, deserialize_with = "null_is_default")]
    pub index_head_dim: usize,
    /// Rows that a selecting layer chooses.
    #[serde(default, deserialize_with = "null_is_default")]
    pub index_topk: usize,
    /// Layer that publishes candidate blocks; -1, null or absent in the file disables them.
    #[serde(default, with = "disabled_by_minus_one")]
    pub candidate_source_layer_id: Option<usize>,
    /// Blocks that the candidate source keeps.
    #[serde(default, deserialize_with = "null_is_default")]
    pub candidate_topk_blocks: usize,
    /// Compressed rows of a candidate block.
    #[serde(default, deserialize_with = "null_is_default")]
    pub candidate_block_size: usize,
    /// RoPE base of window-only layers and draft stages.
    pub rope_theta: f64,
    /// RoPE base of compressed layers, with [`TextConfig::rope_scaling`].
    pub compress_rope_theta: f64,
    /// YaRN parameters of compressed layers.
    pub rope_scaling: RopeScaling,
    /// Residual streams.
    pub hc_mult: usize,
    /// Sinkhorn iterations, the first one included.
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the stream mixing.
    pub hc_eps: f32,
    /// Layers with an Engram.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_layer_ids: Vec<usize>,
    /// Rows of each Engram table; empty if the file does not say.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_num_embeddings: Vec<u64>,
    /// Longest n-gram that is hashed.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_max_ngram_size: usize,
    /// Hash heads for each n-gram size.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_n_heads: usize,
    /// Width of a table row.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_head_dim: usize,
    /// The bucket sizes are the first unused primes from here on.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_vocab_size: u64,
    /// Token that stands for absent positions, before compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engram_pad_token_id: Option<u32>,
    /// Size of the compressed token map.
    #[serde(default, deserialize_with = "null_is_default")]
    pub engram_compressed_vocab_size: usize,
    /// Draft stages; 0 = no drafting.
    #[serde(default, deserialize_with = "null_is_default")]
    pub num_nextn_predict_layers: usize,
    /// Tokens of a draft block.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_block_size: usize,
    /// Token that stands at the positions to be drafted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dspark_noise_token_id: Option<u32>,
    /// Layers whose attention inputs feed the draft stages.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_target_layer_ids: Vec<usize>,
    /// Rank of the Markov head.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_markov_rank: usize,
    /// What the confidence head of the drafts reads.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_confidence_input: ConfidenceInput,
    /// Experts of a draft stage.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_n_routed_experts: usize,
    /// Experts chosen a token in a draft stage.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dspark_num_experts_per_tok: usize,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Fields that this type does not list.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What the confidence head of the drafts reads, besides the Markov embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConfidenceInput {
    /// The collapsed streams before the last norm, as the model was released.
    #[default]
    Raw,
    /// The same after the norm: heads that were trained behind it.
    Normalized,
}

/// YaRN: `rope_scaling` in the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RopeScaling {
    /// `yarn`; some files call the field `type`.
    #[serde(default)]
    pub rope_type: String,
    /// Divisor of the slow frequencies.
    pub factor: f64,
    /// Rotations within the original length above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
    /// Fields that this type does not list.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The vision tower. All sizes are 0 when there is none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VisionConfig {
    /// `deepseek_v41_vision` where present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
    /// Blocks; 0 = no tower, and none of the `vision.*` and `aligner.*` tensors.
    #[serde(default)]
    pub num_hidden_layers: usize,
    /// Width of the tower.
    #[serde(default)]
    pub hidden_size: usize,
    /// Attention heads.
    #[serde(default)]
    pub num_attention_heads: usize,
    /// Width of the MLP.
    #[serde(default)]
    pub intermediate_size: usize,
    /// Pixels of a patch side.
    #[serde(default)]
    pub patch_size: usize,
    /// RoPE base.
    #[serde(default)]
    pub rope_theta: f64,
    /// Patches of a block side: one row of the language model for each block.
    #[serde(default)]
    pub downsample_ratio: usize,
    /// Most blocks of an image.
    #[serde(default)]
    pub max_image_tokens: usize,
    /// Fewest pixels of a resized image.
    #[serde(default)]
    pub min_pixels: usize,
    /// Widest aspect ratio; `None` = any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_wh_ratio: Option<f64>,
    /// Fields that this type does not list.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl ModelConfig {
    /// The only architecture that this engine runs.
    pub const ARCHITECTURE: &str = "DeepseekV41ForCausalLM";
    /// Its `model_type`.
    pub const MODEL_TYPE: &str = "deepseek_v41";

    /// Reads and validates the text of a `config.json`.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        // The family first: a file of another one lacks our fields, and that is not its fault.
        let head: validate::Family =
            serde_json::from_slice(text).map_err(|source| ConfigError::Json { source })?;
        head.check()?;
        let mut config: Self =
            serde_json::from_slice(text).map_err(|source| ConfigError::Json { source })?;
        config.merge_token_ids()?;
        config.text_config.forget_absent_parts();
        config.validate()?;
        Ok(config)
    }

    /// The text of a `config.json` with this configuration.
    pub fn to_json(&self) -> String {
        // Serializing to memory fails only for maps with keys that are not strings.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Whether the checkpoint has a vision tower.
    pub fn has_vision(&self) -> bool {
        self.vision_config.num_hidden_layers > 0
    }
}

impl TextConfig {
    /// The KV source whose compressed rows layer `layer` reads: itself or the nearest earlier one.
    /// `None` for window-only layers.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        if *self.compress_ratios.get(layer)? == 0 || layer >= self.num_hidden_layers {
            return None;
        }
        self.kv_source_layer_ids.iter().copied().filter(|&source| source <= layer).max()
    }

    /// The layer whose selected rows layer `layer` uses: itself or the nearest earlier selecting
    /// one. `None` for window-only layers.
    pub fn index_source(&self, layer: usize) -> Option<usize> {
        self.kv_source(layer)?;
        self.index_source_layer_ids.iter().copied().filter(|&source| source <= layer).max()
    }

    /// Whether layer `layer` owns a compressed KV.
    pub fn is_kv_source(&self, layer: usize) -> bool {
        self.kv_source_layer_ids.contains(&layer)
    }

    /// Whether layer `layer` selects compressed rows.
    pub fn is_index_source(&self, layer: usize) -> bool {
        self.index_source_layer_ids.contains(&layer)
    }

    /// Whether layer `layer` chooses its rows inside the candidate blocks of an earlier layer.
    pub fn uses_candidates(&self, layer: usize) -> bool {
        self.is_index_source(layer)
            && self.candidate_source_layer_id.is_some_and(|source| layer > source)
    }

    /// The fewest tokens that whole groups of every compression ratio fill.
    pub fn common_group(&self) -> usize {
        self.compress_ratios.iter().filter(|&&ratio| ratio > 0).fold(1, |all, &ratio| {
            let (mut divisor, mut rest) = (all, ratio);
            while rest > 0 {
                (divisor, rest) = (rest, divisor % rest);
            }
            ratio.saturating_mul(all / divisor)
        })
    }

    /// The first layer of ratio 1, where the decoder starts; `None` if there is none.
    pub fn decoder_start(&self) -> Option<usize> {
        self.compress_ratios[..self.num_hidden_layers].iter().position(|&ratio| ratio == 1)
    }

    /// Place of layer `layer` in `engram_layer_ids`.
    pub fn engram_index(&self, layer: usize) -> Option<usize> {
        self.engram_layer_ids.iter().position(|&id| id == layer)
    }

    /// Table rows that one token gathers in one Engram layer: n-gram sizes from 2 on, times heads.
    pub fn hash_columns(&self) -> usize {
        self.engram_max_ngram_size.saturating_sub(1) * self.engram_n_heads
    }

    /// Outputs of a stream-mixing projection: pre, post and comb coefficients.
    pub fn hc_mix(&self) -> usize {
        (2 + self.hc_mult) * self.hc_mult
    }

    /// Input width of one group of the output projection.
    pub fn group_width(&self) -> usize {
        self.num_attention_heads * self.head_dim / self.o_groups
    }

    /// Whether the checkpoint has draft stages.
    pub fn has_drafts(&self) -> bool {
        self.num_nextn_predict_layers > 0
    }
}

mod one_or_many {
    use super::*;
    use serde::Serializer;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(u32),
        Many(Vec<u32>),
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        Ok(match Option::<OneOrMany>::deserialize(deserializer)? {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        })
    }

    pub fn serialize<S: Serializer>(ids: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        match ids {
            [id] => id.serialize(serializer),
            ids => ids.serialize(serializer),
        }
    }
}

mod disabled_by_minus_one {
    use super::*;
    use serde::Serializer;
    use serde::de::Error;

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<usize>, D::Error> {
        match Option::<i64>::deserialize(deserializer)? {
            None | Some(-1) => Ok(None),
            Some(id) => usize::try_from(id).map(Some).map_err(|_| {
                D::Error::custom(format!("candidate_source_layer_id {id}: a layer, -1 or null"))
            }),
        }
    }

    pub fn serialize<S: Serializer>(id: &Option<usize>, serializer: S) -> Result<S::Ok, S::Error> {
        match id {
            Some(id) => id.serialize(serializer),
            None => (-1i64).serialize(serializer),
        }
    }
}

fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
