//! Writing a step down.

use super::{InFlight, Scheduler};
use crate::engine::PrefillMode;
use crate::plan::PlanSequence;
use crate::request::RequestId;
use crate::sequence::Sequence;
use crate::work::{SequenceWork, Verify, Work};

/// What a step has left.
struct Budget {
    rows: usize,
    outputs: usize,
}

impl Scheduler {
    /// The next step: a row (and drafts) of every sequence that decodes, then rows of prompts.
    /// `None` if there is nothing to do.
    pub fn plan(&mut self) -> Option<Work> {
        let mut work = Work::default();
        let mut budget = Budget { rows: self.shape.rows, outputs: self.shape.outputs };
        let ids: Vec<RequestId> = self.running.iter().map(|&(_, id)| id).collect();
        let reading = |s: &Sequence| s.place.as_ref().is_some_and(|p| p.reading());
        let (prompts, decoding): (Vec<RequestId>, Vec<RequestId>) =
            ids.into_iter().partition(|id| self.sequences.get(id).is_some_and(reading));

        let mut most = self.shape.drafts;
        if !decoding.is_empty() {
            let share = if prompts.is_empty() { budget.rows } else { budget.rows * 3 / 4 };
            most = most.min((share / decoding.len()).saturating_sub(1));
        }
        let drafts = self.plan_drafts(&decoding, most, &mut work);
        for id in decoding {
            self.plan_decode(id, most, drafts, &mut budget, &mut work);
        }
        if let Some(verify) = &work.verify {
            let planned: usize =
                work.sequences.iter().filter_map(|s| s.follow).sum::<u32>() as usize;
            let spared = planned.saturating_sub(verify.count);
            budget.rows += spared;
            budget.outputs += spared;
        }
        let decode_rows = self.shape.rows - budget.rows;
        let mut ended = Vec::new();
        let (prompts, most_rows) = self.prompts_now(prompts, decode_rows);
        budget.rows = budget.rows.min(most_rows);
        let shares = self.share_rows(&prompts, &budget);
        let mut others = shares.len();
        for (id, rows) in shares {
            others -= 1;
            if self.plan_chunk(id, rows, others, drafts, &mut budget, &mut work) {
                ended.push(id);
            }
        }
        if work.sequences.is_empty() && self.ops.is_empty() {
            return None;
        }
        work.before = std::mem::take(&mut self.ops);
        for id in ended {
            self.remember_chunk(id);
            if self.sequences.get(&id).and_then(|s| s.place.as_ref()).is_some_and(|p| !p.reading())
            {
                self.fork(id);
            }
        }
        let prefill_rows = work.plan.sequences.iter().map(|s| s.tokens.len()).sum();
        self.in_flight.push_back(InFlight {
            sequences: work.sequences.clone(),
            prefill_rows,
            decode_rows,
            decoder_rows: work.plan.sequences.iter().map(|s| s.kept_rows()).sum(),
            charge: self.shares.planned(prefill_rows, decode_rows),
        });
        Some(work)
    }

    /// Decides how many drafts the sequences verify in all, each `most` at most, and returns how
    /// many tokens are drafted after the step. Confidences of two rounds ago are asked: the drafts
    /// at hand must not have a say ([`crate::drafting`]).
    fn plan_drafts(&mut self, decoding: &[RequestId], most: usize, work: &mut Work) -> usize {
        let rates = |id: &RequestId| {
            let sequence = self.sequences.get(id).filter(|s| s.params.draft)?;
            let [older, newer] = &sequence.confidences;
            let told = if sequence.in_flight > 0 { newer } else { older };
            let mut rates = self.drafting.rates(told.as_deref());
            let tokens = sequence.tokens.len() + sequence.coming.0;
            rates.truncate(most.min(sequence.max_len.saturating_sub(tokens + 1)));
            Some(rates)
        };
        let rates: Vec<Vec<f32>> =
            decoding.iter().map(|id| rates(id).unwrap_or_default()).collect();
        let plan = self.drafting.plan(&rates);
        let verify = |count| Verify { count, correction: self.drafting.correction() };
        work.verify = plan.verify.map(verify);
        plan.draft
    }

    /// The newest token of a sequence and the drafts after it, `most` at most; then `drafts` tokens
    /// are drafted. Where the rows stand is known to the worker: a step in flight may still add
    /// tokens, and the worst case is planned for.
    fn plan_decode(
        &mut self,
        id: RequestId,
        most: usize,
        drafts: usize,
        budget: &mut Budget,
        work: &mut Work,
    ) {
        let verified = work.verify.as_ref().map_or(most, |verify| verify.count.min(most));
        let Some(sequence) = self.sequences.get(&id) else { return };
        let (least, coming) = sequence.coming;
        let left = sequence.max_len.saturating_sub(sequence.tokens.len() + least);
        let room = budget.rows.min(budget.outputs).min(left);
        if room == 0 || sequence.place.is_none() {
            return;
        }
        let (verified, draft) = if sequence.params.draft { (verified, drafts) } else { (0, 0) };
        let verify = verified.min(room - 1);
        let wanted = self.shape.pages_for(sequence.tokens.len() + coming + verify);
        if !self.grow(id, wanted) {
            return;
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let Some(place) = &sequence.place else { return };
        work.plan.sequences.push(PlanSequence {
            slot: place.slot,
            pages: place.pages.clone(),
            decoder_window_from: place.window_from as u32,
            ..PlanSequence::default()
        });
        work.sequences.push(SequenceWork {
            id,
            follow: Some(verify as u32),
            sample: true,
            draft: draft as u32,
            prompt_logprobs: None,
        });
        sequence.in_flight += 1;
        sequence.coming = (least + 1, coming + 1 + verify);
        budget.rows -= 1 + verify;
        budget.outputs -= 1 + verify;
    }

    /// Those of `prompts` that may go on in a step beside `decoding` rows, and with how many rows:
    /// all of them when it is their turn, else a short one that has just arrived.
    fn prompts_now(&self, prompts: Vec<RequestId>, decoding: usize) -> (Vec<RequestId>, usize) {
        let rows = self.shares.prompt_rows(decoding);
        if rows > 0 {
            return (prompts, rows);
        }
        let short = self.shape.chunk / 4;
        let new = |id: &RequestId| {
            let place = self.sequences.get(id).and_then(|s| s.place.as_ref());
            place.filter(|p| p.served == 0).is_some_and(|p| {
                let rows = p.target - p.next;
                rows <= short && self.shares.newcomer_may_run(rows)
            })
        };
        (prompts.into_iter().find(new).into_iter().collect(), short)
    }

    /// Shares rows among prompts: half for the first in line, so that it gets on; the rest for those
    /// that have been served least, so that short ones need not wait for long ones. Nobody gets more
    /// than can run.
    fn share_rows(&self, prompts: &[RequestId], budget: &Budget) -> Vec<(RequestId, usize)> {
        let rows = budget.rows;
        let wants = |id: &RequestId| {
            let Some(sequence) = self.sequences.get(id) else { return 0 };
            let most = match sequence.wants_prompt_logprobs() {
                true => self.shape.chunk.min(budget.outputs),
                false => self.shape.chunk,
            };
            sequence.place.as_ref().map_or(0, |p| (p.stops[0] - p.next).min(most))
        };
        let Some((first, others)) = prompts.split_first() else { return Vec::new() };
        let own = wants(first);
        let mut given = own.min(if others.is_empty() { rows } else { rows.div_ceil(2) });
        let mut left = rows - given;
        let mut others: Vec<RequestId> = others.to_vec();
        let served = |id: &RequestId| {
            self.sequences.get(id).and_then(|s| s.place.as_ref()).map_or(0, |p| p.served)
        };
        others.sort_by_key(|id| (served(id), *id));
        let mut shares = vec![(*first, 0)];
        for id in others {
            let take = wants(&id).min(left);
            left -= take;
            shares.push((id, take));
        }
        given += left.min(own - given);
        shares[0].1 = given;
        shares.retain(|&(_, rows)| rows > 0);
        shares
    }

    /// The next rows of a prompt. Returns whether they end where a chunk must. Each of the `others`
    /// that are planned after it may need an output for its last row, so these are left.
    fn plan_chunk(
        &mut self,
        id: RequestId,
        rows: usize,
        others: usize,
        drafts: usize,
        budget: &mut Budget,
        work: &mut Work,
    ) -> bool {
        let shape = &self.shape;
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let logprobs = match sequence.wants_prompt_logprobs() {
            true => sequence.params.prompt_logprobs,
            false => None,
        };
        let Some(place) = &mut sequence.place else { return false };
        let mut rows = rows.min(budget.rows);
        if logprobs.is_some() {
            rows = rows.min(budget.outputs.saturating_sub(others));
        }
        if rows == place.target - place.next && budget.outputs == 0 {
            rows -= 1;
        }
        if rows == 0 {
            return false;
        }
        let (start, end) = (place.next, place.next + rows);
        let (stop, last) = (place.stops[0], end == place.target);
        let mode = if logprobs.is_some() { PrefillMode::Off } else { shape.prefill };
        let keep_from = sequence.prompt_len.saturating_sub(shape.keep);
        // Where decoder rows begin, how far their windows reach, and where they are complete.
        let (from, window_from, complete_from) = match mode {
            PrefillMode::Off => (0, place.window_from, place.complete_from),
            // The last row before the stop comes out complete, and so does what follows it; where
            // prefixes are kept, also the rows before it from which a snapshot can be cut.
            PrefillMode::Exact => {
                let slack = if shape.prefix_cache { shape.backtracking } else { 1 };
                let complete_from = stop.saturating_sub(slack).max(place.complete_from);
                // The row before the stop runs, whatever is complete already.
                match complete_from.min(stop - 1).saturating_sub(shape.span - 1) {
                    needed if needed > place.base => (needed, needed, complete_from),
                    _ => (place.base, place.window_from, complete_from),
                }
            }
            PrefillMode::Compact => (keep_from, keep_from, place.complete_from),
            PrefillMode::Mask => (0, keep_from, place.complete_from),
        };
        let outputs = match (logprobs, last) {
            (Some(_), _) => (0..rows as u32).collect(),
            (None, true) => vec![rows as u32 - 1],
            (None, false) => Vec::new(),
        };
        budget.rows -= rows;
        budget.outputs -= outputs.len();
        work.plan.sequences.push(PlanSequence {
            slot: place.slot,
            pages: place.pages.clone(),
            start: start as u32,
            tokens: sequence.tokens[start..end].to_vec(),
            context: sequence.tokens[start.saturating_sub(shape.context)..start].to_vec(),
            embeddings: Vec::new(),
            decoder_from: from as u32,
            decoder_window_from: window_from as u32,
            complete_from: match mode {
                PrefillMode::Exact => complete_from.min(stop - 1) as u32,
                _ => 0,
            },
            outputs,
        });
        let draft = if last && sequence.params.draft { drafts as u32 } else { 0 };
        work.sequences.push(SequenceWork {
            id,
            follow: None,
            sample: last,
            draft,
            prompt_logprobs: logprobs,
        });
        place.next = end;
        place.served += rows;
        sequence.in_flight += 1;
        if last {
            sequence.coming = (1, 1);
        }
        if end != stop {
            return false;
        }
        place.stops.remove(0);
        (place.base, place.window_from, place.complete_from) = (end, window_from, complete_from);
        true
    }
}
