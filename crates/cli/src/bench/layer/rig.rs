//! A random model with full caches, and steps over them.

use super::timed::Timed;
use crate::failure::Outcome;
use anyhow::{Context, anyhow};
use deepinfer::cache::{CacheFormat, Caches, Geometry};
use deepinfer::config::TextConfig;
use deepinfer::engram::Engram;
use deepinfer::model::{Batch, Indexer, Limits, Model, Probe, Scratch};
use deepinfer::plan::{DraftSequence, PlanSequence, StepPlan};
use deepinfer::synth::Plan;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::ops::{ABSENT, Result};
use deepinfer_device::random::{Content, Random};
use deepinfer_device::{Device, RowFormat, splitmix};
use std::sync::Arc;

/// Device memory that is left alone: the driver's own, and scratch that grows.
pub const MARGIN: usize = 4 << 30;
/// Bytes that are written to keep the device busy while a step is put into its queue.
const FILLER: usize = 256 << 20;

/// Sizes of a rig.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of the largest step.
    pub rows: usize,
    /// Sequences of the largest step.
    pub sequences: usize,
    /// Positions of the longest sequence.
    pub context: usize,
}

/// Bytes that a rig takes.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Bytes {
    /// Weights on the device.
    pub weights: usize,
    /// Work space of the largest step.
    pub work: usize,
    /// Rings, compressed rows and index keys.
    pub caches: usize,
}

/// The model and all that a step needs.
pub struct Rig<D: Timed> {
    pub device: Arc<D>,
    pub model: Model<D>,
    pub caches: Caches<D>,
    pub scratch: Scratch<D>,
    pub bytes: Bytes,
    geometry: Geometry,
    sizes: Sizes,
    filler: D::Buffer<u8>,
    fill_seconds: f64,
}

/// Bytes of a page of all sources.
pub fn page_bytes<D: Device>(device: &D, c: &TextConfig, geometry: &Geometry) -> usize {
    let formats = CacheFormat::Released.row_formats(device.exact_rows());
    let row = formats.compressed.row_bytes(c.head_dim) + formats.index.row_bytes(c.index_head_dim);
    c.kv_source_layer_ids
        .iter()
        .map(|&layer| geometry.rows_per_page(c.compress_ratios[layer]) * row)
        .sum()
}

/// Sizes of the caches of a configuration.
pub fn geometry(c: &TextConfig) -> Geometry {
    Geometry::new(c, c.dspark_block_size + 1)
}

impl<D: Timed> Rig<D> {
    /// Makes the model of `plan` and fills caches with random rows: pages for all sequences at
    /// their longest, or as many as there is memory for.
    pub fn new(device: &Arc<D>, plan: &Plan, sizes: Sizes, seed: u64) -> Outcome<Self> {
        let d = &**device;
        let used = |before: Option<(usize, usize)>| -> Outcome<usize> {
            let after = d.memory()?;
            let free = |memory: Option<(usize, usize)>| memory.map_or(0, |(free, _)| free);
            Ok(free(before).saturating_sub(free(after)))
        };
        let start = d.memory()?;
        let text = &plan.config.text_config;
        let tokenizer = Tokenizer::from_bytes(&plan.tokenizer_json)?;
        let engram = Engram::new(text, &tokenizer)?;
        let model =
            Model::random(d, plan, seed, engram, &mut |_, _| {}).context("making the weights")?;
        d.sync()?;
        let weights = used(start)?;

        let before = d.memory()?;
        let geometry = geometry(text);
        let formats = CacheFormat::Released.row_formats(d.exact_rows());
        let limits = Limits {
            rows: sizes.rows,
            sequences: sizes.sequences,
            outputs: sizes.sequences,
            pages: geometry.pages_for(sizes.context),
        };
        let scratch = Scratch::new(d, text, formats, &limits)?;
        // Made again for each context; here it shows that it fits.
        Batch::<D>::new(d, text, &geometry, &limits)?;
        let mut filler = d.alloc::<u8>(if before.is_some() { FILLER } else { 0 })?;
        let work = used(before)?;

        let before = d.memory()?;
        let wanted = sizes.sequences * limits.pages;
        let pages = match before {
            Some((free, _)) => {
                let room = free.saturating_sub(MARGIN) / page_bytes(d, text, &geometry).max(1);
                wanted.min(room).max(limits.pages)
            }
            None => wanted,
        };
        let slots = sizes.sequences;
        let mut caches =
            Caches::new(d, text, CacheFormat::Released, geometry.clone(), slots, pages)?;
        fill(d, text, &mut caches, seed)?;
        let fill_seconds = match before {
            Some(_) => time_filling(d, &mut filler)?,
            None => 0.0,
        };
        let bytes = Bytes { weights, work, caches: used(before)? };
        let device = device.clone();
        Ok(Self { device, model, caches, scratch, bytes, geometry, sizes, filler, fill_seconds })
    }

    /// The model's configuration.
    pub fn text(&self) -> &TextConfig {
        &self.model.config.text_config
    }

    /// Inputs of steps in sequences of at most `context` positions.
    pub fn batch(&self, context: usize) -> Outcome<Batch<D>> {
        let limits = Limits {
            rows: self.sizes.rows,
            sequences: self.sizes.sequences,
            outputs: self.sizes.sequences,
            pages: self.geometry.pages_for(context),
        };
        Ok(Batch::new(&*self.device, self.text(), &self.geometry, &limits)?)
    }

    /// Whether so many sequences of `context` positions have pages of their own.
    pub fn distinct(&self, sequences: usize, context: usize) -> bool {
        sequences * self.geometry.pages_for(context) <= self.caches.pages
    }

    /// Any tokens will do.
    fn token(&self, slot: usize, position: usize) -> u32 {
        let random = splitmix::mix((slot as u64) << 32 | position as u64);
        (random % self.text().vocab_size as u64) as u32
    }

    fn sequence(&self, slot: usize, context: usize, start: usize, rows: usize) -> PlanSequence {
        let pages = self.geometry.pages_for(context);
        let page = |i: usize| ((slot * pages + i) % self.caches.pages) as u32;
        let back = self.text().engram_max_ngram_size.saturating_sub(1).min(start);
        PlanSequence {
            slot: slot as u32,
            pages: (0..pages).map(page).collect(),
            start: start as u32,
            tokens: (start..start + rows).map(|p| self.token(slot, p)).collect(),
            context: (start - back..start).map(|p| self.token(slot, p)).collect(),
            decoder_from: start as u32,
            ..PlanSequence::default()
        }
    }

    /// One row in each of `sequences` sequences, at the last of `context` positions.
    pub fn decode(&self, sequences: usize, context: usize) -> StepPlan {
        let one = |slot| {
            let sequence = self.sequence(slot, context, context - 1, 1);
            PlanSequence { outputs: vec![0], ..sequence }
        };
        StepPlan { sequences: (0..sequences).map(one).collect() }
    }

    /// The last `rows` of `context` positions of one sequence, by chunks; the last row's logits are
    /// wanted. `all`: every row runs every layer; else rows stop where nothing wanted depends on
    /// them, as those of a prompt do.
    pub fn prefill(&self, rows: usize, context: usize, chunk: usize, all: bool) -> Vec<StepPlan> {
        let chunk = chunk.min(self.sizes.rows);
        let first = context - rows;
        let mut plans = Vec::new();
        for start in (first..context).step_by(chunk) {
            let n = chunk.min(context - start);
            let mut sequence = self.sequence(0, context, start, n);
            if start + n == context {
                sequence.outputs = vec![n as u32 - 1];
            }
            if !all {
                sequence.complete_from = context as u32 - 1;
            }
            plans.push(StepPlan { sequences: vec![sequence] });
        }
        plans
    }

    /// A draft block behind `context - 1` positions of each of `sequences` sequences.
    pub fn drafts(&self, sequences: usize, context: usize) -> Vec<DraftSequence> {
        let position = context - 1;
        (0..sequences)
            .map(|slot| DraftSequence {
                slot: slot as u32,
                token: self.token(slot, position),
                position: position as u32,
                window_from: 0,
            })
            .collect()
    }

    /// Puts a step into the device's queue.
    pub fn forward(
        &mut self,
        plan: &StepPlan,
        batch: &mut Batch<D>,
        probe: &mut impl Probe<D>,
    ) -> Result<usize> {
        let (caches, scratch) = (&mut self.caches, &mut self.scratch);
        self.model.forward(&*self.device, plan, caches, batch, scratch, probe)
    }

    /// Gives the device something to do for at least `seconds`, and other contents to its cache.
    pub fn occupy(&mut self, seconds: f64) -> Result<()> {
        if self.fill_seconds == 0.0 {
            return Ok(());
        }
        let random = Random { content: Content::Fp4, key: 0 };
        for _ in 0..1 + (seconds / self.fill_seconds) as usize {
            self.device.random_bytes(&random, FILLER, &mut self.filler)?;
        }
        Ok(())
    }

    /// The logits of the last step's outputs are numbers.
    pub fn check_logits(&self, outputs: usize) -> Outcome {
        let mut logits = vec![0.0f32; outputs * self.text().vocab_size];
        self.device.download(&self.scratch.logits, 0, &mut logits)?;
        let bad = logits.iter().filter(|x| !x.is_finite()).count();
        if bad > 0 {
            return Err(anyhow!("{bad} of {} logits are not finite", logits.len()).into());
        }
        Ok(())
    }
}

fn time_filling<D: Timed>(device: &D, filler: &mut D::Buffer<u8>) -> Result<f64> {
    let random = Random { content: Content::Fp4, key: 0 };
    device.random_bytes(&random, FILLER, filler)?;
    let start = device.mark()?;
    device.random_bytes(&random, FILLER, filler)?;
    device.between(&start, &device.mark()?)
}

/// Random rows everywhere.
fn fill<D: Device>(device: &D, c: &TextConfig, caches: &mut Caches<D>, seed: u64) -> Result<()> {
    let formats = caches.formats;
    let mut key = splitmix::mix(!seed);
    let mut rows = |format: RowFormat, width: usize, out: &mut D::Buffer<u8>| {
        key = splitmix::mix(key);
        let bytes = device.len(out);
        device.random_bytes(&Random { content: Content::Rows { format, width }, key }, bytes, out)
    };
    for ring in caches.windows.iter_mut().chain(&mut caches.draft_windows) {
        rows(formats.window, c.head_dim, ring)?;
    }
    for &layer in &c.kv_source_layer_ids {
        let source = caches.source_mut(layer);
        rows(formats.compressed, c.head_dim, &mut source.rows)?;
        rows(formats.index, c.index_head_dim, &mut source.keys)?;
    }
    Ok(())
}

/// Looks at what a step chose: how many experts each layer reads, and that compressed rows are
/// those of a query's own past, ascending and as many as there must be.
pub struct Choices {
    /// Experts that a row uses.
    pub experts_per_row: usize,
    /// By layer: distinct experts, over all steps.
    pub experts: Vec<usize>,
    /// Position of the first row in each step's sequences; rows of one follow each other.
    pub start: usize,
    /// Rows of a sequence.
    pub rows_each: usize,
    /// Compression ratios of the layers.
    pub ratios: Vec<usize>,
    /// What is wrong.
    pub failure: Option<String>,
}

impl<D: Device> Probe<D> for Choices {
    fn selected(
        &mut self,
        d: &D,
        layer: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let k = indexer.k;
        let mut chosen = vec![0u32; rows * k];
        d.download(&s.selected, 0, &mut chosen)?;
        for (row, chosen) in chosen.chunks_exact(k).enumerate() {
            let visible = (self.start + row % self.rows_each + 1) / self.ratios[layer];
            let count = chosen.iter().position(|c| *c == ABSENT).unwrap_or(k);
            let some = &chosen[..count];
            let past = some.iter().all(|c| (*c as usize) < visible);
            let ascending = some.windows(2).all(|pair| pair[0] < pair[1]);
            if !past || !ascending || count != k.min(visible) {
                let text = format!("layer {layer}, row {row}: {count} of {visible} rows: {some:?}");
                self.failure.get_or_insert(text);
            }
        }
        Ok(())
    }

    fn routed(&mut self, d: &D, layer: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let mut ids = vec![0u32; rows * self.experts_per_row];
        d.download(&s.expert_ids, 0, &mut ids)?;
        ids.sort_unstable();
        ids.dedup();
        self.experts[layer] += ids.len();
        Ok(())
    }
}
