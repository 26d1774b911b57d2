//! Entries in host memory, the least recently used dropped first.

use super::Entry;
use crate::cache::prefix::Key;
use std::collections::{BTreeMap, HashMap};

/// Entries up to a number of bytes.
pub struct Host {
    limit: usize,
    bytes: usize,
    entries: HashMap<Key, (u64, Entry)>,
    by_use: BTreeMap<u64, Key>,
    clock: u64,
}

impl Host {
    /// Room for `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let (entries, by_use) = (HashMap::new(), BTreeMap::new());
        Self { limit, bytes: 0, entries, by_use, clock: 0 }
    }

    /// Takes an entry in. Returns what is not here any more: the oldest ones make room; or this one,
    /// if it does not fit.
    pub fn put(&mut self, key: Key, entry: Entry) -> Vec<Key> {
        self.remove(&key);
        let size = entry.bytes();
        if size > self.limit {
            return vec![key];
        }
        let mut dropped = Vec::new();
        while self.bytes + size > self.limit {
            let Some((_, oldest)) = self.by_use.first_key_value() else { break };
            let oldest = *oldest;
            self.remove(&oldest);
            dropped.push(oldest);
        }
        self.clock += 1;
        self.bytes += size;
        self.by_use.insert(self.clock, key);
        self.entries.insert(key, (self.clock, entry));
        dropped
    }

    /// Whether an entry is here.
    pub fn holds(&self, key: &Key) -> bool {
        self.entries.contains_key(key)
    }

    /// An entry, marked as used.
    pub fn get(&mut self, key: &Key) -> Option<Entry> {
        let (used, entry) = self.entries.get_mut(key)?;
        self.clock += 1;
        self.by_use.remove(used);
        self.by_use.insert(self.clock, *key);
        *used = self.clock;
        Some(entry.clone())
    }

    fn remove(&mut self, key: &Key) {
        if let Some((used, entry)) = self.entries.remove(key) {
            self.by_use.remove(&used);
            self.bytes -= entry.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let page = |len| Entry::Page(Arc::new(vec![0; len]));
        let mut host = Host::new(10);
        assert!(host.put([1; 16], page(4)).is_empty());
        assert!(host.put([2; 16], page(4)).is_empty());
        assert!(host.get(&[1; 16]).is_some());
        assert_eq!(host.put([3; 16], page(4)), [[2; 16]]);
        assert!(host.get(&[2; 16]).is_none());
        assert!(host.get(&[1; 16]).is_some() && host.get(&[3; 16]).is_some());
        assert_eq!(host.put([4; 16], page(11)), [[4; 16]]);
        assert_eq!(host.put([1; 16], page(10)), [[3; 16]]);
        assert!(host.holds(&[1; 16]) && !host.holds(&[3; 16]));
        assert_eq!(host.bytes, 10);
        assert_eq!((host.entries.len(), host.by_use.len()), (1, 1));
    }
}
