//! The order in which entries were used.

use crate::cache::prefix::Key;
use std::collections::{BTreeMap, HashMap};

/// Keys, the least recently used first.
#[derive(Default)]
pub struct Order {
    clock: u64,
    used: HashMap<Key, u64>,
    by_use: BTreeMap<u64, Key>,
}

impl Order {
    /// Puts a key at the end, wherever it was.
    pub fn put_last(&mut self, key: Key) {
        self.clock += 1;
        if let Some(before) = self.used.insert(key, self.clock) {
            self.by_use.remove(&before);
        }
        self.by_use.insert(self.clock, key);
    }

    /// The first key.
    pub fn first(&self) -> Option<Key> {
        self.by_use.first_key_value().map(|(_, key)| *key)
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &Key) {
        if let Some(used) = self.used.remove(key) {
            self.by_use.remove(&used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_goes_to_the_end_when_it_is_used() {
        let mut order = Order::default();
        (1..=4).for_each(|key| order.put_last([key; 16]));
        order.put_last([1; 16]);
        order.remove(&[3; 16]);
        order.remove(&[9; 16]);
        assert_eq!(order.first(), Some([2; 16]));
        let left = std::iter::from_fn(|| {
            let first = order.first()?;
            order.remove(&first);
            Some(first)
        });
        let left: Vec<Key> = left.collect();
        assert_eq!(left, [[2; 16], [4; 16], [1; 16]]);
        assert!(order.used.is_empty() && order.by_use.is_empty());
    }
}
