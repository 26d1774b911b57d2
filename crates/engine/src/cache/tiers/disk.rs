//! Entries in a directory: one file each, named by its key.
//!
//! A file is a magic number, the length of a header (little-endian u32), the header (JSON), the
//! payload, and the sha256 of everything before. Files are written under another name and renamed,
//! so readers see whole files only. A thread does the reading and writing, in the order in which it
//! was told.

use super::Entry;
use crate::cache::Snapshot;
use crate::cache::prefix::{Description, Key, PrefixIndex};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

const MAGIC: &[u8; 8] = b"DIPREFX1";
const DIGEST: usize = 32;

/// What a file says about its payload.
#[derive(Serialize, Deserialize)]
struct Header {
    identity: String,
    key: String,
    parent: String,
    at_root: bool,
    tokens: Vec<u32>,
    lowest: Option<usize>,
    position: u32,
    /// Lengths of the parts of the payload: a page; or a state's rings, then its pages.
    parts: Vec<usize>,
}

enum Message {
    /// The file's beginning, up to the payload, and the payload.
    Write(PathBuf, Vec<u8>, Entry),
    Read(PathBuf, Key),
    Remove(PathBuf),
    Flush(SyncSender<()>),
}

/// An entry that was read; `None` if it was missing or damaged.
type Loaded = (Key, Option<Entry>);

/// A directory of entries.
pub struct Disk {
    dir: PathBuf,
    identity: String,
    limit: u64,
    bytes: u64,
    /// Sizes of this identity's files, and their order of arrival.
    files: HashMap<Key, u64>,
    order: VecDeque<Key>,
    found: Vec<Description>,
    /// Entries that are being read.
    reading: HashSet<Key>,
    loaded: Receiver<Loaded>,
    thread: Option<(Sender<Message>, JoinHandle<()>)>,
}

impl Disk {
    /// Opens a directory, and makes it if need be. Reads the headers of its files.
    pub fn open(dir: &Path, limit: u64, identity: &[u8]) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let (sender, messages) = channel();
        let (done, loaded) = channel();
        let identity = hex(&Sha256::digest(identity));
        let own = identity.clone();
        let thread = std::thread::Builder::new()
            .name("prefix-disk".into())
            .spawn(move || work_on_files(&own, &messages, &done))?;
        let mut disk = Self {
            dir: dir.to_owned(),
            identity,
            limit,
            bytes: 0,
            files: HashMap::new(),
            order: VecDeque::new(),
            found: Vec::new(),
            reading: HashSet::new(),
            loaded,
            thread: Some((sender, thread)),
        };
        disk.scan()?;
        Ok(disk)
    }

    fn scan(&mut self) -> io::Result<()> {
        let mut files = Vec::new();
        for file in fs::read_dir(&self.dir)? {
            let Ok(file) = file else { continue };
            let path = file.path();
            if path.extension().is_none_or(|e| e != "prefix") {
                continue;
            }
            let Ok(meta) = file.metadata() else { continue };
            let Some(header) = read_header(&path) else { continue };
            if header.identity != self.identity {
                continue;
            }
            let Some(description) = header.description() else { continue };
            let named = path.file_stem().and_then(|s| s.to_str()) == Some(&header.key);
            if named {
                files.push((meta.modified().ok(), meta.len(), description));
            }
        }
        files.sort_by_key(|(time, ..)| *time);
        for (_, size, description) in files {
            self.note(description.key, size);
            self.found.push(description);
        }
        Ok(())
    }

    /// Enters everything found on opening, parents first.
    pub fn restore(&self, index: &mut PrefixIndex) {
        let mut left: Vec<&Description> = self.found.iter().collect();
        loop {
            let before = left.len();
            left.retain(|description| !index.restore(description));
            if left.len() == before || left.is_empty() {
                return;
            }
        }
    }

    fn note(&mut self, key: Key, size: u64) {
        match self.files.insert(key, size) {
            Some(old) => self.bytes -= old,
            None => self.order.push_back(key),
        }
        self.bytes += size;
    }

    /// Takes an entry in; a thread writes it. The oldest ones make room.
    pub fn put(&mut self, description: Description, entry: Entry) {
        let Some(head) = head(&self.identity, &description, &entry) else { return };
        let key = description.key;
        self.note(key, (head.len() + entry.bytes() + DIGEST) as u64);
        self.send(Message::Write(self.path(&key), head, entry));
        while self.bytes > self.limit {
            let Some(oldest) = self.order.pop_front() else { return };
            self.bytes -= self.files.remove(&oldest).unwrap_or(0);
            self.send(Message::Remove(self.path(&oldest)));
        }
    }

    /// Asks for an entry, which [`Disk::loaded`] will return. Returns false if there is none.
    pub fn request(&mut self, key: &Key) -> bool {
        if !self.files.contains_key(key) {
            return false;
        }
        self.reading.contains(key)
            || self.send(Message::Read(self.path(key), *key)) && self.reading.insert(*key)
    }

    /// Entries that have been read since the last call. Damaged ones are removed.
    pub fn loaded(&mut self) -> Vec<Loaded> {
        let loaded: Vec<Loaded> = self.loaded.try_iter().collect();
        for (key, entry) in &loaded {
            self.reading.remove(key);
            if entry.is_none() {
                self.bytes -= self.files.remove(key).unwrap_or(0);
                self.order.retain(|k| k != key);
                self.send(Message::Remove(self.path(key)));
            }
        }
        loaded
    }

    /// Waits until everything told so far is done.
    pub fn flush(&mut self) {
        let (done, wait) = sync_channel(1);
        self.send(Message::Flush(done));
        // An error means that the thread is gone, and with it the reason to wait.
        let _ = wait.recv();
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.dir.join(format!("{}.prefix", hex(key)))
    }

    /// Returns false if the thread has ended, which it does only with us: its entries are misses.
    fn send(&self, message: Message) -> bool {
        self.thread.as_ref().is_some_and(|(thread, _)| thread.send(message).is_ok())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.thread.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn work_on_files(identity: &str, messages: &Receiver<Message>, loaded: &Sender<Loaded>) {
    for message in messages {
        match message {
            Message::Write(path, head, entry) => {
                let partial = path.with_extension(format!("{}.part", std::process::id()));
                // What cannot be written is a miss later.
                let written = write_file(&partial, &head, &entry);
                if written.and_then(|()| fs::rename(&partial, &path)).is_err() {
                    let _ = fs::remove_file(&partial);
                }
            }
            Message::Read(path, key) => {
                let entry = fs::read(&path).ok().and_then(|file| decode(identity, &key, &file));
                // Nobody waits for it if that fails.
                let _ = loaded.send((key, entry));
            }
            Message::Remove(path) => {
                let _ = fs::remove_file(path);
            }
            Message::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}

fn write_file(path: &Path, head: &[u8], entry: &Entry) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut digest = Sha256::new();
    for part in std::iter::once(head).chain(entry.parts()) {
        digest.update(part);
        file.write_all(part)?;
    }
    file.write_all(&digest.finalize())
}

/// A file up to its payload.
fn head(identity: &str, description: &Description, entry: &Entry) -> Option<Vec<u8>> {
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

fn decode(identity: &str, key: &Key, file: &[u8]) -> Option<Entry> {
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
        Some(_) => {
            let (position, pages) = (header.position, parts.collect());
            Entry::State(Arc::new(Snapshot { position, slot: first, pages }))
        }
    })
}

fn split_header(body: &[u8]) -> Option<(Header, &[u8])> {
    let rest = body.strip_prefix(MAGIC)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (header, payload) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((serde_json::from_slice(header).ok()?, payload))
}

fn read_header(path: &Path) -> Option<Header> {
    let mut file = File::open(path).ok()?;
    let mut start = [0; 12];
    file.read_exact(&mut start).ok()?;
    let len = u32::from_le_bytes([start[8], start[9], start[10], start[11]]);
    let mut body = start.to_vec();
    file.take(u64::from(len)).read_to_end(&mut body).ok()?;
    split_header(&body).map(|(header, _)| header)
}

impl Header {
    fn description(&self) -> Option<Description> {
        Some(Description {
            key: unhex(&self.key)?,
            parent: unhex(&self.parent)?,
            tokens: self.tokens.as_slice().into(),
            lowest: self.lowest,
            at_root: self.at_root,
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<Key> {
    let mut key = Key::default();
    if text.len() != 2 * key.len() || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn description(key: u8, lowest: Option<usize>) -> Description {
        let tokens = [1, 2, 3].as_slice().into();
        Description { key: [key; 16], parent: [9; 16], tokens, lowest, at_root: true }
    }

    /// Reads one entry and waits for it.
    fn read(disk: &mut Disk, key: &Key) -> Option<Entry> {
        if !disk.request(key) {
            return None;
        }
        disk.flush();
        let mut loaded = disk.loaded();
        assert_eq!(loaded.len(), 1);
        let (found, entry) = loaded.remove(0);
        assert_eq!(found, *key);
        entry
    }

    fn state() -> Snapshot {
        Snapshot { position: 7, slot: vec![1, 2, 3], pages: vec![vec![4; 5]] }
    }

    #[test]
    fn entries_survive_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = Disk::open(dir.path(), 1 << 20, b"me").expect("opens");
        disk.put(description(1, None), Entry::Page(Arc::new(vec![5; 100])));
        disk.put(description(2, Some(6)), Entry::State(Arc::new(state())));
        drop(disk);
        let mut disk = Disk::open(dir.path(), 1 << 20, b"me").expect("opens");
        assert_eq!(disk.found.len(), 2);
        let page = read(&mut disk, &[1; 16]);
        assert!(matches!(page, Some(Entry::Page(bytes)) if *bytes == vec![5; 100]));
        let found = read(&mut disk, &[2; 16]);
        assert!(matches!(found, Some(Entry::State(s)) if *s == state()));
        let mut other = Disk::open(dir.path(), 1 << 20, b"another").expect("opens");
        assert!(other.found.is_empty() && read(&mut other, &[1; 16]).is_none());
    }

    #[test]
    fn a_missing_file_is_a_miss() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = Disk::open(dir.path(), 1 << 20, b"me").expect("opens");
        disk.put(description(1, None), Entry::Page(Arc::new(vec![5; 100])));
        disk.flush();
        fs::remove_file(disk.path(&[1; 16])).expect("is there");
        assert!(read(&mut disk, &[1; 16]).is_none());
        assert_eq!(disk.bytes, 0);
        assert!(!disk.request(&[1; 16]));
    }

    #[test]
    fn the_oldest_files_make_room() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = Disk::open(dir.path(), 1500, b"me").expect("opens");
        for key in 1..6 {
            disk.put(description(key, None), Entry::Page(Arc::new(vec![5; 200])));
        }
        disk.flush();
        assert!(disk.bytes <= 1500 && read(&mut disk, &[5; 16]).is_some());
        assert!(read(&mut disk, &[1; 16]).is_none());
        disk.flush();
        let sizes = fs::read_dir(dir.path()).expect("is there").flatten();
        let sizes: u64 = sizes.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
        assert_eq!(sizes, disk.bytes);
        let files = fs::read_dir(dir.path()).expect("is there").count();
        assert_eq!(files, disk.files.len());
    }

    #[test]
    fn an_entry_is_read_after_it_was_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = Disk::open(dir.path(), 1 << 30, b"me").expect("opens");
        for key in 1..100 {
            disk.put(description(key, None), Entry::Page(Arc::new(vec![key; 100_000])));
            assert!(disk.request(&[key; 16]) && disk.request(&[key; 16]));
        }
        disk.flush();
        let loaded = disk.loaded();
        assert_eq!(loaded.len(), 99);
        assert!(loaded.iter().all(|(_, entry)| entry.is_some()));
    }

    proptest! {
        /// A damaged file is a miss: any byte, any length.
        #[test]
        fn damage_is_found(at in 0usize..10_000, to in any::<u8>(), cut in any::<bool>()) {
            let entry = Entry::State(Arc::new(state()));
            let head = head("me", &description(1, Some(2)), &entry).expect("encodes");
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("file");
            write_file(&path, &head, &entry).expect("can be written");
            let file = fs::read(&path).expect("is there");
            let at = at % file.len();
            let mut damaged = file.clone();
            if cut { damaged.truncate(at) } else { damaged[at] = to }
            let read = decode("me", &[1; 16], &damaged);
            prop_assert_eq!(read.is_some(), damaged == file);
        }
    }
}
