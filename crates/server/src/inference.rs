//! The seam between HTTP and the engine.

use deepinfer::grammar::GrammarSpec;
use deepinfer::request::{Request, RequestError, RequestHandle};
use deepinfer::tokenizer::Tokenizer;
use std::sync::Arc;

/// Whatever turns requests into events. The server knows nothing else of an engine.
pub trait Inference: Send + Sync + 'static {
    /// Starts a request with one continuation. Dropping the handle aborts it.
    fn submit(&self, request: Request) -> Result<RequestHandle, RequestError>;

    /// Starts all `n` continuations of a request. Dropping a handle aborts its one.
    fn submit_all(&self, request: Request) -> Result<Vec<RequestHandle>, RequestError> {
        let one = |i: usize| {
            let mut request = request.clone();
            request.params.n = 1;
            request.params.sample = request.params.sample.wrapping_add(i as u32);
            self.submit(request)
        };
        (0..request.params.n).map(one).collect()
    }

    /// Compiles a grammar, or says why it cannot be enforced; blocks until then.
    fn check_grammar(&self, grammar: &GrammarSpec) -> Result<(), RequestError>;

    /// What does not change while it runs.
    fn info(&self) -> &Info;

    /// Numbers of this moment.
    fn figures(&self) -> Figures;

    /// Waits until the loop that serves requests has taken a turn. `Err` says why it has ended.
    /// Called from a thread of its own: a loop that hangs makes this hang.
    fn check(&self) -> Result<(), String>;

    /// Changes while a step of the loop gets on: a long step is no hang.
    fn beats(&self) -> u64;
}

/// What does not change while an engine runs.
#[derive(Clone)]
pub struct Info {
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Most tokens of a sequence, output included.
    pub max_tokens: usize,
    /// Most requests that may wait.
    pub queue_limit: usize,
    /// A name for weights and numerics, the same for the same answers; absent if not known.
    pub fingerprint: Option<String>,
}

/// Numbers of a moment. Counters count from the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Requests that run now.
    pub running: u64,
    /// Requests that wait now.
    pub waiting: u64,
    /// Requests that ended by themselves.
    pub finished: u64,
    /// Requests whose caller gave up.
    pub aborted: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of these, tokens that came from the prefix cache.
    pub cached_tokens: u64,
    /// Prompt rows computed.
    pub prefill_rows: u64,
    /// Other rows computed.
    pub decode_rows: u64,
    /// Tokens produced.
    pub output_tokens: u64,
    /// Tokens drafted, by position in the block.
    pub drafted: Vec<u64>,
    /// Drafts verified, by position in the block.
    pub verified: Vec<u64>,
    /// Drafts accepted, by position in the block.
    pub accepted: Vec<u64>,
    /// Requests that lost their place in memory, saved on the host.
    pub swapped: u64,
    /// Requests that lost their place in memory, to be computed again.
    pub recomputed: u64,
    /// Entries of the prefix cache that could not be written to disk.
    pub disk_failed: u64,
    /// Entries of the prefix cache that came faster than the disk takes them.
    pub disk_skipped: u64,
    /// Times of steps and queues.
    pub times: Vec<Times>,
}

/// Durations by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// What took the time, as part of a metric's name: `engine_decode_step`.
    pub name: &'static str,
    /// What was measured, in words.
    pub help: &'static str,
    /// Upper ends of the buckets, in seconds.
    pub ends: Vec<f64>,
    /// Durations in each bucket, and above all of them.
    pub counts: Vec<u64>,
    /// All durations together, in seconds.
    pub sum: f64,
}
