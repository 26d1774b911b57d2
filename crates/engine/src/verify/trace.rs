//! Everything about one prompt: the reference's values where it has them, the CPU's elsewhere.
//!
//! References keep streams at some positions only, and of the draft stages nothing but what goes in
//! and what comes out. A pass on the CPU that starts every layer from the reference fills the gaps.

use super::VerifyError;
use super::compare::Pass;
use super::drafts::DraftTrace;
use super::record::Recorder;
use super::reference::Reference;
use crate::config::TextConfig;
use deepinfer_device::ops::ABSENT;
use std::collections::{BTreeMap, BTreeSet};

/// Values of one prompt that a pass starts from, by layer; absent ones are not forced.
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
    /// Window keys, decoded. References do not have them.
    pub window: BTreeMap<usize, Vec<f32>>,
    /// Index queries, rounded. References do not have them.
    pub queries: BTreeMap<usize, Vec<f32>>,
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
        pass: &Pass<'_>,
    ) -> Result<Self, VerifyError> {
        let (prefix, rows) = (pass.prefix.as_str(), pass.rows);
        let (h, s, k) = (c.hidden_size, c.hc_mult, c.num_experts_per_tok);
        let positions = pass.stream_positions.clone();
        let floats = |quantity: &str, shape: &dyn Fn(usize) -> Vec<usize>| {
            let base = format!("{prefix}.{quantity}");
            let read = |l| Ok((l, reference.floats(&format!("{base}.{l}"), &shape(l))?));
            let layers = reference.layers(&base).into_iter();
            layers.map(read).collect::<Result<_, VerifyError>>()
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
                .collect::<Result<_, VerifyError>>()?,
            candidates: sets("candidates")
                .into_iter()
                .map(|l| Ok((l, pass.candidate_mask(prefix, l)?)))
                .collect::<Result<_, VerifyError>>()?,
            experts: sets("experts")
                .into_iter()
                .map(|l| {
                    let ids = reference.integers(&format!("{prefix}.experts.{l}"), &[rows, k])?;
                    Ok((l, ids.into_iter().map(|i| i as u32).collect()))
                })
                .collect::<Result<_, VerifyError>>()?,
            weights: floats("expert_weights", &|_| vec![rows, k])?,
            features: match reference.contains(&features) {
                true => {
                    reference.floats(&features, &[rows, c.dspark_target_layer_ids.len() * h])?
                }
                false => Vec::new(),
            },
            window: BTreeMap::new(),
            queries: BTreeMap::new(),
            stream_positions: positions,
        })
    }
}

impl Forced {
    /// What a pass over `rows` rows recorded, in the places that are not forced yet.
    fn complete(&mut self, own: &Recorder, rows: usize, ratios: &[usize], block: usize) {
        let every: Vec<usize> = (0..rows).collect();
        for (l, layer) in (own.first..).zip(&own.layers) {
            let width = layer.streams.len() / rows.max(1);
            let mut streams = layer.streams.clone();
            if let Some(known) = self.streams.get(&l) {
                for (known, &p) in known.chunks(width.max(1)).zip(&self.stream_positions) {
                    streams[p * width..][..width].copy_from_slice(known);
                }
            }
            self.streams.insert(l, streams);
            self.pre.entry(l).or_insert_with(|| layer.pre.clone());
            // Weights go with the order of the choices.
            if !self.weights.contains_key(&l) {
                self.experts.insert(l, layer.experts.clone());
                self.weights.insert(l, layer.expert_weights.clone());
            }
            for (to, from) in [
                (&mut self.window, &layer.window),
                (&mut self.compressed, &layer.compressed),
                (&mut self.keys, &layer.keys),
                (&mut self.queries, &layer.queries),
            ] {
                if let Some(from) = from {
                    to.entry(l).or_insert_with(|| from.decoded());
                }
            }
            let ratio = ratios.get(l).copied().unwrap_or(1).max(1);
            if !layer.selected.is_empty() {
                let sets = || index_sets(&layer.selected, rows);
                self.selected.entry(l).or_insert_with(sets);
            }
            if !layer.candidates.is_empty() {
                let sets = || {
                    let blocks = index_sets(&layer.candidates, rows).into_iter().enumerate();
                    blocks
                        .map(|(p, b)| rows_of(&b, block as u32, ((p + 1) / ratio) as u32))
                        .collect()
                };
                self.candidates.entry(l).or_insert_with(sets);
            }
        }
        for (l, rows) in (own.end()..).zip(&own.context) {
            self.window.entry(l).or_insert_with(|| rows.decoded());
        }
        if self.features.is_empty() {
            self.features.clone_from(&own.features);
        }
        self.stream_positions = every;
    }

    /// Choices alone, and the weights of the experts.
    pub fn choices(own: &Recorder, rows: usize, c: &TextConfig) -> Self {
        let all = Self::recorded(own, rows, c);
        let Self { selected, candidates, experts, weights, .. } = all;
        Self { selected, candidates, experts, weights, ..Self::default() }
    }

    /// What a pass over `rows` rows recorded.
    pub fn recorded(own: &Recorder, rows: usize, c: &TextConfig) -> Self {
        let mut forced = Self::default();
        forced.complete(own, rows, &c.compress_ratios, c.candidate_block_size);
        forced
    }
}

/// Everything about one prompt.
pub(super) struct Trace {
    /// What every layer starts from.
    pub forced: Forced,
    /// What every layer makes of it.
    pub expected: Recorder,
    /// `[rows, vocab]`.
    pub logits: Vec<f32>,
    /// Draft blocks.
    pub drafts: Vec<DraftTrace>,
}

impl Trace {
    /// Joins the reference's values with those of a pass that started from them.
    pub fn new(
        pass: &Pass<'_>,
        mut forced: Forced,
        mut own: Recorder,
        mut logits: Vec<f32>,
        drafts: Vec<DraftTrace>,
    ) -> Result<Self, VerifyError> {
        let (c, rows) = (pass.config, pass.rows);
        let (h, s) = (c.hidden_size, c.hc_mult);
        let positions = &pass.stream_positions;
        // Elsewhere the pass went on from its own streams, and so may its results differ.
        let known = |to: &mut Vec<f32>, values: &[f32], width: usize| {
            for &p in positions {
                to[p * width..][..width].copy_from_slice(&values[p * width..][..width]);
            }
        };
        let read = |to: &mut Vec<f32>, name: &str, width: usize| {
            let name = format!("{}.{name}", pass.prefix);
            if pass.reference.contains(&name) {
                known(to, &pass.reference.floats(&name, &[rows, width])?, width);
            }
            Ok::<(), VerifyError>(())
        };
        for (l, layer) in own.layers.iter_mut().enumerate() {
            let name = format!("{}.streams_after_engram.{l}", pass.prefix);
            if pass.reference.contains(&name) {
                let values = pass.reference.floats(&name, &[positions.len(), s, h])?;
                for (values, &p) in values.chunks(s * h).zip(positions) {
                    layer.after_memory[p * s * h..][..s * h].copy_from_slice(values);
                }
            }
            read(&mut layer.attention_out, &format!("attn_out.{l}"), h)?;
            read(&mut layer.experts_out, &format!("ffn_out.{l}"), h)?;
            if let Some(pre) = forced.pre.get(&l) {
                known(&mut layer.pre, pre, s);
            }
        }
        read(&mut own.features, "dspark.features", c.dspark_target_layer_ids.len() * h)?;
        read(&mut own.hidden, "hidden", h)?;
        read(&mut logits, "logits", c.vocab_size)?;
        forced.complete(&own, rows, &c.compress_ratios, c.candidate_block_size);
        Ok(Self { forced, expected: own, logits, drafts })
    }
}

/// Sets of a `[rows, k]` buffer.
pub(super) fn index_sets(indices: &[u32], rows: usize) -> Vec<BTreeSet<u32>> {
    let k = indices.len() / rows.max(1);
    let present = |row: &[u32]| row.iter().copied().filter(|&i| i != ABSENT).collect();
    indices.chunks(k.max(1)).map(present).collect()
}

/// The visible rows of blocks.
pub(super) fn rows_of(blocks: &BTreeSet<u32>, size: u32, visible: u32) -> BTreeSet<u32> {
    let rows = blocks.iter().flat_map(|&b| b * size..(b + 1) * size);
    rows.filter(|&row| row < visible).collect()
}

/// Blocks that hold at least one of the visible `rows`.
pub(super) fn blocks_of(rows: &BTreeSet<u32>, size: u32, visible: u32) -> BTreeSet<u32> {
    rows.iter().filter(|&&row| row < visible).map(|row| row / size).collect()
}

#[cfg(test)]
mod tests {
    use super::super::record::LayerRecord;
    use super::*;

    #[test]
    fn blocks_and_their_visible_rows() {
        let rows = BTreeSet::from([0, 3, 9]);
        assert_eq!(blocks_of(&rows, 4, 9), BTreeSet::from([0]));
        assert_eq!(blocks_of(&rows, 4, 10), BTreeSet::from([0, 2]));
        assert_eq!(rows_of(&BTreeSet::from([0, 2]), 4, 10), BTreeSet::from([0, 1, 2, 3, 8, 9]));
        assert_eq!(
            index_sets(&[5, 1, ABSENT, ABSENT], 2),
            [BTreeSet::from([1, 5]), BTreeSet::new()]
        );
    }

    #[test]
    fn gaps_are_filled_and_known_values_stay() {
        let layer = LayerRecord {
            streams: vec![1.0, 2.0, 3.0],
            pre: vec![0.5; 3],
            ..LayerRecord::default()
        };
        let mut own = Recorder::default();
        own.layers.push(layer);
        let mut forced = Forced { stream_positions: vec![1], ..Forced::default() };
        forced.streams.insert(0, vec![9.0]);
        forced.complete(&own, 3, &[0], 8);
        assert_eq!(forced.streams[&0], [1.0, 9.0, 3.0]);
        assert_eq!(forced.pre[&0], [0.5; 3]);
        assert_eq!(forced.stream_positions, [0, 1, 2]);
    }
}
