//! Keeping prefixes for later requests.

use super::Scheduler;
use crate::request::RequestId;
use crate::work::{Op, SaveName};

impl Scheduler {
    /// A chunk of a prompt has been planned up to a point of interest: keeps the state there.
    pub(super) fn remember_chunk(&mut self, id: RequestId) {
        let Some(place) = self.sequences.get(&id).and_then(|s| s.place.as_ref()) else { return };
        let end = place.next;
        let lowest = end.saturating_sub(self.shape.backtracking).max(place.complete_from);
        self.remember(id, end, lowest);
    }

    /// A request has ended: keeps its state, from which a next turn goes on.
    pub(super) fn remember_turn(&mut self, id: RequestId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let Some(place) = &sequence.place else { return };
        if place.reading() {
            return;
        }
        // The last token has not been run.
        let end = sequence.tokens.len() - 1;
        let written = place.written.max(end);
        let lowest = written.saturating_sub(self.shape.backtracking).max(place.complete_from);
        self.remember(id, end, lowest);
    }

    /// Enters the first `end` tokens of a sequence into the prefix cache, with a snapshot that can
    /// be cut from `lowest` on, or earlier if there is such a one; without one if there is no such cut. What the lower tiers are told
    /// to expect counts as stored at once: the device may drop its copy before theirs is there.
    fn remember(&mut self, id: RequestId, end: usize, lowest: usize) {
        let Some(prefix) = &mut self.prefix else { return };
        let Some(sequence) = self.sequences.get(&id) else { return };
        let Some(place) = &sequence.place else { return };
        let (salt, tokens) = (sequence.salt.as_deref(), &sequence.tokens[..end]);
        let lowest = (lowest <= end).then_some(lowest);
        let added = prefix.insert(salt, tokens, &place.pages, lowest, &mut self.pools);
        let keep = self.tiers.enabled();
        self.tiers.touch(&added.stored);
        if let Some(snapshot) = added.snapshot {
            let (key, slot) = (snapshot.description.key, snapshot.slot);
            if snapshot.new {
                self.ops.push(Op::CopySlot { from: place.slot, to: slot });
            }
            if keep {
                self.tiers.expect(snapshot.description);
                prefix.set_stored(&key);
                let pages = snapshot.open.into_iter().collect();
                self.ops.push(Op::SaveState { name: SaveName::Prefix(key), slot, pages });
            }
        }
        // The beginning first: a tier that takes no more for now leaves out what hangs on it.
        for (description, page) in added.pages.into_iter().filter(|_| keep) {
            let key = description.key;
            self.tiers.expect(description);
            prefix.set_stored(&key);
            self.ops.push(Op::SavePage { key, page });
        }
    }
}
