//! DSpark: a small chain of layers proposes a block of tokens in one pass; a Markov head makes each
//! proposal depend on the one before it, and a confidence head says how likely it is to be accepted.

use super::Model;
use super::attention::Attention;
use super::batch::{Batch, Limits, Series};
use super::experts::Experts;
use super::probe::Probe;
use super::scratch::Scratch;
use super::streams::Site;
use crate::cache::Caches;
use crate::config::{ConfidenceInput, TextConfig};
use crate::plan::DraftSequence;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// What a block proposes, both `[sequences][block]`: tokens, and the confidence head's logits.
pub type Drafts = (Vec<Vec<u32>>, Vec<Vec<f32>>);

/// Weights of the draft stages.
pub struct DraftModel<D: Device> {
    /// `[H, targets * H]`.
    pub main_proj: D::Matrix,
    /// `[H]`.
    pub main_norm: D::Buffer<f32>,
    /// The stages, in order.
    pub stages: Vec<Stage<D>>,
    /// Norm before the shared head, `[H]`.
    pub norm: D::Buffer<f32>,
    /// `[vocab, rank]`.
    pub markov_embed: D::Matrix,
    /// `[vocab, rank]`.
    pub markov_head: D::Matrix,
    /// Markov rank.
    pub rank: usize,
    /// `[1, H + rank]`.
    pub confidence: D::Matrix,
    /// What the confidence head reads.
    pub confidence_input: ConfidenceInput,
    /// Most tokens a block proposes.
    pub block: usize,
    /// Token in the place of those to be proposed.
    pub noise: u32,
    /// Norm epsilon.
    pub eps: f32,
}

/// One stage: an ordinary layer over the rings and its own block.
pub struct Stage<D: Device> {
    pub(super) attention_site: Site<D>,
    pub(super) attention: Attention<D>,
    pub(super) experts_site: Site<D>,
    pub(super) experts: Experts<D>,
}

/// Work space of [`Model::draft_block`]. `N` is the most sequences, `B` the most tokens in a block.
pub struct DraftScratch<D: Device> {
    /// Sequences of the current block.
    pub sequences: usize,
    /// Width of the logits.
    pub vocab: usize,
    /// `[N * B, H]`: collapsed states before the norm, sequence major.
    pub raw_hidden: D::Buffer<D::Act>,
    /// `[N * B, vocab]`: logits before the Markov head, sequence major.
    pub base_logits: D::Buffer<f32>,
    /// `[N, vocab]`: logits of the token being chosen.
    pub logits: D::Buffer<f32>,
    markov_logits: D::Buffer<f32>,
    /// `[N]`: the token before the one being chosen.
    pub previous: D::Buffer<u32>,
    step_rows: D::Buffer<u32>,
    sequence_rows: D::Buffer<u32>,
    hidden: D::Buffer<D::Act>,
    embedding: D::Buffer<D::Act>,
    joined: D::Buffer<D::Act>,
    confidence: D::Buffer<f32>,
}

impl<D: Device> DraftScratch<D> {
    /// Allocates for `limits.sequences` sequences of the configured block.
    pub fn new(device: &D, c: &TextConfig, limits: &Limits) -> Result<Self> {
        let (n, b) = (limits.sequences, c.dspark_block_size);
        let (h, r, v) = (c.hidden_size, c.dspark_markov_rank, c.vocab_size);
        let mut sequence_rows = device.alloc(n)?;
        device.upload(&(0..n as u32).collect::<Vec<_>>(), &mut sequence_rows, 0)?;
        Ok(Self {
            sequences: 0,
            vocab: v,
            raw_hidden: device.alloc(n * b * h)?,
            base_logits: device.alloc(n * b * v)?,
            logits: device.alloc(n * v)?,
            markov_logits: device.alloc(n * v)?,
            previous: device.alloc(n)?,
            step_rows: device.alloc(n)?,
            sequence_rows,
            hidden: device.alloc(n * h)?,
            embedding: device.alloc(n * r)?,
            joined: device.alloc(n * (h + r))?,
            confidence: device.alloc(n)?,
        })
    }
}

/// Chooses one draft token for each sequence.
pub trait DraftChoice<D: Device> {
    /// Reads `scratch.logits` (`[sequences, vocab]`, Markov part included, to be processed in
    /// place) and leaves the chosen tokens in `scratch.previous`. `index` counts the tokens of the
    /// block.
    fn choose(&mut self, device: &D, index: usize, scratch: &mut DraftScratch<D>) -> Result<()>;
}

impl<D: Device> DraftModel<D> {
    /// Stores the draft rows of the step's rows: every stage's key of the features that the target
    /// layers left in `s.features`. Runs after the last of a step's `layers` layers.
    pub fn publish(
        &self,
        device: &D,
        layers: usize,
        caches: &mut Caches<D>,
        batch: &Batch<D>,
        s: &mut Scratch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<()> {
        let set = batch.set();
        let rows = set.map.rows;
        let hidden = s.shape.hidden;
        device.linear(&s.features, &self.main_proj, rows, &mut s.collapsed)?;
        device.rms_norm(&s.collapsed, &self.main_norm, self.eps, hidden, rows, &mut s.x)?;
        for (i, (stage, ring)) in self.stages.iter().zip(&mut caches.draft_windows).enumerate() {
            device.linear(&s.x, &stage.attention.wkv, rows, &mut s.kv_raw)?;
            stage.attention.window_keys(device, set, rows, s)?;
            probe.window_keys(device, layers + i, rows, s)?;
            let width = s.formats.window.row_bytes(stage.attention.shape.head_dim);
            device.scatter_rows(&s.fresh, width, &set.ring_rows, rows, ring)?;
        }
        Ok(())
    }
}

impl<D: Device> Model<D> {
    /// Proposes `block` tokens for each sequence (at most `dspark_block_size`, and as many rows as
    /// the batch allows). Returns tokens and confidence logits, both `[sequences][block]`. Leaves
    /// the caches as they were. For the probe, the stages count on from the last layer.
    ///
    /// # Panics
    /// If the checkpoint has no draft stages, or `block` is too large.
    pub fn draft_block(
        &self,
        device: &D,
        sequences: &[DraftSequence],
        block: usize,
        caches: &Caches<D>,
        batch: &mut Batch<D>,
        s: &mut Scratch<D>,
        drafts: &mut DraftScratch<D>,
        choice: &mut impl DraftChoice<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<Drafts> {
        let model = self.draft.as_ref().expect("the checkpoint has draft stages");
        assert!(block <= model.block, "a block proposes at most {} tokens", model.block);
        batch.prepare_draft(device, self, sequences, block, model.noise)?;
        batch.replay(device, batch.key(), |batch| {
            let rows = batch.rows;
            device.embed(&self.embed, &batch.tokens, rows, &mut s.x)?;
            device.streams_start(&s.x, &s.shape, rows, &mut s.streams)?;
            s.reset_pre(device, rows)?;
            for (i, (stage, ring)) in model.stages.iter().zip(&caches.draft_windows).enumerate() {
                let l = self.layers.len() + i;
                stage.forward(device, l, ring, caches.ring_len, batch, s, probe)?;
            }
            let raw = &mut drafts.raw_hidden;
            device.streams_collapse(&s.streams, &s.mix.pre, &s.shape, rows, raw)?;
            device.rms_norm(raw, &model.norm, model.eps, s.shape.hidden, rows, &mut s.x)?;
            device.linear_f32(&s.x, &self.head, 1.0, rows, &mut drafts.base_logits)
        })?;
        model.choose_tokens(device, self, sequences, block, batch, s, drafts, choice)
    }
}

impl<D: Device> DraftModel<D> {
    /// The sequential part: token `i + 1` depends on token `i` through the Markov head.
    fn choose_tokens(
        &self,
        device: &D,
        model: &Model<D>,
        sequences: &[DraftSequence],
        block: usize,
        batch: &mut Batch<D>,
        s: &mut Scratch<D>,
        drafts: &mut DraftScratch<D>,
        choice: &mut impl DraftChoice<D>,
    ) -> Result<Drafts> {
        let n = sequences.len();
        let vocab = model.config.text_config.vocab_size;
        let hidden = s.shape.hidden;
        let key = Some([Series::DraftToken as u32, 0, n as u32, 0]);
        drafts.sequences = n;
        let first: Vec<u32> = sequences.iter().map(|q| q.token).collect();
        device.upload(&first, &mut drafts.previous, 0)?;
        let mut tokens = vec![Vec::with_capacity(block); n];
        let mut confidences = vec![Vec::with_capacity(block); n];
        for i in 0..block {
            let rows: Vec<u32> = (0..n).map(|q| (q * block + i) as u32).collect();
            device.upload(&rows, &mut drafts.step_rows, 0)?;
            let d = &mut *drafts;
            batch.replay(device, key, |_| {
                device.embed(&self.markov_embed, &d.previous, n, &mut d.embedding)?;
                device.linear_f32(&d.embedding, &self.markov_head, 1.0, n, &mut d.markov_logits)?;
                device.gather_rows(&d.base_logits, vocab, &d.step_rows, n, &mut d.logits)?;
                device.add_rows_f32(&d.markov_logits, vocab, n, &mut d.logits, &d.sequence_rows)?;
                let states = match self.confidence_input {
                    ConfidenceInput::Raw => &d.raw_hidden,
                    ConfidenceInput::Normalized => &s.x,
                };
                device.gather_rows(states, hidden, &d.step_rows, n, &mut d.hidden)?;
                device.concat(&d.hidden, hidden, &d.embedding, self.rank, n, &mut d.joined)?;
                device.linear_f32(&d.joined, &self.confidence, 1.0, n, &mut d.confidence)
            })?;

            choice.choose(device, i, drafts)?;
            let mut chosen = vec![0u32; n];
            let mut confidence = vec![0.0f32; n];
            device.download(&drafts.previous, 0, &mut chosen)?;
            device.download(&drafts.confidence, 0, &mut confidence)?;
            for q in 0..n {
                tokens[q].push(chosen[q]);
                confidences[q].push(confidence[q]);
            }
        }
        Ok((tokens, confidences))
    }
}

impl<D: Device> Stage<D> {
    /// Runs the rows of a block, which [`Batch::prepare_draft`] has put down, through this stage:
    /// `s.streams` and `s.mix.pre`. `ring` holds the stage's keys of earlier positions.
    pub fn forward(
        &self,
        device: &D,
        l: usize,
        ring: &D::Buffer<u8>,
        ring_len: usize,
        batch: &Batch<D>,
        s: &mut Scratch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<()> {
        let set = batch.set();
        let rows = set.map.rows;
        probe.before_layer(device, l, rows, s)?;
        self.attention_site.enter(device, rows, s)?;
        let mixed = device.beside(rows, || self.attention_site.mix(device, rows, s))?;
        let keys = device.beside(rows, || self.attention.keys(device, set, s))?;
        probe.window_keys(device, l, rows, s)?;
        self.attention.narrow(device, rows, s)?;
        self.attention.queries(device, set, s)?;
        device.join(keys)?;
        self.attention.attend_rows(device, ring, ring_len, None, set, s)?;
        self.attention.output(device, set, s)?;
        probe.attention_out(device, l, rows, s)?;
        device.join(mixed)?;
        self.attention_site.leave(device, rows, s)?;
        self.experts_site.enter(device, rows, s)?;
        let mixed = device.beside(rows, || self.experts_site.mix(device, rows, s))?;
        self.experts.route(device, set, rows, s)?;
        probe.routed(device, l, rows, s)?;
        self.experts.forward(device, rows, s)?;
        probe.experts_out(device, l, rows, s)?;
        device.join(mixed)?;
        self.experts_site.leave(device, rows, s)?;
        probe.after_layer(device, l, rows, s)
    }
}
