//! What a caller asks for, and what comes back.

mod check;
mod event;
mod params;

pub use check::{Bounds, MOST_SAMPLES, RequestError, check_text};
pub use event::{
    Completion, Event, EventSink, FinishReason, Reading, RequestHandle, RequestId, Token,
    TokenLogprobs, Usage, event_queue,
};
pub use params::{Constraint, SamplingParams, ThinkingBudget};

/// Text to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids, as they are.
    Tokens(Vec<u32>),
    /// Plain text, encoded as a text of its own (with the tokens that start one).
    Text(String),
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Text to continue.
    pub prompt: Prompt,
    /// How.
    pub params: SamplingParams,
    /// Larger numbers are served first; equal ones in order of arrival.
    pub priority: i32,
    /// Requests share cached prefixes only with requests that carry the same salt.
    pub cache_salt: Option<String>,
}

impl Request {
    /// A request to continue token ids.
    pub fn tokens(prompt: impl Into<Vec<u32>>, params: SamplingParams) -> Self {
        Self::new(Prompt::Tokens(prompt.into()), params)
    }

    /// A request to continue plain text.
    pub fn text(prompt: impl Into<String>, params: SamplingParams) -> Self {
        Self::new(Prompt::Text(prompt.into()), params)
    }

    fn new(prompt: Prompt, params: SamplingParams) -> Self {
        Self { prompt, params, priority: 0, cache_salt: None }
    }
}
