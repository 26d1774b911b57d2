//! Dropping entries of the index: the least recently used first, leaves before what they hang on.

use super::{Key, NodeId, PrefixIndex};
use crate::cache::pages::Pools;
use std::sync::Arc;

enum Candidate {
    Page(NodeId),
    Snapshot(NodeId, Arc<[u32]>),
}

impl PrefixIndex {
    /// Drops entries from the device until `pages` pages have been freed, or nothing more can be
    /// freed. Returns how many were.
    pub fn evict(&mut self, pages: usize, pools: &mut Pools) -> usize {
        let before = pools.pages.available();
        let mut held = self.on_device();
        // A page may be open in one snapshot and full in a node: it is free after both have gone.
        while self.evict_pass(before.saturating_add(pages), pools) < before.saturating_add(pages) {
            let now = self.on_device();
            if now == held {
                break;
            }
            held = now;
        }
        pools.pages.available() - before
    }

    /// Drops what can go until `wanted` pages are available. Returns how many are.
    fn evict_pass(&mut self, wanted: usize, pools: &mut Pools) -> usize {
        if pools.pages.available() >= wanted {
            return pools.pages.available();
        }
        for (_, _, candidate) in self.candidates() {
            match candidate {
                Candidate::Snapshot(id, tail) => {
                    if self.nodes[id].is_some() {
                        self.drop_from_device(id, &tail, pools);
                    }
                }
                Candidate::Page(id) => self.drop_page(id, pools),
            }
            if pools.pages.available() >= wanted {
                break;
            }
        }
        pools.pages.available()
    }

    /// Drops everything from the device, and forgets what is nowhere else.
    pub fn clear(&mut self, pools: &mut Pools) {
        self.evict(usize::MAX, pools);
    }

    /// Drops the least recently used snapshot from the device.
    pub(super) fn evict_snapshot(&mut self, pools: &mut Pools) {
        let oldest = self.candidates().into_iter().find_map(|(_, _, candidate)| match candidate {
            Candidate::Snapshot(id, tail) => Some((id, tail)),
            Candidate::Page(_) => None,
        });
        if let Some((id, tail)) = oldest {
            self.drop_from_device(id, &tail, pools);
        }
    }

    /// Forgets an entry that a lower tier turned out not to hold.
    pub fn forget(&mut self, key: &Key, pools: &mut Pools) {
        match self.by_key.get(key).cloned() {
            Some((id, None)) => {
                self.node_mut(id).stored = false;
                if self.node(id).page.is_none() {
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
    }

    /// What lies on the device, the first to go first.
    fn candidates(&self) -> Vec<(u64, usize, Candidate)> {
        let mut out = Vec::new();
        for (id, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            for (tail, snapshot) in &node.snapshots {
                if snapshot.slot.is_some() {
                    let candidate = Candidate::Snapshot(id, tail.clone());
                    out.push((snapshot.used, usize::MAX - snapshot.position, candidate));
                }
            }
            if node.page.is_some() {
                out.push((node.used, usize::MAX - node.end, Candidate::Page(id)));
            }
        }
        // A node is used whenever something under it is, so this order meets leaves first.
        out.sort_by_key(|&(used, shallow, _)| (used, shallow));
        out
    }

    /// Drops a snapshot's slot and open page; forgets it if it is nowhere else.
    pub(super) fn drop_from_device(&mut self, id: NodeId, tail: &Arc<[u32]>, pools: &mut Pools) {
        let Some(snapshot) = self.node_mut(id).snapshots.get_mut(tail) else { return };
        let (slot, open, stored) = (snapshot.slot.take(), snapshot.open.take(), snapshot.stored);
        if let Some(slot) = slot {
            pools.slots.release(slot);
            self.snapshots_on_device -= 1;
        }
        if let Some(open) = open {
            pools.pages.release(open);
        }
        if !stored {
            self.remove_snapshot(id, tail, pools);
        }
    }

    /// Drops a node's page, unless a sequence uses it: that would free nothing. What hangs under a
    /// page that is nowhere else is of no use without it.
    fn drop_page(&mut self, id: NodeId, pools: &mut Pools) {
        let Some(node) = &mut self.nodes[id] else { return };
        let Some(page) = node.page else { return };
        if pools.pages.refs(page) > 1 {
            return;
        }
        if node.stored {
            node.page = None;
            pools.pages.release(page);
        } else {
            self.remove_subtree(id, pools);
        }
    }

    fn remove_snapshot(&mut self, id: NodeId, tail: &Arc<[u32]>, pools: &mut Pools) {
        let Some(snapshot) = self.node_mut(id).snapshots.remove(tail) else { return };
        self.by_key.remove(&snapshot.key);
        if let Some(slot) = snapshot.slot {
            pools.slots.release(slot);
            self.snapshots_on_device -= 1;
        }
        if let Some(open) = snapshot.open {
            pools.pages.release(open);
        }
    }

    /// Forgets a node and everything under it.
    fn remove_subtree(&mut self, id: NodeId, pools: &mut Pools) {
        let children: Vec<NodeId> = self.node(id).children.values().copied().collect();
        children.into_iter().for_each(|child| self.remove_subtree(child, pools));
        let tails: Vec<_> = self.node(id).snapshots.keys().cloned().collect();
        tails.iter().for_each(|tail| self.remove_snapshot(id, tail, pools));
        if let Some(page) = self.node_mut(id).page.take() {
            pools.pages.release(page);
        }
        self.remove_node(id);
    }

    /// Takes an empty node out of the tree.
    fn remove_node(&mut self, id: NodeId) {
        let Some(node) = self.nodes[id].take() else { return };
        self.by_key.remove(&node.key);
        self.vacant.push(id);
        if let Some((parent, tokens)) = node.parent {
            self.node_mut(parent).children.remove(&tokens);
        }
    }

    /// Pages and snapshots that the index holds on the device.
    pub fn on_device(&self) -> (usize, usize) {
        let nodes = self.nodes.iter().flatten();
        let pages = nodes.filter(|node| node.page.is_some()).count();
        (pages, self.snapshots_on_device)
    }
}
