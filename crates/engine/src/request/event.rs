//! Events of a request, and the queue that carries them from the engine to the caller.

use super::RequestError;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Number of a request, in order of submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Something that happened to a request. After [`Event::Finished`] or [`Event::Failed`] nothing
/// follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt has been read; comes once, before any token. The entry of the first prompt token
    /// is absent; the list is empty if `prompt_logprobs` was not asked for.
    PromptRead {
        /// Prompt tokens whose state came from the prefix cache.
        cached: usize,
        /// Log-probabilities of the prompt tokens but the first.
        logprobs: Vec<TokenLogprobs>,
    },
    /// New tokens. `text` is what they add to the output; it lags behind while a character or a
    /// possible stop string is incomplete.
    Tokens {
        /// In order.
        tokens: Vec<Token>,
        /// Added text.
        text: String,
    },
    /// The end.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Counts.
        usage: Usage,
    },
    /// The request could not be served.
    Failed(RequestError),
}

/// A produced token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Present if asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities under the model's own distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that stands in the text.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens, best first (the lower id on ties).
    pub top: Vec<(u32, f32)>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-text token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the most tokens a sequence may have.
    Length,
    /// The caller gave up.
    Aborted,
}

/// Counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many came from the prefix cache, or from another continuation of the request.
    pub cached_tokens: usize,
    /// Tokens produced, the one that stopped included.
    pub output_tokens: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Of these, how many were verified.
    pub verified: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Times that the request lost its place in memory.
    pub preemptions: usize,
    /// Key of its random choices.
    pub seed: u64,
}

/// Everything a request gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// Tokens, the one that stopped included.
    pub tokens: Vec<Token>,
    /// Text, without what stopped it.
    pub text: String,
    /// Why it ended; `None` while it runs.
    pub reason: Option<FinishReason>,
    /// Counts.
    pub usage: Usage,
    /// Log-probabilities of the prompt tokens but the first, if asked for.
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

impl Completion {
    /// Adds an event. Returns whether it was the last one.
    pub fn push(&mut self, event: Event) -> Result<bool, RequestError> {
        match event {
            Event::PromptRead { logprobs, .. } => self.prompt_logprobs = logprobs,
            Event::Tokens { tokens, text } => {
                self.tokens.extend(tokens);
                self.text.push_str(&text);
            }
            Event::Finished { reason, usage } => {
                self.reason = Some(reason);
                self.usage = usage;
                return Ok(true);
            }
            Event::Failed(error) => return Err(error),
        }
        Ok(false)
    }

    /// Ids of the tokens.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

/// How far the engine is with a request's prompt. Changes while it is looked at.
#[derive(Debug, Default)]
pub struct Reading {
    admitted: OnceLock<Instant>,
    read: AtomicUsize,
}

impl Reading {
    /// When the request left the queue for the first time.
    pub fn admitted(&self) -> Option<Instant> {
        self.admitted.get().copied()
    }

    /// Prompt tokens that come from the prefix cache, have been read, or are read by the step that
    /// runs.
    pub fn read(&self) -> usize {
        self.read.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct Queue {
    events: VecDeque<Event>,
    usage: Usage,
    closed: bool,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
    abandoned: AtomicBool,
    reading: Arc<Reading>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both ends of a request's events.
pub fn event_queue(id: RequestId) -> (EventSink, RequestHandle) {
    let shared = Arc::new(Shared::default());
    (EventSink { shared: shared.clone() }, RequestHandle { id, shared })
}

/// Where the engine puts a request's events.
pub struct EventSink {
    shared: Arc<Shared>,
}

impl EventSink {
    /// Adds an event.
    pub fn send(&self, event: Event) {
        let last = matches!(event, Event::Finished { .. } | Event::Failed(_));
        let waker = {
            let mut queue = self.shared.lock();
            if queue.closed {
                return;
            }
            if let Event::Finished { usage, .. } = &event {
                queue.usage = *usage;
            }
            queue.events.push_back(event);
            queue.closed = last;
            queue.waker.take()
        };
        self.shared.arrived.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Says that the request has left the queue; counts the first time only.
    pub fn admitted(&self) {
        self.shared.reading.admitted.get_or_init(Instant::now);
    }

    /// Says how many prompt tokens have been read.
    pub fn read(&self, tokens: usize) {
        self.shared.reading.read.store(tokens, Ordering::Relaxed);
    }

    /// Says what has been counted until now. [`Event::Finished`] says it too.
    pub fn count(&self, usage: Usage) {
        self.shared.lock().usage = usage;
    }

    /// Whether the caller has dropped its handle or called [`RequestHandle::abort`].
    pub fn abandoned(&self) -> bool {
        self.shared.abandoned.load(Ordering::Relaxed)
    }
}

impl Drop for EventSink {
    fn drop(&mut self) {
        self.send(Event::Failed(RequestError::Stopped { reason: "it was shut down".into() }));
    }
}

/// A running request: read its events with [`RequestHandle::recv`] (blocking), as an iterator, or
/// with [`RequestHandle::next_event`] (async, any executor). Dropping the handle aborts the request.
pub struct RequestHandle {
    id: RequestId,
    shared: Arc<Shared>,
}

impl RequestHandle {
    /// Number of the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// How far the engine is with the prompt.
    pub fn reading(&self) -> Arc<Reading> {
        self.shared.reading.clone()
    }

    /// Counts until now, of events that have not been read yet too; for a request that is given up,
    /// the last that there are.
    pub fn usage(&self) -> Usage {
        self.shared.lock().usage
    }

    /// The next event; blocks. `None` after the last one.
    pub fn recv(&self) -> Option<Event> {
        let mut queue = self.shared.lock();
        loop {
            if let Some(event) = queue.events.pop_front() {
                return Some(event);
            }
            if queue.closed {
                return None;
            }
            queue = self.shared.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next event, if it comes within `timeout`.
    pub fn recv_timeout(&self, timeout: Duration) -> Option<Event> {
        // A time that no clock reaches is no limit.
        let Some(until) = Instant::now().checked_add(timeout) else { return self.recv() };
        let mut queue = self.shared.lock();
        loop {
            if let Some(event) = queue.events.pop_front() {
                return Some(event);
            }
            let left = until.saturating_duration_since(Instant::now());
            if queue.closed || left.is_zero() {
                return None;
            }
            let waited = self.shared.arrived.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The next event, if it is there already.
    pub fn try_recv(&self) -> Option<Event> {
        self.shared.lock().events.pop_front()
    }

    /// Whether the last event has been read.
    pub fn is_done(&self) -> bool {
        let queue = self.shared.lock();
        queue.closed && queue.events.is_empty()
    }

    /// The next event, for hand-written futures and streams. One task at a time may wait.
    pub fn poll_recv(&self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut queue = self.shared.lock();
        match queue.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if queue.closed => Poll::Ready(None),
            None => {
                queue.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next event. `None` after the last one.
    pub async fn next_event(&self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// Reads all events; blocks.
    pub fn wait(&self) -> Result<Completion, RequestError> {
        let mut completion = Completion::default();
        while let Some(event) = self.recv() {
            completion.push(event)?;
        }
        Ok(completion)
    }

    /// Gives up: the request ends with [`FinishReason::Aborted`] at the engine's next step.
    pub fn abort(&self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Iterator for RequestHandle {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_arrive_in_order_and_end() {
        let (sink, handle) = event_queue(RequestId(1));
        let tokens = |id| Event::Tokens {
            tokens: vec![Token { id, logprobs: None }],
            text: format!("{id}"),
        };
        let finished = Event::Finished { reason: FinishReason::Stop, usage: Usage::default() };
        let reader = std::thread::spawn(move || handle.wait());
        sink.send(tokens(1));
        sink.send(tokens(2));
        sink.send(finished);
        sink.send(tokens(3));
        let completion = reader.join().expect("reader ends").expect("no error");
        assert_eq!((completion.ids(), completion.text.as_str()), (vec![1, 2], "12"));
        assert_eq!(completion.reason, Some(FinishReason::Stop));
    }

    #[test]
    fn any_timeout_is_taken() {
        let (sink, handle) = event_queue(RequestId(1));
        assert!(handle.recv_timeout(Duration::ZERO).is_none());
        sink.send(Event::Finished { reason: FinishReason::Stop, usage: Usage::default() });
        assert!(handle.recv_timeout(Duration::MAX).is_some());
    }

    #[test]
    fn a_dropped_sink_fails_the_request() {
        let (sink, handle) = event_queue(RequestId(1));
        drop(sink);
        assert!(matches!(handle.wait(), Err(RequestError::Stopped { .. })));
    }

    #[test]
    fn a_dropped_handle_abandons_the_request() {
        let (sink, handle) = event_queue(RequestId(1));
        assert!(!sink.abandoned());
        drop(handle);
        assert!(sink.abandoned());
    }

    #[test]
    fn a_task_is_woken() {
        struct Flag(AtomicBool);
        impl std::task::Wake for Flag {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let (sink, handle) = event_queue(RequestId(1));
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        let waker = Waker::from(flag.clone());
        let mut context = Context::from_waker(&waker);
        let mut future = Box::pin(handle.next_event());
        assert!(future.as_mut().poll(&mut context).is_pending());
        sink.send(Event::PromptRead { cached: 0, logprobs: Vec::new() });
        assert!(flag.0.load(Ordering::SeqCst));
        assert!(future.as_mut().poll(&mut context).is_ready());
    }
}
