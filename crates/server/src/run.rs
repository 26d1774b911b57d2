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
    /// Limit of the thinking, if there is one.
    pub budget: Option<Budget>,
}

/// A limit of the thinking. When it is reached, the end of thinking is put into the text as if it
/// had been produced, and the answer follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most tokens of thinking.
    pub tokens: usize,
    /// The token that ends thinking.
    pub end: u32,
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
    /// Drafts verified.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Times that the request lost its place in memory.
    pub preemptions: usize,
    /// Key of the random choices; known at the end.
    pub seed: Option<u64>,
    /// From the submission to the first token.
    pub first_token: Option<Duration>,
    /// From the submission until now or the end.
    pub total: Duration,
}

/// A running job. Dropping it aborts the request.
pub struct Run {
    inference: Arc<dyn Inference>,
    failure: watch::Receiver<Option<String>>,
    job: Job,
    handle: RequestHandle,
    /// An event that was read too early.
    next: Option<Event>,
    started: Instant,
    accounts: Accounts,
    /// All tokens so far.
    tokens: Vec<u32>,
    /// Whether the thinking that has a limit still goes on.
    limited: bool,
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
    /// Submits a job. `failure` tells when the engine has failed, in words; `ticket` is held as
    /// long as the job runs; `record` gets its accounts, also if it is dropped early.
    pub fn start(
        inference: Arc<dyn Inference>,
        failure: watch::Receiver<Option<String>>,
        job: Job,
        ticket: Ticket,
        record: Record,
    ) -> Result<Self, ApiError> {
        let mut params = job.params.clone();
        let limited = match job.budget {
            Some(budget) if params.max_tokens.is_none_or(|most| budget.tokens < most) => {
                params.max_tokens = Some(budget.tokens.max(1));
                params.stop_tokens.push(budget.end);
                true
            }
            _ => false,
        };
        let submitted = inference.submit(request(&job, job.prompt.clone(), params));
        let handle = submitted.map_err(ApiError::from)?;
        let accounts = Accounts { prompt_tokens: job.prompt.len(), ..Accounts::default() };
        Ok(Self {
            inference,
            failure,
            job,
            handle,
            next: None,
            started: Instant::now(),
            accounts,
            tokens: Vec::new(),
            limited,
            ready: false,
            ended: false,
            ticket,
            record,
            recorded: false,
            complete: Arc::default(),
        })
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
        if !std::mem::replace(&mut self.recorded, true) {
            self.record.ended(result, &self.accounts);
        }
    }

    fn step(&mut self, event: Option<Event>) -> Result<Option<Step>, ApiError> {
        self.accounts.total = self.started.elapsed();
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
                self.accounts.drafted += usage.drafted;
                self.accounts.accepted += usage.accepted;
                self.accounts.preemptions += usage.preemptions;
                self.accounts.seed = Some(usage.seed);
                match self.go_on(reason, usage.seed)? {
                    Some(step) => Ok(step),
                    None => {
                        self.end(Ok(reason));
                        Ok(Some(Step::End(reason)))
                    }
                }
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

    /// When the limited thinking has ended: starts the answer. The outer `None` means that there is
    /// nothing to start.
    fn go_on(&mut self, reason: FinishReason, seed: u64) -> Result<Option<Option<Step>>, ApiError> {
        let Some(budget) = self.job.budget.filter(|_| self.limited) else { return Ok(None) };
        self.limited = false;
        let closed = self.tokens.last() == Some(&budget.end);
        if !closed && reason != FinishReason::Length {
            return Ok(None);
        }
        let step = (!closed).then(|| {
            let token = Token { id: budget.end, logprobs: None };
            self.take(vec![token], String::new())
        });
        let mut params = self.job.params.clone();
        params.seed = Some(seed);
        params.prompt_logprobs = None;
        params.max_tokens = match params.max_tokens {
            Some(most) if most <= self.tokens.len() => {
                self.next = Some(Event::Finished {
                    reason: FinishReason::Length,
                    usage: deepinfer::request::Usage { seed, ..Default::default() },
                });
                return Ok(Some(step));
            }
            most => most.map(|most| most - self.tokens.len()),
        };
        let mut prompt = self.job.prompt.clone();
        prompt.extend(&self.tokens);
        self.handle = self.inference.submit(request(&self.job, prompt, params))?;
        Ok(Some(step))
    }

    /// Accounts until now. Tokens of thinking are counted by who knows where it ends.
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
        self.accounts.total = self.started.elapsed();
        self.end(Ok(match self.complete.load(Relaxed) {
            true => FinishReason::Stop,
            false => FinishReason::Aborted,
        }));
    }
}

fn request(job: &Job, prompt: Vec<u32>, params: SamplingParams) -> Request {
    let mut request = Request::tokens(prompt, params);
    request.cache_salt = job.cache_salt.clone();
    request.priority = job.priority;
    request
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
