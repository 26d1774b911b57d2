//! The engine: requests in, streams of events out.
//!
//! A thread of its own runs the loop ([`crate::step`]); another one the device. Callers hold an
//! [`Engine`] (cheap to share by reference or [`Arc`]) and a [`RequestHandle`] a request.

mod config;
mod error;
mod generate;
mod open;

pub use config::{DraftMode, EngineConfig, PrefillMode, PrefixCache};
pub use error::EngineError;
pub use generate::Progress;
pub use open::identity;

use crate::cache::tiers::Tiers;
use crate::metrics::Metrics;
use crate::output::OutputText;
use crate::request::{
    Bounds, Prompt, Request, RequestError, RequestHandle, RequestId, event_queue,
};
use crate::schedule::{Held, Scheduler, Shape};
use crate::sequence::Arrival;
use crate::step::{Executor, StepLoop, Threaded};
use crate::tokenizer::Tokenizer;
use crate::work::Worker;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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
    metrics: Arc<Metrics>,
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
        let scheduler = Scheduler::new(shape, tiers, metrics.clone());
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
            metrics,
            next_id: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// Starts a request. Errors that are the request's own come back at once; those of the queue
    /// may also come as the first event.
    pub fn submit(&self, request: Request) -> Result<RequestHandle, RequestError> {
        let Request { prompt, params, priority, cache_salt } = request;
        let prompt = self.encode(prompt)?;
        params.check(&prompt, &self.bounds)?;
        let limit = self.bounds.max_tokens;
        let max_len = params.max_tokens.map_or(limit, |n| prompt.len() + n);
        let seed = params.seed.unwrap_or_else(random_seed);
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sink, handle) = event_queue(id);
        let text = OutputText::new(self.tokenizer.clone(), params.stop.clone());
        let arrival = Arrival {
            id,
            priority,
            salt: cache_salt,
            params,
            prompt,
            seed,
            max_len,
            text,
            sink,
            time: Instant::now(),
        };
        let mut inbox = self.shared.lock();
        if let Some(reason) = &inbox.ended {
            return Err(RequestError::Stopped { reason: reason.clone() });
        }
        let waiting = self.metrics.waiting.get() as usize + inbox.arrivals.len();
        if waiting >= self.queue_limit {
            return Err(RequestError::QueueFull { waiting, limit: self.queue_limit });
        }
        inbox.arrivals.push(arrival);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(handle)
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

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Figures.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// What the scheduler holds now; `None` if the engine has stopped.
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

/// Runs the loop until the engine is dropped or the device fails.
fn serve<E: Executor>(mut steps: StepLoop<E>, shared: &Shared) {
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
    let mut inbox = shared.lock();
    inbox.arrivals.clear();
    inbox.questions.clear();
    inbox.ended = Some(reason);
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
