//! Draft blocks at the reference's anchors.

use super::compare::Pass;
use super::reference::Continuation;
use super::run::Runner;
use super::{Lengths, Verifier, VerifyError};
use crate::model::{Probe, Scratch};
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// Runs the tokens before each anchor, drafts, and compares. With `features` (`[rows, width]`) the
/// draft stages read those instead of what the backbone computed.
pub(super) fn compare<D: Device>(
    verifier: &mut Verifier<'_, D>,
    runner: &mut Runner<D>,
    pass: &Pass<'_>,
    ids: &[u32],
    next: &Continuation,
    lengths: &Lengths,
    features: Option<&[f32]>,
) -> std::result::Result<(), VerifyError> {
    let t = &pass.tolerances;
    let mut tokens = pass.sets("drafts");
    let mut hidden = pass.numbers("draft_hidden", t.draft_hidden);
    let mut base = pass.numbers("draft_base_logits", t.logits);
    let mut logits = pass.numbers("draft_logits", t.logits);
    let mut confidence = pass.numbers("confidence", t.confidence);
    let (h, vocab) = (pass.config.hidden_size, pass.config.vocab_size);
    let mut unstable = 0;
    for block in &next.dspark {
        let (anchor, n) = (block.anchor_position, block.draft.len());
        if anchor > lengths.limit {
            unstable += 1;
            continue;
        }
        let fits = anchor <= lengths.rows && n <= pass.config.dspark_block_size && n > 0;
        if !fits || block.draft.iter().any(|&id| id as usize >= vocab) {
            return Err(VerifyError::Prompt {
                name: pass.prompt.clone(),
                reason: format!("the draft block at anchor {anchor} does not fit the checkpoint"),
            });
        }
        runner.restart();
        let width = pass.config.dspark_target_layer_ids.len() * h;
        let last = pass.config.num_hidden_layers - 1;
        let features = features.map(|f| &f[..anchor * width]);
        runner.run(&ids[..anchor], Vec::new(), &mut Features { features, last })?;
        let Some(own) = runner.draft(block.anchor_token, &block.draft)? else {
            tokens.note("the checkpoint has no draft stages");
            break;
        };
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
    Ok(())
}

/// Replaces what the draft stages read.
struct Features<'a> {
    features: Option<&'a [f32]>,
    last: usize,
}

impl<D: Device> Probe<D> for Features<'_> {
    fn after_layer(&mut self, d: &D, l: usize, _rows: usize, s: &mut Scratch<D>) -> Result<()> {
        match self.features {
            Some(features) if l == self.last => d.upload_act(features, &mut s.features, 0),
            _ => Ok(()),
        }
    }
}
