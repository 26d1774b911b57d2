//! A request on its way through the engine.

use crate::cache::Snapshot;
use crate::cache::prefix::Key;
use crate::cache::tiers::Entry;
use crate::grammar::{CompileError, Grammar, Pending};
use crate::output::OutputText;
use crate::request::{
    Event, EventSink, FinishReason, RequestError, RequestId, SamplingParams, Token, TokenLogprobs,
    Usage,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// A request and everything the scheduler knows of it.
pub struct Sequence {
    /// Number of the request: the order of arrival.
    pub id: RequestId,
    /// Larger ones go first.
    pub priority: i32,
    /// Whom it shares cached prefixes with.
    pub salt: Option<String>,
    /// What was asked for.
    pub params: Arc<SamplingParams>,
    /// Key of the random choices.
    pub seed: u64,
    /// The form of its output.
    pub form: Form,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Most tokens, output included.
    pub max_len: usize,
    /// Prompt and committed output.
    pub tokens: Vec<u32>,
    /// Steps that run it now.
    pub in_flight: u32,
    /// Least and most tokens that those steps add.
    pub coming: (usize, usize),
    /// Its place on the device.
    pub place: Option<Place>,
    /// Its state on the host, after it lost its place.
    pub swapped: Swapped,
    /// What it waits for and has of its prefix in the lower tiers.
    pub stored: StoredPrefix,
    /// When it arrived.
    pub arrival: Instant,
    /// Since when it waits for its own place: others read its prompt before that.
    pub queued: Instant,
    /// Whether its prompt counts among the tokens that wait.
    pub counted: bool,
    /// Counts for the caller.
    pub usage: Usage,
    /// Whether it has been admitted before.
    pub started: bool,
    /// Confidences of the drafts of the last two rounds, the older ones first; `None` before them.
    pub confidences: [Option<Vec<f32>>; 2],
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    prompt_read: bool,
    fresh: Vec<Token>,
    fresh_text: String,
    text: OutputText,
    sink: EventSink,
}

/// A sequence's place on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rings and pending rows.
    pub slot: u32,
    /// Pages, by position.
    pub pages: Vec<u32>,
    /// Positions whose rows are planned one by one; all before `target` are, once it decodes.
    pub next: usize,
    /// Positions to plan that way: all tokens that were known on admission.
    pub target: usize,
    /// Rows planned since admission.
    pub served: usize,
    /// Position at which the state is as if every row had run every layer.
    pub base: usize,
    /// Decoder windows reach back to here.
    pub window_from: usize,
    /// A state can be cut from here on, as far as decoder rows are concerned.
    pub complete_from: usize,
    /// Positions at which a chunk ends, ascending; the last one is `target`.
    pub stops: Vec<usize>,
    /// One past the last position that a committed step wrote.
    pub written: usize,
}

impl Place {
    /// A place with the state after `next` tokens of a text that ends at the last one of `stops`.
    pub fn at(slot: u32, pages: Vec<u32>, next: usize, stops: Vec<usize>) -> Self {
        Self {
            slot,
            pages,
            next,
            target: stops.last().copied().unwrap_or(next),
            served: 0,
            base: next,
            window_from: 0,
            // The state promises no more than its tokens.
            complete_from: next,
            stops,
            written: next,
        }
    }

    /// A place with the state after all `len` tokens of a text, whose decoder windows reach back to
    /// `window_from`. The last row runs again, so that a token is chosen after it.
    pub fn after(slot: u32, pages: Vec<u32>, len: usize, window_from: usize) -> Self {
        let place = Self::at(slot, pages, len - 1, vec![len]);
        Self { window_from, complete_from: len, written: len, ..place }
    }

    /// Whether rows remain to be planned one by one.
    pub fn reading(&self) -> bool {
        self.next < self.target
    }
}

/// Whether a sequence's state is on the host.
#[derive(Clone, Debug, Default)]
pub enum Swapped {
    /// No.
    #[default]
    No,
    /// It is on its way.
    Saving,
    /// Yes.
    Saved(Arc<Snapshot>),
}

/// The form of a sequence's output.
#[derive(Clone, Debug, Default)]
pub enum Form {
    /// Any.
    #[default]
    Free,
    /// A grammar that is being compiled.
    Pending(Pending),
    /// A grammar.
    Ready(Grammar),
}

impl Form {
    /// Whether there is nothing to wait for.
    pub fn settle(&mut self) -> Result<bool, CompileError> {
        let Form::Pending(pending) = self else { return Ok(true) };
        let Some(result) = pending.poll() else { return Ok(false) };
        *self = Form::Ready(result?);
        Ok(true)
    }

    /// The grammar, if there is one.
    pub fn grammar(&self) -> Option<&Grammar> {
        match self {
            Form::Ready(grammar) => Some(grammar),
            Form::Free | Form::Pending(_) => None,
        }
    }
}

/// Entries of a waiting sequence's prefix.
#[derive(Clone, Debug, Default)]
pub struct StoredPrefix {
    /// Being read.
    pub coming: HashSet<Key>,
    /// Read.
    pub here: HashMap<Key, Entry>,
}

/// What a new sequence is made from.
pub struct Arrival {
    /// Number of the request.
    pub id: RequestId,
    /// Larger ones go first.
    pub priority: i32,
    /// Whom it shares cached prefixes with.
    pub salt: Option<String>,
    /// What was asked for; checked.
    pub params: SamplingParams,
    /// The prompt; checked.
    pub prompt: Vec<u32>,
    /// Key of the random choices.
    pub seed: u64,
    /// The form of its output.
    pub form: Form,
    /// Another continuation of the same prompt: this one starts from its state when that prompt has
    /// been read.
    pub leader: Option<RequestId>,
    /// Most tokens, output included.
    pub max_len: usize,
    /// Its text.
    pub text: OutputText,
    /// Its events.
    pub sink: EventSink,
    /// When it arrived.
    pub time: Instant,
}

impl Sequence {
    /// A sequence that waits.
    pub fn new(arrival: Arrival) -> Self {
        let prompt_len = arrival.prompt.len();
        let seed = arrival.seed;
        Self {
            id: arrival.id,
            priority: arrival.priority,
            salt: arrival.salt,
            params: Arc::new(arrival.params),
            seed,
            form: arrival.form,
            prompt_len,
            max_len: arrival.max_len,
            tokens: arrival.prompt,
            in_flight: 0,
            coming: (0, 0),
            place: None,
            swapped: Swapped::No,
            stored: StoredPrefix::default(),
            arrival: arrival.time,
            queued: arrival.time,
            counted: false,
            usage: Usage { prompt_tokens: prompt_len, seed, ..Usage::default() },
            started: false,
            confidences: [None, None],
            prompt_logprobs: Vec::new(),
            prompt_read: false,
            fresh: Vec::new(),
            fresh_text: String::new(),
            text: arrival.text,
            sink: arrival.sink,
        }
    }

    /// Tokens produced so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Whether log-probabilities of the prompt are still to be computed.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.params.prompt_logprobs.is_some()
            && !self.prompt_read
            && self.prompt_logprobs.len() + 1 < self.prompt_len
    }

    /// Whether the caller has gone.
    pub fn abandoned(&self) -> bool {
        self.sink.abandoned()
    }

    /// Adds a token and says whether it is the last one. `ends` are the tokens that end a text.
    pub fn push(&mut self, token: Token, ends: &[u32]) -> Option<FinishReason> {
        let id = token.id;
        self.tokens.push(id);
        self.fresh.push(token);
        self.usage.output_tokens += 1;
        let enough = self.output_len() >= self.params.min_tokens;
        let params = &self.params;
        let eos = !params.ignore_eos && ends.contains(&id);
        // A form that is complete allows nothing else, whatever the least number of tokens.
        let complete = eos && self.form.grammar().is_some();
        if complete || enough && (eos || params.stop_tokens.contains(&id)) {
            return Some(FinishReason::Stop);
        }
        if self.text.push(id, enough, &mut self.fresh_text) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() >= self.max_len).then_some(FinishReason::Length)
    }

    /// Says that it has left the queue.
    pub fn admitted(&self) {
        self.sink.admitted();
        self.sink.count(self.usage);
    }

    /// Sends what is new.
    pub fn emit(&mut self) {
        if let Some(place) = self.place.as_ref().filter(|_| !self.prompt_read) {
            self.sink.read(place.next.min(self.prompt_len));
        }
        if self.fresh.is_empty() {
            return;
        }
        self.sink.count(self.usage);
        if !self.prompt_read {
            self.prompt_read = true;
            let logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.sink.send(Event::PromptRead { cached: self.usage.cached_tokens, logprobs });
        }
        let tokens = std::mem::take(&mut self.fresh);
        self.sink.send(Event::Tokens { tokens, text: std::mem::take(&mut self.fresh_text) });
    }

    /// Sends the end.
    pub fn finish(mut self, reason: FinishReason) {
        let look = self.output_len() >= self.params.min_tokens;
        self.text.finish(look, &mut self.fresh_text);
        self.emit();
        if !self.fresh_text.is_empty() {
            let text = std::mem::take(&mut self.fresh_text);
            self.sink.send(Event::Tokens { tokens: Vec::new(), text });
        }
        self.sink.send(Event::Finished { reason, usage: self.usage });
    }

    /// Sends a failure.
    pub fn fail(mut self, error: RequestError) {
        self.emit();
        self.sink.send(Event::Failed(error));
    }
}
