//! What all handlers share.

use crate::error::ApiError;
use crate::inference::{Inference, Info};
use crate::load::{Key, Ticket};
use crate::metrics::{self, Metrics};
use crate::output::{Markup, Remember};
use crate::replay::{Marks, Memory};
use crate::responses::store::Store;
use crate::run::{Job, Run};
use crate::sse::Silence;
use crate::tls::Tls;
use crate::traces::Traces;
use deepinfer::chat::Effort;
use deepseek_recipe_core::special_tokens::SpecialToken;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names that requests may call the model by; the first one is the model's own.
    pub model_names: Vec<String>,
    /// Who may ask; empty: everybody.
    pub keys: Vec<Arc<Key>>,
    /// Thinking of Chat Completions and Responses requests that do not say. Messages requests that
    /// do not say are answered without thinking, as their protocol has it.
    pub default_effort: Effort,
    /// Largest body, in bytes.
    pub max_body: usize,
    /// Longest time for a request's head, and then for its body.
    pub read_timeout: Duration,
    /// Longest time that a connection takes nothing of what is sent to it; then it is cut, and its
    /// request ends.
    pub write_timeout: Duration,
    /// Memory for responses that can be asked for again, in bytes.
    pub store_bytes: usize,
    /// Memory for the tokens of answers, in bytes; 0 keeps none.
    pub replay_bytes: usize,
    /// Longest silence of a stream.
    pub keep_alive: Duration,
    /// Longest time without a turn of the engine's loop before it counts as dead; `None`: for ever.
    pub stall_limit: Option<Duration>,
    /// Longest time that running requests get after the first signal.
    pub drain_limit: Duration,
    /// A known answer that is tested before the server is ready. Without it, a fixed prompt must be
    /// continued twice in the same way.
    pub self_test: Option<SelfTest>,
    /// Encrypts connections.
    pub tls: Option<Tls>,
    /// Takes traces.
    pub traces: Option<Traces>,
}

/// A known answer: a prompt and its most probable continuation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelfTest {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Token ids.
    pub tokens: Vec<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model_names: vec!["deepinfer".into()],
            keys: Vec::new(),
            default_effort: Effort::default(),
            max_body: 32 << 20,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            store_bytes: 64 << 20,
            replay_bytes: 64 << 20,
            keep_alive: Duration::from_secs(10),
            stall_limit: Some(Duration::from_secs(25)),
            drain_limit: Duration::from_secs(60),
            self_test: None,
            tls: None,
            traces: None,
        }
    }
}

/// What all handlers share.
pub struct App {
    /// Settings.
    pub config: Config,
    /// The engine.
    pub inference: Arc<dyn Inference>,
    /// Its tokenizer, as parsers see it.
    pub markup: Markup,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Requests that are being worked on.
    pub open: Arc<AtomicUsize>,
    /// When it started, in seconds since 1970.
    pub started: u64,
    /// Whether the self-test has passed.
    pub ready: AtomicBool,
    /// Whether no new requests are taken.
    pub draining: AtomicBool,
    /// Responses that can be asked for again.
    pub store: Store,
    /// Answers as they were produced.
    pub memory: Arc<Memory>,
    failure: watch::Sender<Option<String>>,
}

/// What is known of a request before its body.
#[derive(Clone, Default)]
pub struct Call {
    /// Its name in logs and headers.
    pub id: String,
    /// Who asks.
    pub key: Option<Arc<Key>>,
    /// Whether events shall tell how far the prompt has been read.
    pub progress: bool,
    /// Its span, if there are traces.
    pub span: Option<opentelemetry::Context>,
}

impl Call {
    /// The name of the key that it came with.
    pub fn owner(&self) -> Option<String> {
        self.key.as_ref().map(|key| key.name.clone())
    }
}

impl App {
    /// Over an engine. Nothing runs yet.
    pub fn new(config: Config, inference: Arc<dyn Inference>) -> Arc<Self> {
        let markup = Markup::new(inference.info().tokenizer.clone());
        Arc::new(Self {
            markup,
            metrics: Arc::default(),
            open: Arc::default(),
            started: unix_time(),
            ready: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            store: Store::new(config.store_bytes),
            memory: Arc::new(Memory::new(config.replay_bytes)),
            failure: watch::Sender::new(None),
            config,
            inference,
        })
    }

    /// Where the tokens of answers to `scope` are kept; nowhere if the tokenizer lacks the tokens
    /// that enclose them.
    pub fn remember(&self, scope: String) -> Option<Remember> {
        let token = |t: SpecialToken| self.info().tokenizer.special_id(t.default_str());
        let marks =
            Marks { assistant: token(SpecialToken::Assistant)?, end: token(SpecialToken::Eos)? };
        Some(Remember { memory: self.memory.clone(), scope, marks })
    }

    /// The engine's constants.
    pub fn info(&self) -> &Info {
        self.inference.info()
    }

    /// The model's own name.
    pub fn model(&self) -> &str {
        self.config.model_names.first().map_or("deepinfer", String::as_str)
    }

    /// Checks the name that a request calls the model by.
    pub fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if self.config.model_names.iter().any(|known| known == name) {
            return Ok(());
        }
        let known = self.config.model_names.join(", ");
        let message = format!("there is no model {name:?}; this server has {known}");
        Err(ApiError::NotFound { param: Some("model".into()), message })
    }

    /// Why the engine does not work, if it does not.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Says that the engine does not work any more: open requests end with an error.
    pub fn fail(&self, reason: String) {
        self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            failure.get_or_insert(reason);
            first
        });
    }

    /// Changes when the engine fails.
    pub fn failures(&self) -> watch::Receiver<Option<String>> {
        self.failure.subscribe()
    }

    /// A ticket for one request, which may run several jobs.
    pub fn ticket(&self, call: &Call) -> Result<Ticket, ApiError> {
        if self.draining.load(Relaxed) {
            let message = "the server is about to stop; send the request to another one".into();
            return Err(ApiError::Unavailable { message });
        }
        Ticket::take(call.key.as_ref(), &self.open)
    }

    /// What a stream sends while there are no events.
    pub fn silence(&self, call: &Call, ticket: &Ticket) -> Silence {
        let prompts = call.progress.then(|| ticket.prompts());
        Silence { keep_alive: self.config.keep_alive, prompts }
    }

    /// Starts a job of a request: a run for each of its answers. `protocol` is for counters and
    /// logs.
    pub fn start_all(
        &self,
        protocol: &'static str,
        call: &Call,
        job: Job,
        ticket: &Ticket,
    ) -> Result<Vec<Run>, ApiError> {
        let record = || Record {
            metrics: self.metrics.clone(),
            protocol,
            id: call.id.clone(),
            key: call.owner(),
            trace: self.config.traces.clone().zip(call.span.clone()),
        };
        Run::start(&*self.inference, &self.failures(), job, ticket, record)
    }

    /// Starts a job that has one answer.
    pub fn start(
        &self,
        protocol: &'static str,
        call: &Call,
        job: Job,
        ticket: &Ticket,
    ) -> Result<Run, ApiError> {
        let run = self.start_all(protocol, call, job, ticket)?.pop();
        run.ok_or_else(|| ApiError::internal("the engine gave no answer"))
    }
}

/// Where the accounts of a run go when it is over.
pub struct Record {
    metrics: Arc<Metrics>,
    protocol: &'static str,
    id: String,
    key: Option<String>,
    trace: Option<(Traces, opentelemetry::Context)>,
}

impl Record {
    /// Counts tokens as they come.
    pub fn produced(&self, n: usize) {
        self.metrics.produce(n);
    }

    /// Counts and logs a run. Texts and tokens are never logged.
    pub fn write(&self, outcome: &'static str, accounts: &crate::run::Accounts) {
        self.metrics.answer(self.protocol, outcome, accounts);
        if let Some((traces, request)) = &self.trace {
            traces.answer(request, self.protocol, outcome, accounts);
        }
        let [queue_ms, prefill_ms, decode_ms] =
            accounts.phases().map(|(_, time)| time.map(|time| time.as_millis() as u64));
        tracing::info!(
            request = %self.id,
            key = self.key.as_deref(),
            protocol = self.protocol,
            outcome,
            prompt_tokens = accounts.prompt_tokens,
            cached_tokens = accounts.cached_tokens,
            output_tokens = accounts.output_tokens,
            reasoning_tokens = accounts.reasoning_tokens,
            drafted_tokens = accounts.drafted,
            verified_tokens = accounts.verified,
            accepted_tokens = accounts.accepted,
            queue_ms,
            prefill_ms,
            decode_ms,
            first_token_ms = accounts.first_token.map(|t| t.as_millis() as u64),
            total_ms = accounts.total.as_millis() as u64,
            "answer"
        );
    }

    /// Counts and logs a run that ended so.
    pub fn ended(
        &self,
        result: Result<deepinfer::request::FinishReason, &ApiError>,
        accounts: &crate::run::Accounts,
    ) {
        self.write(metrics::outcome(result), accounts);
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A name that no other answer has, such as `chatcmpl-...`.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}
