//! Times of steps: by layer, and by operation in each layer.

use super::marks::{Marks, OperationTime, Place, add};
use super::rig::{Choices, Rig};
use super::timed::Timed;
use super::work::{Reach, Weights};
use crate::failure::Outcome;
use anyhow::anyhow;
use deepinfer::config::TextConfig;
use deepinfer::model::{Batch, NoProbe};
use deepinfer::plan::StepPlan;
use deepinfer::synth::Plan;
use deepinfer_device::bench::median;
use deepinfer_device::ops::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// Measurements of a case: as many as take about this long, within these limits.
const SECONDS: f64 = 0.25;
const REPEATS: std::ops::RangeInclusive<usize> = 1..=7;
/// The device is kept busy for at most so long while a step is put into its queue.
const BUSY: f64 = 0.05;

/// What kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One row in each of `rows` sequences.
    Decode,
    /// The last `rows` positions of one sequence, through all layers.
    Prefill,
    /// The same, where rows stop when nothing wanted depends on them.
    Prompt,
    /// A draft block in each of `rows` sequences, one stage.
    Draft,
}

/// One step, or the steps of one prompt.
#[derive(Debug, Serialize)]
pub struct Case {
    pub mode: Mode,
    /// Positions of a sequence.
    pub context: usize,
    /// Sequences of a decode step or of drafts; rows of a prompt.
    pub rows: usize,
    /// Whether every sequence has pages of its own.
    pub own_pages: bool,
    /// From the call to the last result, nothing else in the queue: launches included.
    pub seconds: f64,
    /// Of these, until everything was in the device's queue.
    pub queued_seconds: f64,
    /// From the first layer to the last result on a device that does not wait for launches; decode
    /// steps and drafts as a graph, on a device that records them.
    pub device_seconds: f64,
    /// Tokens of the step over `seconds`, where all layers run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Kinds of layers, in the order of the model.
    pub layers: Vec<LayerTime>,
}

/// Layers of one kind, on average.
#[derive(Debug, Serialize)]
pub struct LayerTime {
    pub kind: &'static str,
    /// Layers of the kind.
    pub layers: usize,
    /// On a device that does not wait for launches; as part of a graph where the step is one.
    pub seconds: f64,
    /// Bytes of weights and cache rows that must be read.
    pub bytes: f64,
    /// These bytes over the time, over the rate at which the device reads memory.
    pub share_of_read: f64,
    /// Operations of products, of attention and of index scores, over the time.
    pub tflop_per_s: f64,
    /// Of a step that is not recorded, one operation after the other, with a mark behind each kernel,
    /// which takes time of its own.
    pub operations: Vec<OperationTime>,
}

/// What a layer is, as reports name it.
fn kind(c: &TextConfig, layer: usize) -> &'static str {
    let decoder = c.decoder_start().is_some_and(|start| layer >= start);
    match (c.kv_source(layer), c.is_kv_source(layer), c.is_index_source(layer), decoder) {
        (None, ..) => "window only",
        (_, true, _, false) => "encoder, own keys",
        (_, true, _, true) => "decoder, own keys",
        (_, _, true, false) => "encoder, chooses rows",
        (_, _, true, true) => "decoder, chooses among candidates",
        (_, _, _, false) => "encoder",
        (_, _, _, true) => "decoder",
    }
}

/// Measures steps of one rig.
pub struct Measure<'a, D: Timed> {
    pub rig: &'a mut Rig<D>,
    pub plan: &'a Plan,
    /// Bytes a second that the device reads.
    pub read_rate: f64,
}

/// What one run with marks gave.
#[derive(Default)]
struct Marked {
    /// From the first mark to the last one.
    seconds: f64,
    places: BTreeMap<Place, f64>,
    operations: BTreeMap<Place, Vec<OperationTime>>,
}

/// What a series of runs gave.
struct Times {
    seconds: f64,
    queued_seconds: f64,
    /// The median run.
    marked: Marked,
    operations: BTreeMap<Place, Vec<OperationTime>>,
}

impl<D: Timed> Measure<'_, D> {
    /// A decode step.
    pub fn decode(&mut self, rows: usize, context: usize) -> Outcome<Case> {
        let plans = vec![self.rig.decode(rows, context)];
        self.case(Mode::Decode, rows, context, &plans)
    }

    /// The end of a prompt, in steps of at most `chunk` rows.
    pub fn prefill(
        &mut self,
        mode: Mode,
        rows: usize,
        context: usize,
        chunk: usize,
    ) -> Outcome<Case> {
        let plans = self.rig.prefill(rows, context, chunk, mode == Mode::Prefill);
        self.case(mode, rows, context, &plans)
    }

    fn case(
        &mut self,
        mode: Mode,
        rows: usize,
        context: usize,
        plans: &[StepPlan],
    ) -> Outcome<Case> {
        let mut batch = self.rig.batch(context)?;
        let (experts, outputs) = self.look(mode, plans, &mut batch)?;
        self.rig.check_logits(outputs)?;
        let times = self.times(plans, &mut batch)?;
        let sequences = plans[0].sequences.len();
        let layers = match mode {
            Mode::Prompt => Vec::new(),
            _ => self.layers(plans, &experts, &times),
        };
        Ok(Case {
            mode,
            context,
            rows,
            own_pages: self.rig.distinct(sequences, context),
            seconds: times.seconds,
            queued_seconds: times.queued_seconds,
            device_seconds: times.marked.seconds,
            tokens_per_s: Some(rows as f64 / times.seconds),
            layers,
        })
    }

    /// Runs the steps once and looks at their choices. Returns the distinct experts by layer, and
    /// the outputs of the last step.
    fn look(
        &mut self,
        mode: Mode,
        plans: &[StepPlan],
        batch: &mut Batch<D>,
    ) -> Outcome<(Vec<usize>, usize)> {
        let text = self.rig.text().clone();
        let mut choices = Choices {
            experts_per_row: text.num_experts_per_tok,
            experts: vec![0; text.num_hidden_layers],
            start: 0,
            rows_each: 1,
            ratios: text.compress_ratios.clone(),
            failure: None,
        };
        let mut outputs = 0;
        for plan in plans {
            let first = &plan.sequences[0];
            (choices.start, choices.rows_each) = (first.start as usize, first.tokens.len());
            outputs = match mode {
                // Fewer rows come to some layers.
                Mode::Prompt => self.rig.forward(plan, batch, &mut NoProbe)?,
                _ => self.rig.forward(plan, batch, &mut choices)?,
            };
        }
        self.rig.device.sync()?;
        match choices.failure {
            Some(failure) => Err(anyhow!("the choice of rows: {failure}").into()),
            None => Ok((choices.experts, outputs)),
        }
    }

    fn times(&mut self, plans: &[StepPlan], batch: &mut Batch<D>) -> Outcome<Times> {
        let device = self.rig.device.clone();
        device.sync()?;
        let start = Instant::now();
        for plan in plans {
            self.rig.forward(plan, batch, &mut NoProbe)?;
        }
        let queued_seconds = start.elapsed().as_secs_f64();
        device.sync()?;
        let busy = 3.0 * queued_seconds;
        let operations = self.marked(plans, batch, busy, &mut Marks::new(true))?.operations;

        // As the engine runs it: a step that only decodes is recorded.
        batch.record(&*device);
        let (mut wall, mut queued) = (Vec::new(), Vec::new());
        let mut repeats = *REPEATS.end();
        let unrecorded = if Self::records(plans) { 2 } else { 0 };
        for i in 0.. {
            device.sync()?;
            let start = Instant::now();
            for plan in plans {
                self.rig.forward(plan, batch, &mut NoProbe)?;
            }
            let until_queued = start.elapsed().as_secs_f64();
            device.sync()?;
            let seconds = start.elapsed().as_secs_f64();
            if i < unrecorded {
                continue;
            }
            queued.push(until_queued);
            wall.push(seconds);
            repeats = ((SECONDS / seconds) as usize).clamp(*REPEATS.start(), *REPEATS.end());
            if wall.len() >= repeats {
                break;
            }
        }
        let queued_seconds = median(&mut queued);
        // Recorded again, with marks.
        batch.record(&*device);
        let mut marks = Marks::new(false);
        for _ in 0..unrecorded {
            self.marked(plans, batch, queued_seconds, &mut marks)?;
        }
        let mut runs = Vec::new();
        for _ in 0..repeats {
            runs.push(self.marked(plans, batch, queued_seconds, &mut marks)?);
        }
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let marked = runs.swap_remove(runs.len() / 2);
        Ok(Times { seconds: median(&mut wall), queued_seconds, marked, operations })
    }

    /// Whether steps of this kind are recorded.
    fn records(plans: &[StepPlan]) -> bool {
        plans.iter().all(|plan| plan.sequences.iter().all(|q| q.outputs.len() == q.tokens.len()))
    }

    /// Runs the steps while the device is busy with other things. `marks` are made anew, unless the
    /// step was recorded with them.
    fn marked(
        &mut self,
        plans: &[StepPlan],
        batch: &mut Batch<D>,
        queued_seconds: f64,
        marks: &mut Marks<D>,
    ) -> Outcome<Marked> {
        let device = self.rig.device.clone();
        let mut sums = Marked::default();
        for plan in plans {
            device.sync()?;
            let busy = 1.5 * queued_seconds / plans.len() as f64;
            self.rig.occupy(busy.min(BUSY))?;
            let mut new = marks.like();
            self.rig.forward(plan, batch, &mut new)?;
            if !new.is_empty() {
                *marks = new;
            }
            let end = device.mark()?;
            device.traced();
            let (places, all) = marks.seconds(&device, &end)?;
            sums.seconds += all;
            for (place, seconds) in places {
                *sums.places.entry(place).or_default() += seconds;
            }
            for (place, operations) in marks.operations(&device)? {
                let to = sums.operations.entry(place).or_default();
                operations.iter().for_each(|o| add(to, &o.name, o.seconds, o.kernels));
            }
        }
        Ok(sums)
    }

    /// Times of kinds of layers.
    fn layers(&self, plans: &[StepPlan], experts: &[usize], times: &Times) -> Vec<LayerTime> {
        let c = self.rig.text();
        let rows: f64 = plans.iter().map(|p| p.rows() as f64).sum();
        let steps = plans.len() as f64;
        let mut kinds: Vec<Kind> = Vec::new();
        for (&place, &seconds) in &times.marked.places {
            let (Place::Memory(layer) | Place::Layer(layer)) = place;
            let w = Weights::of(self.plan, &format!("layers.{layer}."), c.n_routed_experts);
            let operations = times.operations.get(&place).map_or(&[][..], Vec::as_slice);
            if let Place::Memory(_) = place {
                let row = (c.engram_head_dim + c.engram_head_dim.div_ceil(32)) * c.hash_columns();
                let bytes = steps * w.memory_bytes as f64 + rows * row as f64;
                let work = 2.0 * rows * w.memory_weights as f64;
                Kind::add(&mut kinds, "n-gram memory", seconds, bytes, work, operations);
                continue;
            }
            let mut bytes =
                steps * w.bytes as f64 + (experts[layer] as u64 * w.expert_bytes) as f64;
            let used = w.weights + c.num_experts_per_tok as u64 * w.expert_weights;
            let mut work = 2.0 * rows * used as f64;
            for q in plans.iter().flat_map(|plan| &plan.sequences) {
                // Rows of one sequence share what they read.
                let last = Reach::of(c, layer, q.end() as usize - 1);
                let chosen =
                    last.chosen.max((q.tokens.len() * last.chosen).min(shared(c, layer, q)));
                bytes += self.row_bytes(last.window, chosen, last.scored);
                for p in q.start..q.end() {
                    work += Reach::of(c, layer, p as usize).operations(c);
                }
            }
            Kind::add(&mut kinds, kind(c, layer), seconds, bytes, work, operations);
        }
        kinds.into_iter().map(|kind| kind.time(self.read_rate)).collect()
    }

    /// Bytes of so many rows of each kind.
    fn row_bytes(&self, window: usize, chosen: usize, scored: usize) -> f64 {
        let (c, formats) = (self.rig.text(), self.rig.caches.formats);
        let bytes = window * formats.window.row_bytes(c.head_dim)
            + chosen * formats.compressed.row_bytes(c.head_dim)
            + scored * formats.index.row_bytes(c.index_head_dim);
        bytes as f64
    }

    /// One stage of a draft block in each of `sequences` sequences.
    pub fn draft_stage(&mut self, sequences: usize, context: usize) -> Outcome<Option<Case>> {
        let Some(draft) = &self.rig.model.draft else { return Ok(None) };
        let (block, noise) = (draft.block, draft.noise);
        let device = self.rig.device.clone();
        let mut batch = self.rig.batch(context)?;
        let drafts = self.rig.drafts(sequences, context);
        batch.prepare_draft(&*device, &self.rig.model, &drafts, block, noise)?;
        let c = self.rig.text().clone();
        let layer = c.num_hidden_layers;
        let plain = |rig: &mut Rig<D>| -> Result<()> {
            let Some(draft) = &rig.model.draft else { return Ok(()) };
            let (ring, ring_len) = (&rig.caches.draft_windows[0], rig.caches.ring_len);
            let (s, probe) = (&mut rig.scratch, &mut NoProbe);
            draft.stages[0].forward(&*device, layer, ring, ring_len, &batch, s, probe)
        };
        // As the engine runs it: recorded.
        let mut graphs = device.graphs();
        let mut run = |rig: &mut Rig<D>| match &mut graphs {
            Some(graphs) => device.replay(graphs, [0; 4], || plain(rig)),
            None => plain(rig),
        };
        for _ in 0..2 {
            run(self.rig)?;
        }
        let (mut wall, mut queued, mut alone) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..1 + *REPEATS.end() {
            device.sync()?;
            let start = Instant::now();
            run(self.rig)?;
            queued.push(start.elapsed().as_secs_f64());
            device.sync()?;
            wall.push(start.elapsed().as_secs_f64());
        }
        let rows = sequences * block;
        let k = c.dspark_num_experts_per_tok;
        let mut ids = vec![0u32; rows * k];
        device.download(&self.rig.scratch.expert_ids, 0, &mut ids)?;
        ids.sort_unstable();
        ids.dedup();
        let queued_seconds = median(&mut queued);
        for _ in 0..*REPEATS.end() {
            self.rig.occupy((1.5 * queued_seconds).min(BUSY))?;
            let start = device.mark()?;
            run(self.rig)?;
            let end = device.mark()?;
            alone.push(device.between(&start, &end)?);
        }
        device.sync()?;
        let start = Instant::now();
        plain(self.rig)?;
        let busy = 3.0 * start.elapsed().as_secs_f64();
        self.rig.occupy(busy.min(BUSY))?;
        let start = device.mark()?;
        device.trace();
        plain(self.rig)?;
        let mut operations = Vec::new();
        let mut before = start;
        for (name, mark) in device.traced() {
            add(&mut operations, &name, device.between(&before, &mark)?, 1);
            before = mark;
        }
        let w = Weights::of(self.plan, "mtp.0.", c.dspark_n_routed_experts);
        let reach = Reach::of_draft(&c, context - 1);
        let bytes = (w.bytes + ids.len() as u64 * w.expert_bytes) as f64
            + sequences as f64 * self.row_bytes(reach.window, 0, 0);
        let used = (w.weights + k as u64 * w.expert_weights) as f64;
        let work = rows as f64 * (2.0 * used + reach.operations(&c));
        let (seconds, device_seconds) = (median(&mut wall), median(&mut alone));
        let mut kinds = Vec::new();
        Kind::add(&mut kinds, "draft stage", device_seconds, bytes, work, &operations);
        Ok(Some(Case {
            mode: Mode::Draft,
            context,
            rows: sequences,
            own_pages: true,
            seconds,
            queued_seconds,
            device_seconds,
            tokens_per_s: None,
            layers: kinds.into_iter().map(|kind| kind.time(self.read_rate)).collect(),
        }))
    }
}

/// Compressed rows that a sequence's rows can choose among.
fn shared(c: &TextConfig, layer: usize, q: &deepinfer::plan::PlanSequence) -> usize {
    (q.end() as usize).checked_div(c.compress_ratios[layer]).unwrap_or(0)
}

/// Sums over the layers of a kind.
struct Kind {
    name: &'static str,
    layers: usize,
    seconds: f64,
    bytes: f64,
    work: f64,
    operations: Vec<OperationTime>,
}

impl Kind {
    fn add(
        kinds: &mut Vec<Kind>,
        name: &'static str,
        seconds: f64,
        bytes: f64,
        work: f64,
        operations: &[OperationTime],
    ) {
        if !kinds.iter().any(|kind| kind.name == name) {
            let (layers, operations) = (0, Vec::new());
            kinds.push(Kind { name, layers, seconds: 0.0, bytes: 0.0, work: 0.0, operations });
        }
        for kind in kinds.iter_mut().filter(|kind| kind.name == name) {
            kind.layers += 1;
            kind.seconds += seconds;
            kind.bytes += bytes;
            kind.work += work;
            for o in operations {
                add(&mut kind.operations, &o.name, o.seconds, o.kernels);
            }
        }
    }

    /// The average layer.
    fn time(self, read_rate: f64) -> LayerTime {
        let n = self.layers as f64;
        let average = |o: OperationTime| OperationTime {
            seconds: o.seconds / n,
            kernels: o.kernels / self.layers,
            ..o
        };
        LayerTime {
            kind: self.name,
            layers: self.layers,
            seconds: self.seconds / n,
            bytes: self.bytes / n,
            share_of_read: self.bytes / self.seconds / read_rate,
            tflop_per_s: self.work / self.seconds / 1e12,
            operations: self.operations.into_iter().map(average).collect(),
        }
    }
}
