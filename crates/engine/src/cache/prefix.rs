//! Which prefixes of earlier requests are still there: a radix tree over pages of tokens.
//!
//! A node is one full page of text after its parent's; it refers to the page of shared rows, on the
//! device or in a lower tier. What sequences do not share (window rings, pending rows, the open
//! page) is kept in snapshots at chosen positions; a hit ends where a snapshot can be cut. The index
//! holds a reference to every page and slot that it names, and decides what to drop.

mod evict;
mod insert;
#[cfg(test)]
mod tests;
mod tree;

use super::pages::Pools;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tree::{Node, NodeId, PageRank, SnapshotRank, common};

/// Names an entry in the lower tiers: a hash of everything that the entry's bytes depend on.
pub type Key = [u8; 16];

/// A node, or a snapshot of it by its tail.
type Known = (NodeId, Option<Arc<[u32]>>);

/// Where an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this page or slot of the device.
    Device(u32),
    /// In a lower tier.
    Stored(Key),
}

/// A usable prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Tokens whose state can be taken over.
    pub cut: usize,
    /// The shared rows of each full page before `cut`.
    pub pages: Vec<Place>,
    /// The page that `cut` lies in, to be copied; `None` at a page border. A stored one that has the
    /// key of `state` is part of that entry.
    pub open: Option<Place>,
    /// The rings.
    pub state: Place,
    nodes: Vec<NodeId>,
    /// Pages on the device without which the index would lose some of this.
    pages_needed: Vec<u32>,
}

impl Hit {
    /// Keys of what lies in a lower tier, each once.
    pub fn stored(&self) -> impl Iterator<Item = Key> + '_ {
        let open = self.open.iter().filter(|&&open| open != self.state);
        let places = self.pages.iter().chain(open).chain([&self.state]);
        places.filter_map(|place| match place {
            Place::Stored(key) => Some(*key),
            Place::Device(_) => None,
        })
    }

    /// Keeps the index from dropping any of this, until [`Hit::unpin`].
    pub fn pin(&self, pools: &mut Pools) {
        self.pages_needed.iter().for_each(|&page| pools.pages.retain(page));
        if let Place::Device(slot) = self.state {
            pools.slots.retain(slot);
        }
    }

    /// Undoes [`Hit::pin`].
    pub fn unpin(&self, pools: &mut Pools) {
        self.pages_needed.iter().for_each(|&page| pools.pages.release(page));
        if let Place::Device(slot) = self.state {
            pools.slots.release(slot);
        }
    }
}

/// Result of a lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// The longest usable prefix.
    pub hit: Option<Hit>,
    /// Tokens that some earlier text shares with this one, usable or not.
    pub shared: usize,
}

/// What an insertion added, for the lower tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// Pages for the lower tiers, from the first on: those that are new to the index; and, where
    /// there are lower tiers, the first few that these do not hold any more.
    pub pages: Vec<(Description, u32)>,
    /// Keys of what the lower tiers hold already, the text's beginning last.
    pub stored: Vec<Key>,
    /// The snapshot, unless the lower tiers hold it, or there are none and it is not new.
    pub snapshot: Option<OfferedSnapshot>,
}

/// A snapshot for the lower tiers, which the index has on the device or has made room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedSnapshot {
    /// What it is.
    pub description: Description,
    /// Slot of its rings.
    pub slot: u32,
    /// Its open page.
    pub open: Option<u32>,
    /// Whether the rings must be copied to `slot` first. Else they are there, and may serve earlier
    /// cuts than those of the text that was entered: nothing may be copied over them.
    pub new: bool,
}

/// What an entry of a lower tier is: enough to find its place in the tree again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its key.
    pub key: Key,
    /// Key of the node it hangs under; see `at_root`.
    pub parent: Key,
    /// A page's tokens, or the tokens of a state after its last full page.
    pub tokens: Arc<[u32]>,
    /// `None` for pages. Earliest position at which a state can be cut.
    pub lowest: Option<usize>,
    /// Whether the parent is a root.
    pub at_root: bool,
}

/// The index.
pub struct PrefixIndex {
    page_tokens: usize,
    identity: Vec<u8>,
    most_snapshots: usize,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    by_key: HashMap<Key, Known>,
    /// Nodes with a page on the device.
    pages_by_use: BTreeSet<PageRank>,
    /// Snapshots on the device.
    snapshots_by_use: BTreeSet<SnapshotRank>,
    /// Roots that may have nothing left under them.
    bare_roots: Vec<NodeId>,
    /// Whether there are lower tiers.
    tiers: bool,
    clock: u64,
}

impl PrefixIndex {
    /// An empty index over pages of `page_tokens` tokens that keeps at most `most_snapshots`
    /// snapshots on the device. Keys depend on `identity`, which names everything that cached bytes
    /// depend on besides the text.
    pub fn new(page_tokens: usize, most_snapshots: usize, identity: &[u8]) -> Self {
        Self {
            page_tokens,
            identity: identity.to_vec(),
            most_snapshots,
            nodes: Vec::new(),
            vacant: Vec::new(),
            by_key: HashMap::new(),
            pages_by_use: BTreeSet::new(),
            snapshots_by_use: BTreeSet::new(),
            bare_roots: Vec::new(),
            tiers: false,
            clock: 0,
        }
    }

    /// Says whether there are lower tiers, which want what they do not hold.
    pub fn with_tiers(mut self, tiers: bool) -> Self {
        self.tiers = tiers;
        self
    }

    /// Looks for the longest prefix of `tokens` that can be taken over, at most `longest` tokens,
    /// and marks it as used.
    pub fn lookup(&mut self, salt: Option<&str>, tokens: &[u32], longest: usize) -> Lookup {
        self.clock += 1;
        let Some(&(root, _)) = self.by_key.get(&self.root_key(salt)) else {
            return Lookup::default();
        };
        let path = self.path(root, tokens);
        let mut best: Option<(usize, usize, Arc<[u32]>)> = None;
        for (depth, &id) in path.iter().enumerate() {
            let node = self.node(id);
            for (tail, snapshot) in &node.snapshots {
                let matched = node.end + common(tail, &tokens[node.end..]);
                let cut = matched.min(snapshot.position).min(longest);
                let better = best.as_ref().is_none_or(|&(b, ..)| cut > b);
                if better && cut >= snapshot.lowest.max(1) && self.reaches(&path, depth, cut) {
                    best = Some((cut, depth, tail.clone()));
                }
            }
        }
        let shared = self.shared(path.last().copied().unwrap_or(root), tokens);
        let hit = best.map(|(cut, depth, tail)| self.hit(&path, cut, depth, &tail));
        Lookup { hit, shared }
    }

    /// Whether every page that a cut needs is somewhere.
    fn reaches(&self, path: &[NodeId], depth: usize, cut: usize) -> bool {
        let pages = cut.div_ceil(self.page_tokens).min(depth);
        path[1..=pages].iter().all(|&id| self.node(id).page.is_some() || self.node(id).stored)
    }

    fn hit(&mut self, path: &[NodeId], cut: usize, depth: usize, tail: &Arc<[u32]>) -> Hit {
        let full = cut / self.page_tokens;
        let border = cut.is_multiple_of(self.page_tokens);
        let place = |node: &Node| match node.page {
            Some(page) => Place::Device(page),
            None => Place::Stored(node.key),
        };
        let pages = path[1..=full].iter().map(|&id| place(self.node(id))).collect();
        let within = (!border && full < depth).then(|| place(self.node(path[full + 1])));
        path[..=depth].iter().for_each(|&id| self.touch(id));
        self.touch_snapshot(path[depth], tail);
        let snapshot = &self.node(path[depth]).snapshots[tail];
        let stored = Place::Stored(snapshot.key);
        let open = match within {
            Some(place) => Some(place),
            None if border => None,
            None => Some(snapshot.open.map_or(stored, Place::Device)),
        };
        let state = snapshot.slot.map_or(stored, Place::Device);
        let needed = path[1..=depth].iter().filter_map(|&id| self.node(id).page);
        let pages_needed = needed.chain(snapshot.open).collect();
        Hit { cut, pages, open, state, nodes: path[1..=full].to_vec(), pages_needed }
    }

    /// Tells the index that a full page of `hit`, the `index`th, was loaded into `page`. The index
    /// takes a reference.
    pub fn loaded(&mut self, hit: &Hit, index: usize, page: u32, pools: &mut Pools) {
        if self.node(hit.nodes[index]).page.is_none() {
            self.set_page(hit.nodes[index], page, pools);
        }
    }

    /// Pages and snapshots that the index holds on the device.
    pub fn on_device(&self) -> (usize, usize) {
        (self.pages_by_use.len(), self.snapshots_by_use.len())
    }

    /// Everything that the index knows of: pages and snapshots, on the device or in a lower tier,
    /// and the roots that they hang under.
    pub fn known(&self) -> usize {
        self.by_key.len()
    }
}
