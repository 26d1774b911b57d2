//! Runs prompts for a comparison: one sequence at a time, in its own caches.

use crate::cache::CacheFormat;
use crate::config::TextConfig;
use crate::model::draft::{DraftChoice, DraftScratch};
use crate::model::{Model, NoProbe, Probe};
use crate::plan::StepPlan;
use crate::session::Session;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;
use std::sync::Arc;

/// A model with caches for one sequence.
pub(super) struct Runner<D: Device> {
    pub session: Session<D>,
}

/// What a draft block gave.
pub(super) struct Drafted {
    /// The model's own choice at each place.
    pub tokens: Vec<u32>,
    /// Confidence logits.
    pub confidence: Vec<f32>,
    /// `[block, H]`.
    pub raw_hidden: Vec<f32>,
    /// `[block, vocab]`.
    pub base_logits: Vec<f32>,
    /// `[block, vocab]`.
    pub draft_logits: Vec<f32>,
}

impl<D: Device> Runner<D> {
    /// Room for a sequence of `positions` tokens, run in one step or in many.
    pub fn new(
        device: &Arc<D>,
        model: &Arc<Model<D>>,
        format: CacheFormat,
        positions: usize,
    ) -> Result<Self> {
        let (device, model) = (device.clone(), model.clone());
        let session = Session::new(device, model, format, 1, positions, positions)?;
        Ok(Self { session })
    }

    pub fn text(&self) -> &TextConfig {
        &self.session.model.config.text_config
    }

    /// Begins another sequence. What the last one left in the caches is out of sight.
    pub fn restart(&mut self) {
        self.session.texts[0].clear();
    }

    /// Runs `tokens` after those so far, with the embeddings of their image rows. Returns the
    /// logits of every row, `[rows, vocab]`.
    pub fn run(
        &mut self,
        tokens: &[u32],
        embeddings: Vec<f32>,
        probe: &mut impl Probe<D>,
    ) -> Result<Vec<f32>> {
        let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut sequence = self.session.extend(0, tokens, &outputs);
        sequence.embeddings = embeddings;
        let plan = StepPlan { sequences: vec![sequence] };
        Ok(self.session.run(&plan, probe)?.concat())
    }

    /// Runs a prompt of tokens in chunks of `chunk`. Returns the logits of every row.
    pub fn run_chunks(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<f32>> {
        let mut logits = Vec::with_capacity(tokens.len() * self.text().vocab_size);
        for part in tokens.chunks(chunk.max(1)) {
            logits.extend(self.run(part, Vec::new(), &mut NoProbe)?);
        }
        Ok(logits)
    }

    /// Drafts from `token`, which follows the tokens run so far. Where the own choice differs from
    /// `expected`, the chain goes on from the expected token, so that later places stay
    /// comparable. `None` if the model has no draft stages.
    pub fn draft(
        &mut self,
        token: u32,
        expected: &[u32],
        probe: &mut impl Probe<D>,
    ) -> Result<Option<Drafted>> {
        if self.session.drafts.is_none() {
            return Ok(None);
        }
        let block = expected.len();
        let mut choice = Follow { expected, own: Vec::new(), logits: Vec::new() };
        let (_, confidence) =
            self.session.draft_probed(&[(0, token)], block, &mut choice, probe)?;
        let Some(drafts) = &self.session.drafts else { return Ok(None) };
        let (hidden, vocab) = (self.text().hidden_size, self.text().vocab_size);
        let device = &self.session.device;
        let mut raw_hidden = vec![0.0; block * hidden];
        device.download_act(&drafts.raw_hidden, 0, &mut raw_hidden)?;
        let mut base_logits = vec![0.0; block * vocab];
        device.download(&drafts.base_logits, 0, &mut base_logits)?;
        Ok(Some(Drafted {
            tokens: choice.own,
            confidence: confidence.concat(),
            raw_hidden,
            base_logits,
            draft_logits: choice.logits,
        }))
    }

    /// The compressed rows (`keys` false) or index keys that `layer` has published for `tokens`
    /// tokens, as their readers see them; empty if the layer publishes none.
    pub fn published(&self, layer: usize, keys: bool, tokens: usize) -> Result<Vec<f32>> {
        let caches = &self.session.caches;
        let paged = if keys { caches.index_keys(layer) } else { caches.compressed(layer) };
        let Some(paged) = paged else { return Ok(Vec::new()) };
        let (device, rows) = (&*self.session.device, tokens / paged.ratio);
        // The session's only slot owns the pages from 0 on, in order: rows lie in order.
        let in_order: Vec<u32> = (0..rows as u32).collect();
        let mut indices = device.alloc(rows)?;
        device.upload(&in_order, &mut indices, 0)?;
        let mut decoded = device.alloc::<D::Act>(rows * paged.width)?;
        device.decode_rows(paged.cache, paged.width, paged.format, &indices, rows, &mut decoded)?;
        super::record::acts(device, &decoded, rows * paged.width)
    }
}

/// Notes the own greedy choice and continues with the expected token.
struct Follow<'a> {
    expected: &'a [u32],
    own: Vec<u32>,
    logits: Vec<f32>,
}

impl<D: Device> DraftChoice<D> for Follow<'_> {
    fn choose(&mut self, device: &D, index: usize, scratch: &mut DraftScratch<D>) -> Result<()> {
        let mut logits = vec![0.0; scratch.vocab];
        device.download(&scratch.logits, 0, &mut logits)?;
        self.own.push(argmax(&logits));
        self.logits.extend(logits);
        device.upload(&[self.expected[index]], &mut scratch.previous, 0)
    }
}

/// Index of the largest value, the lowest one on ties.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best as u32
}
