//! Lower tiers of the prefix cache: host memory, and a directory that survives a restart.
//!
//! Entries are written through when the index takes them in, so the device can drop its copy at any
//! time. An entry that is missing, damaged or of another size is a miss, never an error.

mod disk;
mod host;

use super::Snapshot;
use super::prefix::{Description, Key, PrefixIndex};
use disk::Disk;
use host::Host;
use std::collections::HashMap;
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
    fn bytes(&self) -> usize {
        match self {
            Entry::Page(bytes) => bytes.len(),
            Entry::State(state) => {
                state.slot.len() + state.pages.iter().map(Vec::len).sum::<usize>()
            }
        }
    }
}

/// The lower tiers; none by default.
#[derive(Default)]
pub struct Tiers {
    host: Option<Host>,
    disk: Option<Disk>,
    /// Entries on their way from the device.
    expected: HashMap<Key, Description>,
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
        self.expected.insert(description.key, description);
    }

    /// Takes in a page. Returns whether it is kept.
    pub fn put_page(&mut self, key: Key, bytes: Vec<u8>) -> bool {
        self.put(key, Entry::Page(Arc::new(bytes)))
    }

    /// Takes in a state. Returns whether it is kept.
    pub fn put_state(&mut self, key: Key, state: Snapshot) -> bool {
        self.put(key, Entry::State(Arc::new(state)))
    }

    fn put(&mut self, key: Key, entry: Entry) -> bool {
        let Some(description) = self.expected.remove(&key) else { return false };
        if let Some(disk) = &mut self.disk {
            disk.put(description, entry.clone());
        }
        self.host.as_mut().is_some_and(|host| host.put(key, entry)) || self.disk.is_some()
    }

    /// The page `key`, of `len` bytes.
    pub fn page(&mut self, key: &Key, len: usize) -> Option<Arc<Vec<u8>>> {
        match self.get(key)? {
            Entry::Page(bytes) if bytes.len() == len => Some(bytes),
            _ => None,
        }
    }

    /// The state `key`, with `slot` bytes of rings and pages of `page` bytes.
    pub fn state(&mut self, key: &Key, slot: usize, page: usize) -> Option<Arc<Snapshot>> {
        let fits = |s: &Snapshot| s.slot.len() == slot && s.pages.iter().all(|p| p.len() == page);
        match self.get(key)? {
            Entry::State(state) if fits(&state) => Some(state),
            _ => None,
        }
    }

    fn get(&mut self, key: &Key) -> Option<Entry> {
        if let Some(entry) = self.host.as_mut().and_then(|host| host.get(key)) {
            return Some(entry);
        }
        let entry = self.disk.as_mut()?.get(key)?;
        if let Some(host) = &mut self.host {
            host.put(*key, entry.clone());
        }
        Some(entry)
    }

    /// Waits until everything taken in is on disk.
    pub fn flush(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.flush();
        }
    }
}
