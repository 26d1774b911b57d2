//! How good drafts are: decoding is replayed over text that the model wrote.

use crate::args::Eval;
use crate::failure::Outcome;
use crate::open::{self, Loaded};
use deepinfer::model::NoProbe;
use deepinfer::plan::StepPlan;
use deepinfer::session::{GreedyDrafts, Session};
use deepinfer_device::Device;

/// Figures of drafting.
pub struct Drafts {
    /// Drafts accepted a block, over blocks that could be accepted whole.
    pub mean_accepted: f64,
    /// Distance between the mean confidence and the share of accepted drafts, over drafts whose
    /// predecessors in the block were accepted.
    pub confidence_error: f64,
}

/// Replays `texts` (prompt, what the model wrote). `None` if the model does not draft, or there is
/// nothing to replay.
pub fn measure<D: Device>(
    args: &Eval,
    loaded: &Loaded<D>,
    texts: &[(Vec<u32>, Vec<u32>)],
) -> Outcome<Option<Drafts>> {
    let longest = texts.iter().map(|(prompt, made)| prompt.len() + made.len()).max();
    let Some(longest) = longest else { return Ok(None) };
    let Some(draft) = &loaded.model.draft else { return Ok(None) };
    let block = draft.block;
    let (device, model) = (loaded.device.clone(), loaded.model.clone());
    let mut session =
        Session::new(device, model, args.run.kv.into(), 1, longest + block + 1, longest)?;
    let bar = open::bar("replaying drafts", texts.len());
    let (mut full, mut sure) = (Vec::new(), Vec::new());
    for (prompt, made) in texts {
        session.truncate(0, 0);
        let text = [prompt.as_slice(), made].concat();
        let (mut done, mut anchor) = (0, prompt.len());
        while anchor + 1 < text.len() {
            let plan = StepPlan { sequences: vec![session.extend(0, &text[done..anchor], &[])] };
            session.run(&plan, &mut NoProbe)?;
            done = anchor;
            let (drafts, confidence) =
                session.draft(&[(0, text[anchor])], block, &mut GreedyDrafts)?;
            let rest = &text[anchor + 1..];
            let possible = block.min(rest.len());
            let hits: Vec<bool> = (0..possible).map(|i| drafts[0][i] == rest[i]).collect();
            let accepted = hits.iter().take_while(|&&hit| hit).count();
            for i in 0..possible.min(accepted + 1) {
                sure.push((1.0 / (1.0 + f64::from(-confidence[0][i]).exp()), hits[i]));
            }
            if possible == block {
                full.push(accepted as f64);
            }
            anchor += accepted + 1;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if full.is_empty() {
        return Ok(None);
    }
    let mean_accepted = full.iter().sum::<f64>() / full.len() as f64;
    Ok(Some(Drafts { mean_accepted, confidence_error: calibration_error(&sure) }))
}

/// Distance between the mean confidence and the share of hits.
fn calibration_error(sure: &[(f64, bool)]) -> f64 {
    let n = sure.len().max(1) as f64;
    let confidence: f64 = sure.iter().map(|(p, _)| p).sum();
    let hits = sure.iter().filter(|(_, hit)| *hit).count() as f64;
    (confidence - hits).abs() / n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibrated_confidence_has_no_error() {
        let exact: Vec<(f64, bool)> = (0..100).map(|i| (0.25, i % 4 == 0)).collect();
        assert!(calibration_error(&exact) < 1e-9);
        assert!((calibration_error(&[(1.0, false)]) - 1.0).abs() < 1e-9);
        assert!((calibration_error(&[(0.5, true), (0.5, true)]) - 0.5).abs() < 1e-9);
    }
}
