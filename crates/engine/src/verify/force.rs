//! A probe that makes every layer start from the reference's values: streams, `pre`, published
//! rows, and the choices of rows and experts. What the model itself computed is recorded first.

use super::VerifyError;
use super::record::{Recorder, acts, plain};
use super::reference::Reference;
use crate::cache::Caches;
use crate::config::TextConfig;
use crate::model::{Batch, CandidateRole, Indexer, Layer, Probe, Scratch};
use deepinfer_device::Device;
use deepinfer_device::ops::{ABSENT, Result};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// Kinds of choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Choice {
    /// Compressed rows.
    Rows,
    /// Candidate blocks.
    Candidates,
    /// Experts.
    Experts,
}

/// Choices (kind, layer, position) whose difference is within the error of the scores.
pub(super) type Excused = HashSet<(Choice, usize, usize)>;

/// The reference's values of one prompt, by layer; absent ones are not forced.
#[derive(Default)]
pub(super) struct Forced {
    /// Positions of `streams`.
    pub stream_positions: Vec<usize>,
    /// Streams at a layer's END, `[positions, S, H]`.
    pub streams: BTreeMap<usize, Vec<f32>>,
    /// `pre` at a layer's end, `[rows, S]`.
    pub pre: BTreeMap<usize, Vec<f32>>,
    /// Compressed rows, decoded.
    pub compressed: BTreeMap<usize, Vec<f32>>,
    /// Index keys, decoded.
    pub keys: BTreeMap<usize, Vec<f32>>,
    /// Chosen rows, one set a position.
    pub selected: BTreeMap<usize, Vec<BTreeSet<u32>>>,
    /// Candidate rows, one set a position.
    pub candidates: BTreeMap<usize, Vec<BTreeSet<u32>>>,
    /// Chosen experts, `[rows, k]`.
    pub experts: BTreeMap<usize, Vec<u32>>,
    /// Their weights.
    pub weights: BTreeMap<usize, Vec<f32>>,
    /// Draft features, `[rows, targets * H]`.
    pub features: Vec<f32>,
}

impl Forced {
    /// Reads what the reference has under `prefix` for a prompt of `rows` rows.
    pub fn read(
        reference: &Reference,
        c: &TextConfig,
        pass: &super::compare::Pass<'_>,
    ) -> std::result::Result<Self, VerifyError> {
        let (prefix, rows) = (pass.prefix.as_str(), pass.rows);
        let (h, s, k) = (c.hidden_size, c.hc_mult, c.num_experts_per_tok);
        let positions = pass.stream_positions.clone();
        let floats = |quantity: &str, shape: &dyn Fn(usize) -> Vec<usize>| {
            let base = format!("{prefix}.{quantity}");
            let read = |l| Ok((l, reference.floats(&format!("{base}.{l}"), &shape(l))?));
            let layers = reference.layers(&base).into_iter();
            layers.map(read).collect::<std::result::Result<_, VerifyError>>()
        };
        let published = |l: usize| rows / c.compress_ratios.get(l).copied().unwrap_or(1).max(1);
        let sets = |quantity: &str| reference.layers(&format!("{prefix}.{quantity}"));
        let features = format!("{prefix}.dspark.features");
        Ok(Self {
            streams: floats("streams", &|_| vec![positions.len(), s, h])?,
            pre: floats("pre_mix", &|_| vec![rows, s])?,
            compressed: floats("compressed_kv", &|l| vec![published(l), c.head_dim])?,
            keys: floats("index_keys", &|l| vec![published(l), c.index_head_dim])?,
            selected: sets("topk")
                .into_iter()
                .map(|l| Ok((l, pass.selection(prefix, l)?)))
                .collect::<std::result::Result<_, VerifyError>>()?,
            candidates: sets("candidates")
                .into_iter()
                .map(|l| Ok((l, pass.candidate_mask(prefix, l)?)))
                .collect::<std::result::Result<_, VerifyError>>()?,
            experts: sets("experts")
                .into_iter()
                .map(|l| {
                    let ids = reference.integers(&format!("{prefix}.experts.{l}"), &[rows, k])?;
                    Ok((l, ids.into_iter().map(|i| i as u32).collect()))
                })
                .collect::<std::result::Result<_, VerifyError>>()?,
            weights: floats("expert_weights", &|_| vec![rows, k])?,
            features: match reference.contains(&features) {
                true => {
                    reference.floats(&features, &[rows, c.dspark_target_layer_ids.len() * h])?
                }
                false => Vec::new(),
            },
            stream_positions: positions,
        })
    }
}

/// The probe.
pub(super) struct Forcer<'a, D: Device> {
    /// What the model computed, before anything was replaced.
    pub recorder: Recorder,
    /// Differences within the error of the scores.
    pub excused: Excused,
    /// Own compressed rows and index keys `(layer, keys)`, as stored.
    pub published: BTreeMap<(usize, bool), Vec<f32>>,
    layers: &'a [Layer<D>],
    config: Arc<TextConfig>,
    forced: &'a Forced,
    /// Error of a score relative to the largest one.
    score_error: f64,
    /// Index queries are rounded.
    rounded: bool,
    keys: BTreeMap<usize, Vec<f32>>,
}

impl<'a, D: Device> Forcer<'a, D> {
    pub fn new(
        config: Arc<TextConfig>,
        layers: &'a [Layer<D>],
        forced: &'a Forced,
        score_error: f64,
        rounded: bool,
    ) -> Self {
        Self {
            recorder: Recorder::new(&config),
            excused: Excused::new(),
            published: BTreeMap::new(),
            layers,
            config,
            forced,
            score_error,
            rounded,
            keys: BTreeMap::new(),
        }
    }

    /// Whether sets that differ do so within the error: every score that was left out against every
    /// one that was taken instead.
    fn excusable(
        &self,
        own: &BTreeSet<u32>,
        reference: &BTreeSet<u32>,
        score: impl Fn(u32) -> f64,
        error: impl Fn(u32, u32) -> f64,
    ) -> bool {
        own.len() == reference.len()
            && reference.difference(own).all(|&missing| {
                own.difference(reference)
                    .all(|&extra| (score(extra) - score(missing)).abs() <= error(extra, missing))
            })
    }

    fn check_rows(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &Scratch<D>,
    ) -> Result<()> {
        let (heads, dim, k) = (indexer.heads, indexer.dim, indexer.k);
        let ratio = self.config.compress_ratios[indexer.owner].max(1);
        let Some(keys) = self.keys.get(&indexer.owner) else { return Ok(()) };
        let q = acts(d, &s.index_q, rows * heads * dim)?;
        let weights = plain(d, &s.index_weights, rows * heads)?;
        let own = plain(d, &s.selected, rows * k)?;
        let blocks = self.config.candidate_topk_blocks;
        let own_blocks = match indexer.role {
            CandidateRole::Publish(_) => plain(d, &s.candidates, rows * blocks)?,
            _ => Vec::new(),
        };
        let scores = |p: usize, row: u32| -> f64 {
            let key = &keys[row as usize * dim..][..dim];
            (0..heads)
                .map(|h| {
                    let q = &q[(p * heads + h) * dim..][..dim];
                    let dot: f64 = q.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum();
                    dot.max(0.0) * f64::from(weights[p * heads + h])
                })
                .sum()
        };
        let mut found = Vec::new();
        for p in 0..rows {
            let visible = ((p + 1) / ratio) as u32;
            let scale = (0..visible).map(|r| scores(p, r).abs()).fold(0.0, f64::max);
            // One query element may have been rounded the other way: a step is at most a third of
            // its row's largest value.
            let step = |a: u32, b: u32| {
                let (a, b) = (&keys[a as usize * dim..][..dim], &keys[b as usize * dim..][..dim]);
                let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let head = |h: usize| {
                    let q = &q[(p * heads + h) * dim..][..dim];
                    let largest = q.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    f64::from(largest / 3.0 * apart * weights[p * heads + h].abs())
                };
                (0..heads).map(head).fold(0.0, f64::max)
            };
            let error = |a: u32, b: u32| {
                let rounded = if self.rounded { step(a, b) } else { 0.0 };
                self.score_error * scale + rounded
            };
            if let Some(reference) = self.forced.selected.get(&l) {
                let set: BTreeSet<u32> =
                    own[p * k..][..k].iter().copied().filter(|&i| i != ABSENT).collect();
                if set != reference[p]
                    && self.excusable(&set, &reference[p], |r| scores(p, r), error)
                {
                    found.push((Choice::Rows, l, p));
                }
            }
            if let (CandidateRole::Publish(shape), Some(mask)) =
                (indexer.role, self.forced.candidates.get(&l))
            {
                let size = shape.block_size as u32;
                let set: BTreeSet<u32> = own_blocks[p * blocks..][..blocks]
                    .iter()
                    .copied()
                    .filter(|&b| b != ABSENT)
                    .collect();
                let reference = blocks_of(&mask[p], size, visible);
                let best = |b: u32| {
                    let rows = b * size..((b + 1) * size).min(visible);
                    rows.map(|r| scores(p, r)).fold(f64::NEG_INFINITY, f64::max)
                };
                let widest = |_: u32, _: u32| {
                    let rows = || 0..visible;
                    rows().map(|r| error(r, 0)).fold(0.0, f64::max)
                };
                if set != reference && self.excusable(&set, &reference, best, widest) {
                    found.push((Choice::Candidates, l, p));
                }
            }
        }
        self.excused.extend(found);
        Ok(())
    }

    fn check_experts(&mut self, d: &D, l: usize, rows: usize, s: &Scratch<D>) -> Result<()> {
        let Some(reference) = self.forced.experts.get(&l) else { return Ok(()) };
        let experts = &self.layers[l].experts;
        let (k, n) = (experts.k, experts.count);
        let gate = plain(d, &s.gate, rows * n)?;
        let bias = plain(d, &experts.bias, n)?;
        let own = plain(d, &s.expert_ids, rows * k)?;
        let mut found = Vec::new();
        for p in 0..rows {
            let set: BTreeSet<u32> = own[p * k..][..k].iter().copied().collect();
            let expected: BTreeSet<u32> = reference[p * k..][..k].iter().copied().collect();
            let score = |e: u32| {
                let x = f64::from(gate[p * n + e as usize]);
                x.exp().ln_1p().sqrt() + f64::from(bias[e as usize])
            };
            let scale = (0..n as u32).map(|e| score(e).abs()).fold(0.0, f64::max);
            let error = |_: u32, _: u32| self.score_error * scale;
            if set != expected && self.excusable(&set, &expected, score, error) {
                found.push((Choice::Experts, l, p));
            }
        }
        self.excused.extend(found);
        Ok(())
    }
}

/// Blocks that hold at least one of the visible `rows`.
fn blocks_of(rows: &BTreeSet<u32>, size: u32, visible: u32) -> BTreeSet<u32> {
    rows.iter().filter(|&&row| row < visible).map(|row| row / size).collect()
}

/// Rows of sets as a `[rows, k]` buffer: ascending, absent ones at the end.
fn index_rows(sets: &[BTreeSet<u32>], k: usize) -> Vec<u32> {
    let mut out = vec![ABSENT; sets.len() * k];
    for (row, set) in out.chunks_exact_mut(k.max(1)).zip(sets) {
        row.iter_mut().zip(set).for_each(|(to, &from)| *to = from);
    }
    out
}

/// Reads what a source layer has stored, and replaces it.
fn replace_rows<D: Device>(
    d: &D,
    caches: &mut Caches<D>,
    layer: usize,
    keys: bool,
    reference: Option<&Vec<f32>>,
    tokens: usize,
) -> Result<Vec<f32>> {
    let paged = if keys { caches.index_keys(layer) } else { caches.compressed(layer) };
    let Some(paged) = paged else { return Ok(Vec::new()) };
    let (width, format, rows) = (paged.width, paged.format, tokens / paged.ratio);
    let mut values = d.alloc::<D::Act>(rows * width)?;
    d.decode_rows(paged.cache, width, format, rows, &mut values)?;
    let own = acts(d, &values, rows * width)?;
    if let Some(reference) = reference {
        let mut encoded = d.alloc::<u8>(rows * format.row_bytes(width))?;
        d.upload_act(reference, &mut values, 0)?;
        d.encode_rows(&values, width, format, rows, &mut encoded)?;
        let source = caches.source_mut(layer);
        let cache = if keys { &mut source.keys } else { &mut source.rows };
        d.copy(&encoded, 0, cache, 0, rows * format.row_bytes(width))?;
    }
    Ok(own)
}

impl<D: Device> Probe<D> for Forcer<'_, D> {
    fn before_layer(&mut self, d: &D, l: usize, _rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let Some(before) = l.checked_sub(1) else { return Ok(()) };
        let width = s.shape.streams * s.shape.hidden;
        if let Some(streams) = self.forced.streams.get(&before) {
            for (i, &p) in self.forced.stream_positions.iter().enumerate() {
                d.upload_act(&streams[i * width..][..width], &mut s.streams, p * width)?;
            }
        }
        if let Some(pre) = self.forced.pre.get(&before) {
            d.upload(pre, &mut s.mix.pre, 0)?;
        }
        Ok(())
    }

    fn after_memory(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.after_memory(d, l, rows, s)
    }

    fn published(
        &mut self,
        d: &D,
        l: usize,
        caches: &mut Caches<D>,
        batch: &Batch<D>,
    ) -> Result<()> {
        // The session's only slot owns the pages from 0 on, in order, and the step starts at 0.
        for keys in [false, true] {
            let reference = if keys { &self.forced.keys } else { &self.forced.compressed };
            let own = replace_rows(d, caches, l, keys, reference.get(&l), batch.rows)?;
            if keys {
                let stored = reference.get(&l).unwrap_or(&own);
                self.keys.insert(l, stored.clone());
            }
            self.published.insert((l, keys), own);
        }
        Ok(())
    }

    fn selected(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        self.recorder.selected(d, l, rows, indexer, s)?;
        self.check_rows(d, l, rows, indexer, s)?;
        if let Some(sets) = self.forced.selected.get(&l) {
            d.upload(&index_rows(sets, indexer.k), &mut s.selected, 0)?;
        }
        if let (CandidateRole::Publish(shape), Some(mask)) =
            (indexer.role, self.forced.candidates.get(&l))
        {
            let ratio = self.config.compress_ratios[indexer.owner].max(1);
            let blocks: Vec<BTreeSet<u32>> = mask
                .iter()
                .enumerate()
                .map(|(p, m)| blocks_of(m, shape.block_size as u32, ((p + 1) / ratio) as u32))
                .collect();
            d.upload(&index_rows(&blocks, shape.blocks), &mut s.candidates, 0)?;
        }
        Ok(())
    }

    fn attention_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.attention_out(d, l, rows, s)
    }

    fn routed(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.routed(d, l, rows, s)?;
        self.check_experts(d, l, rows, s)?;
        if let (Some(ids), Some(weights)) =
            (self.forced.experts.get(&l), self.forced.weights.get(&l))
        {
            d.upload(ids, &mut s.expert_ids, 0)?;
            d.upload(weights, &mut s.expert_weights, 0)?;
        }
        Ok(())
    }

    fn experts_out(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.experts_out(d, l, rows, s)
    }

    fn after_layer(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.after_layer(d, l, rows, s)?;
        if l + 1 < self.recorder.layers.len() {
            return Ok(());
        }
        // The head and the draft stages start from the reference, too.
        self.before_layer(d, l + 1, rows, s)?;
        if !self.forced.features.is_empty() {
            d.upload_act(&self.forced.features, &mut s.features, 0)?;
        }
        Ok(())
    }

    fn hidden(&mut self, d: &D, outputs: usize, hidden: &mut D::Buffer<D::Act>) -> Result<()> {
        self.recorder.hidden(d, outputs, hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_become_ascending_rows_with_absent_ends() {
        let sets = [BTreeSet::from([5, 1]), BTreeSet::new()];
        assert_eq!(index_rows(&sets, 3), [1, 5, ABSENT, ABSENT, ABSENT, ABSENT]);
        assert_eq!(blocks_of(&BTreeSet::from([0, 3, 9]), 4, 9), BTreeSet::from([0]));
    }
}
