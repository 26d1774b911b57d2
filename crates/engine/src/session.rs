//! A model with caches and work space, driven step by step by hand: for comparisons, measurements
//! and tests. Serving goes through the engine, which plans its steps itself.

use crate::cache::{CacheFormat, Caches, Geometry};
use crate::model::draft::{DraftChoice, DraftScratch, Drafts};
use crate::model::{Batch, Limits, Model, NoProbe, Probe, Scratch};
use crate::plan::{DraftSequence, PlanSequence, StepPlan};
use deepinfer_device::Device;
use deepinfer_device::ops::{Result, SampleRow};
use std::sync::Arc;

/// One model, `slots` sequences of at most `tokens` tokens each.
pub struct Session<D: Device> {
    /// Where everything runs.
    pub device: Arc<D>,
    /// The model.
    pub model: Arc<Model<D>>,
    /// Caches of all slots; slot `i` owns the pages from `i * pages_each` on.
    pub caches: Caches<D>,
    /// Inputs of the current step.
    pub batch: Batch<D>,
    /// Work space.
    pub scratch: Scratch<D>,
    /// Work space of drafting, if the model drafts.
    pub drafts: Option<DraftScratch<D>>,
    pages_each: usize,
    /// What every slot holds.
    pub texts: Vec<Vec<u32>>,
}

impl<D: Device> Session<D> {
    /// Makes room for `slots` sequences of `tokens` tokens, and for steps of `rows` rows.
    pub fn new(
        device: Arc<D>,
        model: Arc<Model<D>>,
        format: CacheFormat,
        slots: usize,
        tokens: usize,
        rows: usize,
    ) -> Result<Self> {
        let text = &model.config.text_config;
        let d: &D = &device;
        let geometry = Geometry::new(text, text.dspark_block_size + 1);
        let pages_each = geometry.pages_for(tokens).max(1);
        let block = text.dspark_block_size;
        let rows = rows.max(slots * (block + 1));
        let limits = Limits { rows, sequences: slots, outputs: rows, pages: pages_each };
        let batch = Batch::new(d, text, &geometry, &limits)?;
        let caches = Caches::new(d, text, format, geometry, slots, slots * pages_each)?;
        let scratch = Scratch::new(d, text, caches.formats, &limits)?;
        let drafts = match model.draft {
            Some(_) => Some(DraftScratch::new(d, text, &limits)?),
            None => None,
        };
        let texts = vec![Vec::new(); slots];
        Ok(Self { device, model, caches, batch, scratch, drafts, pages_each, texts })
    }

    /// Pages of a slot.
    pub fn pages(&self, slot: usize) -> Vec<u32> {
        let first = slot * self.pages_each;
        (first as u32..(first + self.pages_each) as u32).collect()
    }

    /// Plans `tokens` after what `slot` holds, through all layers, with logits for the rows
    /// `outputs`. Records the tokens.
    pub fn extend(&mut self, slot: usize, tokens: &[u32], outputs: &[u32]) -> PlanSequence {
        let start = self.texts[slot].len();
        let back = self.model.config.text_config.engram_max_ngram_size.saturating_sub(1);
        let context = self.texts[slot][start.saturating_sub(back)..].to_vec();
        self.texts[slot].extend_from_slice(tokens);
        PlanSequence {
            slot: slot as u32,
            pages: self.pages(slot),
            start: start as u32,
            tokens: tokens.to_vec(),
            context,
            outputs: outputs.to_vec(),
            decoder_from: start as u32,
            ..PlanSequence::default()
        }
    }

    /// Forgets what follows the first `len` tokens of `slot`: at most the geometry's backtracking.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.texts[slot].truncate(len);
    }

    /// Runs a step. Returns the logits of its output rows, `[outputs][vocab]`.
    pub fn run(&mut self, plan: &StepPlan, probe: &mut impl Probe<D>) -> Result<Vec<Vec<f32>>> {
        let (batch, scratch) = (&mut self.batch, &mut self.scratch);
        let n = self.model.forward(&self.device, plan, &mut self.caches, batch, scratch, probe)?;
        let vocab = self.model.config.text_config.vocab_size;
        (0..n)
            .map(|row| {
                let mut logits = vec![0.0; vocab];
                self.device.download(&self.scratch.logits, row * vocab, &mut logits)?;
                Ok(logits)
            })
            .collect()
    }

    /// Runs `text` in `slot`, which is empty: the negative log likelihoods of its tokens from the
    /// second on, each given those before it, in nats.
    pub fn nll(
        &mut self,
        slot: usize,
        text: &[u32],
        probe: &mut impl Probe<D>,
    ) -> Result<Vec<f64>> {
        let (mut found, most) = (Vec::new(), self.batch.limits().rows.max(1));
        let inputs = &text[..text.len().saturating_sub(1)];
        for (i, part) in inputs.chunks(most).enumerate() {
            let outputs: Vec<u32> = (0..part.len() as u32).collect();
            let plan = StepPlan { sequences: vec![self.extend(slot, part, &outputs)] };
            let logits = self.run(&plan, probe)?;
            let next = &text[i * most + 1..];
            found.extend(logits.iter().zip(next).map(|(row, &token)| surprise(row, token)));
        }
        Ok(found)
    }

    /// Proposes `block` tokens after `token` in every slot of `sequences` (slot, token).
    ///
    /// # Panics
    /// If the model has no draft stages.
    pub fn draft(
        &mut self,
        sequences: &[(usize, u32)],
        block: usize,
        choice: &mut impl DraftChoice<D>,
    ) -> Result<Drafts> {
        self.draft_probed(sequences, block, choice, &mut NoProbe)
    }

    /// The same, with a look at the draft stages.
    ///
    /// # Panics
    /// As [`Session::draft`].
    pub fn draft_probed(
        &mut self,
        sequences: &[(usize, u32)],
        block: usize,
        choice: &mut impl DraftChoice<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<Drafts> {
        let plan: Vec<DraftSequence> = sequences
            .iter()
            .map(|&(slot, token)| DraftSequence {
                slot: slot as u32,
                token,
                position: self.texts[slot].len() as u32,
                window_from: 0,
            })
            .collect();
        let drafts = self.drafts.as_mut().expect("the model has draft stages");
        self.model.draft_block(
            &self.device,
            &plan,
            block,
            &self.caches,
            &mut self.batch,
            &mut self.scratch,
            drafts,
            choice,
            probe,
        )
    }
}

/// Negative log likelihood of a token, in nats.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    sum.ln() + largest - f64::from(logits[token as usize])
}

/// Drafts the most probable token.
pub struct GreedyDrafts;

impl<D: Device> DraftChoice<D> for GreedyDrafts {
    fn choose(&mut self, device: &D, _index: usize, s: &mut DraftScratch<D>) -> Result<()> {
        let n = s.sequences;
        let rows = vec![SampleRow::greedy(); n];
        device.sample(&s.logits, s.vocab, &rows, &mut s.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surprise_is_a_log_likelihood() {
        assert!((surprise(&[0.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        let likely = surprise(&[1000.0, 1001.0], 1);
        assert!((likely - (1.0 + (-1f64).exp()).ln()).abs() < 1e-12);
    }
}
