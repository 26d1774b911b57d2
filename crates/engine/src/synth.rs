//! Random checkpoints in the released layout, of any size, for tests and measurements.

mod presets;
mod shards;
mod tokenizer;
mod values;

pub use values::{StoredTensor, matrix, stored};

use crate::checkpoint::layout::{self, TensorSpec};
use crate::config::{ConfigError, ModelConfig};
use crate::engram::{EngramError, Hasher, TokenMap};
use crate::tokenizer::{Tokenizer, TokenizerError};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Which checkpoint to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// About 5 MB: every mechanism, small.
    Tiny,
    /// About 4.5 GB, of which a token reads over 1 GB: for measuring a CPU.
    Bench,
    /// So many layers (6 to 40) of the released widths.
    FlashLayers(usize),
}

impl FromStr for Preset {
    type Err = SynthError;

    fn from_str(text: &str) -> Result<Self, SynthError> {
        match text.split_once(':') {
            None if text == "tiny" => Ok(Preset::Tiny),
            None if text == "bench" => Ok(Preset::Bench),
            Some(("flash-layers", layers)) => layers
                .parse()
                .map(Preset::FlashLayers)
                .map_err(|_| SynthError::Preset { found: text.to_owned() }),
            _ => Err(SynthError::Preset { found: text.to_owned() }),
        }
    }
}

/// What to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Sizes.
    pub preset: Preset,
    /// Another seed gives other weights.
    pub seed: u64,
    /// About how many rows each Engram table has; the preset's if `None`.
    pub engram_rows: Option<u64>,
    /// `max_position_embeddings`; the preset's if `None`.
    pub positions: Option<usize>,
}

impl Options {
    /// The preset with its own sizes and seed 0.
    pub fn new(preset: Preset) -> Self {
        Self { preset, seed: 0, engram_rows: None, positions: None }
    }
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Tensors, scales counted.
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// Files of weights.
    pub shards: usize,
}

/// Why a checkpoint could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// Not a preset.
    #[error("preset {found:?}: expected tiny, bench or flash-layers:N with N from 6 to 40")]
    Preset {
        /// What was given.
        found: String,
    },
    /// A number of layers that cannot show every kind of layer.
    #[error("flash-layers:{found}: N must be from 6 to 40")]
    Layers {
        /// What was given.
        found: usize,
    },
    /// Too few tokens for every byte and the special tokens.
    #[error("vocab_size {found}: a generated tokenizer has at least {least} tokens")]
    Vocabulary {
        /// What was given.
        found: usize,
        /// The least.
        least: usize,
    },
    /// The folder has files in it.
    #[error("{} is not empty; give a new folder", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// The sizes make no valid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The generated tokenizer does not load.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The Engram sizes do not fit.
    #[error(transparent)]
    Engram(#[from] EngramError),
}

/// A checkpoint that is decided but not written.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Final configuration.
    pub config: ModelConfig,
    /// The tokenizer's file.
    pub tokenizer_json: String,
    /// Every tensor, scales not listed.
    pub specs: Vec<TensorSpec>,
}

/// Decides configuration, tokenizer and tensors; makes no weights.
pub fn plan(options: &Options) -> Result<Plan, SynthError> {
    let mut config = presets::config(options.preset)?;
    let text = &mut config.text_config;
    if let Some(rows) = options.engram_rows {
        text.engram_vocab_size = (rows / text.hash_columns().max(1) as u64).max(2);
    }
    if let Some(positions) = options.positions {
        text.max_position_embeddings = positions;
    }
    plan_for(config)
}

/// The same for any configuration, whose Engram sizes are adapted to the generated tokenizer.
pub fn plan_for(mut config: ModelConfig) -> Result<Plan, SynthError> {
    let (vocab, least) = (config.text_config.vocab_size, tokenizer::LEAST);
    if vocab < least {
        return Err(SynthError::Vocabulary { found: vocab, least });
    }
    let tokenizer_json = tokenizer::tokenizer_json(vocab);
    let tokenizer = Tokenizer::from_bytes(&tokenizer_json)?;
    let map = TokenMap::compute(&tokenizer);
    let text = &mut config.text_config;
    text.engram_compressed_vocab_size = map.size();
    let pad = text.engram_pad_token_id.and_then(|id| map.get(id)).unwrap_or_default();
    let hasher = Hasher::new(text, pad)?;
    text.engram_num_embeddings = hasher.layers().iter().map(|layer| layer.table_rows()).collect();
    config.validate()?;
    let specs = layout::tensors(&config, &config.text_config.engram_num_embeddings);
    Ok(Plan { config, tokenizer_json, specs })
}

/// Makes the checkpoint in the new or empty folder `out`. `progress` is told the bytes written and
/// the bytes in all.
pub fn write(
    out: &Path,
    options: &Options,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Summary, SynthError> {
    write_plan(out, &plan(options)?, options.seed, progress)
}

/// Makes the checkpoint that `plan` describes in the new or empty folder `out`; see [`write()`].
pub fn write_plan(
    out: &Path,
    plan: &Plan,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Summary, SynthError> {
    let io = |source| SynthError::Io { path: out.to_owned(), source };
    std::fs::create_dir_all(out).map_err(io)?;
    if std::fs::read_dir(out).map_err(io)?.next().is_some() {
        return Err(SynthError::NotEmpty { path: out.to_owned() });
    }
    let streams = plan.config.text_config.hc_mult;
    let tensors: Vec<StoredTensor> =
        plan.specs.iter().flat_map(|spec| stored(spec, streams, seed)).collect();
    let bytes: u64 = tensors.iter().map(StoredTensor::bytes).sum();
    write_file(out, "config.json", &plan.config.to_json())?;
    write_file(out, "tokenizer.json", &plan.tokenizer_json)?;
    let special = serde_json::json!({
        "bos_token": crate::tokenizer::BOS, "eos_token": crate::tokenizer::EOS,
        "pad_token": crate::tokenizer::PAD, "add_bos_token": false, "add_eos_token": false,
        "model_max_length": plan.config.text_config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    write_file(out, "tokenizer_config.json", &special.to_string())?;
    let ends = serde_json::json!({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2});
    write_file(out, "generation_config.json", &ends.to_string())?;
    let shard_bytes = (bytes / 3 + 1).min(4 << 30);
    let shards = shards::write(out, &tensors, shard_bytes, &mut |done| progress(done, bytes))?;
    Ok(Summary { tensors: tensors.len(), bytes, shards })
}

fn write_file(folder: &Path, name: &str, content: &str) -> Result<(), SynthError> {
    let path = folder.join(name);
    std::fs::write(&path, content).map_err(|source| SynthError::Io { path, source })
}
