//! Dropping entries of the index: the least recently used first, leaves before what they hang on.

use super::tree::{Node, NodeId};
use super::{Key, PrefixIndex};
use crate::cache::pages::Pools;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

impl PrefixIndex {
    /// Drops entries from the device until `pages` pages have been freed, or nothing more can be
    /// freed; what is pinned stays. Returns how many were. All that
    /// [`reclaimable`](crate::cache::pages::Pool::reclaimable) counts can be freed.
    pub fn evict(&mut self, pages: usize, pools: &mut Pools) -> usize {
        let before = pools.pages.available();
        let wanted = before.saturating_add(pages);
        loop {
            let held = self.on_device();
            self.evict_pass(wanted, pools);
            // A page may be open in one snapshot and full in a node: it is free after both have
            // gone.
            if pools.pages.available() >= wanted || self.on_device() == held {
                break;
            }
        }
        self.remove_bare_roots();
        pools.pages.available() - before
    }

    /// Drops what can go until `wanted` pages are available.
    fn evict_pass(&mut self, wanted: usize, pools: &mut Pools) {
        let (mut after_page, mut after_snapshot) = (Unbounded, Unbounded);
        while pools.pages.available() < wanted {
            let page = self.pages_by_use.range((after_page, Unbounded)).next().copied();
            let snapshot = self.snapshots_by_use.range((after_snapshot.clone(), Unbounded)).next();
            match (page, snapshot.cloned()) {
                (page, Some(rank)) if page.is_none_or(|p| (rank.0, rank.1) <= (p.0, p.1)) => {
                    if !self.is_pinned(rank.2, &rank.3, pools) {
                        self.drop_from_device(rank.2, &rank.3, pools);
                    }
                    after_snapshot = Excluded(rank);
                }
                (Some(rank), _) => {
                    self.drop_page(rank.2, pools);
                    after_page = Excluded(rank);
                }
                (None, _) => return,
            }
        }
    }

    /// Drops everything from the device, and forgets what is nowhere else.
    pub fn clear(&mut self, pools: &mut Pools) {
        self.evict(usize::MAX, pools);
    }

    /// Drops the least recently used snapshot from the device.
    pub(super) fn evict_snapshot(&mut self, pools: &mut Pools) {
        let mut ranks = self.snapshots_by_use.iter();
        let oldest = ranks.find(|rank| !self.is_pinned(rank.2, &rank.3, pools)).cloned();
        if let Some((_, _, id, tail)) = oldest {
            self.drop_from_device(id, &tail, pools);
        }
    }

    /// Whether others than the index refer to a snapshot's slot.
    fn is_pinned(&self, id: NodeId, tail: &Arc<[u32]>, pools: &Pools) -> bool {
        let slot = self.node(id).snapshots.get(tail).and_then(|snapshot| snapshot.slot);
        slot.is_some_and(|slot| pools.slots.refs(slot) > 1)
    }

    /// Forgets an entry that no lower tier holds, unless it lies on the device: then it goes when
    /// it leaves that. What hangs under a forgotten page is forgotten, too.
    pub fn forget(&mut self, key: &Key, pools: &mut Pools) {
        match self.by_key.get(key).cloned() {
            Some((id, None)) => {
                let node = self.node_mut(id);
                node.stored = false;
                if node.page.is_none() && node.parent.is_some() {
                    self.remove_subtree(id, pools);
                }
            }
            Some((id, Some(tail))) => {
                if let Some(snapshot) = self.node_mut(id).snapshots.get_mut(&tail) {
                    snapshot.stored = false;
                    if snapshot.slot.is_none() {
                        self.remove_snapshot(id, &tail, pools);
                    }
                }
            }
            None => {}
        }
        self.remove_bare_roots();
    }

    /// Drops a snapshot from the device; forgets it if it is nowhere else.
    pub(super) fn drop_from_device(&mut self, id: NodeId, tail: &Arc<[u32]>, pools: &mut Pools) {
        self.take_state(id, tail, pools);
        if self.node(id).snapshots.get(tail).is_some_and(|snapshot| !snapshot.stored) {
            self.remove_snapshot(id, tail, pools);
        }
    }

    /// Drops a node's page, unless others use it: that would free nothing. What hangs under a page
    /// that is nowhere else is of no use without it.
    fn drop_page(&mut self, id: NodeId, pools: &mut Pools) {
        let node = self.node(id);
        let Some(page) = node.page else { return };
        if pools.pages.refs(page) > 1 {
            return;
        }
        match node.stored {
            true => self.take_page(id, pools),
            false => self.remove_subtree(id, pools),
        }
    }

    fn remove_snapshot(&mut self, id: NodeId, tail: &Arc<[u32]>, pools: &mut Pools) {
        self.take_state(id, tail, pools);
        if let Some(snapshot) = self.node_mut(id).snapshots.remove(tail) {
            self.by_key.remove(&snapshot.key);
            self.bare_roots.push(id);
        }
    }

    /// Forgets a node and everything under it.
    fn remove_subtree(&mut self, id: NodeId, pools: &mut Pools) {
        // Parents before what hangs on them.
        let mut ids = vec![id];
        let mut next = 0;
        while let Some(&id) = ids.get(next) {
            ids.extend(self.node(id).children.values());
            next += 1;
        }
        for id in ids.into_iter().rev() {
            let tails: Vec<_> = self.node(id).snapshots.keys().cloned().collect();
            tails.iter().for_each(|tail| self.remove_snapshot(id, tail, pools));
            self.take_page(id, pools);
            self.remove_node(id);
        }
    }

    /// Takes an empty node out of the tree.
    fn remove_node(&mut self, id: NodeId) {
        let Some(node) = self.nodes[id].take() else { return };
        self.by_key.remove(&node.key);
        self.vacant.push(id);
        if let Some((parent, tokens)) = node.parent {
            self.node_mut(parent).children.remove(&tokens);
            self.bare_roots.push(parent);
        }
    }

    /// Takes out roots that have nothing left under them. Those that lost something are looked at,
    /// at the end of each change: until then ids of roots stay valid.
    pub(super) fn remove_bare_roots(&mut self) {
        while let Some(id) = self.bare_roots.pop() {
            let node = self.nodes[id].as_ref();
            let bare =
                |n: &Node| n.parent.is_none() && n.children.is_empty() && n.snapshots.is_empty();
            if node.is_some_and(bare) {
                self.remove_node(id);
            }
        }
    }
}
