//! Lower tiers of the prefix cache: host memory, and a directory that survives a restart.
//!
//! Entries are written through when the index takes them in, so the device can drop its copy at any
//! time. An entry that is missing, damaged or of another size is a miss, never an error. Nothing here
//! waits for a disk: what lies there is asked for, and comes later.

mod disk;
mod host;
mod order;

use super::Snapshot;
use super::prefix::{Description, Key, PrefixIndex};
use disk::Disk;
use disk::Limits;
pub use disk::Losses;
use host::Host;
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// Most bytes of entries that wait to be written to a directory, with `host_bytes` bytes of host
/// memory: a quarter of that besides it, and 64 MiB at least, as those of a prompt come at once.
pub fn queue_bytes(host_bytes: usize) -> usize {
    (host_bytes / 4).max(64 << 20)
}

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

    /// A state with the `lowest` of its description.
    fn described(self, description: &Description) -> Self {
        match (self, description.lowest) {
            (Entry::State(state), Some(lowest)) if state.lowest != lowest => {
                let state = Arc::unwrap_or_clone(state);
                Entry::State(Arc::new(Snapshot { lowest, ..state }))
            }
            (entry, _) => entry,
        }
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
    /// It is being read, and [`Tiers::loaded`] will return it, unless [`Tiers::put`] takes it in
    /// before; or it was announced, and will be taken in.
    Coming,
    /// It lies in a directory that does not answer now.
    Silent,
    /// It is not there.
    Missing,
}

/// What has come from a disk.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Entries that have been read; `None` for those that were not to be had.
    pub entries: Vec<(Key, Option<Entry>)>,
    /// Entries that no tier holds any more.
    pub gone: Vec<Key>,
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

    /// Host memory, and a directory (made if need be) for `disk_bytes` bytes, besides
    /// [`queue_bytes`] of memory. Entries of another `identity` that were there before make room
    /// first. Fails if the directory cannot be written to.
    pub fn disk(
        host_bytes: usize,
        dir: &Path,
        disk_bytes: u64,
        identity: &[u8],
    ) -> std::io::Result<Self> {
        let limits = Limits { files: disk_bytes, queue: queue_bytes(host_bytes) };
        let disk = Some(Disk::open(dir, limits, identity)?);
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

    /// Whether an entry has been announced and not been taken in yet.
    pub fn expects(&self, key: &Key) -> bool {
        self.expected.contains_key(key)
    }

    /// The entry that [`Tiers::put`] would take in: a state says where it can be cut, as announced.
    pub fn described(&self, key: &Key, entry: Entry) -> Entry {
        match self.expected.get(key).and_then(VecDeque::front) {
            Some(description) => entry.described(description),
            None => entry,
        }
    }

    /// Takes in an entry that was announced. Returns the keys of entries that no tier holds any
    /// more, for [`PrefixIndex::forget`]: those that made room; this one, if it is not kept.
    pub fn put(&mut self, key: Key, entry: Entry) -> Vec<Key> {
        let waiting = self.expected.get_mut(&key);
        let description = waiting.and_then(|waiting| waiting.pop_front());
        if self.expected.get(&key).is_some_and(VecDeque::is_empty) {
            self.expected.remove(&key);
        }
        let Some(description) = description else { return self.gone(vec![key]) };
        let entry = entry.described(&description);
        let mut dropped = Vec::new();
        if let Some(disk) = &mut self.disk {
            dropped.extend(disk.put(description, entry.clone()));
        }
        if let Some(host) = &mut self.host {
            dropped.extend(host.put(key, entry));
        }
        self.gone(dropped)
    }

    /// Marks entries as used, in that order: what was used last makes room last.
    pub fn touch(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(host) = &mut self.host {
                host.get(key);
            }
            if let Some(disk) = &mut self.disk {
                disk.touch(key);
            }
        }
    }

    /// Those of `keys` that are in no tier, and on their way to none.
    fn gone(&self, mut keys: Vec<Key>) -> Vec<Key> {
        keys.retain(|key| {
            !self.expected.contains_key(key)
                && !self.host.as_ref().is_some_and(|host| host.holds(key))
                && !self.disk.as_ref().is_some_and(|disk| disk.holds(key))
        });
        keys
    }

    /// Looks for an entry, and asks for it if it lies on disk.
    pub fn get(&mut self, key: &Key) -> Stored {
        if self.expected.contains_key(key) {
            return Stored::Coming;
        }
        if let Some(entry) = self.host.as_mut().and_then(|host| host.get(key)) {
            return Stored::Here(entry);
        }
        self.disk.as_mut().map_or(Stored::Missing, |disk| disk.get(key))
    }

    /// What has been read since the last call.
    pub fn loaded(&mut self) -> Loaded {
        let Some(disk) = &mut self.disk else { return Loaded::default() };
        let (entries, mut dropped) = disk.loaded();
        for (key, entry) in &entries {
            if let (Some(entry), Some(host)) = (entry, &mut self.host) {
                dropped.extend(host.put(*key, entry.clone()));
            }
        }
        let gone = self.gone(dropped);
        Loaded { entries, gone }
    }

    /// Entries that the directory did not take so far.
    pub fn losses(&self) -> Losses {
        self.disk.as_ref().map_or(Losses::default(), Disk::losses)
    }

    /// The directory does not answer until the returned value is dropped, and is given up at once.
    #[cfg(test)]
    pub fn hang(&mut self) -> Option<std::sync::mpsc::Receiver<()>> {
        self.disk.as_mut().map(Disk::hang)
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
        assert!(tiers.put(key, entry()).is_empty());
        assert!(matches!(tiers.get(&key), Stored::Coming), "another is on its way");
        assert!(tiers.put(key, entry()).is_empty());
        let unknown = [8; 16];
        assert_eq!(tiers.put(unknown, entry()), [unknown], "it was not announced");
    }

    fn announce(tiers: &mut Tiers, key: u8) {
        let (key, tokens) = ([key; 16], Arc::from([1]));
        tiers.expect(Description { key, parent: [0; 16], tokens, lowest: None, at_root: true });
    }

    fn page() -> Entry {
        Entry::Page(Arc::new(vec![0; 400]))
    }

    #[test]
    fn what_no_tier_holds_any_more_is_told() {
        let mut tiers = Tiers::host(1000);
        (1..=4).for_each(|key| announce(&mut tiers, key));
        announce(&mut tiers, 1);
        assert!(tiers.put([1; 16], page()).is_empty());
        assert!(tiers.put([2; 16], page()).is_empty());
        assert!(tiers.put([3; 16], page()).is_empty(), "the first is on its way again");
        assert_eq!(tiers.put([4; 16], page()), [[2; 16]]);
        assert_eq!(tiers.put([1; 16], page()), [[3; 16]]);
    }

    #[test]
    fn an_entry_is_gone_when_it_has_left_every_tier() {
        let folder = tempfile::tempdir().expect("a folder");
        // Two in host memory, three on disk.
        let mut tiers = Tiers::disk(1000, folder.path(), 2300, b"model").expect("opens");
        (1..=6).for_each(|key| announce(&mut tiers, key));
        for key in 1..=3 {
            assert!(tiers.put([key; 16], page()).is_empty());
        }
        assert_eq!(tiers.put([4; 16], page()), [[1; 16]]);
        tiers.flush();
        assert!(tiers.loaded().entries.is_empty());
        assert!(matches!(tiers.get(&[2; 16]), Stored::Coming));
        assert!(tiers.put([5; 16], page()).is_empty(), "the second is being read");
        tiers.flush();
        // It takes the place of the fourth in host memory, which is on disk.
        let loaded = tiers.loaded();
        assert!(matches!(loaded.entries[..], [(key, Some(_))] if key == [2; 16]));
        assert!(loaded.gone.is_empty());
        // The third leaves the disk; the fifth and then the second leave host memory.
        assert_eq!(tiers.put([6; 16], page()), [[3; 16]]);
        assert!(matches!(tiers.get(&[2; 16]), Stored::Here(_)));
    }

    /// Its file made room while it was being read, and what is read does not come.
    #[test]
    fn an_entry_that_makes_room_in_a_directory_that_hangs_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut tiers = Tiers::disk(0, folder.path(), 1000, b"model").expect("opens");
        (1..=2).for_each(|key| announce(&mut tiers, key));
        assert!(tiers.put([1; 16], page()).is_empty());
        tiers.flush();
        assert!(tiers.loaded().entries.is_empty());
        let hang = tiers.hang();
        assert!(matches!(tiers.get(&[1; 16]), Stored::Coming));
        assert!(tiers.put([2; 16], page()).is_empty(), "the first is being read");
        let loaded = tiers.loaded();
        assert!(matches!(loaded.entries[..], [(key, None)] if key == [1; 16]));
        assert_eq!(loaded.gone, [[1; 16]]);
        drop(hang);
    }

    #[test]
    fn an_entry_that_cannot_be_read_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut tiers = Tiers::disk(0, folder.path(), 1 << 20, b"model").expect("opens");
        announce(&mut tiers, 1);
        assert!(tiers.put([1; 16], page()).is_empty());
        tiers.flush();
        assert!(tiers.loaded().entries.is_empty());
        for file in std::fs::read_dir(folder.path()).expect("is there").flatten() {
            std::fs::remove_file(file.path()).expect("is there");
        }
        assert!(matches!(tiers.get(&[1; 16]), Stored::Coming));
        tiers.flush();
        let loaded = tiers.loaded();
        assert!(matches!(loaded.entries[..], [(key, None)] if key == [1; 16]));
        assert_eq!(loaded.gone, [[1; 16]]);
    }
}
