//! A folder of reference numbers: `reference.json` and `reference.safetensors`.

use super::VerifyError;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const JSON: &str = "reference.json";
const TENSORS: &str = "reference.safetensors";

/// An open reference.
pub struct Reference {
    path: PathBuf,
    /// What `reference.json` says.
    pub index: Index,
    data: Vec<u8>,
    offset: usize,
    metadata: Metadata,
    used: RefCell<BTreeSet<String>>,
}

/// `reference.json`, as far as comparisons need it.
#[derive(Debug, Deserialize)]
pub struct Index {
    /// Name of the checkpoint, for reports.
    #[serde(default)]
    pub checkpoint: String,
    /// Prompts of token ids.
    pub prompts: Vec<Prompt>,
    /// Prompts with images.
    #[serde(default)]
    pub vision: Vec<VisionPrompt>,
}

/// A prompt and what follows it.
#[derive(Debug, Deserialize)]
pub struct Prompt {
    /// Prefix of the tensor names.
    pub name: String,
    /// Token ids.
    pub ids: Vec<u32>,
    /// With cache rounding.
    #[serde(default)]
    pub quantized: Option<Continuation>,
    /// Without.
    #[serde(default)]
    pub f32: Option<Continuation>,
}

/// What follows a prompt under one cache format.
#[derive(Debug, Default, Deserialize)]
pub struct Continuation {
    /// Greedy tokens.
    #[serde(default)]
    pub greedy: Vec<u32>,
    /// Gap between the two best logits of each greedy step.
    #[serde(default)]
    pub argmax_gap: Vec<f64>,
    /// Greedy steps on which all roundings of the reference agree.
    #[serde(default)]
    pub greedy_stable_steps: Option<usize>,
    /// First position at which another rounding of the reference moves the logits; the length of
    /// the prompt if there is none.
    #[serde(default)]
    pub first_unstable_position: Option<usize>,
    /// Draft blocks.
    #[serde(default)]
    pub dspark: Vec<DraftBlock>,
}

/// One draft block.
#[derive(Debug, Deserialize)]
pub struct DraftBlock {
    /// Position of the anchor: the newest token, which has not been run.
    pub anchor_position: usize,
    /// The anchor.
    pub anchor_token: u32,
    /// Tokens drafted greedily.
    pub draft: Vec<u32>,
    /// Gap between the two best logits of each.
    #[serde(default)]
    pub argmax_gap: Vec<f64>,
    /// Confidence logits.
    #[serde(default)]
    pub confidence_logits: Vec<f64>,
}

/// A prompt with an image.
#[derive(Debug, Deserialize)]
pub struct VisionPrompt {
    /// Token ids; image positions hold the image token.
    pub ids: Vec<u32>,
    /// With cache rounding.
    #[serde(default)]
    pub quantized: Option<VisionContinuation>,
    /// Without.
    #[serde(default)]
    pub f32: Option<VisionContinuation>,
}

/// What follows a prompt with an image.
#[derive(Debug, Deserialize)]
pub struct VisionContinuation {
    /// Token with the largest logit at the end.
    #[serde(default)]
    pub next_token: Option<u32>,
}

impl Reference {
    /// Opens the folder `path`.
    pub fn open(path: &Path) -> Result<Self, VerifyError> {
        let read = |name: &str| {
            let path = path.join(name);
            std::fs::read(&path).map_err(|source| VerifyError::Io { path, source })
        };
        let json = read(JSON)?;
        let index = serde_json::from_slice(&json)
            .map_err(|source| VerifyError::Json { path: path.join(JSON), source })?;
        let data = read(TENSORS)?;
        let damaged = |source| VerifyError::Tensors { path: path.join(TENSORS), source };
        // Checks every offset against the length of the file.
        SafeTensors::deserialize(&data).map_err(damaged)?;
        let (header, metadata) = SafeTensors::read_metadata(&data).map_err(damaged)?;
        let used = RefCell::default();
        Ok(Self { path: path.to_owned(), index, offset: header + 8, data, metadata, used })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether tensor `name` is there.
    pub fn contains(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// Shape of tensor `name`.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>, VerifyError> {
        let info = self.metadata.info(name);
        info.map(|i| i.shape.clone()).ok_or_else(|| self.missing(name))
    }

    /// Numbers at the end of the names that start with `prefix` and a dot: the layers for which
    /// the reference has that quantity, ascending.
    pub fn layers(&self, prefix: &str) -> Vec<usize> {
        let mut layers: Vec<usize> = self
            .metadata
            .tensors()
            .keys()
            .filter_map(|name| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok())
            .collect();
        layers.sort_unstable();
        layers
    }

    /// A float tensor of the given shape.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, VerifyError> {
        let (dtype, bytes) = self.bytes(name, shape)?;
        Ok(match dtype {
            Dtype::F32 => chunks::<4>(bytes).map(f32::from_le_bytes).collect(),
            Dtype::F64 => chunks::<8>(bytes).map(|b| f64::from_le_bytes(b) as f32).collect(),
            Dtype::BF16 => {
                chunks::<2>(bytes).map(|b| half::bf16::from_le_bytes(b).to_f32()).collect()
            }
            other => return Err(self.dtype(name, other, "a float type")),
        })
    }

    /// An integer tensor of the given shape.
    pub fn integers(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>, VerifyError> {
        let (dtype, bytes) = self.bytes(name, shape)?;
        Ok(match dtype {
            Dtype::I64 => chunks::<8>(bytes).map(i64::from_le_bytes).collect(),
            Dtype::I32 => chunks::<4>(bytes).map(|b| i64::from(i32::from_le_bytes(b))).collect(),
            Dtype::U8 | Dtype::BOOL => bytes.iter().map(|&b| i64::from(b)).collect(),
            other => return Err(self.dtype(name, other, "an integer type")),
        })
    }

    /// Names that no comparison has read, with numbers replaced by `*`, and how many each stands
    /// for.
    pub fn unused(&self) -> BTreeMap<String, usize> {
        let used = self.used.borrow();
        let mut out = BTreeMap::new();
        for name in self.metadata.tensors().keys().filter(|name| !used.contains(*name)) {
            *out.entry(pattern(name)).or_default() += 1;
        }
        out
    }

    fn bytes(&self, name: &str, shape: &[usize]) -> Result<(Dtype, &[u8]), VerifyError> {
        let info = self.metadata.info(name).ok_or_else(|| self.missing(name))?;
        if info.shape != shape {
            return Err(VerifyError::Shape {
                name: name.to_owned(),
                found: info.shape.clone(),
                expected: shape.to_vec(),
            });
        }
        self.used.borrow_mut().insert(name.to_owned());
        let (from, to) = info.data_offsets;
        Ok((info.dtype, &self.data[self.offset + from..self.offset + to]))
    }

    fn missing(&self, name: &str) -> VerifyError {
        VerifyError::Missing { path: self.path.join(TENSORS), name: name.to_owned() }
    }

    fn dtype(&self, name: &str, found: Dtype, expected: &'static str) -> VerifyError {
        VerifyError::Dtype { name: name.to_owned(), found: format!("{found:?}"), expected }
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

fn pattern(name: &str) -> String {
    let parts = name.split('.').map(|part| {
        let number = part.trim_start_matches(['p', 'a']);
        if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) { "*" } else { part }
    });
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_hide_prompts_layers_and_anchors() {
        assert_eq!(pattern("f32.p33.dspark.a2.raw_hidden"), "f32.*.dspark.*.raw_hidden");
        assert_eq!(pattern("vision.0.patches"), "vision.*.patches");
        assert_eq!(pattern("quantized.p150.attn_out.7"), "quantized.*.attn_out.*");
    }

    #[test]
    fn a_folder_without_a_reference_names_the_missing_file() {
        let error = Reference::open(Path::new("/nonexistent")).err().expect("no such folder");
        assert!(error.to_string().contains("reference.json"), "{error}");
    }
}
