//! An [`Inference`] that says what it is told to: for tests of everything above the engine.

use crate::inference::{Figures, Inference, Info};
use deepinfer::grammar::{CompileError, Compiler, CompilerLimits, GrammarSpec, GrammarVocabulary};
use deepinfer::request::{
    Event, EventSink, FinishReason, Prompt, Request, RequestError, RequestHandle, RequestId, Token,
    TokenLogprobs, Usage, check_text, event_queue,
};
use deepinfer::tokenizer::{Decoder, Tokenizer};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How a request is answered.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Tokens to produce.
    pub tokens: Vec<u32>,
    /// How the text ends, if `max_tokens` does not cut it.
    pub reason: FinishReason,
    /// Prompt tokens that are said to come from the cache.
    pub cached: usize,
    /// Tokens an event.
    pub burst: usize,
    /// Time before each event; zero sends everything at once.
    pub pace: Duration,
    /// Time in the queue.
    pub wait: Duration,
    /// Time of reading the prompt, before the time of the first event.
    pub reading: Duration,
    /// Drafts that are said to have been verified and accepted at each event.
    pub drafts: (usize, usize),
    /// Fails with this instead of the end.
    pub failure: Option<RequestError>,
}

impl Reply {
    /// These tokens, one an event, at once, then a stop.
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Self {
        Self {
            tokens: tokens.into(),
            reason: FinishReason::Stop,
            cached: 0,
            burst: 1,
            pace: Duration::ZERO,
            wait: Duration::ZERO,
            reading: Duration::ZERO,
            drafts: (0, 0),
            failure: None,
        }
    }
}

type Script = Box<dyn Fn(&Request, &[u32]) -> Result<Reply, RequestError> + Send + Sync>;

/// Answers from a script.
pub struct Scripted {
    info: Info,
    script: Script,
    compiler: OnceLock<Result<Compiler, RequestError>>,
    next_id: AtomicU64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    finished: AtomicU64,
    aborted: AtomicU64,
    output: AtomicU64,
    prompt: AtomicU64,
    cached: AtomicU64,
    beats: AtomicU64,
}

#[derive(Default)]
struct State {
    active: Vec<Active>,
    /// Why it has ended.
    ended: Option<String>,
    /// Does not take turns any more.
    hangs: bool,
    /// But its step gets on.
    beats: bool,
    closed: bool,
}

struct Active {
    sink: EventSink,
    events: std::vec::IntoIter<Event>,
    due: Instant,
    pace: Duration,
    /// When it leaves the queue, and how long its prompt takes then.
    admission: Instant,
    reading: Duration,
    begun: bool,
    usage: Usage,
    drafts: (usize, usize),
}

impl Active {
    /// Leaves the queue and reads the prompt, as far as it is time for it.
    fn begin(&mut self, now: Instant) {
        let Some(passed) = now.checked_duration_since(self.admission) else { return };
        self.sink.admitted();
        let whole = self.reading.as_secs_f64();
        let part = if whole > 0.0 { (passed.as_secs_f64() / whole).min(1.0) } else { 1.0 };
        self.sink.read((self.usage.prompt_tokens as f64 * part) as usize);
        self.sink.count(self.usage);
        self.begun = part == 1.0;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scripted {
    /// Answers every request with what `script` says for it and its prompt's tokens.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        max_tokens: usize,
        script: impl Fn(&Request, &[u32]) -> Result<Reply, RequestError> + Send + Sync + 'static,
    ) -> Self {
        let vocab = tokenizer.vocab_size();
        let shared = Arc::new(Shared::default());
        let driver = shared.clone();
        std::thread::spawn(move || drive(&driver));
        let fingerprint = Some("scripted".into());
        let info = Info { tokenizer, vocab, max_tokens, queue_limit: 1024, fingerprint };
        Self {
            info,
            script: Box::new(script),
            compiler: OnceLock::new(),
            next_id: AtomicU64::new(0),
            shared,
        }
    }

    /// Answers every request with the same tokens.
    pub fn always(tokenizer: Arc<Tokenizer>, tokens: Vec<u32>) -> Self {
        Self::new(tokenizer, 1 << 16, move |_, _| Ok(Reply::tokens(tokens.clone())))
    }

    /// Ends as an engine ends whose device has failed.
    pub fn kill(&self, reason: &str) {
        let mut state = self.shared.lock();
        state.ended = Some(reason.to_owned());
        for active in state.active.drain(..) {
            active.sink.send(Event::Failed(RequestError::Stopped { reason: reason.to_owned() }));
        }
    }

    /// Stops taking turns, as an engine does whose device never answers.
    pub fn hang(&self) {
        let mut state = self.shared.lock();
        (state.hangs, state.beats) = (true, false);
    }

    /// Stops taking turns because a step takes long, which gets on.
    pub fn take_long(&self) {
        let mut state = self.shared.lock();
        (state.hangs, state.beats) = (true, true);
    }

    fn events(&self, request: &Request, prompt: usize, reply: &Reply) -> Vec<Event> {
        let params = &request.params;
        let room = self.info.max_tokens.saturating_sub(prompt);
        let limit = params.max_tokens.unwrap_or(room).min(room);
        let mut reason = reply.reason;
        let mut tokens = reply.tokens.clone();
        if let Some(at) = tokens.iter().position(|token| params.stop_tokens.contains(token)) {
            tokens.truncate(at + 1);
            reason = FinishReason::Stop;
        }
        if tokens.len() > limit {
            tokens.truncate(limit);
            reason = FinishReason::Length;
        }
        // Text after each token, and where a stop string cuts it.
        let mut decoder = Decoder::new(true);
        let mut text = String::new();
        let mut ends = Vec::new();
        for &token in &tokens {
            decoder.push(&self.info.tokenizer, token, &mut text);
            ends.push(text.len());
        }
        if let Some(at) = params.stop.iter().filter_map(|stop| text.find(stop)).min() {
            let last = ends.iter().position(|&end| end > at).unwrap_or(ends.len());
            tokens.truncate(last + 1);
            ends.truncate(last + 1);
            text.truncate(at);
            reason = FinishReason::Stop;
        }
        let mut events = Vec::new();
        let logprobs = (1..prompt).filter(|_| params.prompt_logprobs.is_some());
        let logprobs = logprobs.map(|_| logprobs_of(0, params.prompt_logprobs.unwrap_or(0)));
        events.push(Event::PromptRead { cached: reply.cached, logprobs: logprobs.collect() });
        let mut from = 0;
        let mut done = 0;
        for chunk in tokens.chunks(reply.burst.max(1)) {
            done += chunk.len();
            let to = ends[done - 1].min(text.len());
            let token =
                |&id: &u32| Token { id, logprobs: params.logprobs.map(|n| logprobs_of(id, n)) };
            let tokens = chunk.iter().map(token).collect();
            events.push(Event::Tokens { tokens, text: text[from..to].to_owned() });
            from = to;
        }
        events.push(match &reply.failure {
            Some(error) => Event::Failed(error.clone()),
            None => Event::Finished { reason, usage: Usage::default() },
        });
        events
    }
}

fn logprobs_of(token: u32, top: usize) -> TokenLogprobs {
    let entry = |i: usize| (token.wrapping_add(i as u32), -0.5 - i as f32);
    TokenLogprobs { token, logprob: -0.5, top: (0..top).map(entry).collect() }
}

impl Inference for Scripted {
    fn submit(&self, request: Request) -> Result<RequestHandle, RequestError> {
        if let Some(reason) = &self.shared.lock().ended {
            return Err(RequestError::Stopped { reason: reason.clone() });
        }
        let encoding = |e: deepinfer::tokenizer::TokenizerError| RequestError::Encoding {
            reason: e.to_string(),
        };
        let prompt = match &request.prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => {
                check_text(&self.info.tokenizer, text, self.info.max_tokens)?;
                self.info.tokenizer.encode(text).map_err(encoding)?
            }
        };
        let bounds = deepinfer::request::Bounds {
            vocab: self.info.vocab,
            max_tokens: self.info.max_tokens,
            image_token: None,
            prefill: deepinfer::engine::PrefillMode::Off,
            text: true,
        };
        request.params.check(&prompt, &bounds)?;
        let reply = (self.script)(&request, &prompt)?;
        let events = self.events(&request, prompt.len(), &reply);
        let id = RequestId(self.next_id.fetch_add(1, Relaxed));
        let (sink, handle) = event_queue(id);
        self.shared.prompt.fetch_add(prompt.len() as u64, Relaxed);
        self.shared.cached.fetch_add(reply.cached as u64, Relaxed);
        let admission = Instant::now() + reply.wait;
        let usage = Usage {
            prompt_tokens: prompt.len(),
            cached_tokens: reply.cached,
            seed: request.params.seed.unwrap_or(0),
            ..Usage::default()
        };
        let mut active = Active {
            sink,
            events: events.into_iter(),
            due: admission + reply.reading + reply.pace,
            pace: reply.pace,
            admission,
            reading: reply.reading,
            begun: false,
            usage,
            drafts: reply.drafts,
        };
        if (reply.wait + reply.reading + reply.pace).is_zero() {
            while self.shared.advance(&mut active) {}
        } else {
            self.shared.lock().active.push(active);
            self.shared.wake.notify_one();
        }
        Ok(handle)
    }

    fn check_grammar(&self, grammar: &GrammarSpec) -> Result<(), RequestError> {
        let compiler = self.compiler.get_or_init(|| {
            let (tokenizer, vocab) = (&self.info.tokenizer, self.info.vocab);
            let ends: Vec<u32> = tokenizer.eos().into_iter().collect();
            GrammarVocabulary::of_tokenizer(tokenizer, vocab, &ends)
                .map(|vocabulary| Compiler::new(vocabulary, CompilerLimits::default()))
                .map_err(|error| CompileError::Fault { reason: error.to_string() }.into())
        });
        compiler.as_ref().map_err(RequestError::clone)?.compile(grammar.clone())?;
        Ok(())
    }

    fn info(&self) -> &Info {
        &self.info
    }

    fn figures(&self) -> Figures {
        Figures {
            running: self.shared.lock().active.len() as u64,
            finished: self.shared.finished.load(Relaxed),
            aborted: self.shared.aborted.load(Relaxed),
            output_tokens: self.shared.output.load(Relaxed),
            prompt_tokens: self.shared.prompt.load(Relaxed),
            cached_tokens: self.shared.cached.load(Relaxed),
            ..Figures::default()
        }
    }

    fn check(&self) -> Result<(), String> {
        loop {
            {
                let state = self.shared.lock();
                if let Some(reason) = &state.ended {
                    return Err(reason.clone());
                }
                if !state.hangs || state.closed {
                    return Ok(());
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn beats(&self) -> u64 {
        let beat = u64::from(self.shared.lock().beats);
        self.shared.beats.fetch_add(beat, Relaxed) + beat
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_one();
    }
}

impl Shared {
    /// Sends the next event. Returns whether there are more.
    fn advance(&self, active: &mut Active) -> bool {
        let Some(mut event) = active.events.next() else { return false };
        if !active.begun {
            active.begin(active.due);
        }
        match &mut event {
            Event::Tokens { tokens, .. } => {
                self.output.fetch_add(tokens.len() as u64, Relaxed);
                active.usage.output_tokens += tokens.len();
                active.usage.drafted += active.drafts.0;
                active.usage.verified += active.drafts.0;
                active.usage.accepted += active.drafts.1;
                active.sink.count(active.usage);
            }
            Event::Finished { usage, .. } => {
                self.finished.fetch_add(1, Relaxed);
                *usage = active.usage;
            }
            _ => {}
        }
        active.sink.send(event);
        active.due += active.pace;
        active.events.len() > 0
    }
}

/// Sends the events of paced requests when they are due.
fn drive(shared: &Shared) {
    let mut state = shared.lock();
    while !state.closed {
        let now = Instant::now();
        if !state.hangs {
            state.active.retain_mut(|active| {
                if active.sink.abandoned() {
                    shared.aborted.fetch_add(1, Relaxed);
                    return false;
                }
                if !active.begun {
                    active.begin(now);
                }
                active.due > now || shared.advance(active)
            });
        }
        let next = state.active.iter().map(|active| active.due).min();
        let idle = Duration::from_millis(5);
        let pause = next.map_or(idle, |due| due.saturating_duration_since(Instant::now()));
        let pause = pause.clamp(Duration::from_micros(200), idle);
        state = shared.wake.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}
