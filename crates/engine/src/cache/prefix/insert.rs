//! Entering texts, and what lower tiers hold.

use super::tree::{NodeId, Snapshot, bytes, digest, page_key, state_key};
use super::{Description, Inserted, Key, OfferedSnapshot, PrefixIndex};
use crate::cache::pages::Pools;
use std::cmp::Reverse;
use std::sync::Arc;

/// Most pages of a text that lower tiers are offered again at a time, from its beginning on. They
/// are safe on the device meanwhile, and where the tiers are smaller than that, most would be dropped
/// once more: a shared beginning comes back at once, a long text over several turns.
pub(super) const PAGES_AGAIN: usize = 16;

impl PrefixIndex {
    /// Enters the full pages of `tokens`, the beginning of a text that lies in `pages`. With
    /// `lowest`, also makes room for a snapshot of the state after `tokens`, which can be cut from
    /// there on; there may be no room. The index takes references of its own.
    pub fn insert(
        &mut self,
        salt: Option<&str>,
        tokens: &[u32],
        pages: &[u32],
        lowest: Option<usize>,
        pools: &mut Pools,
    ) -> Inserted {
        self.clock += 1;
        let mut inserted = Inserted::default();
        let root = self.root(salt);
        let mut id = root;
        let mut again = 0;
        for (text, &page) in tokens.chunks_exact(self.page_tokens).zip(pages) {
            let (parent, at_root) = (self.node(id).key, self.node(id).parent.is_none());
            id = match self.node(id).children.get(text) {
                Some(&child) => child,
                None => self.add_node(id, text.into()),
            };
            self.touch(id);
            let node = self.node(id);
            let (key, stored, held) = (node.key, node.stored, node.page);
            if held.is_none() {
                self.set_page(id, page, pools);
            }
            match stored {
                true => inserted.stored.push(key),
                false if held.is_none() || (self.tiers && again < PAGES_AGAIN) => {
                    again += usize::from(held.is_some());
                    let tokens = text.into();
                    let description = Description { key, parent, tokens, lowest: None, at_root };
                    inserted.pages.push((description, held.unwrap_or(page)));
                }
                false => {}
            }
        }
        if let Some(lowest) = lowest {
            self.add_snapshot(id, tokens, pages, lowest, pools, &mut inserted);
        }
        inserted.stored.reverse();
        self.bare_roots.push(root);
        self.remove_bare_roots();
        inserted
    }

    fn add_snapshot(
        &mut self,
        id: NodeId,
        tokens: &[u32],
        pages: &[u32],
        lowest: usize,
        pools: &mut Pools,
        inserted: &mut Inserted,
    ) {
        let node = self.node(id);
        let (end, parent) = (node.end, node.key);
        let tail: Arc<[u32]> = tokens[end..].into();
        if let Some(known) = node.snapshots.get(&tail) {
            if let (Some(slot), true) = (known.slot, known.lowest <= lowest) {
                // It serves every cut that the caller's would.
                let (key, lowest, open) = (known.key, Some(known.lowest), known.open);
                if known.stored {
                    inserted.stored.push(key);
                } else if self.tiers {
                    let tokens = tail.clone();
                    let description =
                        Description { key, parent, tokens, lowest, at_root: end == 0 };
                    let snapshot = OfferedSnapshot { description, slot, open, new: false };
                    inserted.snapshot = Some(snapshot);
                }
                return self.touch_snapshot(id, &tail);
            }
            self.drop_from_device(id, &tail, pools);
        }
        if self.snapshots_by_use.len() >= self.most_snapshots {
            self.evict_snapshot(pools);
        }
        if self.snapshots_by_use.len() >= self.most_snapshots {
            return;
        }
        let Some(slot) = pools.slots.take() else { return };
        let open = (!tail.is_empty()).then(|| pages[end / self.page_tokens]);
        if let Some(open) = open {
            pools.pages.retain_cached(open);
        }
        let key = digest(&[&parent, b"state", &bytes(&tail)]);
        self.by_key.insert(key, (id, Some(tail.clone())));
        let (position, used) = (tokens.len(), self.clock);
        let snapshot =
            Snapshot { key, position, lowest, slot: Some(slot), open, stored: false, used };
        self.snapshots_by_use.insert((used, Reverse(position), id, tail.clone()));
        self.node_mut(id).snapshots.insert(tail.clone(), snapshot);
        let description =
            Description { key, parent, tokens: tail, lowest: Some(lowest), at_root: end == 0 };
        inserted.snapshot = Some(OfferedSnapshot { description, slot, open, new: true });
    }

    /// Enters an entry that a lower tier holds. Returns false if its parent is not known (yet), or
    /// if it does not fit the tree.
    pub fn restore(&mut self, entry: &Description) -> bool {
        let entered = self.restore_under(entry);
        self.remove_bare_roots();
        entered
    }

    fn restore_under(&mut self, entry: &Description) -> bool {
        if entry.at_root && !self.by_key.contains_key(&entry.parent) {
            let root = self.add_root(entry.parent);
            self.bare_roots.push(root);
        }
        let Some(&(id, None)) = self.by_key.get(&entry.parent) else { return false };
        if entry.at_root != self.node(id).parent.is_none() {
            return false;
        }
        let end = self.node(id).end;
        match entry.lowest {
            None => {
                if entry.tokens.len() != self.page_tokens || entry.key != page_key(entry) {
                    return false;
                }
                let child = match self.node(id).children.get(&entry.tokens) {
                    Some(&child) => child,
                    None => self.add_node(id, entry.tokens.clone()),
                };
                self.node_mut(child).stored = true;
            }
            Some(lowest) => {
                let position = end + entry.tokens.len();
                if entry.tokens.len() >= self.page_tokens
                    || entry.key != state_key(entry)
                    || lowest > position
                {
                    return false;
                }
                let tail = entry.tokens.clone();
                self.by_key.insert(entry.key, (id, Some(tail.clone())));
                let used = self.clock;
                self.node_mut(id).snapshots.entry(tail).or_insert(Snapshot {
                    key: entry.key,
                    position,
                    lowest,
                    slot: None,
                    open: None,
                    stored: false,
                    used,
                });
                self.set_stored(&entry.key);
            }
        }
        true
    }

    /// Marks an entry as present in a lower tier, if the index still knows it.
    pub fn set_stored(&mut self, key: &Key) {
        match self.by_key.get(key).cloned() {
            Some((id, None)) => self.node_mut(id).stored = true,
            Some((id, Some(tail))) => {
                if let Some(snapshot) = self.node_mut(id).snapshots.get_mut(&tail) {
                    snapshot.stored = true;
                }
            }
            None => {}
        }
    }
}
