//! A name for what a checkpoint holds.

use super::EngineError;
use crate::checkpoint::Checkpoint;
use crate::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::time::UNIX_EPOCH;

/// Tensors below this size count whole: norms, biases, sinks, most scales.
const SMALL: usize = 64 << 10;
/// Samples of a shard, for the others.
const SAMPLES: usize = 256;
/// Bytes of a sample.
const LENGTH: usize = 256;

/// A name for a checkpoint's content: its configuration and tokenizer, and of each shard the header,
/// the length, all tensors below 64 KiB, 256 samples of 256 bytes, and, for a file in a folder, when
/// it was last changed, in nanoseconds. Reading all would take minutes. So large tensors that were
/// changed in place are told by the time alone; and a copy has another name, unless it kept the time.
pub fn identity(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Vec<u8>, EngineError> {
    let mut hash = Sha256::new();
    hash.update(checkpoint.config().to_json());
    hash.update(tokenizer.digest());
    let mut small: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for tensor in checkpoint.tensors().filter(|tensor| tensor.range.len() < SMALL) {
        small.entry(tensor.shard).or_default().push(tensor.range);
    }
    for (shard, file) in checkpoint.shards() {
        hash.update((shard.len() as u64).to_le_bytes());
        hash.update(shard);
        hash.update((file.len() as u64).to_le_bytes());
        let modified = checkpoint.source().modified(shard);
        let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        hash.update(since.map_or(0, |since| since.as_nanos()).to_le_bytes());
        hash.update(header(file));
        let mut ranges = small.remove(shard).unwrap_or_default();
        // In the order of the file, which a disk reads best.
        ranges.sort_by_key(|range| range.start);
        ranges.into_iter().filter_map(|range| file.get(range)).for_each(|part| hash.update(part));
        for i in 0..SAMPLES {
            let at = i * (file.len() / SAMPLES);
            hash.update(&file[at..(at + LENGTH).min(file.len())]);
        }
    }
    Ok(hash.finalize().to_vec())
}

/// The header of a shard, with its length.
fn header(file: &[u8]) -> &[u8] {
    let length = file.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    let end = length.saturating_add(8).min(file.len() as u64);
    &file[..end as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Source;
    use std::fs::{self, File};
    use std::ops::Range;
    use std::path::{Path, PathBuf};
    use std::time::{Duration, SystemTime};

    fn copy() -> tempfile::TempDir {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny-a");
        let to = tempfile::tempdir().expect("a folder");
        for file in fs::read_dir(from).expect("is there").flatten() {
            if !file.file_name().to_string_lossy().starts_with("reference") {
                fs::copy(file.path(), to.path().join(file.file_name())).expect("can be copied");
            }
        }
        to
    }

    fn open(folder: &Path) -> Checkpoint {
        Checkpoint::open(Source::directory(folder)).expect("opens")
    }

    fn name(folder: &Path) -> Vec<u8> {
        let checkpoint = open(folder);
        let tokenizer = checkpoint.tokenizer_json().expect("is there");
        let tokenizer = Tokenizer::from_bytes(tokenizer).expect("is valid");
        identity(&checkpoint, &tokenizer).expect("has a name")
    }

    /// A tensor's file, and its place in that.
    fn place(folder: &Path, name: &str) -> (PathBuf, Range<usize>) {
        let checkpoint = open(folder);
        let tensor = checkpoint.tensors().find(|tensor| tensor.name == name).expect(name);
        (folder.join(tensor.shard), tensor.range)
    }

    /// Changes a file in place, and puts its time back.
    fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let time = fs::metadata(path).expect("is there").modified().expect("has a time");
        let mut bytes = fs::read(path).expect("is there");
        change(&mut bytes);
        fs::write(path, bytes).expect("can be written");
        set_time(path, time);
    }

    fn set_time(path: &Path, time: SystemTime) {
        let file = File::options().write(true).open(path).expect("is there");
        file.set_modified(time).expect("can be set");
    }

    fn is_sampled(at: usize, len: usize) -> bool {
        let mut starts = (0..SAMPLES).map(|i| i * (len / SAMPLES));
        starts.any(|start| (start..start + LENGTH).contains(&at))
    }

    #[test]
    fn one_byte_of_a_small_tensor_makes_another_name() {
        let folder = copy();
        let before = name(folder.path());
        assert_eq!(name(folder.path()), before);
        let (path, range) = place(folder.path(), "layers.1.attn_norm.weight");
        change(&path, |bytes| {
            let len = bytes.len();
            let at = range.into_iter().find(|&at| !is_sampled(at, len)).expect("between samples");
            bytes[at] ^= 1;
        });
        assert_ne!(name(folder.path()), before);
    }

    #[test]
    fn swapped_names_in_a_header_make_another_name() {
        let folder = copy();
        let before = name(folder.path());
        let names = ["layers.1.attn_norm.weight", "layers.2.attn_norm.weight"];
        let [(path, first), (other, second)] = names.map(|name| place(folder.path(), name));
        assert_eq!((&path, first.len()), (&other, second.len()));
        change(&path, |bytes| {
            let len = header(bytes).len();
            let json = String::from_utf8(bytes[8..len].to_vec()).expect("is text");
            let json = json.replace(names[0], "?").replace(names[1], names[0]);
            let json = json.replace('?', names[1]);
            let is_changed = |at: &usize| bytes[8 + at] != json.as_bytes()[*at];
            let mut changed = (0..json.len()).filter(is_changed);
            assert!(changed.all(|at| !is_sampled(8 + at, bytes.len())), "between samples");
            bytes[8..len].copy_from_slice(json.as_bytes());
        });
        assert_eq!(place(folder.path(), names[0]), (other, second));
        assert_ne!(name(folder.path()), before);
    }

    #[test]
    fn a_file_that_was_written_again_makes_another_name() {
        let folder = copy();
        let before = name(folder.path());
        let path = folder.path().join("model-00002-of-00003.safetensors");
        let time = fs::metadata(&path).expect("is there").modified().expect("has a time");
        set_time(&path, time + Duration::from_nanos(1000));
        assert_ne!(name(folder.path()), before);
        set_time(&path, time);
        assert_eq!(name(folder.path()), before);
    }
}
