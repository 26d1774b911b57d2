//! One pass of a prompt against the reference: every quantity, layer by layer.

use super::force::{Choice, Excused};
use super::record::{LayerRecord, Recorder};
use super::report::{Check, Tally};
use super::tolerance::Tolerances;
use super::{Reference, Variant, VerifyError};
use crate::config::TextConfig;
use std::collections::BTreeSet;

/// What is compared with what.
#[derive(Clone)]
pub(super) struct Pass<'a> {
    pub reference: &'a Reference,
    pub config: &'a TextConfig,
    /// Heading of the lines.
    pub variant: &'static str,
    /// The same for the lines about draft stages, where those are compared one by one.
    pub drafts: &'static str,
    /// Name of the prompt, for the lines.
    pub prompt: String,
    /// What the tensor names start with.
    pub prefix: String,
    /// Rows of the prompt.
    pub rows: usize,
    /// Positions that the stream tensors keep.
    pub stream_positions: Vec<usize>,
    /// Positions from here on are not compared.
    pub limit: usize,
    pub tolerances: Tolerances,
    /// Choices that differ within the error of their scores.
    pub excused: Excused,
}

type Get = fn(&LayerRecord) -> &[f32];

impl Pass<'_> {
    /// The same for a forced run, which all positions take part in.
    pub fn forced(self, name: &'static str, variant: Variant) -> Self {
        let tolerances = Tolerances::forced(variant);
        Self { variant: name, limit: self.rows, tolerances, ..self }
    }

    /// Lines of everything that a pass computes, in the order of computation.
    pub fn compare(
        &self,
        recorded: &Recorder,
        published: &dyn Fn(usize, bool) -> Result<Vec<f32>, VerifyError>,
        logits: &[f32],
        out: &mut Vec<Check>,
    ) -> Result<(), VerifyError> {
        let (c, t) = (self.config, &self.tolerances);
        let (h, s) = (c.hidden_size, c.hc_mult);
        let all: Vec<usize> = (0..self.rows).collect();
        let streams = &self.stream_positions;

        out.push(self.layers(
            "streams_after_engram",
            recorded,
            |r| &r.after_memory,
            streams,
            s * h,
            &[s, h],
            t.streams,
        )?);
        out.push(self.cache_rows("compressed_kv", published, false, c.head_dim)?);
        out.push(self.cache_rows("index_keys", published, true, c.index_head_dim)?);
        out.push(self.top_k(recorded)?);
        out.push(self.candidates(recorded)?);
        out.push(self.layers(
            "attn_out",
            recorded,
            |r| &r.attention_out,
            &all,
            h,
            &[h],
            t.sublayer,
        )?);
        let (experts, weights) = self.experts(recorded)?;
        out.push(experts);
        out.push(weights);
        out.push(self.layers(
            "ffn_out",
            recorded,
            |r| &r.experts_out,
            &all,
            h,
            &[h],
            t.sublayer,
        )?);
        out.push(self.layers(
            "streams",
            recorded,
            |r| &r.streams,
            streams,
            s * h,
            &[s, h],
            t.streams,
        )?);
        out.push(self.layers("pre_mix", recorded, |r| &r.pre, &all, s, &[s], t.pre)?);
        let width = c.dspark_target_layer_ids.len() * h;
        if width > 0 {
            let tolerance = t.features;
            out.push(self.rows(
                "features",
                "dspark.features",
                &recorded.features,
                width,
                tolerance,
            )?);
        }
        out.push(self.rows("hidden", "hidden", &recorded.hidden, h, t.hidden)?);
        out.push(self.rows("logits", "logits", logits, c.vocab_size, t.logits)?);
        Ok(())
    }

    /// An empty line about numbers.
    pub fn numbers(&self, quantity: &'static str, tolerance: f64) -> Tally {
        Tally::numbers(self.variant, &self.prompt, quantity, tolerance)
            .isolated(self.tolerances.outside, self.tolerances.rms)
    }

    /// An empty line about sets or tokens.
    pub fn sets(&self, quantity: &'static str) -> Tally {
        Tally::sets(self.variant, &self.prompt, quantity)
    }

    /// Says why a line is empty or short.
    fn close(&self, mut tally: Tally, found: bool) -> Check {
        if !found {
            tally.note("not in the reference");
        } else if self.limit < self.rows {
            tally.note(format!(
                "positions from {} on move with the rounding of the arithmetic; there every layer \
                 is compared from the reference's inputs",
                self.limit
            ));
        }
        tally.check()
    }

    fn reference_layers(&self, quantity: &str) -> Result<Vec<usize>, VerifyError> {
        let prefix = format!("{}.{quantity}", self.prefix);
        let layers = self.reference.layers(&prefix);
        match layers.last() {
            Some(&last) if last >= self.config.num_hidden_layers => Err(VerifyError::Layer {
                name: format!("{prefix}.{last}"),
                layers: self.config.num_hidden_layers,
            }),
            _ => Ok(layers),
        }
    }

    fn layers(
        &self,
        quantity: &'static str,
        recorded: &Recorder,
        get: Get,
        positions: &[usize],
        width: usize,
        row_shape: &[usize],
        tolerance: f64,
    ) -> Result<Check, VerifyError> {
        let mut tally = self.numbers(quantity, tolerance);
        let layers = self.reference_layers(quantity)?;
        for &l in &layers {
            let shape: Vec<usize> = [positions.len()].iter().chain(row_shape).copied().collect();
            let name = format!("{}.{quantity}.{l}", self.prefix);
            let reference = self.reference.floats(&name, &shape)?;
            let own = get(&recorded.layers[l]);
            if own.len() != self.rows * width {
                tally.equal(false, || format!("layer {l}: the model has no such value there"));
                continue;
            }
            for (i, &p) in positions.iter().enumerate().filter(|(_, p)| **p < self.limit) {
                let (own, reference) =
                    (&own[p * width..][..width], &reference[i * width..][..width]);
                tally.floats(own, reference, |j| format!("layer {l} position {p} element {j}"));
            }
        }
        Ok(self.close(tally, !layers.is_empty()))
    }

    /// A quantity of every position.
    fn rows(
        &self,
        quantity: &'static str,
        name: &str,
        own: &[f32],
        width: usize,
        tolerance: f64,
    ) -> Result<Check, VerifyError> {
        let mut tally = self.numbers(quantity, tolerance);
        let name = format!("{}.{name}", self.prefix);
        let found = self.reference.contains(&name);
        if found {
            let reference = self.reference.floats(&name, &[self.rows, width])?;
            for p in 0..self.limit.min(self.rows) {
                let (own, reference) =
                    (&own[p * width..][..width], &reference[p * width..][..width]);
                tally.floats(own, reference, |j| format!("position {p} element {j}"));
            }
        }
        Ok(self.close(tally, found))
    }

    fn cache_rows(
        &self,
        quantity: &'static str,
        published: &dyn Fn(usize, bool) -> Result<Vec<f32>, VerifyError>,
        keys: bool,
        width: usize,
    ) -> Result<Check, VerifyError> {
        let t = &self.tolerances;
        let mut tally = Tally::numbers(self.variant, &self.prompt, quantity, t.cache_rows)
            .isolated(t.cache_outside, f64::INFINITY);
        let layers = self.reference_layers(quantity)?;
        for &l in &layers {
            let name = format!("{}.{quantity}.{l}", self.prefix);
            let own = published(l, keys)?;
            let reference = self.reference.floats(&name, &[own.len() / width, width])?;
            let ratio = self.config.compress_ratios[l].max(1);
            // A row is as good as the last position of its group.
            let rows = (self.limit.min(self.rows) / ratio).min(own.len() / width);
            let n = rows * width;
            let place = |i: usize| format!("layer {l} row {} element {}", i / width, i % width);
            tally.floats(&own[..n], &reference[..n], place);
        }
        Ok(self.close(tally, !layers.is_empty()))
    }

    /// The chosen compressed rows of every query, as sets.
    fn top_k(&self, recorded: &Recorder) -> Result<Check, VerifyError> {
        let mut tally = self.sets("topk");
        let layers = self.reference_layers("topk")?;
        let mut excused = 0;
        for &l in &layers {
            let reference = self.selection(&self.prefix, l)?;
            let own = &recorded.layers[l].selected;
            if own.is_empty() {
                tally.equal(false, || format!("layer {l}: the model selects nothing there"));
                continue;
            }
            let k = own.len() / self.rows;
            for p in 0..self.limit.min(self.rows) {
                let own: BTreeSet<u32> =
                    own[p * k..][..k].iter().copied().filter(|&i| i != u32::MAX).collect();
                let expected = &reference[p];
                let equal = own == *expected;
                if !equal && self.excused.contains(&(Choice::Rows, l, p)) {
                    excused += 1;
                    continue;
                }
                tally.equal(equal, || {
                    format!("layer {l} position {p}: {}", difference(&own, expected))
                });
            }
        }
        note_excused(&mut tally, excused);
        Ok(self.close(tally, !layers.is_empty()))
    }

    /// The reference's chosen rows of layer `l`, one set a position.
    pub fn selection(&self, prefix: &str, l: usize) -> Result<Vec<BTreeSet<u32>>, VerifyError> {
        let name = format!("{prefix}.topk.{l}");
        let shape = self.reference.shape(&name)?;
        let width = shape.get(1).copied().unwrap_or(0);
        let values = self.reference.integers(&name, &[self.rows, width])?;
        Ok((0..self.rows)
            .map(|p| {
                let row = &values[p * width..][..width];
                row.iter().filter_map(|&i| u32::try_from(i).ok()).collect()
            })
            .collect())
    }

    /// Candidate rows of every query, as sets of visible rows.
    fn candidates(&self, recorded: &Recorder) -> Result<Check, VerifyError> {
        let mut tally = self.sets("candidates");
        let layers = self.reference_layers("candidates")?;
        let block = self.config.candidate_block_size;
        let mut excused = 0;
        for &l in &layers {
            let ratio = self.config.compress_ratios[l].max(1);
            let reference = self.candidate_mask(&self.prefix, l)?;
            let own = &recorded.layers[l].candidates;
            if own.is_empty() {
                tally.equal(false, || format!("layer {l}: the model publishes no candidates"));
                continue;
            }
            let blocks = own.len() / self.rows;
            for p in 0..self.limit.min(self.rows) {
                let visible = ((p + 1) / ratio) as u32;
                let own: BTreeSet<u32> = own[p * blocks..][..blocks]
                    .iter()
                    .filter(|&&b| b != u32::MAX)
                    .flat_map(|&b| b * block as u32..(b + 1) * block as u32)
                    .filter(|&row| row < visible)
                    .collect();
                let expected: BTreeSet<u32> =
                    reference[p].iter().copied().filter(|&row| row < visible).collect();
                let equal = own == expected;
                if !equal && self.excused.contains(&(Choice::Candidates, l, p)) {
                    excused += 1;
                    continue;
                }
                tally.equal(equal, || {
                    format!("layer {l} position {p}: {}", difference(&own, &expected))
                });
            }
        }
        note_excused(&mut tally, excused);
        Ok(self.close(tally, !layers.is_empty()))
    }

    /// The reference's candidate rows of layer `l`, one set a position.
    pub fn candidate_mask(
        &self,
        prefix: &str,
        l: usize,
    ) -> Result<Vec<BTreeSet<u32>>, VerifyError> {
        let name = format!("{prefix}.candidates.{l}");
        let width = self.reference.shape(&name)?.get(1).copied().unwrap_or(0);
        let mask = self.reference.integers(&name, &[self.rows, width])?;
        Ok((0..self.rows)
            .map(|p| {
                let row = mask[p * width..][..width].iter().enumerate();
                row.filter(|(_, m)| **m != 0).map(|(i, _)| i as u32).collect()
            })
            .collect())
    }

    /// The chosen experts, as sets, and the weights of those that both chose.
    fn experts(&self, recorded: &Recorder) -> Result<(Check, Check), VerifyError> {
        let mut sets = self.sets("experts");
        let mut weights = self.numbers("expert_weights", self.tolerances.weights);
        let layers = self.reference_layers("experts")?;
        let weighted = self.reference_layers("expert_weights")?;
        let k = self.config.num_experts_per_tok;
        let mut excused = 0;
        for &l in &layers {
            let shape = [self.rows, k];
            let name = |quantity: &str| format!("{}.{quantity}.{l}", self.prefix);
            let ids = self.reference.integers(&name("experts"), &shape)?;
            let values = match weighted.contains(&l) {
                true => self.reference.floats(&name("expert_weights"), &shape)?,
                false => Vec::new(),
            };
            let record = &recorded.layers[l];
            for p in 0..self.limit.min(self.rows) {
                let own_ids = &record.experts[p * k..][..k];
                let own: BTreeSet<u32> = own_ids.iter().copied().collect();
                let expected: BTreeSet<u32> = ids[p * k..][..k].iter().map(|&i| i as u32).collect();
                let equal = own == expected;
                if !equal && self.excused.contains(&(Choice::Experts, l, p)) {
                    excused += 1;
                    continue;
                }
                sets.equal(equal, || {
                    format!("layer {l} position {p}: {}", difference(&own, &expected))
                });
                if !equal || values.is_empty() {
                    continue;
                }
                for (slot, id) in own_ids.iter().enumerate() {
                    let other = ids[p * k..][..k].iter().position(|&i| i as u32 == *id);
                    let (a, b) = (
                        record.expert_weights[p * k + slot],
                        values[p * k + other.unwrap_or(slot)],
                    );
                    weights.floats(&[a], &[b], |_| format!("layer {l} position {p} expert {id}"));
                }
            }
        }
        note_excused(&mut sets, excused);
        Ok((self.close(sets, !layers.is_empty()), self.close(weights, !weighted.is_empty())))
    }
}

fn note_excused(tally: &mut Tally, excused: usize) {
    if excused > 0 {
        tally.note(format!(
            "{excused} choices differ where the scores at the cut are as close as their error"
        ));
    }
}

fn difference(own: &BTreeSet<u32>, expected: &BTreeSet<u32>) -> String {
    let list = |a: &BTreeSet<u32>, b: &BTreeSet<u32>| {
        let items: Vec<String> = a.difference(b).take(8).map(u32::to_string).collect();
        format!("[{}]", items.join(" "))
    };
    format!("missing {}, extra {}", list(expected, own), list(own, expected))
}
