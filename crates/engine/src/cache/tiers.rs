//! Lower tiers of the prefix cache: host memory, and a directory that survives a restart.
//!
//! Entries are written through when the index takes them in, so the device can drop its copy at any
//! time. An entry that is missing, damaged or of another size is a miss, never an error. Nothing here
//! waits for a disk: what lies there is asked for, and comes later.

mod disk;
mod host;

use super::Snapshot;
use super::prefix::{Description, Key, PrefixIndex};
use disk::Disk;
use host::Host;
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// What an entry holds.
#[derive(Clone, Debug)]
pub enum Entry {
    /// Shared rows of a page.
    Page(Arc<Vec<u8>>),
    /// A sequence's state, with its open page if it has one.
    State(Arc<Snapshot>),
}

impl Entry {
    /// Its bytes: a page; or a state's rings, then its open pages.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let (first, pages) = match self {
            Entry::Page(bytes) => (bytes.as_slice(), &[][..]),
            Entry::State(state) => (state.slot.as_slice(), state.pages.as_slice()),
        };
        std::iter::once(first).chain(pages.iter().map(Vec::as_slice))
    }

    fn bytes(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }
}

/// What the lower tiers know of an entry.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Here it is.
    Here(Entry),
    /// It is being read, and [`Tiers::loaded`] will return it; or it was announced, and will be
    /// taken in.
    Coming,
    /// It is not there.
    Missing,
}

/// The lower tiers; none by default.
#[derive(Default)]
pub struct Tiers {
    host: Option<Host>,
    disk: Option<Disk>,
    /// Entries on their way from the device.
    expected: HashMap<Key, VecDeque<Description>>,
}

impl Tiers {
    /// Host memory for `bytes` bytes.
    pub fn host(bytes: usize) -> Self {
        Self { host: Some(Host::new(bytes)), ..Self::default() }
    }

    /// Host memory, and a directory (made if need be) for `disk_bytes` bytes. Entries of another
    /// `identity` are left alone.
    pub fn disk(
        host_bytes: usize,
        dir: &Path,
        disk_bytes: u64,
        identity: &[u8],
    ) -> std::io::Result<Self> {
        let disk = Some(Disk::open(dir, disk_bytes, identity)?);
        Ok(Self { disk, ..Self::host(host_bytes) })
    }

    /// Whether there is any.
    pub fn enabled(&self) -> bool {
        self.host.is_some()
    }

    /// Enters everything that the directory holds.
    pub fn restore(&self, index: &mut PrefixIndex) {
        if let Some(disk) = &self.disk {
            disk.restore(index);
        }
    }

    /// Announces an entry that the device is about to save.
    pub fn expect(&mut self, description: Description) {
        self.expected.entry(description.key).or_default().push_back(description);
    }

    /// Takes in an entry that was announced. Returns whether it is kept.
    pub fn put(&mut self, key: Key, entry: Entry) -> bool {
        let Some(waiting) = self.expected.get_mut(&key) else { return false };
        let description = waiting.pop_front();
        if waiting.is_empty() {
            self.expected.remove(&key);
        }
        let Some(description) = description else { return false };
        if let Some(disk) = &mut self.disk {
            disk.put(description, entry.clone());
        }
        self.host.as_mut().is_some_and(|host| host.put(key, entry)) || self.disk.is_some()
    }

    /// Looks for an entry, and asks for it if it lies on disk.
    pub fn get(&mut self, key: &Key) -> Stored {
        if self.expected.contains_key(key) {
            return Stored::Coming;
        }
        if let Some(entry) = self.host.as_mut().and_then(|host| host.get(key)) {
            return Stored::Here(entry);
        }
        match self.disk.as_mut().is_some_and(|disk| disk.request(key)) {
            true => Stored::Coming,
            false => Stored::Missing,
        }
    }

    /// Entries that have been read since the last call; `None` for those that were not to be had.
    pub fn loaded(&mut self) -> Vec<(Key, Option<Entry>)> {
        let Some(disk) = &mut self.disk else { return Vec::new() };
        let loaded = disk.loaded();
        if let Some(host) = &mut self.host {
            for (key, entry) in &loaded {
                entry.iter().for_each(|entry| {
                    host.put(*key, entry.clone());
                });
            }
        }
        loaded
    }

    /// Waits until everything taken in is on disk.
    pub fn flush(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two states of one text are announced before the first is saved.
    #[test]
    fn saves_meet_their_own_descriptions() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut tiers = Tiers::disk(1 << 20, folder.path(), 1 << 20, b"model").expect("opens");
        let key = [7; 16];
        let description = |lowest| Description {
            key,
            parent: [0; 16],
            tokens: Arc::from([1, 2]),
            lowest: Some(lowest),
            at_root: true,
        };
        let entry = || Entry::State(Arc::new(Snapshot::default()));
        tiers.expect(description(9));
        tiers.expect(description(4));
        assert!(tiers.put(key, entry()));
        assert!(matches!(tiers.get(&key), Stored::Coming), "another is on its way");
        assert!(tiers.put(key, entry()));
        assert!(!tiers.put(key, entry()), "it was not announced");
    }
}
