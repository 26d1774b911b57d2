//! Taking a place away: the last sequence in line gives way, and comes back later as if nothing had
//! happened.

use super::Scheduler;
use crate::request::RequestId;
use crate::sequence::Swapped;
use crate::work::{Op, SaveName};
use std::cmp::Reverse;

impl Scheduler {
    /// Extends a running sequence's pages to `wanted`, at the cost of the prefix cache and then of
    /// sequences behind it. Returns false if it lost its own place.
    pub(super) fn grow(&mut self, id: RequestId, wanted: usize) -> bool {
        loop {
            let Some(place) = self.sequences.get(&id).and_then(|s| s.place.as_ref()) else {
                return false;
            };
            let missing = wanted.saturating_sub(place.pages.len());
            if missing == 0 {
                return true;
            }
            if let Some(pages) = self.take_pages(missing) {
                if let Some(place) = self.sequences.get_mut(&id).and_then(|s| s.place.as_mut()) {
                    place.pages.extend(pages);
                }
                return true;
            }
            let Some(&(_, last)) = self.running.last() else { return false };
            self.preempt(last);
            if last == id {
                return false;
            }
        }
    }

    /// Takes a running sequence's place away. Its state goes to the host if it decodes and there is
    /// room, else it is computed again. What steps in flight produce for it stays valid.
    fn preempt(&mut self, id: RequestId) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        if let Some(place) = &sequence.place {
            let size = self.shape.slot_bytes + place.pages.len() * self.shape.page_bytes;
            if !place.reading() && self.swapped_bytes + size <= self.shape.swap_bytes {
                let (name, slot) = (SaveName::Swap(id), place.slot);
                self.ops.push(Op::SaveState { name, slot, pages: place.pages.clone() });
                self.swapped_bytes += size;
                sequence.swapped = Swapped::Saving;
            }
        }
        self.metrics.preempted(matches!(sequence.swapped, Swapped::Saving));
        self.vacate(&mut sequence);
        sequence.usage.preemptions += 1;
        let rank = (Reverse(sequence.priority), id);
        self.running.remove(&rank);
        self.waiting.insert(rank);
        self.sequences.insert(id, sequence);
    }
}
