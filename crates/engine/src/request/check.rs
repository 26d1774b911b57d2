//! What a request may ask for.

use super::SamplingParams;
use crate::engine::PrefillMode;
use crate::grammar::{CompileError, MatchError};
use crate::tokenizer::Tokenizer;

/// Why a request was refused or failed. A fault of a request ends that request alone.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// The prompt leaves no room for a token.
    #[error("the prompt has {tokens} tokens, but a sequence holds at most {limit} with its output")]
    PromptTooLong {
        /// Tokens in the prompt.
        tokens: usize,
        /// Tokens that a sequence may have.
        limit: usize,
    },
    /// The same, found without encoding the text.
    #[error(
        "the prompt's {bytes} bytes of text have {tokens} tokens or more, but a sequence holds at \
         most {limit} with its output"
    )]
    TextTooLong {
        /// Bytes of text in the prompt.
        bytes: usize,
        /// Tokens that they have at least.
        tokens: usize,
        /// Tokens that a sequence may have.
        limit: usize,
    },
    /// Prompt and output together do not fit.
    #[error(
        "{prompt} prompt tokens and max_tokens {max_tokens} together exceed the {limit} tokens that \
         a sequence may have"
    )]
    TooManyTokens {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens that a sequence may have.
        limit: usize,
    },
    /// A token id that the model does not have.
    #[error("{field} holds token id {token}, but the vocabulary has {vocab} tokens")]
    UnknownToken {
        /// Where it stands.
        field: &'static str,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A value outside its range.
    #[error("{field} is {value}; {expected}")]
    OutOfRange {
        /// The parameter.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// Something that this engine cannot do.
    #[error("{field} is not supported: {reason}")]
    Unsupported {
        /// The parameter.
        field: &'static str,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// The text could not be encoded.
    #[error("the prompt cannot be encoded: {reason}")]
    Encoding {
        /// What the tokenizer said.
        reason: String,
    },
    /// Too many requests wait.
    #[error("{waiting} requests wait already, the limit is {limit}; try again later")]
    QueueFull {
        /// Requests in the queue.
        waiting: usize,
        /// The limit.
        limit: usize,
    },
    /// Too many prompt tokens wait.
    #[error("{waiting} prompt tokens wait already, the limit is {limit}; try again later")]
    QueueTokensFull {
        /// Tokens in the queue.
        waiting: usize,
        /// The limit.
        limit: usize,
    },
    /// The request waited too long for its first step.
    #[error("waited {seconds:.1} s in the queue, the limit is {limit:.1} s; try again later")]
    WaitedTooLong {
        /// Time in the queue.
        seconds: f64,
        /// The limit.
        limit: f64,
    },
    /// The request's own rules leave no token.
    #[error(
        "no token can be chosen at output position {position}: allowed_tokens, logit_bias, \
         bad_words or the grammar leave none; where none of these is given, the logits are not \
         numbers, as from a damaged checkpoint"
    )]
    NothingAllowed {
        /// Tokens produced before.
        position: usize,
    },
    /// The form asked for cannot be enforced.
    #[error("the grammar was refused: {0}")]
    Grammar(#[from] CompileError),
    /// The form asked for could not be enforced any further.
    #[error("the request was ended: {0}")]
    GrammarFault(#[from] MatchError),
    /// The engine has stopped.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}

/// What a request is checked against.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Tokens that a sequence may have, output included.
    pub max_tokens: usize,
    /// The token of image positions.
    pub image_token: Option<u32>,
    /// How prompts are read.
    pub prefill: PrefillMode,
    /// Whether text can be decoded (a tokenizer is present).
    pub text: bool,
}

/// Refuses a prompt of `text` that is certain not to fit into a sequence of at most `limit` tokens:
/// encoding it would take long.
pub fn check_text(tokenizer: &Tokenizer, text: &str, limit: usize) -> Result<(), RequestError> {
    match tokenizer.has_at_least(limit, text) {
        true => Err(RequestError::TextTooLong { bytes: text.len(), tokens: limit, limit }),
        false => Ok(()),
    }
}

/// Most log-probabilities a token.
const MOST_LOGPROBS: usize = 1000;
/// Entries that a list of a request may have: each one is looked at for every token.
const MOST_LISTED: usize = 4096;

/// Most continuations of one request.
pub const MOST_SAMPLES: usize = 128;

impl SamplingParams {
    /// Checks these parameters and the prompt against `bounds`.
    pub fn check(&self, prompt: &[u32], bounds: &Bounds) -> Result<(), RequestError> {
        self.check_prompt(prompt, bounds)?;
        self.check_numbers()?;
        self.check_lists(bounds)?;
        if !(1..=MOST_SAMPLES).contains(&self.n) {
            return Err(out_of_range("n", self.n, "from 1 to 128"));
        }
        if self.prompt_logprobs.is_some()
            && matches!(bounds.prefill, PrefillMode::Compact | PrefillMode::Mask)
        {
            let reason = "prefill mode compact does not compute them; use off or exact";
            return Err(RequestError::Unsupported { field: "prompt_logprobs", reason });
        }
        if !self.stop.is_empty() && !bounds.text {
            let reason = "the engine has no tokenizer; use stop_tokens";
            return Err(RequestError::Unsupported { field: "stop", reason });
        }
        if self.constraint.is_some() && !bounds.text {
            let reason = "the engine has no tokenizer, so it cannot follow a grammar";
            return Err(RequestError::Unsupported { field: "constraint", reason });
        }
        Ok(())
    }

    fn check_prompt(&self, prompt: &[u32], bounds: &Bounds) -> Result<(), RequestError> {
        let limit = bounds.max_tokens;
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if prompt.len() >= limit {
            return Err(RequestError::PromptTooLong { tokens: prompt.len(), limit });
        }
        if let Some(max_tokens) = self.max_tokens
            && max_tokens.saturating_add(prompt.len()) > limit
        {
            return Err(RequestError::TooManyTokens { prompt: prompt.len(), max_tokens, limit });
        }
        check_tokens("prompt", prompt, bounds.vocab)?;
        if bounds.image_token.is_some_and(|image| prompt.contains(&image)) {
            let reason = "the prompt holds the image token, and images cannot be given yet";
            return Err(RequestError::Unsupported { field: "prompt", reason });
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), RequestError> {
        let finite = |x: f32| x.is_finite();
        range("temperature", self.temperature, "a number from 0 on", |x| finite(x) && x >= 0.0)?;
        range("top_p", self.top_p, "above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        range("min_p", self.min_p, "from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
        let positive = |x| finite(x) && x > 0.0;
        range("repetition_penalty", self.repetition_penalty, "a number above 0", positive)?;
        range("presence_penalty", self.presence_penalty, "a number", finite)?;
        range("frequency_penalty", self.frequency_penalty, "a number", finite)?;
        if self.max_tokens == Some(0) {
            return Err(out_of_range("max_tokens", 0, "at least 1"));
        }
        if self.max_tokens.is_some_and(|most| self.min_tokens > most) {
            return Err(out_of_range("min_tokens", self.min_tokens, "at most max_tokens"));
        }
        let most = "at most 1000";
        for (field, wanted) in
            [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)]
        {
            if let Some(n) = wanted.filter(|&n| n > MOST_LOGPROBS) {
                return Err(out_of_range(field, n, most));
            }
        }
        Ok(())
    }

    fn check_lists(&self, bounds: &Bounds) -> Result<(), RequestError> {
        let vocab = bounds.vocab;
        for (field, entries) in [
            ("logit_bias", self.logit_bias.len()),
            ("stop_tokens", self.stop_tokens.len()),
            ("bad_words", self.bad_words.len()),
            ("stop", self.stop.len()),
        ] {
            if entries > MOST_LISTED {
                let value = format!("a list of {entries}");
                return Err(out_of_range(field, value, "at most 4096 entries"));
            }
        }
        let biased: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        check_tokens("logit_bias", &biased, vocab)?;
        for &(_, bias) in &self.logit_bias {
            let expected = "numbers; negative infinity forbids a token";
            range("logit_bias", bias, expected, |x| !x.is_nan() && x != f32::INFINITY)?;
        }
        check_tokens("allowed_tokens", &self.allowed_tokens, vocab)?;
        check_tokens("stop_tokens", &self.stop_tokens, vocab)?;
        check_tokens("forced", &self.forced, vocab)?;
        if bounds.image_token.is_some_and(|image| self.forced.contains(&image)) {
            let reason = "it holds the image token, which is never produced";
            return Err(RequestError::Unsupported { field: "forced", reason });
        }
        if let Some(budget) = &self.thinking_budget {
            check_tokens("thinking_budget", &[budget.end], vocab)?;
        }
        if let Some(trigger) = self.constraint.as_ref().and_then(|c| c.trigger.as_ref()) {
            check_tokens("constraint.trigger", trigger.tokens(), vocab)?;
            let bound: Vec<u32> = trigger.bound().into_iter().collect();
            check_tokens("constraint.trigger", &bound, vocab)?;
        }
        for word in &self.bad_words {
            check_tokens("bad_words", word, vocab)?;
            if word.is_empty() {
                return Err(out_of_range("bad_words", "empty", "each needs at least one token"));
            }
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(out_of_range("stop", "empty", "each needs at least one character"));
        }
        Ok(())
    }
}

fn check_tokens(field: &'static str, tokens: &[u32], vocab: usize) -> Result<(), RequestError> {
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(&token) => Err(RequestError::UnknownToken { field, token, vocab }),
        None => Ok(()),
    }
}

fn range(
    field: &'static str,
    value: f32,
    expected: &'static str,
    holds: impl Fn(f32) -> bool,
) -> Result<(), RequestError> {
    if holds(value) { Ok(()) } else { Err(out_of_range(field, value, expected)) }
}

fn out_of_range(
    field: &'static str,
    value: impl std::fmt::Display,
    expected: &'static str,
) -> RequestError {
    RequestError::OutOfRange { field, value: value.to_string(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{GrammarSpec, Trigger};
    use crate::request::{Constraint, ThinkingBudget};
    use std::sync::Arc;

    fn bounds() -> Bounds {
        Bounds {
            vocab: 100,
            max_tokens: 50,
            image_token: Some(99),
            prefill: PrefillMode::Compact,
            text: false,
        }
    }

    fn refused(change: impl FnOnce(&mut SamplingParams)) -> String {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.check(&[1, 2], &bounds()).expect_err("is refused").to_string()
    }

    #[test]
    fn names_what_it_refuses() {
        assert!(refused(|p| p.temperature = -1.0).contains("temperature is -1"));
        assert!(refused(|p| p.temperature = f32::NAN).contains("temperature"));
        assert!(refused(|p| p.top_p = 0.0).contains("top_p"));
        assert!(refused(|p| p.min_p = 1.5).contains("min_p"));
        assert!(refused(|p| p.repetition_penalty = 0.0).contains("repetition_penalty"));
        assert!(refused(|p| p.presence_penalty = f32::INFINITY).contains("presence_penalty"));
        assert!(refused(|p| p.max_tokens = Some(0)).contains("max_tokens"));
        assert!(refused(|p| p.max_tokens = Some(49)).contains("49"));
        assert!(
            refused(|p| (p.min_tokens, p.max_tokens) = (5, Some(4))).contains("min_tokens is 5")
        );
        assert!(refused(|p| p.logprobs = Some(1001)).contains("logprobs"));
        assert!(refused(|p| p.prompt_logprobs = Some(0)).contains("prompt_logprobs"));
        assert!(refused(|p| p.logit_bias = vec![(100, 1.0)]).contains("logit_bias"));
        assert!(refused(|p| p.logit_bias = vec![(1, f32::INFINITY)]).contains("logit_bias"));
        assert!(refused(|p| p.allowed_tokens = vec![100]).contains("allowed_tokens"));
        assert!(refused(|p| p.stop_tokens = vec![100]).contains("stop_tokens"));
        assert!(refused(|p| p.bad_words = vec![vec![]]).contains("bad_words"));
        assert!(refused(|p| p.stop = vec!["x".into()]).contains("stop"));
        assert!(
            refused(|p| p.stop_tokens = vec![1; 4097]).contains("stop_tokens is a list of 4097")
        );
        assert!(refused(|p| p.logit_bias = vec![(1, 0.0); 4097]).contains("logit_bias"));
        assert!(refused(|p| p.bad_words = vec![vec![1]; 4097]).contains("bad_words"));
        assert!(refused(|p| p.stop = vec!["x".into(); 4097]).contains("stop"));
        assert!(refused(|p| p.n = 0).contains("n is 0"));
        assert!(refused(|p| p.n = 129).contains("n is 129"));
        assert!(refused(|p| p.forced = vec![100]).contains("forced"));
        assert!(refused(|p| p.forced = vec![99]).contains("forced is not supported"));
        let budget = ThinkingBudget { tokens: 1, end: 100 };
        assert!(refused(|p| p.thinking_budget = Some(budget)).contains("thinking_budget"));
        let constraint =
            |trigger| Some(Arc::new(Constraint { grammar: GrammarSpec::JsonObject, trigger }));
        assert!(refused(|p| p.constraint = constraint(None)).contains("constraint"));
        let trigger = Trigger::new(vec![100], None).ok();
        assert!(refused(|p| p.constraint = constraint(trigger)).contains("constraint.trigger"));
    }

    #[test]
    fn checks_the_prompt() {
        let params = SamplingParams::default();
        let check = |prompt: &[u32]| params.check(prompt, &bounds());
        assert_eq!(check(&[]), Err(RequestError::EmptyPrompt));
        assert_eq!(check(&[1; 49]), Ok(()));
        assert_eq!(check(&[1; 50]), Err(RequestError::PromptTooLong { tokens: 50, limit: 50 }));
        assert!(matches!(check(&[100]), Err(RequestError::UnknownToken { token: 100, .. })));
        assert!(matches!(check(&[99]), Err(RequestError::Unsupported { .. })));
    }
}
