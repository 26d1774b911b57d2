//! How likely the model finds fixed answers: a measure that does not hang on single choices, to compare
//! devices by.

use super::tasks::Item;
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

/// A fixed text.
pub struct Text {
    ids: Vec<u32>,
    /// Where the answer starts: only its tokens count, since models learn answers, not questions.
    answer: usize,
}

/// A task's prompt and its answer; `None` where the model thinks first, or calls a tool.
pub fn text(tokenizer: &Tokenizer, item: &Item, prompt: &[u32]) -> Outcome<Option<Text>> {
    let (false, Some(answer)) = (item.thinking, item.expected.as_str()) else { return Ok(None) };
    let answer = tokenizer.encode(answer).with_context(|| format!("task {}", item.id))?;
    let ids = prompt.iter().copied().chain(answer).chain(tokenizer.eos()).collect();
    Ok(Some(Text { ids, answer: prompt.len() }))
}

/// Runs the texts, each alone.
pub fn measure<D: Device>(args: &Eval, loaded: &Loaded<D>, texts: &[Text]) -> Outcome<Likelihood> {
    let (device, model) = (loaded.device.clone(), loaded.model.clone());
    let mut session = Session::new(device, model, args.run.kv.into(), 1, LONGEST, LONGEST)?;
    let mut found = Likelihood::default();
    let bar = open::bar("reading texts", texts.len());
    for text in texts.iter().filter(|text| text.ids.len() <= LONGEST) {
        session.truncate(0, 0);
        let all = session.nll(0, &text.ids, &mut NoProbe)?;
        // The first one is of the second token.
        let answer = &all[text.answer.saturating_sub(1)..];
        found.sum += answer.iter().sum::<f64>();
        found.tokens += answer.len();
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}
