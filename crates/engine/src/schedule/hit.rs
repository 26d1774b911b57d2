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
    /// Takes an entry in. Returns false if it has another size or not the open page that it must, or
    /// cannot be cut where the hit ends: the file may be that of another process, which keeps the
    /// state of the same text with less of what lies before.
    fn take(&mut self, key: Key, entry: Entry, sizes: (usize, usize), open: usize) -> bool {
        let (slot, page) = sizes;
        match entry {
            Entry::Page(bytes) if bytes.len() == page => self.pages.push((key, bytes)),
            Entry::State(state)
                if state.lowest <= self.hit.cut
                    && state.slot.len() == slot
                    && (open == 0 || state.pages.len() == open)
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
        self.metrics.disk_losses(self.tiers.losses());
    }

    /// Takes in an entry that the device has saved for the lower tiers.
    pub(super) fn take_stored(&mut self, key: Key, entry: Entry) {
        let entry = self.tiers.described(&key, entry);
        let gone = self.tiers.put(key, entry.clone());
        self.hand_over(&key, Some(&entry));
        self.forget(&gone);
    }

    /// Forgets what no tier holds any more.
    fn forget(&mut self, gone: &[Key]) {
        if let Some(prefix) = &mut self.prefix {
            gone.iter().for_each(|key| prefix.forget(key, &mut self.pools));
        }
    }

    /// Hands an entry to the sequences that wait for it; they need not wait for one that is not to
    /// be had. While another save of it is on its way, they wait for that: the index knows the last
    /// one.
    fn hand_over(&mut self, key: &Key, entry: Option<&Entry>) {
        if self.tiers.expects(key) {
            return;
        }
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
            let (mut missing, mut silent) = (Vec::new(), false);
            for key in keys {
                let entry = match sequence.stored.here.get(&key) {
                    Some(entry) => Stored::Here(entry.clone()),
                    None => self.tiers.get(&key),
                };
                match entry {
                    Stored::Missing => missing.push(key),
                    // Known still: it is to be had again once the directory answers.
                    Stored::Silent => silent = true,
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
            } else if silent {
                return Prefix::Ready(None, lookup.shared);
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
                        let Snapshot { position, lowest, ref slot, .. } = *state;
                        let (slot, pages) = (slot.clone(), Vec::new());
                        state = Arc::new(Snapshot { position, lowest, slot, pages });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::pages::Pools;
    use crate::cache::prefix::{Description, PrefixIndex};
    use crate::cache::tiers::Tiers;
    use crate::config::ModelConfig;
    use crate::engine::EngineConfig;
    use crate::output::OutputText;
    use crate::request::{RequestHandle, RequestId, SamplingParams, event_queue};
    use crate::schedule::Shape;
    use crate::sequence::{Arrival, Form};
    use std::path::Path;
    use std::time::Instant;

    /// A process puts the state of a text of nine tokens, of which it says that it can be cut from
    /// `lowest` on. Returns the description.
    fn put(folder: &Path, lowest: usize) -> Description {
        let mut tiers = tiers(folder);
        let (mut index, mut pools) = (PrefixIndex::new(16, 1, b"model"), Pools::new(1, 1));
        let page = pools.pages.take().expect("room");
        let inserted = index.insert(None, &[1; 9], &[page], Some(lowest), &mut pools);
        let description = inserted.snapshot.expect("room").description;
        tiers.expect(description.clone());
        let state = Snapshot { position: 9, slot: vec![0; 8], pages: vec![vec![0; 4]], lowest: 0 };
        assert!(tiers.put(description.key, Entry::State(Arc::new(state))).is_empty());
        tiers.flush();
        description
    }

    fn tiers(folder: &Path) -> Tiers {
        Tiers::disk(1 << 10, folder, 1 << 20, b"model").expect("opens")
    }

    /// Two processes share a directory, and the second one's state reaches less far back.
    #[test]
    fn a_state_is_not_cut_before_its_own_lowest() {
        let folder = tempfile::tempdir().expect("a folder");
        let known = put(folder.path(), 4);
        let mut index = PrefixIndex::new(16, 1, b"model");
        assert!(index.restore(&known));
        let mut take = |cut: usize| {
            let hit = index.lookup(None, &[1; 9], cut).hit.expect("the index knows it");
            assert_eq!(hit.cut, cut);
            let mut tiers = tiers(folder.path());
            assert!(matches!(tiers.get(&known.key), Stored::Coming));
            tiers.flush();
            let (key, entry) = tiers.loaded().entries.remove(0);
            let mut found = Found { hit, pages: Vec::new(), state: None };
            found.take(key, entry.expect("is there"), (8, 4), 1)
        };
        assert!(take(5), "as it was put");
        assert_eq!(put(folder.path(), 9).key, known.key);
        // The index still believes that it can be cut from the fourth token on.
        assert!(!take(5), "the file is the other process's now");
        assert!(!take(8));
    }

    /// A file may hold any number of pages; a hit has room for the one that its cut lies in.
    #[test]
    fn a_state_brings_the_pages_that_are_loaded() {
        let (mut index, mut pools) = (PrefixIndex::new(16, 1, b"model"), Pools::new(1, 1));
        let page = pools.pages.take().expect("room");
        let inserted = index.insert(None, &[1; 9], &[page], Some(4), &mut pools);
        let key = inserted.snapshot.expect("room").description.key;
        let hit = index.lookup(None, &[1; 9], 8).hit.expect("found");
        let take = |pages: usize, open: usize| {
            let pages = vec![vec![0; 4]; pages];
            let state = Snapshot { position: 9, slot: vec![0; 8], pages, lowest: 4 };
            let mut found = Found { hit: hit.clone(), pages: Vec::new(), state: None };
            found.take(key, Entry::State(Arc::new(state)), (8, 4), open)
        };
        assert_eq!([0, 1, 2].map(|pages| take(pages, 1)), [false, true, false]);
        // None of them is loaded.
        assert_eq!([0, 1, 2].map(|pages| take(pages, 0)), [true; 3]);
    }

    fn scheduler(folder: &Path) -> Scheduler {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/config.json");
        let model = std::fs::read(path).expect("is there");
        let model = ModelConfig::from_json(&model).expect("is one");
        let shape = Shape::new(&model, &EngineConfig::default(), &[]).expect("fits together");
        let (identity, prefill) = (b"model".to_vec(), PrefillMode::Exact);
        let sizes = Shape { page_tokens: 16, slot_bytes: 8, page_bytes: 4, ..shape };
        let shape = Shape { identity, prefill, prefix_cache: true, ..sizes };
        Scheduler::new(shape, tiers(folder), Arc::default())
    }

    /// A sequence of twelve tokens, with its handle.
    fn sequence() -> (Sequence, RequestHandle) {
        let (sink, handle) = event_queue(RequestId(1));
        let arrival = Arrival {
            id: RequestId(1),
            priority: 0,
            salt: None,
            params: SamplingParams::greedy(),
            prompt: vec![1; 12],
            seed: 0,
            max_len: 20,
            form: Form::Free,
            leader: None,
            text: OutputText::new(None, Vec::new()),
            sink,
            time: Instant::now(),
        };
        (Sequence::new(arrival), handle)
    }

    /// What a directory holds that hangs is done without, and found again when it answers.
    #[test]
    fn a_directory_that_hangs_is_not_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        put(folder.path(), 4);
        let mut scheduler = scheduler(folder.path());
        let known = scheduler.known_prefixes();
        assert!(known > 0);
        let hang = scheduler.tiers.hang();
        let (mut waits, _handle) = sequence();
        assert!(matches!(scheduler.find_prefix(&mut waits), Prefix::Coming));
        scheduler.take_loaded();
        for _ in 0..2 {
            let (mut sequence, _handle) = sequence();
            let found = scheduler.find_prefix(&mut sequence);
            assert!(matches!(found, Prefix::Ready(None, 9)), "it is given up");
            assert!(sequence.stored.coming.is_empty());
        }
        assert_eq!(scheduler.known_prefixes(), known);
        drop(hang);
        scheduler.tiers.flush();
        scheduler.take_loaded();
        let (mut sequence, _handle) = sequence();
        assert!(matches!(scheduler.find_prefix(&mut sequence), Prefix::Coming));
        scheduler.tiers.flush();
        scheduler.take_loaded();
        sequence.stored = Default::default();
        let found = scheduler.find_prefix(&mut sequence);
        assert!(matches!(found, Prefix::Ready(Some(found), _) if found.hit.cut == 9));
    }

    /// Two states of one text are on their way: who waits gets the one that the index knows.
    #[test]
    fn a_state_that_was_announced_says_where_it_can_be_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let known = put(folder.path(), 4);
        let mut tiers = Tiers::host(1 << 10);
        for lowest in [9, 4] {
            tiers.expect(Description { lowest: Some(lowest), ..known.clone() });
        }
        for lowest in [9, 4] {
            assert!(tiers.expects(&known.key));
            let entry = Entry::State(Arc::default());
            let entry = tiers.described(&known.key, entry);
            assert!(matches!(&entry, Entry::State(state) if state.lowest == lowest));
            assert!(tiers.put(known.key, entry).is_empty());
        }
        assert!(!tiers.expects(&known.key));
        let Stored::Here(Entry::State(state)) = tiers.get(&known.key) else { panic!("is there") };
        assert_eq!(state.lowest, 4);
    }
}
