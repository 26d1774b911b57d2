//! Giving waiting requests a place.

use super::Scheduler;
use super::hit::{Found, Prefix};
use crate::cache::Snapshot;
use crate::cache::prefix::Place as Cached;
use crate::engine::PrefillMode;
use crate::request::RequestId;
use crate::sequence::{Place, Sequence, Swapped};
use crate::work::{Op, Opening};
use std::cmp::Reverse;
use std::ops::Bound;
use std::sync::Arc;

/// Fewest tokens that a snapshot at a point of divergence must save a later visitor.
const WORTH_A_SNAPSHOT: usize = 16;

/// What came of looking for a place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Admission {
    Placed,
    /// Its prefix is being read; others may go first.
    Coming,
    NoRoom,
}

impl Scheduler {
    /// Gives places to waiting requests, first come first served within a priority, while there is
    /// room. One whose prefix is being read from a disk lets others go first, and takes no place
    /// from them meanwhile; one more than there are places may wait so.
    pub fn admit(&mut self) {
        self.take_loaded();
        let (mut coming, mut after) = (0, Bound::Unbounded);
        while self.running.len() < self.shape.max_seqs && coming <= self.shape.max_seqs {
            let Some(&rank) = self.waiting.range((after, Bound::Unbounded)).next() else { return };
            let Some(mut sequence) = self.sequences.remove(&rank.1) else { return };
            let admission = match sequence.in_flight {
                0 => self.give_place(&mut sequence),
                _ => Admission::NoRoom,
            };
            if admission == Admission::Placed {
                self.waiting.remove(&rank);
                if std::mem::take(&mut sequence.counted) {
                    self.waiting_tokens -= sequence.prompt_len;
                }
                if !sequence.started {
                    self.metrics.queued_for(sequence.arrival.elapsed());
                    sequence.admitted();
                }
                sequence.started = true;
                self.running.insert((Reverse(sequence.priority), sequence.id));
            }
            self.sequences.insert(rank.1, sequence);
            match admission {
                Admission::Placed => {}
                Admission::Coming => (coming, after) = (coming + 1, Bound::Excluded(rank)),
                Admission::NoRoom => return,
            }
        }
    }

    /// Takes a slot and pages for everything known of a sequence; all or nothing.
    fn give_place(&mut self, sequence: &mut Sequence) -> Admission {
        let len = sequence.tokens.len();
        // A page to spare for each running sequence, so that none is pushed out at once.
        let spare = self.running.len();
        match std::mem::take(&mut sequence.swapped) {
            Swapped::Saving => {
                sequence.swapped = Swapped::Saving;
                Admission::NoRoom
            }
            Swapped::Saved(state) => {
                if self.restore_swapped(sequence, &state, spare) {
                    self.swapped_bytes -= self.swapped_size(&state);
                    return Admission::Placed;
                }
                sequence.swapped = Swapped::Saved(state);
                Admission::NoRoom
            }
            Swapped::No => {
                if sequence.wants_prompt_logprobs() {
                    sequence.prompt_logprobs.clear();
                }
                let (hit, shared) = match self.find_prefix(sequence) {
                    Prefix::Ready(hit, shared) => (hit, shared),
                    Prefix::Coming => return Admission::Coming,
                };
                let mut cut = hit.as_ref().map_or(0, |found| found.hit.cut);
                let wanted = self.shape.pages_for(len + 1);
                let mut place = self.take_place(wanted, hit.as_ref(), spare);
                if place.is_none() && hit.is_some() && self.running.is_empty() {
                    // Nobody else has pages: it does not fit beside the open page that its hit is
                    // copied from, so waiting would not help.
                    cut = 0;
                    place = self.take_place(wanted, None, spare);
                }
                let Some((slot, pages)) = place else { return Admission::NoRoom };
                sequence.stored = Default::default();
                self.open(sequence, slot);
                if !sequence.started {
                    sequence.usage.cached_tokens = cut;
                    self.metrics.prefix(sequence.prompt_len, cut);
                }
                let stops = self.stops(sequence, cut, shared);
                sequence.place = Some(Place::at(slot, pages, cut, stops));
                Admission::Placed
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
        sequence.place = Some(Place::after(slot, pages, len, from));
        true
    }

    /// Takes a slot and `wanted` pages, of which a hit's come from the prefix cache. Where that can
    /// be, makes room for `spare` more.
    fn take_place(
        &mut self,
        wanted: usize,
        found: Option<&Found>,
        spare: usize,
    ) -> Option<(u32, Vec<u32>)> {
        let Some(found) = found else {
            self.make_room(wanted, spare);
            let pages = self.take_pages(wanted)?;
            return self.take_slot().map(|slot| (slot, pages));
        };
        let hit = &found.hit;
        let shared: Vec<u32> = hit
            .pages
            .iter()
            .filter_map(|place| match place {
                Cached::Device(page) => Some(*page),
                Cached::Stored(_) => None,
            })
            .collect();
        hit.pin(&mut self.pools);
        let wanted = wanted - shared.len();
        self.make_room(wanted, spare);
        let place = self.take_pages(wanted).and_then(|fresh| {
            let slot = self.take_slot()?;
            shared.iter().for_each(|&page| self.pools.pages.retain(page));
            Some((slot, self.load_hit(found, slot, fresh)))
        });
        hit.unpin(&mut self.pools);
        place
    }

    fn take_slot(&mut self) -> Option<u32> {
        let slot = self.pools.slots.take();
        debug_assert!(slot.is_some(), "every running sequence and snapshot has a slot");
        slot
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
