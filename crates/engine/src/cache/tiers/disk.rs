//! Entries in a directory: one file each, named by its key.
//!
//! Files are written under another name and renamed, so readers see whole files only. Threads do the
//! reading and writing; an entry is served from memory until it is written.

mod file;
#[cfg(test)]
mod tests;
mod worker;

use super::order::Order;
use super::{Entry, Stored};
use crate::cache::prefix::{Description, Key, PrefixIndex};
use file::{DIGEST, head, hex, is_left_over, make_dir, read_header, try_to_write, unhex};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use worker::{Answer, Job, Workers};

/// A directory that has answered nothing for so long is given up until it answers again.
const PATIENCE: Duration = Duration::from_secs(10);

/// An entry that was read; `None` if it was missing or damaged, or did not come in time.
type Loaded = (Key, Option<Entry>);

/// How much a directory may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of files, those of other identities included.
    pub files: u64,
    /// Bytes of entries that wait to be written; a single one may have more.
    pub queue: usize,
}

/// Entries that a directory did not take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Entries that could not be written.
    pub failed: usize,
    /// Entries that came faster than others could be written.
    pub skipped: usize,
}

/// A directory of entries.
pub struct Disk {
    dir: PathBuf,
    identity: String,
    limits: Limits,
    bytes: u64,
    /// Sizes of this identity's files, written or about to be, and the order in which they were
    /// written or used.
    files: HashMap<Key, u64>,
    order: Order,
    found: Vec<Description>,
    /// Files of other identities that were there on opening, the oldest first, and their bytes.
    others: VecDeque<(PathBuf, u64)>,
    other_bytes: u64,
    workers: Workers,
    /// Last number given to a job.
    number: u64,
    /// Entries that are not written yet, by the number of the job; all of them are in `files`.
    queued: HashMap<Key, (u64, Entry)>,
    /// Bytes that the writer has not done yet.
    queued_bytes: usize,
    /// Entries that are being read and waited for, by the number of the job.
    reading: HashMap<Key, u64>,
    /// Files to be removed once they have been read.
    doomed: HashSet<Key>,
    /// Reads that have not been answered, those included that nobody waits for any more.
    unanswered: usize,
    /// Whether reads were given up that have not been answered yet.
    silent: bool,
    /// When the reader last answered, or began after it had nothing to do.
    heard: Instant,
    patience: Duration,
    /// What has been read, by the number of the job; waited for until it is told.
    read: Vec<(u64, Loaded)>,
    /// Entries that could not be written, for the next call that tells what is not here any more.
    lost: Vec<Key>,
    losses: Losses,
}

impl Disk {
    /// Opens a directory, and makes it if need be. Reads the headers of its files. What is more than
    /// the limit allows is removed.
    pub fn open(dir: &Path, limits: Limits, identity: &[u8]) -> io::Result<Self> {
        make_dir(dir)?;
        try_to_write(dir)?;
        let identity = hex(&Sha256::digest(identity));
        let mut disk = Self {
            dir: dir.to_owned(),
            limits,
            bytes: 0,
            files: HashMap::new(),
            order: Order::default(),
            found: Vec::new(),
            others: VecDeque::new(),
            other_bytes: 0,
            workers: Workers::start(&identity, PATIENCE)?,
            identity,
            number: 0,
            queued: HashMap::new(),
            queued_bytes: 0,
            reading: HashMap::new(),
            doomed: HashSet::new(),
            unanswered: 0,
            silent: false,
            heard: Instant::now(),
            patience: PATIENCE,
            read: Vec::new(),
            lost: Vec::new(),
            losses: Losses::default(),
        };
        disk.scan()?;
        Ok(disk)
    }

    fn scan(&mut self) -> io::Result<()> {
        let (mut files, mut others) = (Vec::new(), Vec::new());
        for file in fs::read_dir(&self.dir)? {
            let Ok(file) = file else { continue };
            let path = file.path();
            if is_left_over(&path) {
                // Another process may have done so at the same time.
                let _ = fs::remove_file(&path);
                continue;
            }
            // Others may keep files of other names here.
            let Some(key) = key_of(&path) else { continue };
            let Some(meta) = file.metadata().ok().filter(fs::Metadata::is_file) else { continue };
            let (time, size) = (meta.modified().ok(), meta.len());
            let Ok(header) = read_header(&path) else {
                others.push((time, size, path));
                continue;
            };
            let described = header.and_then(|h| Some((h.description()?, h.identity)));
            match described.filter(|(description, _)| description.key == key) {
                Some((found, identity)) if identity == self.identity => {
                    files.push((time, size, found));
                }
                Some(_) => others.push((time, size, path)),
                // Not written to its end before a power failure: nobody will read it.
                None => drop(fs::remove_file(&path)),
            }
        }
        others.sort();
        self.other_bytes = others.iter().map(|(_, size, _)| size).sum();
        self.others = others.into_iter().map(|(_, size, path)| (path, size)).collect();
        files.sort_by_key(|(time, ..)| *time);
        let sizes: HashMap<Key, u64> = files.iter().map(|(_, size, d)| (d.key, *size)).collect();
        self.found = files.into_iter().map(|(.., description)| description).collect();
        for key in beginnings_last(&self.found) {
            self.note(key, sizes[&key]);
        }
        self.make_room();
        // Nobody knows these yet.
        self.lost.clear();
        self.found.retain(|description| self.files.contains_key(&description.key));
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

    /// Takes an entry in; a thread writes it. Returns what is not here any more: those
    /// that were used least recently make room; this one, if too much waits to be written; those
    /// that could not be written.
    pub fn put(&mut self, description: Description, entry: Entry) -> Vec<Key> {
        self.settle();
        let key = description.key;
        // What is being read is older than this.
        self.end_reading(&key);
        let bytes = entry.bytes();
        let waiting = self.queued_bytes.saturating_add(bytes);
        let full = self.queued_bytes > 0 && waiting > self.limits.queue;
        if full && description.lowest.is_none() && self.files.contains_key(&key) {
            // The file that is there has the same bytes: a page's key determines them.
            self.order.put_last(key);
            return std::mem::take(&mut self.lost);
        }
        let head = head(&self.identity, &description, &entry);
        let Some(head) = head.filter(|_| !full) else {
            self.losses.skipped += 1;
            // A state that is there may not be what the index was told last.
            self.lose(key);
            return std::mem::take(&mut self.lost);
        };
        self.note(key, (head.len() + bytes + DIGEST) as u64);
        self.number += 1;
        let (path, number) = (self.path(&key), self.number);
        self.queued.insert(key, (number, entry.clone()));
        self.queued_bytes = waiting;
        self.workers.tell(Job::Write { path, head, entry, key, number });
        self.make_room();
        std::mem::take(&mut self.lost)
    }

    /// Removes files above the limit: those of other identities, then our own.
    fn make_room(&mut self) {
        while self.bytes + self.other_bytes > self.limits.files {
            if let Some((path, size)) = self.others.pop_front() {
                self.other_bytes -= size;
                // One of ours may have taken its place.
                if !key_of(&path).is_some_and(|key| self.files.contains_key(&key)) {
                    self.workers.tell(Job::Remove(path));
                }
                continue;
            }
            let Some(oldest) = self.order.first() else { break };
            self.lose(oldest);
        }
    }

    /// Drops an entry and its file, once that is not being read.
    fn lose(&mut self, key: Key) {
        self.lost.push(key);
        self.queued.remove(&key);
        let Some(size) = self.files.remove(&key) else { return };
        self.bytes -= size;
        self.order.remove(&key);
        match self.reading.contains_key(&key) {
            true => drop(self.doomed.insert(key)),
            false => self.remove_file(&key),
        }
    }

    fn remove_file(&self, key: &Key) {
        self.workers.tell(Job::Remove(self.path(key)));
    }

    /// Stops to wait for an entry.
    fn end_reading(&mut self, key: &Key) {
        self.reading.remove(key);
        if self.doomed.remove(key) {
            self.remove_file(key);
        }
    }

    /// Whether an entry is here, or is being read.
    pub fn holds(&self, key: &Key) -> bool {
        self.files.contains_key(key) || self.reading.contains_key(key)
    }

    /// Looks for an entry, and asks for it if it has been written: [`Disk::loaded`] will return it.
    pub fn get(&mut self, key: &Key) -> Stored {
        if let Some((_, entry)) = self.queued.get(key) {
            return Stored::Here(entry.clone());
        }
        if self.reading.contains_key(key) {
            return Stored::Coming;
        }
        if !self.files.contains_key(key) {
            return Stored::Missing;
        }
        if self.silent {
            return Stored::Silent;
        }
        self.number += 1;
        let (path, number) = (self.path(key), self.number);
        if !self.workers.tell(Job::Read { path, key: *key, number }) {
            return Stored::Missing;
        }
        if self.unanswered == 0 {
            self.heard = Instant::now();
        }
        self.unanswered += 1;
        self.reading.insert(*key, number);
        Stored::Coming
    }

    /// Takes in what the threads have done.
    fn settle(&mut self) {
        let answers: Vec<Answer> = self.workers.answers().collect();
        for answer in answers {
            match answer {
                Answer::Written { key, number, bytes, failed } => {
                    self.queued_bytes -= bytes;
                    self.losses.failed += usize::from(failed);
                    if self.queued.get(&key).is_some_and(|(last, _)| *last == number) {
                        self.queued.remove(&key);
                        if failed {
                            self.lose(key);
                        }
                    }
                }
                Answer::Read { key, number, entry } => {
                    self.heard = Instant::now();
                    self.unanswered -= 1;
                    self.silent &= self.unanswered > 0;
                    self.read.push((number, (key, entry)));
                }
            }
        }
    }

    /// Entries that have been read since the last call, and what is not here any more. Damaged ones
    /// are removed. Where nothing has been read for a while, what is asked for is given up.
    pub fn loaded(&mut self) -> (Vec<Loaded>, Vec<Key>) {
        self.settle();
        let mut loaded = Vec::new();
        for (number, (key, entry)) in std::mem::take(&mut self.read) {
            if self.reading.get(&key) == Some(&number) {
                self.end_reading(&key);
                if entry.is_none() {
                    self.lose(key);
                }
                loaded.push((key, entry));
            }
        }
        if !self.reading.is_empty() && self.heard.elapsed() >= self.patience {
            self.silent = true;
            for key in self.reading.keys().copied().collect::<Vec<_>>() {
                if self.doomed.contains(&key) {
                    // It was here for as long as it was being read.
                    self.lost.push(key);
                }
                self.end_reading(&key);
                loaded.push((key, None));
            }
        }
        (loaded, std::mem::take(&mut self.lost))
    }

    /// What was not taken so far.
    pub fn losses(&self) -> Losses {
        self.losses
    }

    /// Waits until everything told so far is done.
    pub fn flush(&mut self) {
        self.workers.flush();
    }

    /// The reader is held back until the returned value is dropped, and nobody has patience with it.
    #[cfg(test)]
    pub fn hang(&mut self) -> std::sync::mpsc::Receiver<()> {
        self.patience = Duration::ZERO;
        self.workers.hold(true)
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.dir.join(format!("{}.prefix", hex(key)))
    }
}

/// The key that a file is named by.
fn key_of(path: &Path) -> Option<Key> {
    let named = path.extension().is_some_and(|e| e == "prefix");
    path.file_stem().filter(|_| named)?.to_str().and_then(unhex)
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
