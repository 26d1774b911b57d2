//! The tree: nodes by number, and the order in which they were used.

use super::{Description, Key, PrefixIndex};
use crate::cache::pages::Pools;
use sha2::{Digest, Sha256};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

pub(super) type NodeId = usize;

/// A page's place in the order of dropping: when it was used, then those that lie deeper first.
/// A node is used whenever something under it is, so leaves come before what they hang on.
pub(super) type PageRank = (u64, Reverse<usize>, NodeId);

/// The same for a snapshot.
pub(super) type SnapshotRank = (u64, Reverse<usize>, NodeId, Arc<[u32]>);

/// A state that sequences can start from.
pub(super) struct Snapshot {
    pub(super) key: Key,
    /// Tokens it covers.
    pub(super) position: usize,
    /// Earliest position at which it can be cut.
    pub(super) lowest: usize,
    /// Slot of the rings.
    pub(super) slot: Option<u32>,
    /// Page that `position` lies in, unless a border; present if `slot` is.
    pub(super) open: Option<u32>,
    pub(super) stored: bool,
    pub(super) used: u64,
}

pub(super) struct Node {
    pub(super) key: Key,
    pub(super) parent: Option<(NodeId, Arc<[u32]>)>,
    /// Tokens up to the end of this node's page; 0 for roots.
    pub(super) end: usize,
    pub(super) children: BTreeMap<Arc<[u32]>, NodeId>,
    pub(super) snapshots: BTreeMap<Arc<[u32]>, Snapshot>,
    pub(super) page: Option<u32>,
    pub(super) stored: bool,
    pub(super) used: u64,
}

impl PrefixIndex {
    /// Key of the root of a salt's tree.
    pub(super) fn root_key(&self, salt: Option<&str>) -> Key {
        digest(&[&self.identity, &[u8::from(salt.is_some())], salt.unwrap_or("").as_bytes()])
    }

    pub(super) fn root(&mut self, salt: Option<&str>) -> NodeId {
        let key = self.root_key(salt);
        match self.by_key.get(&key) {
            Some(&(id, _)) => id,
            None => self.add_root(key),
        }
    }

    pub(super) fn add_root(&mut self, key: Key) -> NodeId {
        self.place(Node {
            key,
            parent: None,
            end: 0,
            children: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            page: None,
            stored: false,
            used: 0,
        })
    }

    pub(super) fn add_node(&mut self, parent: NodeId, tokens: Arc<[u32]>) -> NodeId {
        let above = self.node(parent);
        let key = digest(&[&above.key, b"page", &bytes(&tokens)]);
        let node = Node {
            key,
            parent: Some((parent, tokens.clone())),
            end: above.end + self.page_tokens,
            children: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            page: None,
            stored: false,
            used: self.clock,
        };
        let id = self.place(node);
        self.node_mut(parent).children.insert(tokens, id);
        id
    }

    fn place(&mut self, node: Node) -> NodeId {
        let key = node.key;
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        self.by_key.insert(key, (id, None));
        id
    }

    /// The root and the nodes whose pages `tokens` begins with.
    pub(super) fn path(&self, root: NodeId, tokens: &[u32]) -> Vec<NodeId> {
        let mut path = vec![root];
        for text in tokens.chunks_exact(self.page_tokens) {
            match self.node(path[path.len() - 1]).children.get(text) {
                Some(&child) => path.push(child),
                None => break,
            }
        }
        path
    }

    /// Tokens shared with the text under `id`, the last node of a path.
    pub(super) fn shared(&self, id: NodeId, tokens: &[u32]) -> usize {
        let node = self.node(id);
        let rest = &tokens[node.end..];
        // The longest common prefix is that of a neighbour in the order.
        let children = &node.children;
        let near = [
            children
                .range::<[u32], _>((Bound::Unbounded, Bound::Included(rest)))
                .next_back()
                .map(|(text, _)| text),
            children
                .range::<[u32], _>((Bound::Included(rest), Bound::Unbounded))
                .next()
                .map(|(text, _)| text),
            node.snapshots
                .range::<[u32], _>((Bound::Unbounded, Bound::Included(rest)))
                .next_back()
                .map(|(text, _)| text),
            node.snapshots
                .range::<[u32], _>((Bound::Included(rest), Bound::Unbounded))
                .next()
                .map(|(text, _)| text),
        ];
        node.end + near.into_iter().flatten().map(|text| common(text, rest)).max().unwrap_or(0)
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("ids of removed nodes are not kept")
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("ids of removed nodes are not kept")
    }

    /// Marks a node as used now.
    pub(super) fn touch(&mut self, id: NodeId) {
        let now = self.clock;
        let node = self.node_mut(id);
        let (used, end) = (std::mem::replace(&mut node.used, now), Reverse(node.end));
        if node.page.is_some() && used != now {
            self.pages_by_use.remove(&(used, end, id));
            self.pages_by_use.insert((now, end, id));
        }
    }

    /// Marks a snapshot, which must be there, as used now.
    pub(super) fn touch_snapshot(&mut self, id: NodeId, tail: &Arc<[u32]>) {
        let now = self.clock;
        let Some(snapshot) = self.node_mut(id).snapshots.get_mut(tail) else { return };
        let used = std::mem::replace(&mut snapshot.used, now);
        if snapshot.slot.is_some() && used != now {
            let mut rank = (used, Reverse(snapshot.position), id, tail.clone());
            self.snapshots_by_use.remove(&rank);
            rank.0 = now;
            self.snapshots_by_use.insert(rank);
        }
    }

    /// Gives a node without a page one on the device.
    pub(super) fn set_page(&mut self, id: NodeId, page: u32, pools: &mut Pools) {
        let node = self.node_mut(id);
        node.page = Some(page);
        let rank = (node.used, Reverse(node.end), id);
        self.pages_by_use.insert(rank);
        pools.pages.retain_cached(page);
    }

    /// Drops a snapshot's slot and open page.
    pub(super) fn take_state(&mut self, id: NodeId, tail: &Arc<[u32]>, pools: &mut Pools) {
        let Some(snapshot) = self.node_mut(id).snapshots.get_mut(tail) else { return };
        let rank = (snapshot.used, Reverse(snapshot.position), id, tail.clone());
        let (slot, open) = (snapshot.slot.take(), snapshot.open.take());
        self.snapshots_by_use.remove(&rank);
        slot.into_iter().for_each(|slot| pools.slots.release(slot));
        open.into_iter().for_each(|open| pools.pages.release_cached(open));
    }

    /// Drops a node's page on the device.
    pub(super) fn take_page(&mut self, id: NodeId, pools: &mut Pools) {
        let node = self.node_mut(id);
        let Some(page) = node.page.take() else { return };
        let rank = (node.used, Reverse(node.end), id);
        self.pages_by_use.remove(&rank);
        pools.pages.release_cached(page);
    }
}

pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

pub(super) fn page_key(entry: &Description) -> Key {
    digest(&[&entry.parent, b"page", &bytes(&entry.tokens)])
}

pub(super) fn state_key(entry: &Description) -> Key {
    digest(&[&entry.parent, b"state", &bytes(&entry.tokens)])
}

pub(super) fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|t| t.to_le_bytes()).collect()
}

/// Hash of parts with their lengths.
pub(super) fn digest(parts: &[&[u8]]) -> Key {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    std::array::from_fn(|i| hash[i])
}
