//! Compiles grammars off the engine's loop.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::error::{CompileError, MatchError};
use super::guard::{caught, text};
use super::lower::lower;
use super::matcher::Matcher;
use super::parser::{Parsers, is_complete, lock};
use super::spec::GrammarSpec;
use super::trigger::Trigger;
use super::vocabulary::GrammarVocabulary;

/// Limits of a [`Compiler`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompilerLimits {
    /// Compilations at one time.
    pub threads: usize,
    /// Longest time from [`Compiler::submit`] to the result.
    pub time: Duration,
    /// Largest specification, in bytes of its JSON form.
    pub spec_bytes: usize,
    /// Most schemas in one specification, counting subschemas.
    pub schema_nodes: usize,
    /// Most specifications waiting, and most that may overrun their time, before new ones are
    /// refused as [`CompileError::Busy`].
    pub waiting: usize,
    /// Results kept, errors included, by least recent use.
    pub cached: usize,
}

impl Default for CompilerLimits {
    fn default() -> Self {
        Self {
            threads: 2,
            time: Duration::from_secs(10),
            spec_bytes: 512 << 10,
            schema_nodes: 20_000,
            waiting: 256,
            cached: 128,
        }
    }
}

/// A compiled grammar. Cheap to clone; every sequence gets its own [`Matcher`].
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<GrammarVocabulary>,
    parsers: Arc<Parsers>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// A matcher at the start of the output; with a trigger, free until it is complete.
    ///
    /// # Errors
    /// [`MatchError::Fault`].
    pub fn matcher(&self, trigger: Option<Arc<Trigger>>) -> Result<Matcher, MatchError> {
        let fault = |reason| MatchError::Fault { position: 0, reason };
        let parser = self.parsers.lease().map_err(fault)?;
        Ok(Matcher::new(self.vocabulary.clone(), parser, trigger))
    }

    /// The vocabulary that it was compiled for.
    pub fn vocabulary(&self) -> &Arc<GrammarVocabulary> {
        &self.vocabulary
    }
}

/// Compiles [`GrammarSpec`]s on threads of its own and keeps recent results.
///
/// Equal specifications are compiled once. Threads run only while there is work. A compilation
/// cannot be interrupted from outside; its own size limits end it, and until then it is counted
/// (see [`CompilerLimits::waiting`]) while another thread takes over its place.
pub struct Compiler {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

struct Shared {
    vocabulary: Arc<GrammarVocabulary>,
    limits: CompilerLimits,
    state: Mutex<State>,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    jobs: HashMap<Arc<str>, Entry>,
    queue: VecDeque<Arc<Job>>,
    /// Threads that work within their time.
    running: usize,
    /// Threads whose job was given up.
    overdue: usize,
    clock: u64,
}

struct Entry {
    job: Arc<Job>,
    used: u64,
}

struct Job {
    key: Arc<str>,
    spec: GrammarSpec,
    deadline: Instant,
    status: Mutex<Status>,
}

enum Status {
    Queued,
    Running,
    Done(Result<Grammar, CompileError>),
}

/// A compilation that was asked for. Dropping it does not cancel the work.
#[derive(Clone)]
pub struct Pending {
    shared: Arc<Shared>,
    job: Arc<Job>,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("ready", &self.poll().is_some()).finish()
    }
}

impl Compiler {
    /// A compiler for one model's vocabulary.
    pub fn new(vocabulary: Arc<GrammarVocabulary>, limits: CompilerLimits) -> Self {
        let shared =
            Shared { vocabulary, limits, state: Mutex::default(), finished: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Starts compiling, or finds the result of an equal specification. Never blocks on the work.
    /// Refusals come through the returned handle like every other result.
    pub fn submit(&self, spec: GrammarSpec) -> Pending {
        let shared = &self.shared;
        let limits = &shared.limits;
        let key: Arc<str> = match serde_json::to_string(&spec) {
            Ok(key) => key.into(),
            Err(error) => {
                return self.refused(spec, CompileError::Fault { reason: error.to_string() });
            }
        };
        if key.len() > limits.spec_bytes {
            let (size, limit) = (key.len(), limits.spec_bytes);
            return self
                .refused(spec, CompileError::TooBig { what: "specification bytes", size, limit });
        }
        let mut state = lock(&shared.state);
        state.clock += 1;
        let now = state.clock;
        if let Some(entry) = state.jobs.get_mut(&key) {
            entry.used = now;
            return Pending { shared: shared.clone(), job: entry.job.clone() };
        }
        let waiting = state.queue.len().max(state.overdue);
        if waiting >= limits.waiting {
            drop(state);
            return self.refused(spec, CompileError::Busy { waiting });
        }
        let job = Arc::new(Job {
            key: key.clone(),
            spec,
            deadline: Instant::now() + limits.time,
            status: Mutex::new(Status::Queued),
        });
        state.jobs.insert(key, Entry { job: job.clone(), used: now });
        state.evict(limits.cached);
        state.queue.push_back(job.clone());
        Shared::start_thread(shared, &mut state);
        Pending { shared: shared.clone(), job }
    }

    /// [`submit`](Self::submit) and wait.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    pub fn compile(&self, spec: GrammarSpec) -> Result<Grammar, CompileError> {
        self.submit(spec).wait()
    }

    fn refused(&self, spec: GrammarSpec, error: CompileError) -> Pending {
        let job = Job {
            key: "".into(),
            spec,
            deadline: Instant::now(),
            status: Mutex::new(Status::Done(Err(error))),
        };
        Pending { shared: self.shared.clone(), job: Arc::new(job) }
    }
}

impl Pending {
    /// The result, if there is one. After the time limit there always is.
    pub fn poll(&self) -> Option<Result<Grammar, CompileError>> {
        if let Status::Done(result) = &*lock(&self.job.status) {
            return Some(result.clone());
        }
        (Instant::now() >= self.job.deadline).then(|| Shared::give_up(&self.shared, &self.job))
    }

    /// Blocks until there is a result, at most for the time limit.
    ///
    /// # Errors
    /// Why the specification was refused: see [`CompileError`].
    pub fn wait(&self) -> Result<Grammar, CompileError> {
        loop {
            if let Some(result) = self.poll() {
                return result;
            }
            let state = lock(&self.shared.state);
            // Results are announced under this lock, so none can slip in before the wait.
            if matches!(&*lock(&self.job.status), Status::Done(_)) {
                continue;
            }
            let left = self.job.deadline.saturating_duration_since(Instant::now());
            drop(self.shared.finished.wait_timeout(state, left));
        }
    }
}

impl State {
    /// Forgets the least recently used results over the limit; unfinished jobs stay.
    fn evict(&mut self, limit: usize) {
        while self.jobs.len() > limit {
            let oldest = self
                .jobs
                .iter()
                .filter(|(_, e)| matches!(&*lock(&e.job.status), Status::Done(_)))
                .min_by_key(|(_, e)| e.used)
                .map(|(key, _)| key.clone());
            let Some(key) = oldest else { return };
            self.jobs.remove(&key);
        }
    }
}

impl Shared {
    fn start_thread(shared: &Arc<Self>, state: &mut State) {
        if state.queue.is_empty() || state.running >= shared.limits.threads.max(1) {
            return;
        }
        let worker = shared.clone();
        let spawned = std::thread::Builder::new()
            .name("grammar-compiler".into())
            // Schemas are compiled by recursion.
            .stack_size(16 << 20)
            .spawn(move || worker.work());
        // Without a thread the jobs run into their deadline.
        if spawned.is_ok() {
            state.running += 1;
        }
    }

    fn work(&self) {
        loop {
            let mut state = lock(&self.state);
            let Some(job) = state.queue.pop_front() else {
                state.running -= 1;
                return;
            };
            {
                let mut status = lock(&job.status);
                if !matches!(*status, Status::Queued) {
                    continue;
                }
                *status = Status::Running;
            }
            drop(state);
            let result = self.build(&job.spec);
            let mut state = lock(&self.state);
            let mut status = lock(&job.status);
            if matches!(*status, Status::Done(_)) {
                // Given up: another thread took this one's place.
                state.overdue -= 1;
                return;
            }
            *status = Status::Done(result);
            self.finished.notify_all();
        }
    }

    /// Ends a job that is past its deadline.
    fn give_up(shared: &Arc<Self>, job: &Arc<Job>) -> Result<Grammar, CompileError> {
        let mut state = lock(&shared.state);
        let mut status = lock(&job.status);
        let was_running = match &*status {
            Status::Done(result) => return result.clone(),
            Status::Running => true,
            Status::Queued => false,
        };
        let limit_ms = shared.limits.time.as_millis() as u64;
        let result = Err(CompileError::TooSlow { limit_ms });
        *status = Status::Done(result.clone());
        drop(status);
        // Not an answer to keep: the machine may have been busy.
        state.jobs.remove(&job.key);
        if was_running {
            state.running -= 1;
            state.overdue += 1;
            Self::start_thread(shared, &mut state);
        }
        shared.finished.notify_all();
        result
    }

    fn build(&self, spec: &GrammarSpec) -> Result<Grammar, CompileError> {
        let built = caught(|| Ok(self.build_inner(spec)));
        built.unwrap_or_else(|reason| Err(CompileError::Fault { reason }))
    }

    fn build_inner(&self, spec: &GrammarSpec) -> Result<Grammar, CompileError> {
        let lowered = lower(spec, &self.vocabulary, self.limits.schema_nodes)?;
        let parser = self.vocabulary.factory().create_parser(lowered);
        let mut parser = parser.map_err(|error| refusal(spec, text(error)))?;
        parser.start_without_prompt();
        // The first mask shows a grammar that allows nothing, and its states are learned once.
        if !is_complete(&parser) {
            parser.compute_mask().map_err(|error| refusal(spec, text(error)))?;
        }
        Ok(Grammar { vocabulary: self.vocabulary.clone(), parsers: Parsers::new(parser) })
    }
}

/// Sorts a message of the library under the case that the caller can act on.
fn refusal(spec: &GrammarSpec, reason: String) -> CompileError {
    let has = |needles: &[&str]| needles.iter().any(|needle| reason.contains(needle));
    if reason.starts_with("panic: ") {
        return CompileError::Fault { reason };
    }
    if has(&["too big", "too large", "too many", "Lexer fuel", "fuel", "stack level exceeded"]) {
        return CompileError::TooComplex { reason };
    }
    match spec {
        GrammarSpec::Regex(_) => CompileError::BadRegex { reason },
        GrammarSpec::Lark(_) => CompileError::BadGrammar { reason },
        _ if has(&["Unsatisfiable schema", "NoExtensionBias"]) => {
            CompileError::Contradiction { path: String::new(), reason }
        }
        GrammarSpec::ToolCalls(_) => CompileError::BadGrammar { reason },
        _ => {
            CompileError::Unsupported { path: String::new(), keyword: keyword_in(&reason), reason }
        }
    }
}

/// The keyword that a message of the library speaks of.
fn keyword_in(reason: &str) -> String {
    let keywords = [
        ("patternProperty", "patternProperties"),
        ("oneOf", "oneOf"),
        ("min/maxProperties", "minProperties"),
        ("circular references", "$ref"),
        ("multipleOf", "multipleOf"),
        ("egex", "pattern"),
    ];
    let found = keywords.iter().find(|(needle, _)| reason.contains(needle));
    found.map_or_else(|| "schema".to_owned(), |(_, keyword)| (*keyword).to_owned())
}
