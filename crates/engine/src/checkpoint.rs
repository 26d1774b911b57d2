//! A checkpoint in the released layout: `config.json`, sharded safetensors, tokenizer.
//!
//! Opening reads the configuration, the index and the shards' headers, and checks them; tensor
//! data stays where it is. The model then takes each tensor once, in its stored form, and
//! [`Checkpoint::finish`] proves that none was forgotten.

mod error;
pub mod layout;
pub mod safetensors;
mod source;

pub use error::CheckpointError;
pub use layout::Part;
pub use safetensors::Dtype;
pub use source::Source;

use crate::config::ModelConfig;
use bytes::Bytes;
use deepinfer_device::{Expert, Format, StoredMatrix};
use layout::plain_name;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// An open checkpoint.
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
}

struct Shard {
    name: String,
    file: Bytes,
}

struct Tensor {
    shard: usize,
    dtype: Dtype,
    shape: Vec<u64>,
    range: Range<usize>,
    taken: bool,
}

/// What a report says about one tensor.
#[derive(Clone, Debug)]
pub struct TensorInfo<'a> {
    /// Name without a leading `model.`.
    pub name: &'a str,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: &'a [u64],
    /// Stored bytes.
    pub bytes: u64,
    /// Name of its file.
    pub shard: &'a str,
    /// Its place in that file.
    pub range: Range<usize>,
    /// Part of the model.
    pub part: Part,
    /// Layer, or draft stage for [`Part::Draft`].
    pub layer: Option<usize>,
}

/// What became of a checkpoint's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consumed {
    /// Tensors in use.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Tensors left alone.
    pub skipped_tensors: usize,
    /// Their bytes.
    pub skipped_bytes: u64,
}

#[derive(Deserialize)]
pub(crate) struct Index {
    pub(crate) weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a checkpoint: reads and checks everything but tensor data.
    pub fn open(source: Source) -> Result<Self, CheckpointError> {
        let Some(text) = source.read(CONFIG)? else {
            return Err(CheckpointError::MissingFile { place: source.place(), file: CONFIG });
        };
        let config = ModelConfig::from_json(&text)?;
        let mut checkpoint = Self { source, config, shards: Vec::new(), tensors: BTreeMap::new() };
        match checkpoint.source.read(INDEX)? {
            Some(index) => checkpoint.open_shards(parse_index(&index)?)?,
            None => checkpoint.open_single()?,
        }
        Ok(checkpoint)
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where the files come from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The content of `tokenizer.json`.
    pub fn tokenizer_json(&self) -> Result<Bytes, CheckpointError> {
        self.source.read(TOKENIZER)?.ok_or_else(|| CheckpointError::MissingFile {
            place: self.source.place(),
            file: TOKENIZER,
        })
    }

    fn open_shards(&mut self, index: Index) -> Result<(), CheckpointError> {
        let mut by_shard: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in &index.weight_map {
            by_shard.entry(shard).or_default().insert(plain_name(tensor));
        }
        for (shard, expected) in by_shard {
            let Some(file) = self.source.map(shard)? else {
                return Err(CheckpointError::MissingShard {
                    place: self.source.place(),
                    shard: shard.to_owned(),
                    tensors: expected.len(),
                    example: expected.first().map(|name| (*name).to_owned()).unwrap_or_default(),
                });
            };
            let entries = safetensors::parse_header(shard, &file)?;
            let listed: BTreeSet<&str> =
                entries.iter().map(|entry| plain_name(&entry.name)).collect();
            if let Some(tensor) = expected.difference(&listed).next() {
                let (shard, tensor) = (shard.to_owned(), (*tensor).to_owned());
                return Err(CheckpointError::NotInShard { shard, tensor });
            }
            if let Some(tensor) = listed.difference(&expected).next() {
                let (shard, tensor) = (shard.to_owned(), (*tensor).to_owned());
                return Err(CheckpointError::NotInIndex { shard, tensor });
            }
            self.add_shard(shard, file, entries)?;
        }
        Ok(())
    }

    fn open_single(&mut self) -> Result<(), CheckpointError> {
        let Some(file) = self.source.map(SINGLE)? else {
            return Err(CheckpointError::MissingIndex { place: self.source.place() });
        };
        let entries = safetensors::parse_header(SINGLE, &file)?;
        self.add_shard(SINGLE, file, entries)
    }

    fn add_shard(
        &mut self,
        name: &str,
        file: Bytes,
        entries: Vec<safetensors::TensorEntry>,
    ) -> Result<(), CheckpointError> {
        let shard = self.shards.len();
        self.shards.push(Shard { name: name.to_owned(), file });
        for entry in entries {
            let tensor = plain_name(&entry.name).to_owned();
            let (dtype, shape, range) = (entry.dtype, entry.shape, entry.range);
            let new = Tensor { shard, dtype, shape, range, taken: false };
            if self.tensors.insert(tensor.clone(), new).is_some() {
                return Err(CheckpointError::DuplicateTensor { shard: name.to_owned(), tensor });
            }
        }
        Ok(())
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|(name, tensor)| {
            let (part, layer) = Part::of(name);
            TensorInfo {
                name,
                dtype: tensor.dtype,
                shape: &tensor.shape,
                bytes: tensor.range.len() as u64,
                shard: &self.shards[tensor.shard].name,
                range: tensor.range.clone(),
                part,
                layer,
            }
        })
    }

    /// The files of tensors: names, and contents that are read when they are touched.
    pub(crate) fn shards(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.shards.iter().map(|shard| (shard.name.as_str(), &*shard.file))
    }

    /// Whether there is a tokenizer beside the tensors.
    pub fn has_tokenizer(&self) -> bool {
        self.tokenizer_json().is_ok()
    }

    /// Tensors that the configuration needs and no file has, in the order of the layers. Those of
    /// images are not needed.
    pub fn missing(&self) -> Vec<String> {
        let text = &self.config.text_config;
        // Only names count: a file need not say how many rows its tables have.
        let rows = vec![0; text.engram_layer_ids.len()];
        let of_images =
            |name: &str| Part::of(name).0 == Part::Vision || name.ends_with(".gate.bias_vl");
        let mut missing = Vec::new();
        for spec in layout::tensors(&self.config, &rows) {
            if of_images(&spec.name) {
                continue;
            }
            let Some(tensor) = self.tensors.get(&spec.name) else {
                missing.push(spec.name);
                continue;
            };
            let scale = scale_name(&spec.name);
            if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16) && !self.contains(&scale) {
                missing.push(scale);
            }
        }
        missing
    }

    /// Whether a tensor of that name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The stored shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// Takes the matrix `name` (`[rows, cols]` numbers) in its stored form, with its scales where
    /// the type has them: for `X.weight` they are `X.scale`. `F8_E4M3` may have a scale for each
    /// 32 x 32 tile or for each row and 32 columns: the scales' shape tells. `I8`, `U8` and `F4`
    /// are pairs of E2M1 codes.
    pub fn take_matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<StoredMatrix, CheckpointError> {
        let tensor = self.get(name)?;
        let dtype = tensor.dtype;
        match dtype {
            Dtype::F32 | Dtype::BF16 => {
                let format = if dtype == Dtype::F32 { Format::F32 } else { Format::Bf16 };
                let data = self.take(name, &[rows, cols], "")?;
                Ok(StoredMatrix::new(format, rows, cols, data, Bytes::new()))
            }
            Dtype::F8_E4M3 => {
                let data = self.take(name, &[rows, cols], "")?;
                let formats = [Format::Fp8Block32, Format::Fp8Row32];
                let (format, scale) = self.take_scale(name, dtype, rows, cols, &formats)?;
                Ok(StoredMatrix::new(format, rows, cols, data, scale))
            }
            Dtype::I8 | Dtype::U8 | Dtype::F4 => {
                let note = " (two 4-bit codes a byte: half the columns)";
                let data = match dtype {
                    Dtype::F4 => self.take(name, &[rows, cols], "")?,
                    _ => self.take(name, &[rows, cols.div_ceil(2)], note)?,
                };
                let (format, scale) =
                    self.take_scale(name, dtype, rows, cols, &[Format::Fp4Row32])?;
                Ok(StoredMatrix::new(format, rows, cols, data, scale))
            }
            found => Err(CheckpointError::WrongDtype {
                shard: self.shard_of(name),
                tensor: name.to_owned(),
                found,
                expected: "F32, BF16, F8_E4M3, or I8, U8 or F4 for packed fp4",
            }),
        }
    }

    /// Takes the vector `name` (`[len]`, BF16 or F32) as f32.
    pub fn take_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        self.take_array(name, &[len])
    }

    /// Takes a small array of `shape` (BF16 or F32) as f32, row-major.
    pub fn take_array(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let dtype = self.get(name)?.dtype;
        match dtype {
            Dtype::F32 => {
                let data = self.take(name, shape, "")?;
                let (words, _) = data.as_chunks::<4>();
                Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
            }
            Dtype::BF16 => {
                let data = self.take(name, shape, "")?;
                let (words, _) = data.as_chunks::<2>();
                Ok(words.iter().map(|&word| half::bf16::from_le_bytes(word).to_f32()).collect())
            }
            found => Err(CheckpointError::WrongDtype {
                shard: self.shard_of(name),
                tensor: name.to_owned(),
                found,
                expected: "F32 or BF16",
            }),
        }
    }

    /// Takes the three projections `prefix.w1`, `.w3` (`[intermediate, hidden]`) and `.w2`
    /// (`[hidden, intermediate]`).
    pub fn take_expert(
        &mut self,
        prefix: &str,
        intermediate: usize,
        hidden: usize,
    ) -> Result<Expert<StoredMatrix>, CheckpointError> {
        Ok(Expert {
            w1: self.take_matrix(&format!("{prefix}.w1.weight"), intermediate, hidden)?,
            w3: self.take_matrix(&format!("{prefix}.w3.weight"), intermediate, hidden)?,
            w2: self.take_matrix(&format!("{prefix}.w2.weight"), hidden, intermediate)?,
        })
    }

    /// Ends loading: every tensor was taken, or is named by `skipped`, whose items are full names
    /// or prefixes that end with a dot (`vision.`).
    pub fn finish(&self, skipped: &[&str]) -> Result<Consumed, CheckpointError> {
        let mut consumed = Consumed::default();
        let mut unused = Vec::new();
        for (name, tensor) in &self.tensors {
            let bytes = tensor.range.len() as u64;
            let matches =
                |skip: &&str| name == skip || (skip.ends_with('.') && name.starts_with(*skip));
            if tensor.taken {
                consumed.tensors += 1;
                consumed.bytes += bytes;
            } else if skipped.iter().any(matches) {
                consumed.skipped_tensors += 1;
                consumed.skipped_bytes += bytes;
            } else {
                unused.push(name.clone());
            }
        }
        if unused.is_empty() {
            return Ok(consumed);
        }
        let count = unused.len();
        unused.truncate(8);
        Err(CheckpointError::Unused { count, examples: unused })
    }

    fn get(&self, name: &str) -> Result<&Tensor, CheckpointError> {
        self.tensors
            .get(name)
            .ok_or_else(|| CheckpointError::MissingTensor { tensor: name.to_owned() })
    }

    fn shard_of(&self, name: &str) -> String {
        self.tensors.get(name).map(|t| self.shards[t.shard].name.clone()).unwrap_or_default()
    }

    fn take(
        &mut self,
        name: &str,
        expected: &[usize],
        note: &'static str,
    ) -> Result<Bytes, CheckpointError> {
        let shard = self.shard_of(name);
        let Some(tensor) = self.tensors.get_mut(name) else {
            return Err(CheckpointError::MissingTensor { tensor: name.to_owned() });
        };
        if !tensor.shape.iter().copied().eq(expected.iter().map(|&n| n as u64)) {
            return Err(CheckpointError::WrongShape {
                shard,
                tensor: name.to_owned(),
                found: tensor.shape.clone(),
                expected: expected.to_vec(),
                note,
            });
        }
        if std::mem::replace(&mut tensor.taken, true) {
            return Err(CheckpointError::TakenTwice { tensor: name.to_owned() });
        }
        Ok(self.shards[tensor.shard].file.slice(tensor.range.clone()))
    }

    fn take_scale(
        &mut self,
        name: &str,
        dtype: Dtype,
        rows: usize,
        cols: usize,
        formats: &[Format],
    ) -> Result<(Format, Bytes), CheckpointError> {
        let scale = scale_name(name);
        let Some(tensor) = self.tensors.get(&scale) else {
            return Err(CheckpointError::MissingScale { tensor: name.to_owned(), dtype, scale });
        };
        if !matches!(tensor.dtype, Dtype::F8_E8M0 | Dtype::U8) {
            return Err(CheckpointError::WrongDtype {
                shard: self.shard_of(&scale),
                found: tensor.dtype,
                tensor: scale,
                expected: "F8_E8M0 or U8",
            });
        }
        let fits = |format: &Format| {
            let shape = format.scale_shape(rows, cols);
            shape.is_some_and(|(r, c)| tensor.shape == [r as u64, c as u64])
        };
        let Some(&format) = formats.iter().find(|format| fits(format)) else {
            let shapes = formats.iter().filter_map(|format| format.scale_shape(rows, cols));
            let shapes: Vec<String> = shapes.map(|(r, c)| format!("[{r}, {c}]")).collect();
            return Err(CheckpointError::WrongScaleShape {
                shard: self.shard_of(&scale),
                found: tensor.shape.clone(),
                scale,
                rows,
                cols,
                expected: shapes.join(" or "),
            });
        };
        let shape: Vec<usize> = tensor.shape.iter().map(|&n| n as usize).collect();
        Ok((format, self.take(&scale, &shape, "")?))
    }
}

/// Where the scales of a matrix stand.
fn scale_name(name: &str) -> String {
    format!("{}.scale", name.strip_suffix(".weight").unwrap_or(name))
}

pub(crate) fn parse_index(text: &[u8]) -> Result<Index, CheckpointError> {
    let index: Index =
        serde_json::from_slice(text).map_err(|source| CheckpointError::IndexJson { source })?;
    for (tensor, shard) in &index.weight_map {
        let plain = std::path::Path::new(shard);
        if plain.file_name() != Some(plain.as_os_str()) || shard.contains(['/', '\\']) {
            let (tensor, shard) = (tensor.clone(), shard.clone());
            return Err(CheckpointError::ShardName { tensor, shard });
        }
    }
    Ok(index)
}
