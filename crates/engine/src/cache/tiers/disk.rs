//! Entries in a directory: one file each, named by its key.
//!
//! Files are written under another name and renamed, so readers see whole files only. A thread does
//! the reading and writing, in the order in which it was told.

mod file;

use super::Entry;
use super::order::Order;
use crate::cache::prefix::{Description, Key, PrefixIndex};
use file::{DIGEST, decode, head, hex, is_left_over, partial, read_header, write_file};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

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
    /// Sizes of this identity's files, and the order in which they were written or used.
    files: HashMap<Key, u64>,
    order: Order,
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
            order: Order::default(),
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
            if is_left_over(&path) {
                // Another process may have done so at the same time.
                let _ = fs::remove_file(&path);
                continue;
            }
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
        let sizes: HashMap<Key, u64> = files.iter().map(|(_, size, d)| (d.key, *size)).collect();
        self.found = files.into_iter().map(|(.., description)| description).collect();
        for key in beginnings_last(&self.found) {
            self.note(key, sizes[&key]);
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
        self.bytes -= self.files.insert(key, size).unwrap_or(0);
        self.bytes += size;
        self.order.put_last(key);
    }

    /// Marks an entry as used.
    pub fn touch(&mut self, key: &Key) {
        if self.files.contains_key(key) {
            self.order.put_last(*key);
        }
    }

    /// Takes an entry in; a thread writes it. Returns what is not here any more: those that
    /// were used least recently make room.
    pub fn put(&mut self, description: Description, entry: Entry) -> Vec<Key> {
        let key = description.key;
        let Some(head) = head(&self.identity, &description, &entry) else { return vec![key] };
        let mut dropped = Vec::new();
        self.note(key, (head.len() + entry.bytes() + DIGEST) as u64);
        self.send(Message::Write(self.path(&key), head, entry));
        while self.bytes > self.limit {
            let Some(oldest) = self.order.pop_first() else { break };
            self.bytes -= self.files.remove(&oldest).unwrap_or(0);
            self.send(Message::Remove(self.path(&oldest)));
            dropped.push(oldest);
        }
        dropped
    }

    /// Whether an entry is here, or is being read.
    pub fn holds(&self, key: &Key) -> bool {
        self.files.contains_key(key) || self.reading.contains(key)
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
                self.order.remove(key);
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

/// Keys of entries from the oldest to the newest, but each after what hangs on it: that is of no use
/// without it, and whoever used that used it, too.
fn beginnings_last(by_age: &[Description]) -> Vec<Key> {
    let parents: HashMap<Key, Key> = by_age.iter().map(|d| (d.key, d.parent)).collect();
    let (mut newest_first, mut placed) = (Vec::new(), HashSet::new());
    for description in by_age.iter().rev() {
        let at = newest_first.len();
        let mut key = description.key;
        while let Some(&parent) = parents.get(&key)
            && placed.insert(key)
        {
            newest_first.push(key);
            key = parent;
        }
        newest_first[at..].reverse();
    }
    newest_first.reverse();
    newest_first
}

fn work_on_files(identity: &str, messages: &Receiver<Message>, loaded: &Sender<Loaded>) {
    for message in messages {
        match message {
            Message::Write(path, head, entry) => {
                let partial = partial(&path, std::process::id());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Snapshot;
    use proptest::prelude::*;
    use std::fs::File;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

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
        Snapshot { position: 7, lowest: 6, slot: vec![1, 2, 3], pages: vec![vec![4; 5]] }
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

    /// A beginning is used by everyone: it leaves after what hangs on it, and is there again when it
    /// was written anew.
    #[test]
    fn a_shared_beginning_stays_on_disk() {
        let page = |key: u8, parent: u8| {
            let tokens = [1, 2, 3].as_slice().into();
            Description {
                key: [key; 16],
                parent: [parent; 16],
                tokens,
                lowest: None,
                at_root: false,
            }
        };
        let entry = || Entry::Page(Arc::new(vec![5; 200]));
        for written_again in [false, true] {
            let dir = tempfile::tempdir().expect("a directory");
            let mut disk = Disk::open(dir.path(), 3000, b"me").expect("opens");
            disk.put(page(1, 0), entry());
            for tail in 2..52 {
                match written_again {
                    true => assert!(!disk.put(page(1, 0), entry()).contains(&[1; 16])),
                    false => disk.touch(&[1; 16]),
                }
                assert!(!disk.put(page(tail, 1), entry()).contains(&[1; 16]));
            }
            assert!(disk.bytes <= 3000 && disk.files.len() > 3);
            drop(disk);
            // After a restart, too: its file is the oldest if it was not written again.
            let mut disk = Disk::open(dir.path(), 3000, b"me").expect("opens");
            let held = disk.files.len();
            let mut dropped = Vec::new();
            while dropped.len() < held {
                dropped.extend(disk.put(page(100 + dropped.len() as u8, 9), entry()));
            }
            assert_eq!(dropped[held - 1], [1; 16], "{dropped:?}");
        }
    }

    #[test]
    fn the_newest_tail_keeps_its_beginning_longest() {
        let entry =
            |key: u8, parent: u8| Description { parent: [parent; 16], ..description(key, None) };
        // 1 - 2 - 3 and 1 - 4 - 5, of which 3 was written last; 6 and 7 are on their own.
        let by_age = [(6, 0), (1, 0), (2, 1), (4, 1), (5, 4), (7, 9), (3, 2)];
        let by_age: Vec<Description> = by_age.map(|(key, parent)| entry(key, parent)).into();
        let keys: Vec<u8> = beginnings_last(&by_age).iter().map(|key| key[0]).collect();
        assert_eq!(keys, [6, 5, 4, 7, 3, 2, 1]);
    }

    #[test]
    fn what_a_crash_left_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = |key: u8| dir.path().join(format!("{}.prefix", hex(&[key; 16])));
        let file = |path: PathBuf, age: Duration| {
            let file = File::create(&path).expect("can be written");
            let time = SystemTime::now().checked_sub(age).expect("is a time");
            file.set_modified(time).expect("can be set");
            path
        };
        let (ended, other) = (u32::MAX, std::os::unix::process::parent_id());
        let hours = |count: u64| Duration::from_secs(3600 * count);
        let left = [
            file(partial(&key(1), ended), hours(2)),
            file(partial(&key(2), std::process::id()), hours(2)),
        ];
        let kept = [
            file(partial(&key(3), ended), hours(0)),
            file(partial(&key(4), std::process::id()), hours(0)),
            file(partial(&key(5), other), hours(2)),
            file(dir.path().join("notes.7.part"), hours(2)),
            file(dir.path().join("film.part"), hours(2)),
        ];
        Disk::open(dir.path(), 1 << 20, b"me").expect("opens");
        left.iter().for_each(|path| assert!(!path.exists(), "{path:?} was left"));
        kept.iter().for_each(|path| assert!(path.exists(), "{path:?} may be somebody's"));
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
