//! How tokens are chosen, and when to stop.

use crate::grammar::{GrammarSpec, Trigger};
use std::sync::Arc;

/// A form that the output must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// The form.
    pub grammar: GrammarSpec,
    /// The form begins after these tokens; until then the output is free, but cannot end. `None`: it
    /// begins at once.
    pub trigger: Option<Trigger>,
}

/// A limit of the thinking: of the tokens before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// Most tokens before `end`.
    pub tokens: usize,
    /// The token that ends thinking. It is forced when the budget is used up.
    pub end: u32,
}

/// How the tokens of a request are chosen, and when to stop. Everything here is honoured or refused
/// by name ([`super::RequestError`]), never ignored.
///
/// Order of processing for one row of logits: penalties, logit bias, forbidden tokens, the grammar,
/// temperature, then top-k, top-p and min-p, then the choice. A forced token (`forced`, a thinking
/// budget that is used up) stands whatever the other rules say. Each generated token depends only on the text
/// before it, these parameters and the seed: never on other requests, on drafting or on how the
/// engine cuts its work.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the largest (the lower id on ties). Default 1.
    pub temperature: f32,
    /// Keeps the most probable tokens up to this mass, in (0, 1]. Default 1: all.
    pub top_p: f32,
    /// Keeps this many tokens; 0: all.
    pub top_k: u32,
    /// Keeps tokens at least this probable relative to the best one, in [0, 1]. Default 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; above 0.
    /// Default 1: off.
    pub repetition_penalty: f32,
    /// Subtracted from tokens that occur in the output. Default 0.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the output. Default 0.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens; negative infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// If not empty, no other tokens are produced.
    pub allowed_tokens: Vec<u32>,
    /// Token sequences that are never completed.
    pub bad_words: Vec<Vec<u32>>,
    /// Key of the random choices; `None`: 64 random bits, reported in [`super::Usage`].
    pub seed: Option<u64>,
    /// Most tokens to produce; `None`: as many as fit.
    pub max_tokens: Option<usize>,
    /// Stop tokens and ends of text are forbidden for this many tokens, and stop strings are not
    /// looked for.
    pub min_tokens: usize,
    /// Stops when the text contains one of these; the text ends before it.
    pub stop: Vec<String>,
    /// Stops at these tokens, which are reported but add no text.
    pub stop_tokens: Vec<u32>,
    /// Goes on after the checkpoint's end-of-text tokens.
    pub ignore_eos: bool,
    /// `Some(n)`: report the log-probability of each token and of the `n` most probable ones, as the
    /// model gives them (before penalties, bias and temperature).
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt but the first.
    pub prompt_logprobs: Option<usize>,
    /// Independent continuations, from 1 to 128: see [`crate::engine::Engine::submit_all`]. The
    /// prompt is read once for all of them where there is room.
    pub n: usize,
    /// Which of the independent continuations of a seed this is; with `n`, the first of them. The
    /// continuation `sample` alone gives the same tokens as among others.
    pub sample: u32,
    /// A form that the output must have. When it is complete, the output ends; `min_tokens` does not
    /// hold against it.
    pub constraint: Option<Arc<Constraint>>,
    /// A limit of the thinking.
    pub thinking_budget: Option<ThinkingBudget>,
    /// The output begins with these tokens, whatever the model would choose: their
    /// log-probabilities score a given continuation. Stop rules hold for them too.
    pub forced: Vec<u32>,
    /// Whether the engine may draft for this request. Changes speed, never tokens.
    pub draft: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: Vec::new(),
            bad_words: Vec::new(),
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            n: 1,
            sample: 0,
            constraint: None,
            thinking_budget: None,
            forced: Vec::new(),
            draft: true,
        }
    }
}

impl SamplingParams {
    /// The most probable token each time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether a token's logits depend on which tokens came before.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}
