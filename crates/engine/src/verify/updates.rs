//! A device that stores activations in bf16, layer by layer: what each adds when it starts from the
//! values of a [`Trace`], by the bounds of [`rounded`].
//!
//! Stored rows are judged twice: as computed, like every other number, and as stored, where they
//! must be the rounding of what was computed, bit for bit. So a code may be another than the
//! reference's only where the number lies within its allowed error of a rounding boundary. Readers
//! then get the trace's rows.

use super::compare::Pass;
use super::drafts::{self, DraftStart, DraftTrace};
use super::force::Forcer;
use super::record::{LayerRecord, Recorder, Rows};
use super::reference::Continuation;
use super::report::{Check, Tally};
use super::run::Runner;
use super::tolerance::rounded;
use super::trace::{Forced, Trace, index_sets, rows_of};
use super::{Verifier, VerifyError};
use deepinfer_device::Device;
use deepinfer_device::formats::encode_row;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Runs a prompt from the values of `trace` and compares with what they lead to.
pub(super) fn compare<D: Device>(
    verifier: &mut Verifier<'_, D>,
    runner: &mut Runner<D>,
    pass: &Pass<'_>,
    ids: &[u32],
    embeddings: Vec<f32>,
    next: &Continuation,
    trace: &Trace,
) -> Result<(), VerifyError> {
    let c = pass.config;
    let shared = Arc::new(c.clone());
    let layers = verifier.model.layers();
    let mut probe = Forcer::new(shared, layers, Recorder::new(c), &trace.forced, None);
    runner.restart();
    let logits = runner.run(ids, embeddings, &mut probe)?;
    let own = probe.recorder;

    let mut lines = Lines::new(pass, pass.variant);
    lines.layers(&own, &trace.expected, &trace.forced, "");
    let checks = &mut verifier.report.checks;
    checks.extend(lines.checks());
    let expected = &trace.expected;
    for (quantity, own, expected, width) in [
        ("features", &own.features, &expected.features, own.features.len() / pass.rows.max(1)),
        ("hidden", &own.hidden, &expected.hidden, c.hidden_size),
        ("logits", &logits, &trace.logits, c.vocab_size),
    ] {
        let mut tally = numbers(pass, pass.variant, quantity);
        let place = |i: usize| format!("position {} element {}", i / width, i % width);
        tally.update(quantity, own, expected, &[], 1, place);
        checks.push(tally.check());
    }
    draft_blocks(verifier, runner, pass, ids, next, trace)
}

/// Draft blocks, stage by stage.
fn draft_blocks<D: Device>(
    verifier: &mut Verifier<'_, D>,
    runner: &mut Runner<D>,
    pass: &Pass<'_>,
    ids: &[u32],
    next: &Continuation,
    trace: &Trace,
) -> Result<(), VerifyError> {
    let c = pass.config;
    let variant = pass.drafts;
    let mut lines = Lines::new(pass, variant);
    let mut context = numbers(pass, variant, "context_keys");
    let mut tokens = Tally::sets(variant, &pass.prompt, "drafts");
    let mut outputs: [Numbers; 4] = Default::default();
    for (block, expected) in next.dspark.iter().zip(&trace.drafts) {
        let features = Some(trace.forced.features.as_slice());
        let start = DraftStart { features, block: Some(expected) };
        let Some(own) = drafts::run(runner, pass, ids, block, start)? else { break };
        let at = format!("anchor {} ", expected.anchor);
        let keys = own.context.context.iter().zip(&expected.context.context);
        for (l, (own, expected)) in (c.num_hidden_layers..).zip(keys) {
            let what = format!("{at}layer {l}");
            let Lines { stored, codes, .. } = &mut lines;
            stored_rows(&what, own, expected, &mut context, stored, codes);
        }
        let forced = Forced::recorded(&expected.stages, block.draft.len(), c);
        lines.layers(&own.stages, &expected.stages, &forced, &at);
        compare_tokens(&mut tokens, &own, expected, c.vocab_size);
        let pairs = numbers_of(&own).into_iter().zip(numbers_of(expected));
        for (to, (own, expected)) in outputs.iter_mut().zip(pairs) {
            to.own.extend_from_slice(own);
            to.expected.extend_from_slice(expected);
        }
    }
    let mut checks = vec![context.check()];
    checks.extend(lines.checks());
    for (quantity, numbers) in
        ["hidden", "base_logits", "logits", "confidence"].into_iter().zip(outputs)
    {
        checks.push(numbers.check(pass, variant, quantity));
    }
    checks.push(tokens.check());
    checks.retain(|check| check.compared > 0);
    verifier.report.checks.extend(checks);
    Ok(())
}

fn numbers_of(block: &DraftTrace) -> [&[f32]; 4] {
    let d = &block.drafted;
    [&d.raw_hidden, &d.base_logits, &d.draft_logits, &d.confidence]
}

/// Drafted tokens: they may differ where two logits are as close as the logits may be wrong.
fn compare_tokens(tally: &mut Tally, own: &DraftTrace, expected: &DraftTrace, vocab: usize) {
    let rows = expected.drafted.draft_logits.chunks(vocab);
    for (i, logits) in rows.enumerate() {
        let (a, b) = (own.drafted.tokens[i], expected.drafted.tokens[i]);
        let squares: f64 = logits.iter().map(|&x| f64::from(x).powi(2)).sum();
        let error = rounded::PEAK * rounded::RMS * (squares / vocab as f64).sqrt();
        let gap = f64::from(logits[b as usize] - logits[a as usize]);
        let at = format!("anchor {} draft {i}", expected.anchor);
        if a != b && gap <= 2.0 * error {
            tally.note(format!("{at}: {a} and {b} are {gap:.1e} apart"));
        } else {
            tally.equal(a == b, || format!("{at}: {a} instead of {b}"));
        }
    }
}

fn numbers(pass: &Pass<'_>, variant: &'static str, quantity: &'static str) -> Tally {
    Tally::numbers(variant, &pass.prompt, quantity, rounded::PEAK * rounded::RMS)
}

/// Lines about layers, or about draft stages.
struct Lines<'a> {
    pass: &'a Pass<'a>,
    variant: &'static str,
    memory: Tally,
    window: Tally,
    compressed: Tally,
    keys: Tally,
    queries: Tally,
    stored: Tally,
    /// Rounded values, and those that are another code than the trace's.
    codes: (u64, u64),
    selected: Tally,
    candidates: Tally,
    attention: Tally,
    experts: Tally,
    experts_out: Tally,
    block: Tally,
    /// Few numbers a layer: judged together.
    weights: Numbers,
    pre: Numbers,
}

/// Numbers and what they should be.
#[derive(Default)]
struct Numbers {
    own: Vec<f32>,
    expected: Vec<f32>,
}

impl Numbers {
    fn check(&self, pass: &Pass<'_>, variant: &'static str, quantity: &'static str) -> Check {
        let mut tally = numbers(pass, variant, quantity);
        tally.update(quantity, &self.own, &self.expected, &[], 1, |i| format!("number {i}"));
        tally.check()
    }
}

impl<'a> Lines<'a> {
    fn new(pass: &'a Pass<'a>, variant: &'static str) -> Self {
        let line = |quantity| numbers(pass, variant, quantity);
        let sets = |quantity| Tally::sets(variant, &pass.prompt, quantity);
        Self {
            pass,
            variant,
            memory: line("streams_after_engram"),
            window: line("window_keys"),
            compressed: line("compressed_kv"),
            keys: line("index_keys"),
            queries: line("index_queries"),
            stored: sets("stored_rows"),
            codes: (0, 0),
            selected: sets("topk"),
            candidates: sets("candidates"),
            attention: line("attn_out"),
            experts: sets("experts"),
            experts_out: line("ffn_out"),
            block: line("block_update"),
            weights: Numbers::default(),
            pre: Numbers::default(),
        }
    }

    /// All layers of a pass; `forced` are the values that the next ones start from.
    fn layers(&mut self, own: &Recorder, expected: &Recorder, forced: &Forced, at: &str) {
        for (l, (own, expected)) in (own.first..).zip(own.layers.iter().zip(&expected.layers)) {
            self.layer(own, expected, forced, l, &format!("{at}layer {l}"));
        }
    }

    fn layer(
        &mut self,
        own: &LayerRecord,
        expected: &LayerRecord,
        forced: &Forced,
        l: usize,
        what: &str,
    ) {
        let (h, s) = (self.pass.config.hidden_size, self.pass.config.hc_mult);
        let (streams, row) = (s * h, |p: usize| format!("{what} position {p}"));
        let place = |width: usize| {
            move |i: usize| format!("{what} position {} element {}", i / width, i % width)
        };
        let (from, to) = (&expected.before, forced.streams.get(&l));
        let after_memory = &expected.after_memory;
        if !after_memory.is_empty() {
            let own = &own.after_memory;
            self.memory.update(what, own, after_memory, &[], s, place(streams));
        }
        for (own, expected, computed) in [
            (&own.window, &expected.window, &mut self.window),
            (&own.compressed, &expected.compressed, &mut self.compressed),
            (&own.keys, &expected.keys, &mut self.keys),
            (&own.queries, &expected.queries, &mut self.queries),
        ] {
            if let (Some(own), Some(expected)) = (own, expected) {
                stored_rows(what, own, expected, computed, &mut self.stored, &mut self.codes);
            }
        }
        let rows = own.pre.len() / s.max(1);
        if let Some(expected) = forced.selected.get(&l) {
            let own = index_sets(&own.selected, rows);
            for (p, (own, expected)) in own.iter().zip(expected).enumerate() {
                self.selected.overlap(own, expected, || row(p));
            }
        }
        if let (Some(expected), false) = (forced.candidates.get(&l), own.candidates.is_empty()) {
            let c = self.pass.config;
            let (size, ratio) = (c.candidate_block_size as u32, c.compress_ratios[l].max(1));
            let own = index_sets(&own.candidates, rows);
            for (p, (own, expected)) in own.iter().zip(expected).enumerate() {
                let visible = ((p + 1) / ratio) as u32;
                let expected = expected.iter().copied().filter(|&row| row < visible).collect();
                self.candidates.overlap(&rows_of(own, size, visible), &expected, || row(p));
            }
        }
        self.attention.update(what, &own.attention_out, &expected.attention_out, &[], 1, place(h));
        if let (Some(ids), Some(weights)) = (forced.experts.get(&l), forced.weights.get(&l)) {
            let k = (ids.len() / rows.max(1)).max(1);
            let own = own.experts.chunks(k).zip(own.expert_weights.chunks(k));
            let expected = ids.chunks(k).zip(weights.chunks(k));
            for (p, ((ids, weights), (other, others))) in own.zip(expected).enumerate() {
                let set = |ids: &[u32]| ids.iter().copied().collect::<BTreeSet<u32>>();
                let (own, expected) = (set(ids), set(other));
                self.experts.overlap(&own, &expected, || row(p));
                if own == expected {
                    let place = |id| other.iter().position(|&other| other == id);
                    self.weights.own.extend(weights);
                    self.weights
                        .expected
                        .extend(ids.iter().filter_map(|&id| Some(others[place(id)?])));
                }
            }
        }
        self.experts_out.update(what, &own.experts_out, &expected.experts_out, &[], 1, place(h));
        if let Some(to) = to {
            self.block.update(what, &own.streams, to, from, s, place(streams));
        }
        self.pre.own.extend(&own.pre);
        self.pre.expected.extend(&expected.pre);
    }

    /// The lines about something that there is.
    fn checks(mut self) -> Vec<Check> {
        let (all, other) = self.codes;
        if other > 0 {
            self.stored.note(format!(
                "{other} of {all} rounded values are another code than the CPU's, where what was \
                 computed lies within its allowed error of a rounding boundary"
            ));
        }
        let (pass, variant) = (self.pass, self.variant);
        let lines = [
            self.memory.check(),
            self.window.check(),
            self.compressed.check(),
            self.keys.check(),
            self.queries.check(),
            self.stored.check(),
            self.selected.check(),
            self.candidates.check(),
            self.attention.check(),
            self.experts.check(),
            self.weights.check(pass, variant, "expert_weights"),
            self.experts_out.check(),
            self.block.check(),
            self.pre.check(pass, variant, "pre_mix"),
        ];
        lines.into_iter().filter(|line| line.compared > 0).collect()
    }
}

/// Rows as computed, and as stored.
fn stored_rows(
    what: &str,
    own: &Rows,
    expected: &Rows,
    computed: &mut Tally,
    stored: &mut Tally,
    codes: &mut (u64, u64),
) {
    let width = own.width.max(1);
    let place = |i: usize| format!("{what} row {} element {}", i / width, i % width);
    computed.update(what, &own.computed, &expected.computed, &[], 1, place);
    let mut rounded = vec![0; own.format.row_bytes(own.width)];
    let bytes = own.stored.chunks(rounded.len().max(1));
    for (row, (values, bytes)) in own.computed.chunks(width).zip(bytes).enumerate() {
        encode_row(own.format, values, &mut rounded);
        stored.equal(rounded == bytes, || {
            format!("{what} row {row}: the codes are not those of what was computed")
        });
    }
    // Exact rows have another form on each device.
    if own.format == expected.format {
        let pairs = own.decoded().into_iter().zip(expected.decoded());
        codes.0 += own.computed.len() as u64;
        codes.1 += pairs.filter(|(a, b)| a != b).count() as u64;
    }
}
