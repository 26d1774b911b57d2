//! Which prefixes of earlier requests are still there: a radix tree over pages of tokens.
//!
//! A node is one full page of text after its parent's; it refers to the page of shared rows, on the
//! device or in a lower tier. What sequences do not share (window rings, pending rows, the open
//! page) is kept in snapshots at chosen positions; a hit ends where a snapshot can be cut. The index
//! holds a reference to every page and slot that it names, and decides what to drop.

mod evict;
#[cfg(test)]
mod tests;

use super::pages::Pools;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

/// Names an entry in the lower tiers: a hash of everything that the entry's bytes depend on.
pub type Key = [u8; 16];

type NodeId = usize;

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
}

/// Result of a lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// The longest usable prefix.
    pub hit: Option<Hit>,
    /// Tokens that some earlier text shares with this one, usable or not.
    pub shared: usize,
}

/// A state that sequences can start from.
struct Snapshot {
    key: Key,
    /// Tokens it covers.
    position: usize,
    /// Earliest position at which it can be cut.
    lowest: usize,
    /// Slot of the rings.
    slot: Option<u32>,
    /// Page that `position` lies in, unless a border; present if `slot` is.
    open: Option<u32>,
    stored: bool,
    used: u64,
}

struct Node {
    key: Key,
    parent: Option<(NodeId, Arc<[u32]>)>,
    /// Tokens up to the end of this node's page; 0 for roots.
    end: usize,
    children: BTreeMap<Arc<[u32]>, NodeId>,
    snapshots: BTreeMap<Arc<[u32]>, Snapshot>,
    page: Option<u32>,
    stored: bool,
    used: u64,
}

/// What an insertion added, for the lower tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// Pages that are new to the index.
    pub pages: Vec<(Description, u32)>,
    /// The new snapshot: to be copied into `slot`.
    pub snapshot: Option<NewSnapshot>,
}

/// A snapshot that the index has made room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSnapshot {
    /// What it is.
    pub description: Description,
    /// Slot to copy the rings to.
    pub slot: u32,
    /// Its open page.
    pub open: Option<u32>,
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
    snapshots_on_device: usize,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    by_key: HashMap<Key, Known>,
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
            snapshots_on_device: 0,
            nodes: Vec::new(),
            vacant: Vec::new(),
            by_key: HashMap::new(),
            clock: 0,
        }
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
        let now = self.clock;
        for &id in &path[..=depth] {
            self.node_mut(id).used = now;
        }
        let snapshot = self.node_mut(path[depth]).snapshots.get_mut(tail);
        let snapshot = snapshot.expect("the lookup found it");
        snapshot.used = now;
        let stored = Place::Stored(snapshot.key);
        let open = match within {
            Some(place) => Some(place),
            None if border => None,
            None => Some(snapshot.open.map_or(stored, Place::Device)),
        };
        let state = snapshot.slot.map_or(stored, Place::Device);
        Hit { cut, pages, open, state, nodes: path[1..=full].to_vec() }
    }

    /// Tells the index that a full page of `hit`, the `index`th, was loaded into `page`. The index
    /// takes a reference.
    pub fn loaded(&mut self, hit: &Hit, index: usize, page: u32, pools: &mut Pools) {
        let node = self.node_mut(hit.nodes[index]);
        if node.page.is_none() {
            node.page = Some(page);
            pools.pages.retain(page);
        }
    }

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
        let now = self.clock;
        let mut inserted = Inserted::default();
        let mut id = self.root(salt);
        self.node_mut(id).used = now;
        for (text, &page) in tokens.chunks_exact(self.page_tokens).zip(pages) {
            let (parent, at_root) = (self.node(id).key, self.node(id).parent.is_none());
            id = match self.node(id).children.get(text) {
                Some(&child) => child,
                None => self.add_node(id, text.into()),
            };
            let node = self.node_mut(id);
            node.used = now;
            if node.page.is_none() {
                node.page = Some(page);
                pools.pages.retain(page);
                if !node.stored {
                    let tokens = text.into();
                    let key = node.key;
                    let description = Description { key, parent, tokens, lowest: None, at_root };
                    inserted.pages.push((description, page));
                }
            }
        }
        if let Some(lowest) = lowest {
            inserted.snapshot = self.add_snapshot(id, tokens, pages, lowest, pools);
        }
        inserted
    }

    fn add_snapshot(
        &mut self,
        id: NodeId,
        tokens: &[u32],
        pages: &[u32],
        lowest: usize,
        pools: &mut Pools,
    ) -> Option<NewSnapshot> {
        let now = self.clock;
        let node = self.node_mut(id);
        let (end, parent) = (node.end, node.key);
        let tail: Arc<[u32]> = tokens[end..].into();
        if let Some(known) = node.snapshots.get_mut(&tail) {
            known.used = now;
            if known.slot.is_some() && known.lowest <= lowest {
                return None;
            }
            self.drop_from_device(id, &tail, pools);
        }
        if self.snapshots_on_device >= self.most_snapshots {
            self.evict_snapshot(pools);
        }
        if self.snapshots_on_device >= self.most_snapshots {
            return None;
        }
        let slot = pools.slots.take()?;
        self.snapshots_on_device += 1;
        let open = (!tail.is_empty()).then(|| pages[end / self.page_tokens]);
        if let Some(open) = open {
            pools.pages.retain(open);
        }
        let key = digest(&[&parent, b"state", &bytes(&tail)]);
        self.by_key.insert(key, (id, Some(tail.clone())));
        let position = tokens.len();
        let snapshot =
            Snapshot { key, position, lowest, slot: Some(slot), open, stored: false, used: now };
        self.node_mut(id).snapshots.insert(tail.clone(), snapshot);
        let description =
            Description { key, parent, tokens: tail, lowest: Some(lowest), at_root: end == 0 };
        Some(NewSnapshot { description, slot, open })
    }

    /// Enters an entry that a lower tier holds. Returns false if its parent is not known (yet), or
    /// if it does not fit the tree.
    pub fn restore(&mut self, entry: &Description) -> bool {
        if entry.at_root && !self.by_key.contains_key(&entry.parent) {
            self.add_root(entry.parent);
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

    /// Key of the root of a salt's tree.
    fn root_key(&self, salt: Option<&str>) -> Key {
        digest(&[&self.identity, &[u8::from(salt.is_some())], salt.unwrap_or("").as_bytes()])
    }

    fn root(&mut self, salt: Option<&str>) -> NodeId {
        let key = self.root_key(salt);
        match self.by_key.get(&key) {
            Some(&(id, _)) => id,
            None => self.add_root(key),
        }
    }

    fn add_root(&mut self, key: Key) -> NodeId {
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

    fn add_node(&mut self, parent: NodeId, tokens: Arc<[u32]>) -> NodeId {
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
    fn path(&self, root: NodeId, tokens: &[u32]) -> Vec<NodeId> {
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
    fn shared(&self, id: NodeId, tokens: &[u32]) -> usize {
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

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("ids of removed nodes are not kept")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("ids of removed nodes are not kept")
    }
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn page_key(entry: &Description) -> Key {
    digest(&[&entry.parent, b"page", &bytes(&entry.tokens)])
}

fn state_key(entry: &Description) -> Key {
    digest(&[&entry.parent, b"state", &bytes(&entry.tokens)])
}

fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|t| t.to_le_bytes()).collect()
}

/// Hash of parts with their lengths.
fn digest(parts: &[&[u8]]) -> Key {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    std::array::from_fn(|i| hash[i])
}
