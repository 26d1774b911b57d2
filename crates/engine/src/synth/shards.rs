//! Shards and index, written as they are made: at most a few chunks are in memory.

use super::SynthError;
use super::values::StoredTensor;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::sync_channel;

/// Bytes of one piece of work.
const CHUNK: u64 = 4 << 20;
/// Pieces that are made in parallel and then written together.
const BATCH: usize = 8;

/// Writes `tensors` into `folder` as shards of about `shard_bytes`, then the index. Returns the
/// number of shards.
pub fn write(
    folder: &Path,
    tensors: &[StoredTensor],
    shard_bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<usize, SynthError> {
    let shards = split(tensors, shard_bytes);
    let mut weight_map = Map::new();
    let mut done = 0;
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let path = folder.join(&name);
        write_shard(&path, shard, &mut |bytes| {
            done += bytes;
            progress(done);
        })
        .map_err(|source| SynthError::Io { path, source })?;
        for tensor in *shard {
            weight_map.insert(tensor.name.clone(), json!(name));
        }
    }
    let total: u64 = tensors.iter().map(StoredTensor::bytes).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    // The index comes last: a folder without it is plainly unfinished.
    super::write_file(folder, "model.safetensors.index.json", &index.to_string())?;
    Ok(shards.len())
}

fn split(tensors: &[StoredTensor], shard_bytes: u64) -> Vec<&[StoredTensor]> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (index, tensor) in tensors.iter().enumerate() {
        if size > 0 && size + tensor.bytes() > shard_bytes {
            shards.push(&tensors[start..index]);
            (start, size) = (index, 0);
        }
        size += tensor.bytes();
    }
    shards.push(&tensors[start..]);
    shards
}

fn header(tensors: &[StoredTensor]) -> Vec<u8> {
    let mut entries = Map::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes();
        let entry = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end],
        });
        entries.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

fn write_shard(
    path: &Path,
    tensors: &[StoredTensor],
    progress: &mut dyn FnMut(u64),
) -> std::io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(&header(tensors))?;
    let mut pieces = Vec::new();
    for tensor in tensors {
        let mut at = 0;
        while at < tensor.bytes() {
            let length = CHUNK.min(tensor.bytes() - at);
            pieces.push((tensor, at, length as usize));
            at += length;
        }
    }
    // One thread writes while the others make the next batch.
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel::<Vec<Vec<u8>>>(1);
        let pieces = &pieces;
        scope.spawn(move || {
            for batch in batches(pieces) {
                let made = batch
                    .par_iter()
                    .map(|&(tensor, at, length)| {
                        let mut bytes = vec![0; length];
                        tensor.fill(at, &mut bytes);
                        bytes
                    })
                    .collect();
                if sender.send(made).is_err() {
                    return; // writing failed
                }
            }
        });
        for batch in receiver {
            for bytes in batch {
                file.write_all(&bytes)?;
                progress(bytes.len() as u64);
            }
        }
        Ok(())
    })
}

type Piece<'a> = (&'a StoredTensor, u64, usize);

/// Runs of pieces of at most [`BATCH`] full chunks together; small tensors come many at a time.
fn batches<'a, 'b>(pieces: &'b [Piece<'a>]) -> impl Iterator<Item = &'b [Piece<'a>]> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let mut size = 0;
        let mut fits = |&(_, _, length): &Piece| {
            size += length as u64;
            size <= CHUNK * BATCH as u64
        };
        let count = rest.iter().take_while(|piece| fits(piece)).count();
        let (batch, after) = rest.split_at(count);
        rest = after;
        Some(batch).filter(|batch| !batch.is_empty())
    })
}
