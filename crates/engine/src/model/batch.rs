//! Inputs of a step on the device: what a [`StepPlan`] says, row by row.

use super::Model;
use super::kept::{Kept, kept};
use super::memory;
use super::rope::{Rope, push_angles};
use super::scratch::{Keep, Scratch};
use crate::cache::Geometry;
use crate::config::TextConfig;
use crate::plan::{DraftSequence, IMAGE, StepPlan};
use deepinfer_device::Device;
use deepinfer_device::ops::{ABSENT, GraphKey, Result, RowMap};

/// The largest step that buffers are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows in a step.
    pub rows: usize,
    /// Sequences in a step.
    pub sequences: usize,
    /// Rows whose logits are wanted.
    pub outputs: usize,
    /// Pages of one sequence.
    pub pages: usize,
}

/// Rows that walk through layers together: all rows of a step, or those that a decoder layer keeps.
pub struct RowSet<D: Device> {
    /// Where they are.
    pub map: RowMap<D>,
    plain_angles: D::Buffer<f32>,
    compressed_angles: D::Buffer<f32>,
    pairs: usize,
    /// `[rows]`: ring row that the row's window key goes to; `u64::MAX` for rows that later ones
    /// of the same step would overwrite.
    pub ring_rows: D::Buffer<u64>,
    /// `[rows]`: 1 for image rows.
    pub image: D::Buffer<u8>,
}

impl<D: Device> RowSet<D> {
    fn new(device: &D, limits: &Limits, pairs: usize) -> Result<Self> {
        let (t, n) = (limits.rows, limits.sequences);
        Ok(Self {
            map: RowMap {
                rows: 0,
                sequences: 0,
                sequence: device.alloc(t)?,
                position: device.alloc(t)?,
                window_from: device.alloc(t)?,
                window_to: device.alloc(t)?,
                fresh_from: device.alloc(n)?,
                first_row: device.alloc(n)?,
                slot: device.alloc(n)?,
                pages: device.alloc(n * limits.pages)?,
                max_pages: limits.pages,
            },
            plain_angles: device.alloc(t * pairs * 2)?,
            compressed_angles: device.alloc(t * pairs * 2)?,
            pairs,
            ring_rows: device.alloc(t)?,
            image: device.alloc(t)?,
        })
    }

    /// `[rows, rope_dims / 2, 2]`: cosine and sine of the rows' positions, for compressed layers
    /// or for window-only ones.
    pub fn angles(&self, compressed: bool) -> &D::Buffer<f32> {
        if compressed { &self.compressed_angles } else { &self.plain_angles }
    }

    fn upload(&mut self, device: &D, host: &HostRows, sequences: usize) -> Result<()> {
        let map = &mut self.map;
        map.rows = host.position.len();
        map.sequences = sequences;
        device.upload(&host.sequence, &mut map.sequence, 0)?;
        device.upload(&host.position, &mut map.position, 0)?;
        device.upload(&host.window_from, &mut map.window_from, 0)?;
        device.upload(&host.window_to, &mut map.window_to, 0)?;
        device.upload(&host.fresh_from, &mut map.fresh_from, 0)?;
        device.upload(&host.first_row, &mut map.first_row, 0)?;
        device.upload(&host.plain, &mut self.plain_angles, 0)?;
        device.upload(&host.compressed, &mut self.compressed_angles, 0)?;
        device.upload(&host.ring_rows, &mut self.ring_rows, 0)?;
        device.upload(&host.image, &mut self.image, 0)
    }

    /// Becomes the rows of `all` that `kept` names; `rows` holds their numbers on the device.
    fn keep(&mut self, device: &D, all: &Self, kept: &Kept, rows: &D::Buffer<u32>) -> Result<()> {
        let (n, from, to) = (kept.rows.len(), &all.map, &mut self.map);
        let angles = 2 * self.pairs;
        (to.rows, to.sequences) = (n, from.sequences);
        device.gather_rows(&from.sequence, 1, rows, n, &mut to.sequence)?;
        device.gather_rows(&from.position, 1, rows, n, &mut to.position)?;
        device.gather_rows(&from.window_to, 1, rows, n, &mut to.window_to)?;
        device.upload(&kept.window_from, &mut to.window_from, 0)?;
        device.upload(&kept.fresh_from, &mut to.fresh_from, 0)?;
        device.upload(&kept.first_row, &mut to.first_row, 0)?;
        device.gather_rows(&all.plain_angles, angles, rows, n, &mut self.plain_angles)?;
        device.gather_rows(&all.compressed_angles, angles, rows, n, &mut self.compressed_angles)?;
        device.gather_rows(&all.ring_rows, 1, rows, n, &mut self.ring_rows)?;
        device.gather_rows(&all.image, 1, rows, n, &mut self.image)
    }
}

#[derive(Default)]
struct HostRows {
    sequence: Vec<u32>,
    position: Vec<u32>,
    window_from: Vec<u32>,
    window_to: Vec<u32>,
    fresh_from: Vec<u32>,
    first_row: Vec<u32>,
    plain: Vec<f32>,
    compressed: Vec<f32>,
    ring_rows: Vec<u64>,
    image: Vec<u8>,
}

impl HostRows {
    fn begin_sequence(&mut self, fresh_from: u32) {
        self.fresh_from.push(fresh_from);
        self.first_row.push(self.position.len() as u32);
    }

    fn push(&mut self, rope: &Rope, position: u32, window: std::ops::Range<u32>, image: bool) {
        self.sequence.push(self.fresh_from.len() as u32 - 1);
        self.position.push(position);
        self.window_from.push(window.start);
        self.window_to.push(window.end);
        push_angles(&rope.plain, position, &mut self.plain);
        push_angles(&rope.compressed, position, &mut self.compressed);
        self.image.push(u8::from(image));
    }
}

/// Groups that a step completes, for one compression ratio.
pub struct Groups<D: Device> {
    ratio: usize,
    /// How many.
    pub count: usize,
    /// `[count, ratio]`: see [`Device::pool_groups`].
    pub members: D::Buffer<u32>,
    /// `[count]`: cache row of the compressed row.
    pub cache_rows: D::Buffer<u64>,
    /// `[count, rope_dims / 2, 2]`: angles at each group's first position.
    pub angles: D::Buffer<f32>,
    /// `[rows]`: where a row's value and score wait for the rest of its group.
    pub pending_rows: D::Buffer<u64>,
}

/// A step's inputs on the device.
pub struct Batch<D: Device> {
    /// Recorded steps, where they are recorded; before the buffers, which they use.
    graphs: Option<D::Graphs>,
    limits: Limits,
    geometry: Geometry,
    /// Rows of the step.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub outputs: usize,
    /// `[rows]`: token ids; image rows are absent.
    pub tokens: D::Buffer<u32>,
    /// `[image rows, H]`.
    pub image_embeddings: D::Buffer<D::Act>,
    /// `[image rows]`: their rows.
    pub image_rows: D::Buffer<u64>,
    /// Image rows.
    pub image_count: usize,
    /// Row ids of every n-gram memory, on the host.
    pub memory_row_ids: Vec<Vec<u64>>,
    /// The same on the device: `[current rows, hash columns]`.
    pub memory_rows: Vec<D::Buffer<u64>>,
    memory_rows_kept: D::Buffer<u64>,
    memory_columns: usize,
    /// `[outputs]`: rows among those of the last layer.
    pub output_rows: D::Buffer<u32>,
    /// Width of the draft features.
    pub feature_width: usize,
    /// What decoder layers keep, where that changes.
    kept: Vec<Kept>,
    keep: D::Buffer<u32>,
    encoder: RowSet<D>,
    decoder: RowSet<D>,
    /// Whether `decoder` are the rows that walk through the current layer.
    narrowed: bool,
    groups: Vec<Groups<D>>,
    /// What the step's operations depend on, if it can be recorded.
    key: Option<GraphKey>,
}

/// Which series of operations a recorded one is.
#[derive(Clone, Copy)]
pub(super) enum Series {
    /// [`Model::forward`].
    Step,
    /// The stages of a draft block.
    Draft,
    /// A token of a draft block.
    DraftToken,
}

impl<D: Device> Batch<D> {
    /// Buffers for steps within `limits`.
    pub fn new(device: &D, c: &TextConfig, geometry: &Geometry, limits: &Limits) -> Result<Self> {
        let t = limits.rows;
        let pairs = c.qk_rope_head_dim / 2;
        let columns = c.hash_columns();
        let groups = geometry
            .ratios
            .iter()
            .map(|&ratio| {
                Ok(Groups {
                    ratio,
                    count: 0,
                    members: device.alloc((t + limits.sequences * ratio) * ratio)?,
                    cache_rows: device.alloc(t)?,
                    angles: device.alloc(t * pairs * 2)?,
                    pending_rows: device.alloc(t)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            limits: *limits,
            geometry: geometry.clone(),
            rows: 0,
            outputs: 0,
            tokens: device.alloc(t)?,
            image_embeddings: device.alloc(t * c.hidden_size)?,
            image_rows: device.alloc(t)?,
            image_count: 0,
            memory_row_ids: vec![Vec::new(); c.engram_layer_ids.len()],
            memory_rows: (0..c.engram_layer_ids.len())
                .map(|_| device.alloc(t * columns))
                .collect::<Result<_>>()?,
            memory_rows_kept: device.alloc(t * columns)?,
            memory_columns: columns,
            output_rows: device.alloc(limits.outputs)?,
            feature_width: c.dspark_target_layer_ids.len() * c.hidden_size,
            kept: Vec::new(),
            keep: device.alloc(t)?,
            encoder: RowSet::new(device, limits, pairs)?,
            decoder: RowSet::new(device, limits, pairs)?,
            narrowed: false,
            groups,
            graphs: None,
            key: None,
        })
    }

    /// From now on steps that only decode are recorded, where the device does that. The caller
    /// ensures that all of them use the same model, caches and scratch, and no probe.
    pub fn record(&mut self, device: &D) {
        self.graphs = device.graphs();
    }

    /// Whether steps are recorded.
    pub fn records(&self) -> bool {
        self.graphs.is_some()
    }

    /// Runs `f`, the operations of a series, recorded where that can be done.
    pub(super) fn replay(
        &mut self,
        device: &D,
        key: Option<GraphKey>,
        mut f: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        match (key, self.graphs.take()) {
            (Some(key), Some(mut graphs)) => {
                let result = device.replay(&mut graphs, key, || f(self));
                self.graphs = Some(graphs);
                result
            }
            (_, graphs) => {
                self.graphs = graphs;
                f(self)
            }
        }
    }

    /// The key of the prepared step.
    pub(super) fn key(&self) -> Option<GraphKey> {
        self.key
    }

    /// The largest step that fits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The rows that walk through the current layer.
    pub fn set(&self) -> &RowSet<D> {
        if self.narrowed { &self.decoder } else { &self.encoder }
    }

    /// How many rows walk through the current layer.
    pub fn rows_now(&self) -> usize {
        self.set().map.rows
    }

    /// The groups that this step completes.
    pub fn groups(&self, ratio: usize) -> &Groups<D> {
        self.groups.iter().find(|g| g.ratio == ratio).expect("geometry lists every source's ratio")
    }

    /// Drops the rows that the decoder layer at `depth` and those after it do not need.
    pub fn enter_decoder(&mut self, device: &D, depth: usize, s: &mut Scratch<D>) -> Result<()> {
        let Some(kept) = self.kept.iter().find(|kept| kept.depth == depth) else { return Ok(()) };
        let rows = kept.rows.len();
        if rows < self.rows_now() {
            device.upload(&kept.keep, &mut self.keep, 0)?;
            // The boundary chooses compressed rows afterwards; later layers read earlier choices.
            s.keep_rows(device, &self.keep, rows, self.feature_width, depth > 0)?;
            let kept = Keep { device, keep: &self.keep, rows };
            for ids in &mut self.memory_rows {
                kept.only(ids, self.memory_columns, &mut self.memory_rows_kept)?;
            }
        }
        device.upload(&kept.rows, &mut self.keep, 0)?;
        self.decoder.keep(device, &self.encoder, kept, &self.keep)?;
        self.narrowed = true;
        Ok(())
    }

    /// Fills everything for `plan`.
    pub fn prepare(&mut self, device: &D, model: &Model<D>, plan: &StepPlan) -> Result<()> {
        let text = &model.config.text_config;
        let window = text.sliding_window as u32;
        let decoder_layers = text.decoder_start().map_or(0, |first| text.num_hidden_layers - first);
        let (ring, slots) = (self.geometry.ring_len as u32, &mut Vec::new());
        let mut all = HostRows::default();
        let (mut tokens, mut outputs) = (Vec::new(), Vec::new());
        let (mut image_rows, mut embeddings) = (Vec::new(), Vec::new());
        self.memory_row_ids.iter_mut().for_each(Vec::clear);
        // No wider than the longest sequence needs: rows are chosen among as many. Few widths, so
        // that recorded steps come again.
        let longest = plan.sequences.iter().map(|q| q.pages.len()).max().unwrap_or(0);
        let width = longest.next_power_of_two().min(self.limits.pages);
        self.encoder.map.max_pages = width;
        self.decoder.map.max_pages = width;
        self.kept = kept(plan, decoder_layers, window);

        for (i, q) in plan.sequences.iter().enumerate() {
            let (start, end) = (q.start, q.end());
            all.begin_sequence(start);
            slots.push(q.slot);
            let (first, from) = match self.kept.last() {
                Some(kept) => (kept.first_row[i], kept.fresh_from[i]),
                None => (all.position.len() as u32, start),
            };
            outputs.extend(q.outputs.iter().map(|&o| first + (start + o - from)));
            for (j, &token) in q.tokens.iter().enumerate() {
                let p = start + j as u32;
                let image = token == IMAGE;
                if image {
                    image_rows.push(all.position.len() as u64);
                }
                tokens.push(if image { ABSENT } else { token });
                all.push(&model.rope, p, (p + 1).saturating_sub(window)..p + 1, image);
                all.ring_rows.push(ring_row(q.slot, p, end, ring));
            }
            embeddings.extend_from_slice(&q.embeddings);
            if let Some(engram) = &model.engram {
                memory::push_rows(engram, q, &mut self.memory_row_ids);
            }
            let at = i * width;
            device.upload(&q.pages, &mut self.encoder.map.pages, at)?;
            device.upload(&q.pages, &mut self.decoder.map.pages, at)?;
        }

        self.narrowed = false;
        self.rows = tokens.len();
        self.outputs = outputs.len();
        self.image_count = image_rows.len();
        device.upload(&tokens, &mut self.tokens, 0)?;
        device.upload(&outputs, &mut self.output_rows, 0)?;
        device.upload(&image_rows, &mut self.image_rows, 0)?;
        device.upload_act(&embeddings, &mut self.image_embeddings, 0)?;
        for (ids, rows) in self.memory_row_ids.iter().zip(&mut self.memory_rows) {
            device.upload(ids, rows, 0)?;
        }
        device.upload(slots, &mut self.encoder.map.slot, 0)?;
        device.upload(slots, &mut self.decoder.map.slot, 0)?;
        self.encoder.upload(device, &all, plan.sequences.len())?;
        // Steps that only decode; others hardly ever come again.
        let decodes = self.outputs == self.rows && self.kept.is_empty() && self.image_count == 0;
        let records = self.graphs.is_some() && decodes;
        let (rows, sequences) = (self.rows as u32, plan.sequences.len() as u32);
        self.key = records.then_some([Series::Step as u32, rows, sequences, width as u32]);
        for groups in &mut self.groups {
            groups.prepare(device, &model.rope, &self.geometry, plan, records)?;
        }
        Ok(())
    }

    /// Fills the row set of a draft block: `block` rows a sequence, which see each other both ways.
    pub fn prepare_draft(
        &mut self,
        device: &D,
        model: &Model<D>,
        sequences: &[DraftSequence],
        block: usize,
        noise: u32,
    ) -> Result<()> {
        let window = model.config.text_config.sliding_window as u32;
        let mut host = HostRows::default();
        let (mut tokens, mut slots) = (Vec::new(), Vec::new());
        for q in sequences {
            host.begin_sequence(q.position);
            slots.push(q.slot);
            let from = q.position.saturating_sub(window).max(q.window_from).min(q.position);
            for j in 0..block as u32 {
                tokens.push(if j == 0 { q.token } else { noise });
                host.push(&model.rope, q.position + j, from..q.position + block as u32, false);
                host.ring_rows.push(u64::MAX);
            }
        }
        self.narrowed = true;
        self.rows = tokens.len();
        let series = Series::Draft as u32;
        self.key = Some([series, self.rows as u32, sequences.len() as u32, block as u32]);
        device.upload(&tokens, &mut self.tokens, 0)?;
        device.upload(&slots, &mut self.decoder.map.slot, 0)?;
        self.decoder.upload(device, &host, sequences.len())
    }
}

/// Ring row of a position, unless a later row of the step (which ends before `end`) takes it.
fn ring_row(slot: u32, position: u32, end: u32, ring: u32) -> u64 {
    if position + ring < end {
        return u64::MAX;
    }
    u64::from(slot) * u64::from(ring) + u64::from(position % ring)
}

impl<D: Device> Groups<D> {
    /// With `pad`, as many groups as a step of so many rows and sequences can complete; those that
    /// it does not complete are stored nowhere.
    fn prepare(
        &mut self,
        device: &D,
        rope: &Rope,
        geometry: &Geometry,
        plan: &StepPlan,
        pad: bool,
    ) -> Result<()> {
        let ratio = self.ratio as u32;
        let ring = geometry.pending_len(self.ratio) as u32;
        let page_rows = geometry.rows_per_page(self.ratio) as u32;
        let (mut members, mut cache_rows) = (Vec::new(), Vec::new());
        let (mut angles, mut pending) = (Vec::new(), Vec::new());
        let mut first_row = 0u32;
        for q in &plan.sequences {
            let (start, end) = (q.start, q.end());
            for group in start / ratio..end / ratio {
                for p in group * ratio..(group + 1) * ratio {
                    members.push(match p.checked_sub(start) {
                        Some(j) => first_row + j,
                        None => 1 << 31 | (q.slot * ring + p % ring),
                    });
                }
                let page = u64::from(q.pages[(group / page_rows) as usize]);
                cache_rows.push(page * u64::from(page_rows) + u64::from(group % page_rows));
                push_angles(&rope.compressed, group * ratio, &mut angles);
            }
            pending.extend((start..end).map(|p| ring_row(q.slot, p, end, ring)));
            first_row += q.tokens.len() as u32;
        }
        if pad {
            let sequences = plan.sequences.len();
            let rows = first_row as usize;
            let most = rows.min((rows + sequences * (self.ratio - 1)) / self.ratio);
            members.resize(most * self.ratio, 1 << 31);
            cache_rows.resize(most, u64::MAX);
            angles.resize(most * rope.compressed.len() * 2, 0.0);
        }
        self.count = cache_rows.len();
        device.upload(&members, &mut self.members, 0)?;
        device.upload(&cache_rows, &mut self.cache_rows, 0)?;
        device.upload(&angles, &mut self.angles, 0)?;
        device.upload(&pending, &mut self.pending_rows, 0)
    }
}
