//! How likely the model finds fixed texts: a measure that does not hang on single choices, to compare
//! devices by.

use super::tasks::{Item, Score};
use crate::args::Eval;
use crate::failure::Outcome;
use crate::open::{self, Loaded};
use anyhow::Context;
use deepinfer::model::NoProbe;
use deepinfer::session::Session;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::Device;

/// Longer texts are left out.
pub const LONGEST: usize = 1024;

/// Negative log likelihoods of tokens, in nats, summed.
#[derive(Default)]
pub struct Likelihood {
    sum: f64,
    pub tokens: usize,
}

impl Likelihood {
    /// Of one token; `None` if there is none.
    pub fn mean(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.sum / self.tokens as f64)
    }
}

/// The text of a task: its prompt, and the answer where the model gives it at once.
pub fn text(tokenizer: &Tokenizer, item: &Item, prompt: &[u32]) -> Outcome<Vec<u32>> {
    let mut text = prompt.to_vec();
    if let (Score::Exact, false, Some(answer)) = (item.score, item.thinking, item.expected.as_str())
    {
        let answer = tokenizer.encode(answer);
        text.extend(answer.with_context(|| format!("task {}", item.id))?);
        text.extend(tokenizer.eos());
    }
    Ok(text)
}

/// Runs the texts, each alone.
pub fn measure<D: Device>(
    args: &Eval,
    loaded: &Loaded<D>,
    texts: &[Vec<u32>],
) -> Outcome<Likelihood> {
    let (device, model) = (loaded.device.clone(), loaded.model.clone());
    let mut session = Session::new(device, model, args.run.kv.into(), 1, LONGEST, LONGEST)?;
    let mut found = Likelihood::default();
    let bar = open::bar("reading texts", texts.len());
    for text in texts.iter().filter(|text| text.len() <= LONGEST) {
        session.truncate(0, 0);
        found.sum += session.nll(0, text, &mut NoProbe)?.iter().sum::<f64>();
        found.tokens += text.len().saturating_sub(1);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}
