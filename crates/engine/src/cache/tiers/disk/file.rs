//! What a file holds: a magic number, the length of a header (little-endian u32), the header (JSON),
//! the payload, and the sha256 of everything before.

use crate::cache::Snapshot;
use crate::cache::prefix::{Description, Key};
use crate::cache::tiers::Entry;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MAGIC: &[u8; 8] = b"DIPREFX1";
/// Bytes of the hash at the end.
pub(super) const DIGEST: usize = 32;

/// A file that is being written for longer than this was left by a process that has ended.
const UNFINISHED: Duration = Duration::from_secs(3600);

/// What a file says about its payload.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) identity: String,
    pub(super) key: String,
    parent: String,
    at_root: bool,
    tokens: Vec<u32>,
    lowest: Option<usize>,
    position: u32,
    /// Lengths of the parts of the payload: a page; or a state's rings, then its pages.
    parts: Vec<usize>,
}

/// The name of a file while it is being written: `KEY.PID.part`.
pub(super) fn partial(path: &Path, process: u32) -> PathBuf {
    path.with_extension(format!("{process}.part"))
}

/// Whether a file is one that a process did not finish writing: nothing has been written to it for
/// an hour, and no other process is there that has its number. Our own number tells nothing: in a
/// container, the process before had the same.
pub(super) fn is_left_over(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let mut parts = name.split('.');
    let (Some(key), Some(process), Some("part"), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let (Some(_), Ok(process)) = (unhex(key), process.parse::<u32>()) else { return false };
    let written = fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let age = written.and_then(|time| time.elapsed().ok());
    let old = age.is_some_and(|age| age > UNFINISHED);
    old && (process == std::process::id() || !Path::new(&format!("/proc/{process}")).exists())
}

/// Makes a directory, with those above it, that nobody else may read: prompts are in its files. One
/// that is there stays as it is.
pub(super) fn make_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Makes a file that nobody else may read.
fn make_file(path: &Path) -> io::Result<File> {
    // What is left of an earlier try may be somebody else's to read. If it stays, the next line fails.
    let _ = fs::remove_file(path);
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Where [`try_to_write`] writes: a name that [`is_left_over`] knows, and another each time, as
/// processes in containers may have the same number.
fn trial(dir: &Path) -> PathBuf {
    let random = || RandomState::new().hash_one(()).to_le_bytes();
    partial(&dir.join(hex(&[random(), random()].concat())), std::process::id())
}

/// Writes a file to a directory and removes it. The error says which.
pub(super) fn try_to_write(dir: &Path) -> io::Result<()> {
    let path = trial(dir);
    let write = |mut file: File| {
        file.write_all(&[0; 4096])?;
        // Full disks and quotas of network file systems are not found out before.
        file.sync_all()
    };
    let written = make_file(&path).and_then(write);
    let removed = fs::remove_file(&path);
    let named = |e: io::Error| {
        let place = path.display();
        io::Error::new(e.kind(), format!("cannot write {place}: {e}"))
    };
    written.and(removed).map_err(named)
}

pub(super) fn write_file(path: &Path, head: &[u8], entry: &Entry) -> io::Result<()> {
    let mut file = make_file(path)?;
    let mut digest = Sha256::new();
    for part in std::iter::once(head).chain(entry.parts()) {
        digest.update(part);
        file.write_all(part)?;
    }
    file.write_all(&digest.finalize())
}

/// A file up to its payload.
pub(super) fn head(identity: &str, description: &Description, entry: &Entry) -> Option<Vec<u8>> {
    let position = match entry {
        Entry::Page(_) => 0,
        Entry::State(state) => state.position,
    };
    let header = Header {
        identity: identity.to_owned(),
        key: hex(&description.key),
        parent: hex(&description.parent),
        at_root: description.at_root,
        tokens: description.tokens.to_vec(),
        lowest: description.lowest,
        position,
        parts: entry.parts().map(<[u8]>::len).collect(),
    };
    let header = serde_json::to_vec(&header).ok()?;
    let mut head = MAGIC.to_vec();
    head.extend_from_slice(&(header.len() as u32).to_le_bytes());
    head.extend_from_slice(&header);
    Some(head)
}

pub(super) fn decode(identity: &str, key: &Key, file: &[u8]) -> Option<Entry> {
    let body = file.len().checked_sub(DIGEST)?;
    let (body, digest) = file.split_at(body);
    if Sha256::digest(body)[..] != *digest {
        return None;
    }
    let (header, mut payload) = split_header(body)?;
    if header.identity != identity || header.key != hex(key) {
        return None;
    }
    let mut parts = Vec::with_capacity(header.parts.len());
    for &len in &header.parts {
        let (part, rest) = payload.split_at_checked(len)?;
        parts.push(part.to_vec());
        payload = rest;
    }
    let mut parts = parts.into_iter();
    let first = parts.next()?;
    Some(match header.lowest {
        None => Entry::Page(Arc::new(first)),
        Some(lowest) => {
            let (position, pages) = (header.position, parts.collect());
            Entry::State(Arc::new(Snapshot { position, lowest, slot: first, pages }))
        }
    })
}

fn split_header(body: &[u8]) -> Option<(Header, &[u8])> {
    let rest = body.strip_prefix(MAGIC)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (header, payload) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((serde_json::from_slice(header).ok()?, payload))
}

/// The header of a file; `None` if it has none. Fails if the file cannot be read.
pub(super) fn read_header(path: &Path) -> io::Result<Option<Header>> {
    let file = File::open(path)?;
    let mut body = Vec::new();
    (&file).take(12).read_to_end(&mut body)?;
    let Some(&[a, b, c, d]) = body.get(8..12) else { return Ok(None) };
    let len = u32::from_le_bytes([a, b, c, d]);
    file.take(u64::from(len)).read_to_end(&mut body)?;
    Ok(split_header(&body).map(|(header, _)| header))
}

impl Header {
    pub(super) fn description(&self) -> Option<Description> {
        Some(Description {
            key: unhex(&self.key)?,
            parent: unhex(&self.parent)?,
            tokens: self.tokens.as_slice().into(),
            lowest: self.lowest,
            at_root: self.at_root,
        })
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(super) fn unhex(text: &str) -> Option<Key> {
    let mut key = Key::default();
    if text.len() != 2 * key.len() || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}
