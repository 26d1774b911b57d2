//! Taking a step's results in.

use super::Scheduler;
use crate::cache::tiers::Entry;
use crate::request::{FinishReason, RequestError};
use crate::sequence::Sequence;
use crate::work::{Done, SaveName, SequenceDone, SequenceWork};
use deepinfer_device::ops::ABSENT;
use std::sync::Arc;

/// What a sequence's new tokens mean for it.
enum Outcome {
    Continues,
    Ends(FinishReason),
    Fails(RequestError),
}

impl Scheduler {
    /// Takes in the results of the oldest step in flight.
    pub fn commit(&mut self, done: Done) {
        let Some(step) = self.in_flight.pop_front() else { return };
        for (key, bytes) in done.pages {
            self.take_stored(key, Entry::Page(Arc::new(bytes)));
        }
        for (name, state) in done.states {
            match name {
                SaveName::Swap(id) => self.saved(id, state),
                SaveName::Prefix(key) => self.take_stored(key, Entry::State(Arc::new(state))),
            }
        }
        let (mut decode, mut drafting) = (0, 0);
        for (work, result) in step.sequences.iter().zip(done.sequences) {
            decode += work.follow.map_or(0, |_| 1 + result.verified as usize);
            drafting += usize::from(!result.confidences.is_empty());
            let id = work.id;
            match self.take_result(work, result) {
                // One that has been preempted meanwhile is not among the running ones.
                Outcome::Continues => {
                    let waits = |s: &&mut Sequence| s.place.is_none();
                    if let Some(sequence) = self.sequences.get_mut(&id).filter(waits) {
                        sequence.emit();
                    }
                }
                Outcome::Ends(reason) => self.finish(id, reason),
                Outcome::Fails(error) => self.fail(id, error),
            }
        }
        let (prompt, seconds) = (step.prefill_rows, done.seconds);
        if prompt + step.decode_rows > 0 {
            self.shares.measured(prompt, step.decode_rows, step.charge, seconds);
            let decoder = step.decoder_rows + decode;
            self.metrics.step(prompt, decode, decoder, seconds, done.draft_seconds);
        }
        if prompt == 0 {
            let drafting = (drafting > 0).then_some((drafting, done.draft_seconds));
            self.drafting.measured(decode, seconds - done.draft_seconds, drafting);
        }
    }

    fn take_result(&mut self, work: &SequenceWork, result: SequenceDone) -> Outcome {
        // Requests that ended while the step ran are gone.
        let Some(sequence) = self.sequences.get_mut(&work.id) else { return Outcome::Continues };
        sequence.in_flight -= 1;
        sequence.prompt_logprobs.extend(result.prompt_logprobs);
        if !work.sample {
            return Outcome::Continues;
        }
        let most = 1 + work.follow.unwrap_or(0) as usize;
        sequence.coming = (sequence.coming.0 - 1, sequence.coming.1 - most);
        let accepted = result.tokens.len().saturating_sub(1);
        let (drafted, verified) = (result.confidences.len(), result.verified as usize);
        sequence.usage.drafted += drafted;
        sequence.usage.verified += verified;
        sequence.usage.accepted += accepted;
        self.metrics.drafts(drafted, verified, accepted);
        if let Some(told) = &sequence.confidences[1] {
            self.drafting.verified(told, verified, accepted);
            if !told.is_empty() {
                self.drafting.drafted(told);
            }
        }
        sequence.confidences.rotate_left(1);
        sequence.confidences[1] = Some(result.confidences);
        let len = sequence.tokens.len();
        if let Some(place) = &mut sequence.place {
            let end = if work.follow.is_some() { len + result.verified as usize } else { len };
            // A step in flight goes on after all tokens of this one, whether or not they stay.
            let coming = sequence.coming.1;
            let next = if coming > 0 { len + accepted + coming } else { 0 };
            place.written = place.written.max(end).max(next);
        }
        for token in result.tokens {
            if token.id == ABSENT {
                let position = sequence.output_len();
                return Outcome::Fails(RequestError::NothingAllowed { position });
            }
            self.metrics.produced();
            if let Some(reason) = sequence.push(token, &self.shape.ends) {
                return Outcome::Ends(reason);
            }
        }
        match result.fault {
            Some(fault) => Outcome::Fails(RequestError::GrammarFault(fault)),
            None => Outcome::Continues,
        }
    }
}
