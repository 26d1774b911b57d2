//! The header of a safetensors file: 8 bytes little-endian length, JSON, then the data.
//!
//! The `safetensors` crate defines the element types; the checks are our own, because its errors
//! name neither the tensor nor the numbers.

use super::CheckpointError;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use std::ops::Range;

pub use ::safetensors::Dtype;

/// Longest header that is accepted; the format's own limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name as in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape as stored.
    pub shape: Vec<u64>,
    /// Bytes within the file.
    pub range: Range<usize>,
}

/// Reads and checks the header of the file `shard`. Entries come in the order of their bytes.
/// Touches no byte after the header.
pub fn parse_header(shard: &str, file: &[u8]) -> Result<Vec<TensorEntry>, CheckpointError> {
    let name = || shard.to_owned();
    let file_bytes = file.len() as u64;
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(CheckpointError::TooShort { shard: name(), file_bytes });
    };
    let header = u64::from_le_bytes(*length);
    if header > MAX_HEADER_BYTES || header > rest.len() as u64 {
        let most = MAX_HEADER_BYTES;
        return Err(CheckpointError::HeaderLength { shard: name(), header, file_bytes, most });
    }
    let (json, data) = rest.split_at(header as usize);
    let Header(raw) = serde_json::from_slice(json)
        .map_err(|source| CheckpointError::HeaderJson { shard: name(), source })?;

    let data_start = 8 + header as usize;
    let mut entries = Vec::with_capacity(raw.len());
    for (tensor, info) in raw {
        entries.push(check_entry(shard, tensor, info)?);
    }
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_cover(shard, &entries, data.len() as u64)?;

    // Every end is now within the data, so it fits a usize.
    Ok(entries
        .into_iter()
        .map(|e| TensorEntry {
            name: e.name,
            dtype: e.dtype,
            shape: e.shape,
            range: data_start + e.begin as usize..data_start + e.end as usize,
        })
        .collect())
}

struct Placed {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

fn check_entry(shard: &str, name: String, info: RawInfo) -> Result<Placed, CheckpointError> {
    let RawInfo { dtype: dtype_name, shape, data_offsets: [begin, end] } = info;
    let dtype = serde_json::Value::String(dtype_name.clone());
    let Ok(dtype) = Dtype::deserialize(dtype) else {
        let (shard, tensor) = (shard.to_owned(), name);
        return Err(CheckpointError::UnknownDtype { shard, tensor, dtype: dtype_name });
    };
    let bits = shape.iter().try_fold(dtype.bitsize() as u64, |bits, &n| bits.checked_mul(n));
    let Some(bits) = bits else {
        return Err(CheckpointError::TooLarge { shard: shard.to_owned(), tensor: name, shape });
    };
    let expected = bits.div_ceil(8);
    if end.checked_sub(begin) != Some(expected) {
        let (shard, tensor) = (shard.to_owned(), name);
        return Err(CheckpointError::TensorBytes {
            shard,
            tensor,
            dtype,
            shape,
            expected,
            begin,
            end,
        });
    }
    Ok(Placed { name, dtype, shape, begin, end })
}

/// The tensors must cover the data without overlap or hole.
fn check_cover(shard: &str, sorted: &[Placed], data_bytes: u64) -> Result<(), CheckpointError> {
    let shard = shard.to_owned();
    if let Some(last) = sorted.iter().max_by_key(|entry| entry.end)
        && last.end > data_bytes
    {
        let (tensor, end) = (last.name.clone(), last.end);
        return Err(CheckpointError::TruncatedShard { shard, tensor, end, data_bytes });
    }
    let mut covered = 0;
    let mut before = "";
    for entry in sorted {
        if entry.begin < covered {
            return Err(CheckpointError::OverlappingOffsets {
                shard,
                first: before.to_owned(),
                first_end: covered,
                second: entry.name.clone(),
                second_begin: entry.begin,
            });
        }
        if entry.begin > covered {
            return Err(CheckpointError::UnusedBytes { shard, begin: covered, end: entry.begin });
        }
        covered = entry.end;
        before = &entry.name;
    }
    if covered < data_bytes {
        return Err(CheckpointError::UnusedBytes { shard, begin: covered, end: data_bytes });
    }
    Ok(())
}

#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's entries in file order; a JSON map would drop repeated names silently.
struct Header(Vec<(String, RawInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a map from tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                        continue;
                    }
                    let info = map
                        .next_value::<RawInfo>()
                        .map_err(|error| A::Error::custom(format!("tensor {name}: {error}")))?;
                    entries.push((name, info));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
