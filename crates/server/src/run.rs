//! One answer being produced: the engine's events as the protocols need them, and its accounts.

use crate::app::Record;
use crate::error::ApiError;
use crate::inference::Inference;
use crate::load::Ticket;
use deepinfer::request::{Event, FinishReason, Request, RequestHandle, SamplingParams, Token};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Token ids to continue.
    pub prompt: Vec<u32>,
    /// How.
    pub params: SamplingParams,
    /// Requests share cached prefixes only with requests that carry the same salt.
    pub cache_salt: Option<String>,
    /// Larger numbers are served first.
    pub priority: i32,
}

/// A part of an answer.
#[derive(Debug)]
pub enum Step {
    /// The prompt has been read.
    Ready {
        /// Log-probabilities of prompt tokens but the first, if asked for.
        prompt_logprobs: Vec<deepinfer::request::TokenLogprobs>,
    },
    /// New tokens and the text that they add.
    Tokens {
        /// In order.
        tokens: Vec<Token>,
        /// Added text.
        text: String,
    },
    /// The end; nothing follows.
    End(FinishReason),
}

/// Accounts of an answer. True at every moment, also of an answer that was cut.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Accounts {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many came from the prefix cache.
    pub cached_tokens: usize,
    /// Tokens produced, the one that stopped included.
    pub output_tokens: usize,
    /// Of these, tokens of thinking.
    pub reasoning_tokens: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Of these, how many were verified.
    pub verified: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Times that the request lost its place in memory.
    pub preemptions: usize,
    /// Key of the random choices; known when the request has left the queue.
    pub seed: Option<u64>,
    /// From the submission until the request left the queue.
    pub admitted: Option<Duration>,
    /// From the submission to the first token.
    pub first_token: Option<Duration>,
    /// From the submission until now or the end.
    pub total: Duration,
}

impl Accounts {
    /// Time in the queue, of reading the prompt, and of producing tokens: absent where it did not
    /// come to that.
    pub fn phases(&self) -> [(&'static str, Option<Duration>); 3] {
        let queue = self.admitted.unwrap_or(self.total);
        let read = self.first_token.unwrap_or(self.total);
        let prefill = self.admitted.map(|admitted| read.saturating_sub(admitted));
        let decode = self.first_token.map(|first| self.total.saturating_sub(first));
        [("queue", Some(queue)), ("prefill", prefill), ("decode", decode)]
    }
}

/// A running job. Dropping it aborts the request.
pub struct Run {
    failure: watch::Receiver<Option<String>>,
    job: Job,
    handle: RequestHandle,
    /// An event that was read too early.
    next: Option<Event>,
    started: Instant,
    accounts: Accounts,
    /// All tokens so far.
    tokens: Vec<u32>,
    ready: bool,
    ended: bool,
    ticket: Ticket,
    record: Record,
    /// Whether the end has been recorded.
    recorded: bool,
    /// Set by a reader that has seen the end of the answer before the engine has.
    complete: Arc<AtomicBool>,
}

impl Run {
    /// Submits a job; gives a run for each of its `n` answers. `failure` tells when the engine has
    /// failed, in words; `ticket` is held as long as a job runs; `record` makes what gets the
    /// accounts of a run, also if it is dropped early.
    pub fn start(
        inference: &dyn Inference,
        failure: &watch::Receiver<Option<String>>,
        job: Job,
        ticket: &Ticket,
        record: impl Fn() -> Record,
    ) -> Result<Vec<Self>, ApiError> {
        let mut request = Request::tokens(job.prompt.clone(), job.params.clone());
        request.cache_salt = job.cache_salt.clone();
        request.priority = job.priority;
        let started = Instant::now();
        let limit = inference.info().queue_limit;
        let handles = ticket.submit(limit, job.prompt.len(), job.params.n, || {
            inference.submit_all(request).map_err(ApiError::from)
        })?;
        let run = |handle| Self {
            failure: failure.clone(),
            job: job.clone(),
            handle,
            next: None,
            started,
            accounts: Accounts { prompt_tokens: job.prompt.len(), ..Accounts::default() },
            tokens: Vec::new(),
            ready: false,
            ended: false,
            ticket: ticket.clone(),
            record: record(),
            recorded: false,
            complete: Arc::default(),
        };
        Ok(handles.into_iter().map(run).collect())
    }

    /// The next part. `None` after the end or an error.
    pub async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        while !self.ended {
            let event = match self.next.take() {
                Some(event) => Some(event),
                None => tokio::select! {
                    biased;
                    event = self.handle.next_event() => event,
                    reason = failed(&mut self.failure) => {
                        let message = format!("the engine has failed: {reason}");
                        let error = ApiError::Unavailable { message };
                        self.end(Err(&error));
                        return Some(Err(error));
                    }
                },
            };
            match self.step(event) {
                Ok(Some(step)) => return Some(Ok(step)),
                Ok(None) => {}
                Err(error) => {
                    self.end(Err(&error));
                    return Some(Err(error));
                }
            }
        }
        None
    }

    fn end(&mut self, result: Result<FinishReason, &ApiError>) {
        self.ended = true;
        self.count();
        if !std::mem::replace(&mut self.recorded, true) {
            self.ticket.ended().add(self.accounts.clone());
            self.record.ended(result, &self.accounts);
        }
    }

    /// Brings the accounts up to date.
    fn count(&mut self) {
        let accounts = &mut self.accounts;
        accounts.total = self.started.elapsed();
        if accounts.admitted.is_none() {
            let admitted = self.handle.reading().admitted();
            accounts.admitted = admitted.map(|at| at.saturating_duration_since(self.started));
        }
        let usage = self.handle.usage();
        accounts.drafted = usage.drafted;
        accounts.verified = usage.verified;
        accounts.accepted = usage.accepted;
        accounts.preemptions = usage.preemptions;
        if accounts.admitted.is_some() {
            accounts.seed.get_or_insert(usage.seed);
        }
    }

    fn step(&mut self, event: Option<Event>) -> Result<Option<Step>, ApiError> {
        self.count();
        match event {
            Some(Event::PromptRead { cached, logprobs }) if !self.ready => {
                self.ready = true;
                self.accounts.cached_tokens = cached;
                Ok(Some(Step::Ready { prompt_logprobs: logprobs }))
            }
            Some(Event::PromptRead { .. }) => Ok(None),
            Some(Event::Tokens { mut tokens, mut text }) => {
                // One part for everything that has come while the reader was away.
                while let Some(event) = self.handle.try_recv() {
                    match event {
                        Event::Tokens { tokens: more, text: added } => {
                            tokens.extend(more);
                            text.push_str(&added);
                        }
                        other => {
                            self.next = Some(other);
                            break;
                        }
                    }
                }
                Ok(Some(self.take(tokens, text)))
            }
            Some(Event::Finished { reason, usage }) => {
                self.accounts.seed = Some(usage.seed);
                self.end(Ok(reason));
                Ok(Some(Step::End(reason)))
            }
            Some(Event::Failed(error)) => Err(error.into()),
            None => Err(ApiError::internal("the engine ended a request without saying why")),
        }
    }

    fn take(&mut self, tokens: Vec<Token>, text: String) -> Step {
        if self.tokens.is_empty() && !tokens.is_empty() {
            self.accounts.first_token = Some(self.started.elapsed());
        }
        self.tokens.extend(tokens.iter().map(|token| token.id));
        self.accounts.output_tokens += tokens.len();
        self.ticket.produced(tokens.len());
        self.record.produced(tokens.len());
        Step::Tokens { tokens, text }
    }

    /// Says how many tokens of thinking there are: whoever reads the answer knows where it ends.
    pub fn thought(&mut self, tokens: usize) {
        self.accounts.reasoning_tokens = tokens;
    }

    /// Accounts until now.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Tokens until now.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// A reader sets this when it has seen the end of the answer before the engine has.
    pub fn complete(&self) -> Arc<AtomicBool> {
        self.complete.clone()
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.job
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end(Ok(match self.complete.load(Relaxed) {
            true => FinishReason::Stop,
            false => FinishReason::Aborted,
        }));
    }
}

/// Waits until the engine has failed; for ever if it never does.
async fn failed(failure: &mut watch::Receiver<Option<String>>) -> String {
    loop {
        if let Some(reason) = failure.borrow_and_update().clone() {
            return reason;
        }
        if failure.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
