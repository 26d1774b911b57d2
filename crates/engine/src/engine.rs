//! The engine: requests in, streams of events out.
//!
//! A thread of its own runs the loop ([`crate::step`]); another one the device. Callers hold an
//! [`Engine`] (cheap to share by reference or [`Arc`]) and a [`RequestHandle`] a request.

mod config;
mod error;
mod generate;
mod identity;
mod open;

pub use config::{DraftMode, DraftScheme, EngineConfig, PrefillMode, PrefixCache};
pub use error::EngineError;
pub use generate::Progress;
pub use identity::identity;

use crate::cache::tiers::Tiers;
use crate::grammar::{CompileError, Compiler, CompilerLimits, GrammarSpec, GrammarVocabulary};
use crate::metrics::Metrics;
use crate::output::OutputText;
use crate::pulse::Pulse;
use crate::request::{
    Bounds, Prompt, Request, RequestError, RequestHandle, RequestId, check_text, event_queue,
};
use crate::schedule::{Held, Scheduler, Shape};
use crate::sequence::{Arrival, Form};
use crate::step::{Executor, StepLoop, Threaded};
use crate::tokenizer::Tokenizer;
use crate::work::Worker;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Changes whenever the same text, on the same device, may give other bits than before: cached
/// prefixes on disk of other versions are not used.
pub const NUMERICS_VERSION: u32 = 1;

/// Serves requests until it is dropped, which fails those that still run.
pub struct Engine {
    shared: Arc<Shared>,
    bounds: Bounds,
    queue_limit: usize,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Tokens that end a text.
    ends: Vec<u32>,
    /// Made for the first grammar.
    compiler: OnceLock<Result<Compiler, RequestError>>,
    metrics: Arc<Metrics>,
    pulse: Arc<Pulse>,
    next_id: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

/// What callers and the loop share.
#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
}

#[derive(Default)]
struct Inbox {
    arrivals: Vec<Arrival>,
    aborts: Vec<RequestId>,
    /// Answered with what the scheduler holds.
    questions: Vec<std::sync::mpsc::Sender<Held>>,
    clear_cache: bool,
    stop: bool,
    /// Why the loop has ended.
    ended: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// An engine over any worker. `shape` must be the one that the worker was made for.
    pub fn with_worker(
        worker: impl Worker,
        shape: Shape,
        tiers: Tiers,
        tokenizer: Option<Arc<Tokenizer>>,
        overlap: bool,
    ) -> Result<Self, EngineError> {
        let metrics = Arc::new(Metrics::default());
        let bounds = shape.bounds(tokenizer.is_some());
        let queue_limit = shape.max_queued_requests;
        let ends = shape.ends.clone();
        let scheduler = Scheduler::new(shape, tiers, metrics.clone());
        let pulse = worker.pulse();
        let executor = Threaded::new(worker).map_err(EngineError::Thread)?;
        let shared = Arc::new(Shared::default());
        let state = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || serve(StepLoop::new(scheduler, executor, overlap), &state))
            .map_err(EngineError::Thread)?;
        Ok(Self {
            shared,
            bounds,
            queue_limit,
            tokenizer,
            ends,
            compiler: OnceLock::new(),
            metrics,
            pulse,
            next_id: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// Starts a request. Errors that are the request's own come back at once; those of its grammar
    /// and of the queue may also come as the first event. `n` must be 1; see
    /// [`Engine::submit_all`].
    pub fn submit(&self, request: Request) -> Result<RequestHandle, RequestError> {
        if request.params.n != 1 {
            let reason = "this call gives one continuation; submit_all gives several";
            return Err(RequestError::Unsupported { field: "n", reason });
        }
        let handle = self.submit_all(request)?.pop();
        handle.ok_or_else(|| RequestError::Stopped { reason: "it gave no handle".into() })
    }

    /// Starts all `n` continuations of a request. They share its seed and are told apart by their
    /// sample index, which counts up from [`SamplingParams::sample`](crate::request::SamplingParams).
    /// The prompt is read once, and the others start from its state while there are places and
    /// pages for them; all give the tokens that they give alone. The `prompt_logprobs` of a request
    /// are those of each continuation.
    pub fn submit_all(&self, request: Request) -> Result<Vec<RequestHandle>, RequestError> {
        let Request { prompt, params, priority, cache_salt } = request;
        let prompt = self.encode(prompt)?;
        params.check(&prompt, &self.bounds)?;
        let limit = self.bounds.max_tokens;
        let max_len = params.max_tokens.map_or(limit, |n| prompt.len() + n);
        let seed = params.seed.unwrap_or_else(random_seed);
        let form = match &params.constraint {
            None => Form::Free,
            Some(constraint) => Form::Pending(self.compiler()?.submit(constraint.grammar.clone())),
        };
        let mut handles = Vec::with_capacity(params.n);
        let mut arrivals: Vec<Arrival> = Vec::with_capacity(params.n);
        for i in 0..params.n {
            let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
            let (sink, handle) = event_queue(id);
            let mut params = params.clone();
            params.sample = params.sample.wrapping_add(i as u32);
            arrivals.push(Arrival {
                id,
                priority,
                salt: cache_salt.clone(),
                text: OutputText::new(self.tokenizer.clone(), params.stop.clone()),
                params,
                prompt: prompt.clone(),
                seed,
                form: form.clone(),
                leader: arrivals.first().map(|first| first.id),
                max_len,
                sink,
                time: Instant::now(),
            });
            handles.push(handle);
        }
        let mut inbox = self.shared.lock();
        if let Some(reason) = &inbox.ended {
            return Err(RequestError::Stopped { reason: reason.clone() });
        }
        let waiting = self.metrics.waiting.get() as usize + inbox.arrivals.len();
        if waiting + arrivals.len() > self.queue_limit {
            arrivals.iter().for_each(|_| self.metrics.failed());
            return Err(RequestError::QueueFull { waiting, limit: self.queue_limit });
        }
        inbox.arrivals.extend(arrivals);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(handles)
    }

    /// Compiles a grammar, or finds out why it cannot be enforced; blocks until then. Requests with
    /// the same grammar need not wait for it any more.
    pub fn check_grammar(&self, grammar: &GrammarSpec) -> Result<(), RequestError> {
        self.compiler()?.compile(grammar.clone())?;
        Ok(())
    }

    fn compiler(&self) -> Result<&Compiler, RequestError> {
        let made = self.compiler.get_or_init(|| {
            let Some(tokenizer) = &self.tokenizer else {
                let reason = "the engine has no tokenizer, so it cannot follow a grammar";
                return Err(RequestError::Unsupported { field: "constraint", reason });
            };
            GrammarVocabulary::of_tokenizer(tokenizer, self.bounds.vocab, &self.ends)
                .map(|vocabulary| Compiler::new(vocabulary, CompilerLimits::default()))
                .map_err(|error| CompileError::Fault { reason: error.to_string() }.into())
        });
        made.as_ref().map_err(RequestError::clone)
    }

    /// Gives up a request; one that has ended is left alone.
    pub fn abort(&self, id: RequestId) {
        self.shared.lock().aborts.push(id);
        self.shared.wake.notify_one();
    }

    fn encode(&self, prompt: Prompt) -> Result<Vec<u32>, RequestError> {
        match (prompt, &self.tokenizer) {
            (Prompt::Tokens(tokens), _) => Ok(tokens),
            (Prompt::Text(text), Some(tokenizer)) => {
                let encoding = |e: crate::tokenizer::TokenizerError| RequestError::Encoding {
                    reason: e.to_string(),
                };
                check_text(tokenizer, &text, self.bounds.max_tokens)?;
                let ids = tokenizer.encode(&text).map_err(encoding)?;
                Ok(tokenizer.bos().into_iter().chain(ids).collect())
            }
            (Prompt::Text(_), None) => {
                let reason = "the engine has no tokenizer; give token ids";
                Err(RequestError::Unsupported { field: "prompt", reason })
            }
        }
    }

    /// What requests are checked against.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Most requests that may wait.
    pub fn queue_limit(&self) -> usize {
        self.queue_limit
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Figures.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Beats while a step runs.
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// What the scheduler holds now, once the step that runs has ended; `None` if the engine has
    /// stopped.
    pub fn held(&self) -> Option<Held> {
        let (sender, answer) = std::sync::mpsc::channel();
        {
            let mut inbox = self.shared.lock();
            if inbox.ended.is_some() {
                return None;
            }
            inbox.questions.push(sender);
        }
        self.shared.wake.notify_one();
        answer.recv().ok()
    }

    /// Why the engine has stopped, if it has.
    pub fn ended(&self) -> Option<String> {
        let ended = self.shared.lock().ended.clone();
        let finished = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        ended.or_else(|| finished.then(|| "its thread has ended unexpectedly".to_owned()))
    }

    /// Drops the prefix cache's entries on the device.
    pub fn clear_prefix_cache(&self) {
        self.shared.lock().clear_cache = true;
        self.shared.wake.notify_one();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Closes the inbox when the loop ends, in whatever way: nobody waits for an answer any more.
struct Closes<'a> {
    shared: &'a Shared,
    reason: String,
}

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        let mut inbox = self.shared.lock();
        inbox.arrivals.clear();
        inbox.questions.clear();
        inbox.ended = Some(std::mem::take(&mut self.reason));
    }
}

/// Runs the loop until the engine is dropped or the device fails.
fn serve<E: Executor>(mut steps: StepLoop<E>, shared: &Shared) {
    let mut closes = Closes { shared, reason: "its thread has ended unexpectedly".to_owned() };
    let reason = loop {
        {
            let mut inbox = shared.lock();
            while steps.scheduler.is_idle() && inbox.is_empty() {
                inbox = shared.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
            }
            if inbox.stop {
                break "it was shut down".to_owned();
            }
            let scheduler = &mut steps.scheduler;
            inbox.arrivals.drain(..).for_each(|arrival| scheduler.submit(arrival));
            inbox.aborts.drain(..).for_each(|id| scheduler.abort(id));
            if std::mem::take(&mut inbox.clear_cache) {
                scheduler.clear_prefix_cache();
            }
            for question in inbox.questions.drain(..) {
                let _ = question.send(scheduler.held());
            }
        }
        match steps.step() {
            Ok(true) => {}
            // Requests wait for something that only time brings.
            Ok(false) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error.to_string(),
        }
    };
    steps.scheduler.fail_all(&RequestError::Stopped { reason: reason.clone() });
    closes.reason = reason;
}

impl Inbox {
    fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
            && self.aborts.is_empty()
            && self.questions.is_empty()
            && !self.clear_cache
            && !self.stop
    }
}

/// 64 random bits.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}
