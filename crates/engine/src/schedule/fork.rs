//! Several continuations of one prompt: it is read once, and its state is shared.

use super::Scheduler;
use crate::request::RequestId;
use crate::sequence::{Place, Sequence};
use crate::work::Op;
use std::cmp::Reverse;
use std::time::Instant;

impl Scheduler {
    /// Whether other continuations can wait for this request's prompt: it has not been read.
    pub(super) fn can_lead(&self, id: RequestId) -> bool {
        self.sequences.get(&id).is_some_and(|sequence| {
            let unread = sequence.place.as_ref().is_none_or(Place::reading);
            unread && sequence.output_len() == 0
        })
    }

    /// The last rows of a prompt have been planned: the other continuations start from the state
    /// after them, as far as there is room. The rest wait in line like any request.
    ///
    /// The copies are made before the next step, so they see the state right after the prompt.
    pub(super) fn fork(&mut self, leader: RequestId) {
        for id in self.forks.remove(&leader).unwrap_or_default() {
            let Some(mut sequence) = self.sequences.remove(&id) else { continue };
            let forked = self.fork_place(leader, &mut sequence);
            let rank = (Reverse(sequence.priority), id);
            self.sequences.insert(id, sequence);
            match forked {
                true => {
                    self.running.insert(rank);
                }
                false => self.wait_in_line(id),
            }
        }
    }

    /// Nobody reads the prompt for them any more: they wait in line.
    pub(super) fn release_forks(&mut self, leader: RequestId) {
        for id in self.forks.remove(&leader).unwrap_or_default() {
            self.wait_in_line(id);
        }
    }

    /// Puts one in line that has waited for another's prompt; its own wait begins now.
    fn wait_in_line(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.queued = Instant::now();
        }
        self.enqueue(id);
    }

    /// Gives `sequence` a place with the state of `leader`: whole pages are shared, the open one and
    /// the slot are copied. Its own last prompt row runs again, so that it chooses for itself.
    fn fork_place(&mut self, leader: RequestId, sequence: &mut Sequence) -> bool {
        if self.running.len() >= self.shape.max_seqs || !matches!(sequence.form.settle(), Ok(true))
        {
            return false;
        }
        let len = sequence.prompt_len;
        let source = self.sequences.get(&leader).and_then(|s| s.place.as_ref());
        let Some(source) = source.filter(|place| place.next == len) else { return false };
        let whole = (len - 1) / self.shape.page_tokens;
        let (from, window_from) = (source.slot, source.window_from);
        let (mut pages, open) = (source.pages[..whole].to_vec(), source.pages[whole]);

        // A page to spare for each running sequence, so that none is pushed out at once.
        let wanted = self.shape.pages_for(len + 1) - whole;
        if !self.make_room(wanted + self.running.len(), 0) {
            return false;
        }
        let Some(slot) = self.pools.slots.take() else { return false };
        let Some(fresh) = self.take_pages(wanted) else {
            self.pools.slots.release(slot);
            return false;
        };
        pages.iter().for_each(|&page| self.pools.pages.retain(page));
        self.open(sequence, slot);
        self.ops.push(Op::CopySlot { from, to: slot });
        if let Some(&to) = fresh.first() {
            self.ops.push(Op::CopyPage { from: open, to });
        }
        pages.extend(fresh);
        sequence.place = Some(Place::after(slot, pages, len, window_from));
        sequence.started = true;
        sequence.usage.cached_tokens = len - 1;
        self.metrics.prefix(len, len - 1);
        self.metrics.queued_for(sequence.arrival.elapsed());
        sequence.admitted();
        true
    }
}
