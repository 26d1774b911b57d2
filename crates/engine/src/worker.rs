//! Runs steps on a device: caches, model, sampling, drafting. Decides nothing.

mod measure;

use crate::cache::Caches;
use crate::drafting::{KnownDrafts, rates, share};
use crate::engine::{DraftScheme, EngineConfig};
use crate::model::draft::{DraftChoice, DraftScratch};
use crate::model::{Batch, Limits, Model, Scratch};
use crate::plan::DraftSequence;
use crate::pulse::Pulse;
use crate::request::Token;
use crate::sampler::{FormMasks, RowMasks, Rows, SlotText, beside, logprobs, rejection};
use crate::schedule::Shape;
use crate::work::{Done, Op, SequenceDone, SequenceWork, Work, Worker};
use deepinfer_device::cpu::sample::processed_logprobs;
use deepinfer_device::ops::{ABSENT, Result};
use deepinfer_device::{Device, DeviceError};
use std::sync::Arc;
use std::time::Instant;

/// A model on a device, with everything that changes.
pub struct ModelWorker<D: Device> {
    /// First, as it goes first: recorded steps use what the others own.
    batch: Batch<D>,
    device: Arc<D>,
    model: Arc<Model<D>>,
    caches: Caches<D>,
    scratch: Scratch<D>,
    drafts: Option<DraftScratch<D>>,
    /// Chosen tokens, one an output row.
    chosen: D::Buffer<u32>,
    slots: Vec<Option<Slot>>,
    ends: Vec<u32>,
    context: usize,
    /// Most rows of a step.
    rows: usize,
    scheme: DraftScheme,
    /// Divide the logits of confidences, by position; the last one goes on.
    temperatures: Vec<f32>,
    known: Option<Arc<KnownDrafts>>,
    pulse: Arc<Pulse>,
}

/// What a worker knows of the sequence in a slot.
struct Slot {
    text: SlotText,
    /// Tokens drafted after the newest one.
    drafts: Vec<u32>,
    /// How likely each is to be accepted, given that the ones before are.
    confidences: Vec<f32>,
    /// What each was drawn from, in the rejection scheme.
    logprobs: Vec<Vec<f32>>,
}

/// The largest step that an engine of this shape plans.
pub fn limits(shape: &Shape) -> Limits {
    Limits {
        rows: shape.rows,
        sequences: shape.max_seqs,
        outputs: shape.outputs,
        pages: shape.sequence_pages,
    }
}

impl<D: Device> ModelWorker<D> {
    /// Allocates everything that steps of this shape need.
    pub fn new(
        device: Arc<D>,
        model: Arc<Model<D>>,
        shape: &Shape,
        format: crate::cache::CacheFormat,
    ) -> Result<Self> {
        let text = &model.config.text_config;
        let geometry = crate::schedule::geometry(&model.config);
        let limits = limits(shape);
        let slots = shape.max_seqs + shape.device_snapshots;
        let batch = Batch::new(&*device, text, &geometry, &limits)?;
        let caches = Caches::new(&*device, text, format, geometry, slots, shape.pages)?;
        let scratch = Scratch::new(&*device, text, caches.formats, &limits)?;
        let drafts = match shape.drafts {
            0 => None,
            _ => Some(DraftScratch::new(&*device, text, &limits)?),
        };
        let chosen = device.alloc(limits.outputs)?;
        Ok(Self {
            device,
            batch,
            caches,
            scratch,
            drafts,
            chosen,
            slots: (0..slots).map(|_| None).collect(),
            ends: shape.ends.clone(),
            context: shape.context,
            rows: shape.rows,
            scheme: DraftScheme::default(),
            temperatures: Vec::new(),
            known: None,
            pulse: Arc::default(),
            model,
        })
    }

    /// Drafts, and records steps, as the settings say.
    pub fn with_settings(mut self, config: &EngineConfig) -> Self {
        if config.graphs {
            self.batch.record(&*self.device);
        }
        self.scheme = config.draft_scheme;
        self.temperatures.clone_from(&config.confidence_temperatures);
        self.known.clone_from(&config.known_drafts);
        self
    }

    /// Bytes of a slot and of a page.
    pub fn cache_bytes(&self) -> (usize, usize) {
        (self.caches.slot_bytes(), self.caches.page_bytes())
    }

    fn vocab(&self) -> usize {
        self.model.config.text_config.vocab_size
    }

    fn apply(&mut self, op: Op, done: &mut Done) -> Result<()> {
        let (device, caches) = (&*self.device, &mut self.caches);
        match op {
            Op::Open(opening) => {
                let slot = opening.slot as usize;
                let (vocab, image) =
                    (self.model.config.text_config.vocab_size, self.model.config.image_token_id);
                let text = SlotText::new(*opening, vocab, &self.ends, image);
                self.slots[slot] = Some(Slot::new(text));
            }
            Op::Close { slot } => self.slots[slot as usize] = None,
            Op::CopySlot { from, to } => caches.copy_slot(device, from, to)?,
            Op::CopyPage { from, to } => caches.copy_page(device, from, to)?,
            Op::SaveState { name, slot, pages } => {
                done.states.push((name, caches.snapshot(device, slot, &pages, 0)?));
            }
            Op::SavePage { key, page } => done.pages.push((key, caches.save_page(device, page)?)),
            Op::LoadState { state, slot, pages } => caches.restore(device, &state, slot, &pages)?,
            Op::LoadPage { bytes, page } => caches.load_page(device, page, &bytes)?,
        }
        Ok(())
    }

    /// Fills in the rows of sequences whose newest tokens only this worker knows.
    fn fill(&self, work: &mut Work) -> Result<()> {
        let counts = self.verified(work)?;
        let sequences = work.plan.sequences.iter_mut().zip(&work.sequences);
        for ((plan, sequence), count) in sequences.zip(counts) {
            if sequence.follow.is_none() {
                continue;
            }
            let slot = self.slot(plan.slot)?;
            let tokens = slot.text.tokens();
            let start = tokens.len() - 1;
            let drafts = &slot.drafts[..count];
            plan.start = start as u32;
            plan.tokens = std::iter::once(tokens[start]).chain(drafts.iter().copied()).collect();
            plan.context = tokens[start.saturating_sub(self.context)..start].to_vec();
            plan.outputs = (0..plan.tokens.len() as u32).collect();
        }
        Ok(())
    }

    /// How many drafts each sequence of the step verifies.
    fn verified(&self, work: &Work) -> Result<Vec<usize>> {
        let mut most = Vec::with_capacity(work.sequences.len());
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            most.push(match sequence.follow {
                Some(verify) => self.slot(plan.slot)?.drafts.len().min(verify as usize),
                None => 0,
            });
        }
        let Some(verify) = &work.verify else { return Ok(most) };
        let mut chances = Vec::with_capacity(most.len());
        for (plan, &most) in work.plan.sequences.iter().zip(&most) {
            let slot = self.slot(plan.slot)?;
            let told = &slot.confidences[..most.min(slot.confidences.len())];
            chances.push(rates(told, &verify.correction));
        }
        Ok(share(&chances, verify.count))
    }

    fn slot(&self, slot: u32) -> Result<&Slot> {
        self.slots[slot as usize].as_ref().ok_or(DeviceError::EmptySlot { slot })
    }

    /// What is to be computed of the grammars of the sequences that choose tokens.
    fn form_masks(&mut self, work: &Work) -> Vec<FormMasks> {
        let mut jobs = Vec::new();
        let sequences = work.plan.sequences.iter().zip(&work.sequences);
        for (i, (plan, sequence)) in sequences.enumerate().filter(|(_, (_, s))| s.sample) {
            let Some(slot) = self.slots[plan.slot as usize].as_mut() else { continue };
            let drafts = if sequence.follow.is_some() { &plan.tokens[1..] } else { &[] };
            jobs.extend(FormMasks::new(i, plan.slot, &mut slot.text, drafts));
        }
        jobs
    }

    /// Chooses tokens for every output row and takes in those that count. `masks` are those of the
    /// grammars, by sequence.
    fn sample(&mut self, work: &Work, masks: &[RowMasks]) -> Result<Vec<SequenceDone>> {
        let vocab = self.vocab();
        let mut rows = Rows::new();
        let sequences = work.plan.sequences.iter().zip(&work.sequences);
        for ((plan, sequence), masks) in sequences.zip(masks) {
            let slot = self.slot(plan.slot)?;
            for (i, &output) in plan.outputs.iter().enumerate() {
                let last = output as usize + 1 == plan.tokens.len();
                match sequence.follow {
                    _ if slot.text.fault().is_some() || slot.text.is_dead() => rows.push_ignored(),
                    Some(_) => rows.push(&slot.text, &plan.tokens[1..=i], masks.row(i)),
                    None if sequence.sample && last => rows.push(&slot.text, &[], masks.row(0)),
                    None => rows.push_ignored(),
                }
            }
        }
        if rows.is_empty() {
            return Ok(vec![SequenceDone::default(); work.sequences.len()]);
        }
        let before = self.wanted_logits(work)?;
        rows.choose(&*self.device, vocab, &mut self.scratch.logits, &mut self.chosen)?;
        let mut chosen = vec![0u32; rows.len()];
        self.device.download(&self.chosen, 0, &mut chosen)?;
        if self.scheme == DraftScheme::Rejection {
            self.reject(work, &rows, &mut chosen)?;
        }

        let mut row = 0;
        let mut done = Vec::with_capacity(work.sequences.len());
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let mine = row..row + plan.outputs.len();
            let logits = &before[mine.clone()];
            row = mine.end;
            let slot = self.slots[plan.slot as usize].as_mut();
            let slot = slot.ok_or(DeviceError::EmptySlot { slot: plan.slot })?;
            done.push(slot.take(plan, sequence, &chosen[mine], logits));
        }
        Ok(done)
    }

    /// Replaces the tokens chosen after drafts by those of the rejection scheme.
    fn reject(&self, work: &Work, rows: &Rows, chosen: &mut [u32]) -> Result<()> {
        let vocab = self.vocab();
        let mut first = 0;
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let row = first;
            first += plan.outputs.len();
            let slot = self.slot(plan.slot)?;
            // The most probable token needs no chance.
            if sequence.follow.is_none() || slot.text.params().temperature <= 0.0 {
                continue;
            }
            for (i, (&draft, q)) in plan.tokens[1..].iter().zip(&slot.logprobs).enumerate() {
                let at = row + i;
                if chosen[at] == ABSENT {
                    break;
                }
                let mut logits = vec![0.0; vocab];
                self.device.download(&self.scratch.logits, at * vocab, &mut logits)?;
                let sample = &rows.samples()[at];
                let p = processed_logprobs(&logits, sample);
                chosen[at] = rejection::verify(&p, q, draft, sample);
                if chosen[at] != draft {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Logits of rows whose log-probabilities are wanted, before they are processed.
    fn wanted_logits(&self, work: &Work) -> Result<Vec<Option<Vec<f32>>>> {
        let vocab = self.vocab();
        let mut out = Vec::new();
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let wanted = sequence.prompt_logprobs.is_some()
                || self.slot(plan.slot)?.text.params().logprobs.is_some();
            for _ in &plan.outputs {
                let mut logits = None;
                if wanted {
                    let mut row = vec![0.0; vocab];
                    self.device.download(&self.scratch.logits, out.len() * vocab, &mut row)?;
                    logits = Some(row);
                }
                out.push(logits);
            }
        }
        Ok(out)
    }

    /// Proposes tokens for the sequences that want some, and reports their confidences.
    fn draft(&mut self, work: &Work, done: &mut [SequenceDone]) -> Result<()> {
        let Some(scratch) = &mut self.drafts else { return Ok(()) };
        let mut sequences = Vec::new();
        let mut block = 0;
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let Some(slot) = &mut self.slots[plan.slot as usize] else { continue };
            slot.forget_drafts();
            let tokens = slot.text.tokens();
            let position = tokens.len() as u32 - 1;
            let token = tokens[tokens.len() - 1];
            // As the model was released: nothing is drafted after a single token.
            let more = position >= 2 && !slot.text.is_dead() && !slot.text.ended();
            if !sequence.sample || sequence.draft == 0 || !more {
                continue;
            }
            block = block.max(sequence.draft as usize);
            let window_from = plan.decoder_window_from;
            sequences.push(DraftSequence { slot: plan.slot, token, position, window_from });
        }
        if sequences.is_empty() {
            return Ok(());
        }
        let texts = sequences
            .iter()
            .filter_map(|s| self.slots[s.slot as usize].as_ref().map(|slot| &slot.text))
            .collect();
        let vocab = self.model.config.text_config.vocab_size;
        let rejects = self.scheme == DraftScheme::Rejection;
        let mut choice =
            DraftRows { texts, vocab, chosen: Vec::new(), logprobs: rejects.then(Vec::new) };
        let (tokens, confidences) = self.model.draft_block(
            &self.device,
            &sequences,
            block,
            &self.caches,
            &mut self.batch,
            &mut self.scratch,
            scratch,
            &mut choice,
            &mut &*self.pulse,
        )?;
        let logprobs = choice.logprobs.unwrap_or_default();
        let logprobs = logprobs.into_iter().map(Some).chain(std::iter::repeat(None));
        let drafted = tokens.into_iter().zip(confidences).zip(logprobs);
        for (sequence, ((tokens, confidences), logprobs)) in sequences.iter().zip(drafted) {
            let Some(slot) = &mut self.slots[sequence.slot as usize] else { continue };
            let told = confidences.into_iter().enumerate();
            slot.confidences = told.map(|(i, x)| confidence(x, &self.temperatures, i)).collect();
            (slot.drafts, slot.logprobs) = (tokens, logprobs.unwrap_or_default());
            if let Some(known) = &self.known {
                (slot.drafts, slot.confidences) =
                    known.propose(slot.text.tokens(), slot.text.prompt_len(), block);
                if rejects {
                    // They were not drawn: nothing else could have been proposed.
                    let certain = slot.drafts.iter().map(|&t| rejection::certain(vocab, t));
                    slot.logprobs = certain.collect();
                }
            }
            // What the grammar refuses is not worth a row; in the rejection scheme, whether a draft is
            // verified must not depend on it.
            if !rejects && let Some(form) = slot.text.form() {
                let allowed = form.allowed(&slot.drafts);
                slot.drafts.truncate(allowed);
                slot.confidences.truncate(allowed);
            }
        }
        for (plan, done) in work.plan.sequences.iter().zip(done) {
            if let Some(slot) = &self.slots[plan.slot as usize] {
                done.confidences.clone_from(&slot.confidences);
            }
        }
        Ok(())
    }
}

/// The chance that a confidence head's output stands for.
fn confidence(logit: f32, temperatures: &[f32], index: usize) -> f32 {
    let temperature = temperatures.get(index).or(temperatures.last()).copied().unwrap_or(1.0);
    1.0 / (1.0 + (-logit / temperature.max(1e-5)).exp())
}

impl Slot {
    fn new(text: SlotText) -> Self {
        Self { text, drafts: Vec::new(), confidences: Vec::new(), logprobs: Vec::new() }
    }

    fn forget_drafts(&mut self) {
        self.drafts.clear();
        self.confidences.clear();
        self.logprobs.clear();
    }

    /// Takes in the tokens chosen after each row: drafts count as far as they were chosen.
    fn take(
        &mut self,
        plan: &crate::plan::PlanSequence,
        sequence: &SequenceWork,
        chosen: &[u32],
        logits: &[Option<Vec<f32>>],
    ) -> SequenceDone {
        let mut done = SequenceDone::default();
        if let (Some(top), None) = (sequence.prompt_logprobs, sequence.follow) {
            for (i, logits) in logits.iter().enumerate() {
                let next = plan.start as usize + i + 1;
                if let (Some(logits), true) = (logits, next < self.text.prompt_len()) {
                    done.prompt_logprobs.push(logprobs(logits, self.text.tokens()[next], top));
                }
            }
        }
        if !sequence.sample || self.text.fault().is_some() || self.text.is_dead() {
            done.fault = self.text.fault().cloned();
            return done;
        }
        let wanted = self.text.params().logprobs;
        let token = |id: u32, logits: &Option<Vec<f32>>| Token {
            id,
            logprobs: wanted.zip(logits.as_ref()).map(|(top, logits)| logprobs(logits, id, top)),
        };
        if sequence.follow.is_none() {
            if let (Some(&id), Some(logits)) = (chosen.last(), logits.last()) {
                done.tokens.push(token(id, logits));
                self.text.push(id);
            }
            done.fault = self.text.fault().cloned();
            return done;
        }
        let drafts = &plan.tokens[1..];
        done.verified = drafts.len() as u32;
        for (i, (&id, logits)) in chosen.iter().zip(logits).enumerate() {
            done.tokens.push(token(id, logits));
            self.text.push(id);
            if drafts.get(i) != Some(&id) {
                break;
            }
        }
        done.fault = self.text.fault().cloned();
        done
    }
}

/// Chooses drafts with the sequences' own parameters and noise.
struct DraftRows<'a> {
    texts: Vec<&'a SlotText>,
    vocab: usize,
    /// Tokens of the block so far, by sequence.
    chosen: Vec<Vec<u32>>,
    /// What they were drawn from, by sequence, if it is wanted.
    logprobs: Option<Vec<Vec<Vec<f32>>>>,
}

impl<D: Device> DraftChoice<D> for DraftRows<'_> {
    fn choose(&mut self, device: &D, index: usize, scratch: &mut DraftScratch<D>) -> Result<()> {
        if index == 0 {
            self.chosen = vec![Vec::new(); self.texts.len()];
        }
        let mut rows = Rows::new();
        for (text, drafts) in self.texts.iter().zip(&self.chosen) {
            rows.push(text, drafts, None);
        }
        if let Some(logprobs) = &mut self.logprobs {
            rows.draw_drafts(index);
            logprobs.resize(self.texts.len(), Vec::new());
        }
        rows.choose(device, self.vocab, &mut scratch.logits, &mut scratch.previous)?;
        let sequences = self.logprobs.iter_mut().flatten().zip(rows.samples());
        for (i, (logprobs, sample)) in sequences.enumerate() {
            let mut logits = vec![0.0; self.vocab];
            device.download(&scratch.logits, i * self.vocab, &mut logits)?;
            logprobs.push(processed_logprobs(&logits, sample));
        }
        let mut chosen = vec![0u32; self.texts.len()];
        device.download(&scratch.previous, 0, &mut chosen)?;
        // A row without any allowed token must still name one for the next step of the block.
        let dead = chosen.contains(&ABSENT);
        let named: Vec<u32> = chosen.iter().map(|&t| if t == ABSENT { 0 } else { t }).collect();
        if dead {
            device.upload(&named, &mut scratch.previous, 0)?;
        }
        self.chosen.iter_mut().zip(named).for_each(|(drafts, token)| drafts.push(token));
        Ok(())
    }
}

impl<D: Device> Worker for ModelWorker<D> {
    fn run(&mut self, work: Work) -> Result<Done> {
        let device = Arc::clone(&self.device);
        device.run(|| self.step(work))
    }

    fn pulse(&self) -> Arc<Pulse> {
        self.pulse.clone()
    }

    fn run_series<R: Send>(&mut self, f: impl FnOnce(&mut Self) -> R + Send) -> R {
        let device = Arc::clone(&self.device);
        device.run(|| f(self))
    }
}

impl<D: Device> ModelWorker<D> {
    fn step(&mut self, mut work: Work) -> Result<Done> {
        let start = Instant::now();
        let mut done = Done::default();
        for op in std::mem::take(&mut work.before) {
            self.apply(op, &mut done)?;
            self.pulse.beat();
        }
        if !work.sequences.is_empty() {
            self.fill(&mut work)?;
            let mut forms = self.form_masks(&work);
            let (device, batch, scratch) = (&*self.device, &mut self.batch, &mut self.scratch);
            let (model, caches, mut pulse) = (&self.model, &mut self.caches, &*self.pulse);
            let run = || model.forward(device, &work.plan, caches, batch, scratch, &mut pulse);
            beside(&mut forms, run)?;
            let mut masks = vec![RowMasks::default(); work.sequences.len()];
            for form in forms {
                let sequence = form.sequence;
                if let Some(slot) = &mut self.slots[form.slot as usize] {
                    masks[sequence] = form.give_back(&mut slot.text);
                }
            }
            done.sequences = self.sample(&work, &masks)?;
            let drafting = Instant::now();
            self.draft(&work, &mut done.sequences)?;
            done.draft_seconds = drafting.elapsed().as_secs_f64();
        }
        done.seconds = start.elapsed().as_secs_f64();
        Ok(done)
    }
}
