//! A probe that makes every layer start from the reference's values: streams, `pre`, published
//! rows, and the choices of rows and experts. What the model itself computed is recorded first.

use super::record::{Recorder, Rows, acts, plain};
use super::trace::{Forced, blocks_of};
use crate::cache::Caches;
use crate::config::TextConfig;
use crate::model::{Batch, CandidateRole, Indexer, Layer, Probe, Scratch};
use deepinfer_device::Device;
use deepinfer_device::RowFormat;
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

/// How far scores of choices may be off.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreError {
    /// Relative to the largest score of its row.
    pub relative: f64,
    /// Index queries are rounded to a cache format.
    pub rounded: bool,
}

/// The probe.
pub(super) struct Forcer<'a, D: Device> {
    /// What the model computed, before anything was replaced.
    pub recorder: Recorder,
    /// Differences within the error of the scores.
    pub excused: Excused,
    layers: &'a [Layer<D>],
    config: Arc<TextConfig>,
    forced: &'a Forced,
    /// With it, choices that differ are looked at.
    score_error: Option<ScoreError>,
    keys: BTreeMap<usize, Vec<f32>>,
}

impl<'a, D: Device> Forcer<'a, D> {
    /// `layers` are those of the backbone; `recorder` says which layers are walked.
    pub fn new(
        config: Arc<TextConfig>,
        layers: &'a [Layer<D>],
        recorder: Recorder,
        forced: &'a Forced,
        score_error: Option<ScoreError>,
    ) -> Self {
        Self {
            recorder,
            excused: Excused::new(),
            layers,
            config,
            forced,
            score_error,
            keys: BTreeMap::new(),
        }
    }

    /// Makes layer `l` start from the values.
    fn force(&self, d: &D, l: usize, s: &mut Scratch<D>) -> Result<()> {
        let Some(before) = l.checked_sub(1) else { return Ok(()) };
        let width = s.shape.streams * s.shape.hidden;
        if let Some(streams) = self.forced.streams.get(&before) {
            for (i, &p) in self.forced.stream_positions.iter().enumerate() {
                d.upload_act(&streams[i * width..][..width], &mut s.streams, p * width)?;
            }
        }
        match self.forced.pre.get(&before) {
            Some(pre) => d.upload(pre, &mut s.mix.pre, 0),
            None => Ok(()),
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
        let (Some(keys), Some(allowed)) = (self.keys.get(&indexer.owner), self.score_error) else {
            return Ok(());
        };
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
                let rounded = if allowed.rounded { step(a, b) } else { 0.0 };
                allowed.relative * scale + rounded
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
        let (Some(reference), Some(allowed)) = (self.forced.experts.get(&l), self.score_error)
        else {
            return Ok(());
        };
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
            let error = |_: u32, _: u32| allowed.relative * scale;
            if set != expected && self.excusable(&set, &expected, score, error) {
                found.push((Choice::Experts, l, p));
            }
        }
        self.excused.extend(found);
        Ok(())
    }
}

/// Rows of sets as a `[rows, k]` buffer: ascending, absent ones at the end.
fn index_rows(sets: &[BTreeSet<u32>], k: usize) -> Vec<u32> {
    let mut out = vec![ABSENT; sets.len() * k];
    for (row, set) in out.chunks_exact_mut(k.max(1)).zip(sets) {
        row.iter_mut().zip(set).for_each(|(to, &from)| *to = from);
    }
    out
}

/// `values` in their stored form; `scratch` holds at least as many.
fn encode<D: Device>(
    d: &D,
    values: &[f32],
    width: usize,
    format: RowFormat,
    scratch: &mut D::Buffer<D::Act>,
    out: &mut D::Buffer<u8>,
) -> Result<()> {
    d.upload_act(values, scratch, 0)?;
    d.encode_rows(scratch, width, format, values.len() / width.max(1), out)
}

impl<D: Device> Probe<D> for Forcer<'_, D> {
    fn before_layer(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.force(d, l, s)?;
        self.recorder.before_layer(d, l, rows, s)
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
        s: &mut Scratch<D>,
    ) -> Result<()> {
        self.recorder.published(d, l, caches, batch, s)?;
        // The session's only slot owns the pages from 0 on, in order, and the step starts at 0.
        if let (Some(paged), Some(values)) = (caches.compressed(l), self.forced.compressed.get(&l))
        {
            let (width, format) = (paged.width, paged.format);
            encode(d, values, width, format, &mut s.latent, &mut caches.source_mut(l).rows)?;
        }
        if let (Some(paged), Some(values)) = (caches.index_keys(l), self.forced.keys.get(&l)) {
            let (width, format) = (paged.width, paged.format);
            encode(d, values, width, format, &mut s.key, &mut caches.source_mut(l).keys)?;
        }
        let own = self.recorder.layers[l].keys.as_ref();
        let stored = self.forced.keys.get(&l).cloned().or(own.map(Rows::decoded));
        self.keys.extend(stored.map(|keys| (l, keys)));
        Ok(())
    }

    fn window_keys(&mut self, d: &D, l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        self.recorder.window_keys(d, l, rows, s)?;
        match self.forced.window.get(&l) {
            Some(values) => {
                let width = self.config.head_dim;
                encode(d, values, width, s.formats.window, &mut s.kv, &mut s.fresh)
            }
            None => Ok(()),
        }
    }

    fn index_queries(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        indexer: &Indexer<D>,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        self.recorder.index_queries(d, l, rows, indexer, s)?;
        match self.forced.queries.get(&l) {
            Some(values) => d.upload_act(values, &mut s.index_q, 0),
            None => Ok(()),
        }
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
        if l + 1 < self.recorder.end() {
            return Ok(());
        }
        // What follows the last layer starts from the values, too.
        self.force(d, l + 1, s)?;
        match self.forced.features.is_empty() {
            true => Ok(()),
            false => d.upload_act(&self.forced.features, &mut s.features, 0),
        }
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
    }
}
