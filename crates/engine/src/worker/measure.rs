//! What steps and drafting cost on this device, measured before anything is served.

use super::ModelWorker;
use crate::drafting::CostCurve;
use crate::plan::PlanSequence;
use crate::request::{RequestId, SamplingParams};
use crate::schedule::Shape;
use crate::work::{Op, Opening, SequenceWork, Work, Worker};
use deepinfer_device::Device;
use deepinfer_device::ops::Result;
use std::sync::Arc;

/// Tokens before the rows that are measured.
const PROMPT: usize = 8;

/// A size is measured again until this many seconds have been spent on it, or so many times.
const SECONDS: f64 = 0.4;
const TIMES: usize = 5;
/// Runs before those, where steps are recorded: one that runs operation by operation, and the one
/// that is recorded.
const UNMEASURED: usize = 2;

impl<D: Device> ModelWorker<D> {
    /// Measures steps that decode, from one row to the most that a step of `shape` has, and
    /// drafting. `stored` is asked, with the seconds of a step of one row, for a curve of an
    /// earlier time; if it has one, the rest is not measured. Must run before any other step: slots
    /// and pages are used, and left free.
    pub fn measure_costs(
        &mut self,
        shape: &Shape,
        stored: impl FnOnce(f64) -> Option<CostCurve>,
    ) -> Result<CostCurve> {
        let block = shape.drafts;
        // Every sequence has one page.
        if PROMPT + (UNMEASURED + TIMES) * (block + 1) > shape.page_tokens {
            return Ok(CostCurve::default());
        }
        let most = shape.max_seqs.min(shape.pages);
        let warm = self.measure_rows(1, block, 2)?;
        let first = self.measure_rows(1, block, TIMES)?;
        if let Some(curve) = stored(first.0.min(warm.0)) {
            return Ok(curve);
        }
        let rows = most * (block + 1);
        let mut steps = vec![(1, first.0)];
        for size in sizes(rows.min(shape.outputs), block + 1) {
            steps.push((size, self.measure_rows(size, block, TIMES)?.0));
        }
        let mut drafts = vec![(1, first.1)];
        // Without drafts to verify: a row for each sequence.
        for sequences in sizes(most, 1) {
            drafts.push((sequences, self.measure_sequences(&vec![0; sequences], block, TIMES)?.1));
        }
        Ok(CostCurve::new(steps, drafts))
    }

    /// Seconds of a step of `rows` rows, in as few sequences as have them, and of drafting.
    fn measure_rows(&mut self, rows: usize, block: usize, times: usize) -> Result<(f64, f64)> {
        let sequences = rows.div_ceil(block + 1);
        let drafts: Vec<usize> = (0..sequences).map(|i| (rows + i) / sequences - 1).collect();
        self.measure_sequences(&drafts, block, times)
    }

    /// The same for sequences with so many drafts each.
    fn measure_sequences(
        &mut self,
        drafts: &[usize],
        block: usize,
        times: usize,
    ) -> Result<(f64, f64)> {
        let vocab = self.vocab() as u32;
        let mut random = drafts.len() as u64;
        let mut token = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((random >> 33) % u64::from(vocab)) as u32
        };
        self.open_all(drafts.len(), &mut token)?;
        let (mut steps, mut drafting, mut spent) = (Vec::new(), Vec::new(), 0.0);
        let mut unmeasured = if self.batch.records() { UNMEASURED } else { 0 };
        while steps.len() < times && (steps.is_empty() || spent < SECONDS) {
            let mut work = Work::default();
            for (slot, &verify) in drafts.iter().enumerate() {
                if let Some(slot) = &mut self.slots[slot] {
                    slot.drafts = (0..verify).map(|_| token()).collect();
                }
                work.plan.sequences.push(PlanSequence {
                    slot: slot as u32,
                    pages: vec![slot as u32],
                    ..PlanSequence::default()
                });
                work.sequences.push(SequenceWork {
                    id: RequestId(slot as u64),
                    follow: Some(verify as u32),
                    sample: true,
                    draft: block as u32,
                    prompt_logprobs: None,
                });
            }
            let done = self.run(work)?;
            if unmeasured > 0 {
                unmeasured -= 1;
                continue;
            }
            spent += done.seconds;
            steps.push(done.seconds - done.draft_seconds);
            drafting.push(done.draft_seconds);
        }
        self.slots[..drafts.len()].iter_mut().for_each(|slot| *slot = None);
        Ok((middle(steps), middle(drafting)))
    }

    /// Opens sequences of [`PROMPT`] tokens, or as many as a step has room for, and runs all but the
    /// last of each.
    fn open_all(&mut self, count: usize, token: &mut impl FnMut() -> u32) -> Result<()> {
        let params = Arc::new(SamplingParams { ignore_eos: true, ..SamplingParams::greedy() });
        // A step may have fewer rows.
        let prompt = PROMPT.min(self.rows + 1);
        let mut work = Work::default();
        for slot in 0..count as u32 {
            let tokens: Vec<u32> = (0..prompt).map(|_| token()).collect();
            work.plan.sequences.push(PlanSequence {
                slot,
                pages: vec![slot],
                tokens: tokens[..prompt - 1].to_vec(),
                ..PlanSequence::default()
            });
            let id = RequestId(u64::from(slot));
            work.sequences.push(SequenceWork { id, ..SequenceWork::default() });
            let params = params.clone();
            let (sample, grammar) = (0, None);
            let opening =
                Opening { slot, params, seed: 0, sample, grammar, tokens, prompt_len: prompt };
            work.before.push(Op::Open(Box::new(opening)));
        }
        // In pieces that a step has room for.
        let room = (self.rows / (prompt - 1)).max(1);
        while !work.sequences.is_empty() {
            let count = room.min(work.sequences.len());
            let mut part = Work { before: std::mem::take(&mut work.before), ..Work::default() };
            part.plan.sequences = work.plan.sequences.drain(..count).collect();
            part.sequences = work.sequences.drain(..count).collect();
            self.run(part)?;
        }
        Ok(())
    }
}

/// Sizes above 1 up to `most`, which is one of them: each up to `dense`, then ever fewer.
fn sizes(most: usize, dense: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (2..=dense.min(most)).collect();
    let mut next = dense.max(1);
    while next < most {
        next = (next + next.div_ceil(2)).min(most);
        sizes.push(next);
    }
    sizes
}

/// The mean of the middle ones: the best and the worst are left out where there are enough.
fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_unstable_by(f64::total_cmp);
    let inner = if seconds.len() > 2 { 1..seconds.len() - 1 } else { 0..1.min(seconds.len()) };
    let count = inner.len().max(1);
    seconds[inner].iter().sum::<f64>() / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_dense_at_first() {
        assert!(sizes(1, 6).is_empty());
        assert_eq!(sizes(6, 6), [2, 3, 4, 5, 6]);
        assert_eq!(sizes(30, 6), [2, 3, 4, 5, 6, 9, 14, 21, 30]);
        assert_eq!(sizes(4, 1), [2, 3, 4]);
    }

    #[test]
    fn the_extremes_are_left_out() {
        assert_eq!(middle(vec![9.0, 1.0, 2.0, 3.0, 4.0]), 3.0);
        assert_eq!(middle(vec![2.0, 1.0]), 1.0);
    }
}
