//! What can be wrong with a checkpoint.

use super::safetensors::Dtype;
use crate::config::ConfigError;
use std::io;

/// A checkpoint that cannot be read. Messages name the file, the tensor and the values.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// `config.json` is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The operating system refused a file.
    #[error("{file}: {source}")]
    Io {
        /// Path or name.
        file: String,
        /// Its reason.
        source: io::Error,
    },
    /// A file that every checkpoint has is absent.
    #[error("{place} has no {file}; is it a checkpoint folder?")]
    MissingFile {
        /// Where it was looked for.
        place: String,
        /// The file's name.
        file: &'static str,
    },
    /// Neither an index nor a single file of weights.
    #[error(
        "{place} has neither model.safetensors.index.json nor model.safetensors; the index of a \
         sharded checkpoint is missing"
    )]
    MissingIndex {
        /// Where they were looked for.
        place: String,
    },
    /// The index is not the JSON that it should be.
    #[error("model.safetensors.index.json: {source}")]
    IndexJson {
        /// The parser's message.
        source: serde_json::Error,
    },
    /// The index names a shard outside the folder.
    #[error("model.safetensors.index.json: shard {shard:?} of tensor {tensor} is not a file name")]
    ShardName {
        /// The tensor.
        tensor: String,
        /// The name.
        shard: String,
    },
    /// The index names a shard that is not there.
    #[error(
        "shard {shard} is missing in {place}; the index needs it for {tensors} tensors, {example} \
         among them; is the download complete?"
    )]
    MissingShard {
        /// Where it was looked for.
        place: String,
        /// File name.
        shard: String,
        /// Tensors that the index places there.
        tensors: usize,
        /// One of them.
        example: String,
    },
    /// The index places a tensor in a shard whose header does not list it.
    #[error("{shard}: the index places {tensor} here, but the header does not list it")]
    NotInShard {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// A header lists a tensor that the index does not place there.
    #[error("{shard}: the header lists {tensor}, but the index does not place it here")]
    NotInIndex {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// Two tensors of one name, counting a leading `model.` as nothing.
    #[error("{shard}: tensor {tensor} exists twice (a leading \"model.\" is ignored)")]
    DuplicateTensor {
        /// File name of the second.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// The header's length cannot be right.
    #[error(
        "{shard}: the first 8 bytes give a header of {header} bytes, but the file has {file_bytes} \
         bytes in all and a header at most {most}"
    )]
    HeaderLength {
        /// File name.
        shard: String,
        /// Length that the file claims.
        header: u64,
        /// Length of the file.
        file_bytes: u64,
        /// Longest header that is accepted.
        most: u64,
    },
    /// Too short for a header's length.
    #[error("{shard}: the file has {file_bytes} bytes, too few for a safetensors file")]
    TooShort {
        /// File name.
        shard: String,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The header is not the JSON that it should be.
    #[error("{shard}: header: {source}")]
    HeaderJson {
        /// File name.
        shard: String,
        /// The parser's message.
        source: serde_json::Error,
    },
    /// An element type that no safetensors file may have.
    #[error("{shard}: tensor {tensor} has the unknown dtype {dtype:?}")]
    UnknownDtype {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
        /// What the header says.
        dtype: String,
    },
    /// Offsets and shape disagree.
    #[error(
        "{shard}: tensor {tensor} of dtype {dtype:?} and shape {shape:?} needs {expected} bytes, but \
         its offsets {begin}..{end} hold {}", i128::from(*end) - i128::from(*begin)
    )]
    TensorBytes {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Element type.
        dtype: Dtype,
        /// Shape.
        shape: Vec<u64>,
        /// Bytes that the shape needs.
        expected: u64,
        /// First byte in the data part.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// More elements than fit in 64 bits.
    #[error("{shard}: tensor {tensor} of shape {shape:?} is too large")]
    TooLarge {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Shape.
        shape: Vec<u64>,
    },
    /// The file ends before its tensors do.
    #[error(
        "{shard}: truncated: tensor {tensor} ends at byte {end} of the data, but the file holds \
         {data_bytes}; {} bytes are missing, fetch the file again", end - data_bytes
    )]
    TruncatedShard {
        /// File name.
        shard: String,
        /// The tensor that reaches furthest.
        tensor: String,
        /// Where it ends, in the data part.
        end: u64,
        /// Bytes of the data part.
        data_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "{shard}: offsets overlap: {first} ends at byte {first_end}, {second} starts at \
         {second_begin}"
    )]
    OverlappingOffsets {
        /// File name.
        shard: String,
        /// The tensor that starts first.
        first: String,
        /// Its end.
        first_end: u64,
        /// The other tensor.
        second: String,
        /// Its start.
        second_begin: u64,
    },
    /// Bytes that belong to no tensor; the format forbids them.
    #[error("{shard}: bytes {begin}..{end} of the data belong to no tensor; wrong header length?")]
    UnusedBytes {
        /// File name.
        shard: String,
        /// First byte, in the data part.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The model needs a tensor that the checkpoint lacks.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor was asked for a second time.
    #[error("tensor {tensor} was already taken")]
    TakenTwice {
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the configuration asks for.
    #[error(
        "{shard}: tensor {tensor} has shape {found:?}; config.json asks for {expected:?}{note}"
    )]
    WrongShape {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape as it would be stored.
        expected: Vec<usize>,
        /// How the shape follows, where that is not plain.
        note: &'static str,
    },
    /// A tensor of an element type that this use does not allow.
    #[error("{shard}: tensor {tensor} has dtype {found:?}; expected {expected}")]
    WrongDtype {
        /// File name.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Type in the file.
        found: Dtype,
        /// Types that are allowed.
        expected: &'static str,
    },
    /// A quantized weight without its scales.
    #[error("tensor {tensor} has dtype {dtype:?}, but its scales {scale} are missing")]
    MissingScale {
        /// The weight.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Name of the absent tensor.
        scale: String,
    },
    /// Scales whose shape does not fit the weight's.
    #[error(
        "{shard}: scales {scale} have shape {found:?}; the weight is [{rows}, {cols}] and needs \
         {expected}"
    )]
    WrongScaleShape {
        /// File name of the scales.
        shard: String,
        /// The scales.
        scale: String,
        /// Their shape.
        found: Vec<u64>,
        /// Rows of the weight, as numbers, not bytes.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
        /// Shapes that fit.
        expected: String,
    },
    /// Tensors that nothing uses.
    #[error("{count} tensors of the checkpoint are not used by the model: {}", list(examples, *count))]
    Unused {
        /// How many.
        count: usize,
        /// The first of them.
        examples: Vec<String>,
    },
}

fn list(examples: &[String], count: usize) -> String {
    let more = if count > examples.len() { ", ..." } else { "" };
    format!("{}{more}", examples.join(", "))
}
