//! Giving waiting requests a place.

use super::Scheduler;
use crate::cache::Snapshot;
use crate::cache::prefix::{Hit, Key, Place as Cached};
use crate::engine::PrefillMode;
use crate::request::RequestId;
use crate::sequence::{Place, Sequence, Swapped};
use crate::work::{Op, Opening};
use std::cmp::Reverse;
use std::sync::Arc;

/// Fewest tokens that a snapshot at a point of divergence must save a later visitor.
const WORTH_A_SNAPSHOT: usize = 16;

impl Scheduler {
    /// Gives places to waiting requests, first come first served within a priority, while there is
    /// room.
    pub fn admit(&mut self) {
        while self.running.len() < self.shape.max_seqs {
            let Some(&rank) = self.waiting.first() else { return };
            let Some(mut sequence) = self.sequences.remove(&rank.1) else { return };
            let admitted = sequence.in_flight == 0 && self.give_place(&mut sequence);
            if admitted {
                self.waiting.remove(&rank);
                if !sequence.started {
                    self.waiting_tokens -= sequence.prompt_len;
                    self.metrics.queued_for(sequence.arrival.elapsed());
                }
                sequence.started = true;
                self.running.insert((Reverse(sequence.priority), sequence.id));
            }
            self.sequences.insert(rank.1, sequence);
            if !admitted {
                return;
            }
        }
    }

    /// Takes a slot and pages for everything known of a sequence; all or nothing.
    fn give_place(&mut self, sequence: &mut Sequence) -> bool {
        let len = sequence.tokens.len();
        // A page to spare for each running sequence, so that none is pushed out at once.
        let spare = self.running.len();
        match std::mem::take(&mut sequence.swapped) {
            Swapped::Saving => {
                sequence.swapped = Swapped::Saving;
                false
            }
            Swapped::Saved(state) => {
                if self.restore_swapped(sequence, &state, spare) {
                    self.swapped_bytes -= self.swapped_size(&state);
                    return true;
                }
                sequence.swapped = Swapped::Saved(state);
                false
            }
            Swapped::No => {
                if sequence.wants_prompt_logprobs() {
                    sequence.prompt_logprobs.clear();
                }
                let (hit, shared) = self.find_prefix(sequence);
                let cut = hit.as_ref().map_or(0, |found| found.hit.cut);
                let wanted = self.shape.pages_for(len + 1);
                let Some((slot, pages)) = self.take_place(wanted, hit.as_ref(), spare) else {
                    return false;
                };
                self.open(sequence, slot);
                if !sequence.started {
                    sequence.usage.cached_tokens = cut;
                    self.metrics.prefix(sequence.prompt_len, cut);
                }
                let stops = self.stops(sequence, cut, shared);
                sequence.place = Some(Place {
                    slot,
                    pages,
                    next: cut,
                    target: len,
                    served: 0,
                    base: cut,
                    window_from: 0,
                    complete_from: 0,
                    stops,
                    written: cut,
                });
                true
            }
        }
    }

    pub(super) fn open(&mut self, sequence: &Sequence, slot: u32) {
        self.ops.push(Op::Open(Box::new(Opening {
            slot,
            params: sequence.params.clone(),
            seed: sequence.seed,
            sample: sequence.params.sample,
            grammar: sequence.form.grammar().cloned(),
            tokens: sequence.tokens.clone(),
            prompt_len: sequence.prompt_len,
        })));
    }

    fn restore_swapped(
        &mut self,
        sequence: &mut Sequence,
        state: &Arc<Snapshot>,
        spare: usize,
    ) -> bool {
        let len = sequence.tokens.len();
        let wanted = state.pages.len().max(self.shape.pages_for(len + 1));
        let Some((slot, pages)) = self.take_place(wanted, None, spare) else { return false };
        self.open(sequence, slot);
        let state = state.clone();
        let loaded = pages[..state.pages.len()].to_vec();
        self.ops.push(Op::LoadState { state, slot, pages: loaded });
        let from = self.shape.prompt_window_from(sequence);
        sequence.place = Some(Place {
            slot,
            pages,
            next: len - 1,
            target: len,
            served: 0,
            base: len - 1,
            window_from: from,
            complete_from: len,
            stops: vec![len],
            written: len,
        });
        true
    }

    /// Takes a slot and `wanted` pages, of which a hit's come from the prefix cache.
    fn take_place(
        &mut self,
        wanted: usize,
        found: Option<&Found>,
        spare: usize,
    ) -> Option<(u32, Vec<u32>)> {
        let Some(found) = found else {
            self.make_room(wanted + spare);
            let pages = self.take_pages(wanted)?;
            let slot = self.pools.slots.take();
            debug_assert!(slot.is_some(), "every running sequence and snapshot has a slot");
            return slot.map(|slot| (slot, pages));
        };
        // What the hit needs must not be evicted to make room for it.
        let hit = &found.hit;
        let device = |place: &Cached| match place {
            Cached::Device(number) => Some(*number),
            Cached::Stored(_) => None,
        };
        let shared: Vec<u32> = hit.pages.iter().chain(&hit.open).filter_map(device).collect();
        shared.iter().for_each(|&page| self.pools.pages.retain(page));
        let state = device(&hit.state);
        state.iter().for_each(|&slot| self.pools.slots.retain(slot));

        let kept = hit.pages.iter().filter_map(device).count();
        self.make_room(wanted - kept + spare);
        let fresh = self.take_pages(wanted - kept);
        let place = fresh.and_then(|fresh| {
            let slot = self.pools.slots.take();
            debug_assert!(slot.is_some(), "every running sequence and snapshot has a slot");
            slot.map(|slot| (slot, self.load_hit(found, slot, fresh)))
        });
        state.iter().for_each(|&slot| self.pools.slots.release(slot));
        if place.is_none() {
            shared.iter().for_each(|&page| self.pools.pages.release(page));
        } else if let Some(open) = hit.open.as_ref().and_then(device) {
            self.pools.pages.release(open);
        }
        place
    }

    /// Plans the copies that a hit needs. Returns the sequence's pages: the shared ones, then fresh
    /// ones, of which the first takes the open page.
    fn load_hit(&mut self, found: &Found, slot: u32, fresh: Vec<u32>) -> Vec<u32> {
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

    /// The longest usable prefix of a sequence, with what of it lies in the lower tiers; and how
    /// many tokens some earlier text shares with it.
    fn find_prefix(&mut self, sequence: &Sequence) -> (Option<Found>, usize) {
        let Some(prefix) = &mut self.prefix else { return (None, 0) };
        if sequence.wants_prompt_logprobs() {
            return (None, 0);
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
            let Some(hit) = lookup.hit else { return (None, lookup.shared) };
            let mut found = Found { hit, pages: Vec::new(), state: None };
            let mut missing = Vec::new();
            for place in found.hit.pages.iter().chain(&found.hit.open) {
                if let Cached::Stored(key) = place
                    && *place != found.hit.state
                {
                    match self.tiers.page(key, self.shape.page_bytes) {
                        Some(bytes) => found.pages.push((*key, bytes)),
                        None => missing.push(*key),
                    }
                }
            }
            if let Cached::Stored(key) = found.hit.state {
                let pages = usize::from(found.hit.open == Some(found.hit.state));
                let (slot, page) = (self.shape.slot_bytes, self.shape.page_bytes);
                found.state = self.tiers.state(&key, slot, page).filter(|s| s.pages.len() >= pages);
                if found.state.is_none() {
                    missing.push(key);
                }
            }
            if missing.is_empty() {
                return (Some(found), lookup.shared);
            }
            missing.iter().for_each(|key| prefix.forget(key, &mut self.pools));
        }
    }

    /// Where chunks must end, ascending: at the end of what is known; where the text leaves earlier
    /// ones, if a snapshot there saves the next visitor something; and where the decoder's part of
    /// a compact prompt begins.
    fn stops(&self, sequence: &Sequence, cut: usize, shared: usize) -> Vec<usize> {
        let len = sequence.tokens.len();
        let mut stops = Vec::new();
        if self.prefix.is_some() {
            let point = match self.shape.prefill {
                PrefillMode::Off | PrefillMode::Exact => shared.min(len),
                PrefillMode::Compact | PrefillMode::Mask => {
                    let decoder = sequence.prompt_len.saturating_sub(self.shape.keep);
                    if shared >= cut + WORTH_A_SNAPSHOT { shared.min(decoder) } else { decoder }
                }
            };
            if point >= cut + WORTH_A_SNAPSHOT && point < len {
                stops.push(point);
            }
            if matches!(self.shape.prefill, PrefillMode::Compact | PrefillMode::Mask) {
                let decoder = sequence.prompt_len.saturating_sub(self.shape.keep);
                if decoder > point && decoder >= cut + WORTH_A_SNAPSHOT && decoder < len {
                    stops.push(decoder);
                }
            }
        }
        stops.push(len);
        stops
    }
}

/// A hit, and what of it lies in the lower tiers.
struct Found {
    hit: Hit,
    pages: Vec<(Key, Arc<Vec<u8>>)>,
    state: Option<Arc<Snapshot>>,
}

impl Found {
    fn page(&self, key: &Key) -> Option<Arc<Vec<u8>>> {
        self.pages.iter().find(|(k, _)| k == key).map(|(_, bytes)| bytes.clone())
    }
}

impl super::Shape {
    /// Where the decoder's windows of a sequence begin once its prompt has been read.
    pub(super) fn prompt_window_from(&self, sequence: &Sequence) -> usize {
        match self.prefill {
            PrefillMode::Off | PrefillMode::Exact => 0,
            PrefillMode::Compact | PrefillMode::Mask => {
                sequence.prompt_len.saturating_sub(self.keep)
            }
        }
    }
}

impl Scheduler {
    /// Frees what a sequence has on the host.
    pub(super) fn drop_swapped(&mut self, sequence: &mut Sequence) {
        if let Swapped::Saved(state) = std::mem::take(&mut sequence.swapped) {
            self.swapped_bytes -= self.swapped_size(&state);
        }
    }

    fn swapped_size(&self, state: &Snapshot) -> usize {
        self.shape.slot_bytes + state.pages.len() * self.shape.page_bytes
    }

    /// Notes that a state has arrived on the host.
    pub(super) fn saved(&mut self, id: RequestId, state: Snapshot) {
        let size = self.swapped_size(&state);
        match self.sequences.get_mut(&id) {
            Some(sequence) if matches!(sequence.swapped, Swapped::Saving) => {
                sequence.swapped = Swapped::Saved(Arc::new(state));
            }
            _ => self.swapped_bytes -= size,
        }
    }
}
