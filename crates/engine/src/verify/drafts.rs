//! Draft blocks at the reference's anchors.

use super::compare::Pass;
use super::force::Forcer;
use super::record::Recorder;
use super::reference::{Continuation, DraftBlock};
use super::run::{Drafted, Runner};
use super::trace::Forced;
use super::{Lengths, Verifier, VerifyError};
use crate::model::{Probe, Scratch};
use deepinfer_device::Device;
use std::sync::Arc;

/// One draft block: what the stages computed, and what came out.
pub(super) struct DraftTrace {
    /// Tokens before the block.
    pub anchor: usize,
    /// The stages' keys of those tokens.
    pub context: Recorder,
    /// The stages.
    pub stages: Recorder,
    /// The block.
    pub drafted: Drafted,
}

/// What the stages start from; nothing is replaced that is not there.
#[derive(Clone, Copy, Default)]
pub(super) struct DraftStart<'a> {
    /// `[rows, targets * H]`, instead of what the backbone computed.
    pub features: Option<&'a [f32]>,
    /// A block on another device: its stages' inputs.
    pub block: Option<&'a DraftTrace>,
}

/// Runs the tokens before the block's anchor, and drafts. `None` if the checkpoint has no draft
/// stages.
pub(super) fn run<D: Device>(
    runner: &mut Runner<D>,
    pass: &Pass<'_>,
    ids: &[u32],
    block: &DraftBlock,
    start: DraftStart<'_>,
) -> Result<Option<DraftTrace>, VerifyError> {
    let c = pass.config;
    let (anchor, n) = (block.anchor_position, block.draft.len());
    let model = runner.session.model.clone();
    let shared = Arc::new(c.clone());
    let width = c.dspark_target_layer_ids.len() * c.hidden_size;
    let mut context = Forced::default();
    if let Some(other) = start.block {
        let stages = (c.num_hidden_layers..).zip(&other.context.context);
        context.window.extend(stages.map(|(l, rows)| (l, rows.decoded())));
    }
    let mut probe = Context {
        features: start.features.map(|f| &f[..anchor * width]),
        last: c.num_hidden_layers - 1,
        stages: Forcer::new(shared.clone(), model.layers(), Recorder::keys(c), &context, None),
    };
    runner.restart();
    runner.run(&ids[..anchor], Vec::new(), &mut probe)?;
    let context = probe.stages.recorder;
    let forced =
        start.block.map_or_else(Forced::default, |other| Forced::recorded(&other.stages, n, c));
    let mut probe = Forcer::new(shared, model.layers(), Recorder::drafts(c), &forced, None);
    let drafted = runner.draft(block.anchor_token, &block.draft, &mut probe)?;
    let stages = probe.recorder;
    Ok(drafted.map(|drafted| DraftTrace { anchor, context, stages, drafted }))
}

/// Whether the block can be run.
pub(super) fn check(pass: &Pass<'_>, block: &DraftBlock, rows: usize) -> Result<(), VerifyError> {
    let (c, anchor, n) = (pass.config, block.anchor_position, block.draft.len());
    let fits = anchor <= rows && n <= c.dspark_block_size && n > 0;
    if fits && block.draft.iter().all(|&id| (id as usize) < c.vocab_size) {
        return Ok(());
    }
    Err(VerifyError::Prompt {
        name: pass.prompt.clone(),
        reason: format!("the draft block at anchor {anchor} does not fit the checkpoint"),
    })
}

/// Runs every block and compares it with the reference. With `features` the draft stages read
/// those instead of what the backbone computed. Returns the blocks.
pub(super) fn compare<D: Device>(
    verifier: &mut Verifier<'_, D>,
    runner: &mut Runner<D>,
    pass: &Pass<'_>,
    ids: &[u32],
    next: &Continuation,
    lengths: &Lengths,
    features: Option<&[f32]>,
) -> Result<Vec<DraftTrace>, VerifyError> {
    let t = &pass.tolerances;
    let mut tokens = pass.sets("drafts");
    let mut hidden = pass.numbers("draft_hidden", t.draft_hidden);
    let mut base = pass.numbers("draft_base_logits", t.logits);
    let mut logits = pass.numbers("draft_logits", t.logits);
    let mut confidence = pass.numbers("confidence", t.confidence);
    let (h, vocab) = (pass.config.hidden_size, pass.config.vocab_size);
    let mut unstable = 0;
    let mut traces = Vec::new();
    for block in &next.dspark {
        let (anchor, n) = (block.anchor_position, block.draft.len());
        if anchor > lengths.limit {
            unstable += 1;
            continue;
        }
        check(pass, block, lengths.rows)?;
        let start = DraftStart { features, block: None };
        let Some(trace) = run(runner, pass, ids, block, start)? else {
            tokens.note("the checkpoint has no draft stages");
            break;
        };
        let own = &trace.drafted;
        for (i, (&own, &expected)) in own.tokens.iter().zip(&block.draft).enumerate() {
            let gap = block.argmax_gap.get(i).copied().unwrap_or(f64::INFINITY);
            if own != expected && gap <= 2.0 * t.logits {
                tokens.note(format!(
                    "anchor {anchor} draft {i}: {own} and {expected} are {gap:.1e} apart"
                ));
                continue;
            }
            let text = || format!("anchor {anchor} draft {i}: {own} instead of {expected}");
            tokens.equal(own == expected, text);
        }
        let name = |quantity: &str| format!("{}.dspark.a{anchor}.{quantity}", pass.prefix);
        for (quantity, width, own, tally) in [
            ("raw_hidden", h, &own.raw_hidden, &mut hidden),
            ("base_logits", vocab, &own.base_logits, &mut base),
            ("draft_logits", vocab, &own.draft_logits, &mut logits),
        ] {
            let name = name(quantity);
            if !pass.reference.contains(&name) {
                tally.note("not in the reference");
                continue;
            }
            let reference = pass.reference.floats(&name, &[n, width])?;
            let place =
                |i: usize| format!("anchor {anchor} draft {} element {}", i / width, i % width);
            tally.floats(own, &reference, place);
        }
        let reference = match pass.reference.contains(&name("confidence")) {
            true => pass.reference.floats(&name("confidence"), &[n])?,
            false => block.confidence_logits.iter().map(|&x| x as f32).collect(),
        };
        if reference.len() == n {
            confidence
                .floats(&own.confidence, &reference, |i| format!("anchor {anchor} draft {i}"));
        }
        traces.push(trace);
    }
    let mut checks = [tokens, hidden, base, logits, confidence];
    for tally in &mut checks {
        if next.dspark.is_empty() {
            tally.note("not in the reference");
        }
        if unstable > 0 {
            tally.note(format!(
                "{unstable} anchors lie after position {}, where roundings disagree; there the \
                 draft stages are compared from the reference's features",
                lengths.limit
            ));
        }
    }
    verifier.report.checks.extend(checks.map(|tally| tally.check()));
    Ok(traces)
}

/// The pass over the tokens before a block: what the stages read of it.
struct Context<'a, D: Device> {
    features: Option<&'a [f32]>,
    last: usize,
    stages: Forcer<'a, D>,
}

impl<D: Device> Probe<D> for Context<'_, D> {
    fn after_layer(
        &mut self,
        d: &D,
        l: usize,
        _rows: usize,
        s: &mut Scratch<D>,
    ) -> deepinfer_device::ops::Result<()> {
        match self.features {
            Some(features) if l == self.last => d.upload_act(features, &mut s.features, 0),
            _ => Ok(()),
        }
    }

    fn window_keys(
        &mut self,
        d: &D,
        l: usize,
        rows: usize,
        s: &mut Scratch<D>,
    ) -> deepinfer_device::ops::Result<()> {
        match l > self.last {
            true => self.stages.window_keys(d, l, rows, s),
            false => Ok(()),
        }
    }
}
