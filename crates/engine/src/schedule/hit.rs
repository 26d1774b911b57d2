//! Taking over what earlier requests left in the prefix cache.

use super::Scheduler;
use crate::cache::Snapshot;
use crate::cache::prefix::{Hit, Key, Place as Cached};
use crate::cache::tiers::{Entry, Stored};
use crate::engine::PrefillMode;
use crate::sequence::Sequence;
use crate::work::Op;
use std::sync::Arc;

/// A hit, and what of it lies in the lower tiers.
pub(super) struct Found {
    pub(super) hit: Hit,
    pages: Vec<(Key, Arc<Vec<u8>>)>,
    state: Option<Arc<Snapshot>>,
}

impl Found {
    /// Takes an entry in. Returns false if it has another size or fewer open pages than it must.
    fn take(&mut self, key: Key, entry: Entry, sizes: (usize, usize), open: usize) -> bool {
        let (slot, page) = sizes;
        match entry {
            Entry::Page(bytes) if bytes.len() == page => self.pages.push((key, bytes)),
            Entry::State(state)
                if state.slot.len() == slot
                    && state.pages.len() >= open
                    && state.pages.iter().all(|p| p.len() == page) =>
            {
                self.state = Some(state);
            }
            _ => return false,
        }
        true
    }

    fn page(&self, key: &Key) -> Option<Arc<Vec<u8>>> {
        self.pages.iter().find(|(k, _)| k == key).map(|(_, bytes)| bytes.clone())
    }
}

/// What a sequence can take over.
pub(super) enum Prefix {
    /// The longest usable prefix; and how many tokens some earlier text shares with it.
    Ready(Option<Found>, usize),
    /// Some of it is being read.
    Coming,
}

impl Scheduler {
    /// Takes in what has been read from a disk.
    pub(super) fn take_loaded(&mut self) {
        let loaded = self.tiers.loaded();
        for (key, entry) in &loaded.entries {
            self.hand_over(key, entry.as_ref());
        }
        self.forget(&loaded.gone);
    }

    /// Takes in an entry that the device has saved for the lower tiers.
    pub(super) fn take_stored(&mut self, key: Key, entry: Entry) {
        self.hand_over(&key, Some(&entry));
        let gone = self.tiers.put(key, entry);
        self.forget(&gone);
    }

    /// Forgets what no tier holds any more.
    fn forget(&mut self, gone: &[Key]) {
        if let Some(prefix) = &mut self.prefix {
            gone.iter().for_each(|key| prefix.forget(key, &mut self.pools));
        }
    }

    /// Hands an entry to the sequences that wait for it; they need not wait for one that is not to
    /// be had.
    fn hand_over(&mut self, key: &Key, entry: Option<&Entry>) {
        for sequence in self.sequences.values_mut() {
            if sequence.stored.coming.remove(key)
                && let Some(entry) = entry
            {
                sequence.stored.here.insert(*key, entry.clone());
            }
        }
    }

    /// The longest usable prefix of a sequence, with what of it lies in the lower tiers.
    pub(super) fn find_prefix(&mut self, sequence: &mut Sequence) -> Prefix {
        let Some(prefix) = &mut self.prefix else { return Prefix::Ready(None, 0) };
        if sequence.wants_prompt_logprobs() {
            return Prefix::Ready(None, 0);
        }
        if !sequence.stored.coming.is_empty() {
            return Prefix::Coming;
        }
        let len = sequence.tokens.len();
        let longest = match self.shape.prefill {
            PrefillMode::Off | PrefillMode::Exact => len - 1,
            // What the decoder keeps depends on where the prompt ends.
            PrefillMode::Compact | PrefillMode::Mask => {
                sequence.prompt_len.saturating_sub(self.shape.keep)
            }
        };
        loop {
            let lookup = prefix.lookup(sequence.salt.as_deref(), &sequence.tokens, longest);
            let Some(hit) = lookup.hit else { return Prefix::Ready(None, lookup.shared) };
            let mut found = Found { hit, pages: Vec::new(), state: None };
            let own = found.hit.open == Some(found.hit.state);
            let keys: Vec<Key> = found.hit.stored().collect();
            let mut missing = Vec::new();
            for key in keys {
                let entry = match sequence.stored.here.get(&key) {
                    Some(entry) => Stored::Here(entry.clone()),
                    None => self.tiers.get(&key),
                };
                match entry {
                    Stored::Missing => missing.push(key),
                    Stored::Coming => {
                        sequence.stored.coming.insert(key);
                    }
                    Stored::Here(entry) => {
                        // Kept until the sequence has its place: the tiers may drop it meanwhile.
                        sequence.stored.here.insert(key, entry.clone());
                        let sizes = (self.shape.slot_bytes, self.shape.page_bytes);
                        if !found.take(key, entry, sizes, usize::from(own)) {
                            missing.push(key);
                        }
                    }
                }
            }
            if !missing.is_empty() {
                missing.iter().for_each(|key| prefix.forget(key, &mut self.pools));
            } else if sequence.stored.coming.is_empty() {
                return Prefix::Ready(Some(found), lookup.shared);
            } else {
                return Prefix::Coming;
            }
        }
    }

    /// Plans the copies that a hit needs. Returns the sequence's pages: the shared ones, then fresh
    /// ones, of which the first takes the open page.
    pub(super) fn load_hit(&mut self, found: &Found, slot: u32, fresh: Vec<u32>) -> Vec<u32> {
        let hit = &found.hit;
        let mut fresh = fresh.into_iter();
        let mut pages = Vec::new();
        let mut loads = Vec::new();
        for (index, place) in hit.pages.iter().enumerate() {
            match place {
                Cached::Device(page) => pages.push(*page),
                Cached::Stored(key) => {
                    let Some(page) = fresh.next() else { break };
                    if let Some(bytes) = found.page(key) {
                        loads.push(Op::LoadPage { bytes, page });
                    }
                    if let Some(prefix) = &mut self.prefix {
                        prefix.loaded(hit, index, page, &mut self.pools);
                    }
                    pages.push(page);
                }
            }
        }
        pages.extend(fresh);
        let open = pages.get(hit.pages.len()).copied();
        // Copies first: a load may go to a page that the cache has just given up.
        if let (Some(Cached::Device(from)), Some(to)) = (hit.open, open) {
            self.ops.push(Op::CopyPage { from, to });
        }
        match hit.state {
            Cached::Device(from) => self.ops.push(Op::CopySlot { from, to: slot }),
            Cached::Stored(_) => {
                if let Some(state) = &found.state {
                    // The state brings its open page along, unless the cut lies before it.
                    let own = hit.open == Some(hit.state);
                    let mut state = state.clone();
                    if !own && !state.pages.is_empty() {
                        let (position, slot) = (state.position, state.slot.clone());
                        state = Arc::new(Snapshot { position, slot, pages: Vec::new() });
                    }
                    let to = open.filter(|_| own).into_iter().collect();
                    self.ops.push(Op::LoadState { state, slot, pages: to });
                }
            }
        }
        if let (Some(Cached::Stored(key)), Some(page)) = (hit.open, open)
            && let Some(bytes) = found.page(&key)
        {
            loads.push(Op::LoadPage { bytes, page });
        }
        self.ops.extend(loads);
        pages
    }
}
