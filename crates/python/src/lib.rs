//! The native part of the Python package `deepinfer`: engines, and requests to them. What Python
//! programs see is in `python/deepinfer`.

mod demo;
mod params;

use deepinfer::cache::CacheFormat;
use deepinfer::chat::{self, ChatTemplate, Conversation, Effort};
use deepinfer::checkpoint::Source;
use deepinfer::engine::{EngineConfig, EngineError, Progress};
use deepinfer::metrics::Counter;
use deepinfer::request::{FinishReason, Request, RequestError, TokenLogprobs, check_text};
use deepinfer::settings::Settings;
use deepinfer::tokenizer::{Decoder, Tokenizer};
use params::Params;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time between looks at signals.
const SIGNALS: Duration = Duration::from_millis(50);

/// Time between calls of a progress function.
const PROGRESS: Duration = Duration::from_millis(100);

/// A running engine.
#[pyclass(frozen)]
struct Engine {
    engine: deepinfer::engine::Engine,
}

/// Settings of an engine, by the names of `LLM`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct EngineSettings {
    kv_tokens: Option<usize>,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    draft: String,
    draft_scheme: String,
    prefill: String,
    prefix_cache: String,
    kv_cache_dtype: String,
    device: String,
    threads: Option<usize>,
}

/// Log-probabilities of one token: itself, and the most probable ones.
type Logprobs = (u32, f32, Vec<(u32, f32)>);

/// One continuation.
#[pyclass(frozen, get_all)]
#[derive(Default)]
struct Completion {
    text: String,
    reasoning: Option<String>,
    token_ids: Vec<u32>,
    logprobs: Option<Vec<Logprobs>>,
    prompt_logprobs: Option<Vec<Logprobs>>,
    finish_reason: &'static str,
    error: Option<String>,
    seed: u64,
    cached_tokens: usize,
    drafted_tokens: usize,
    verified_tokens: usize,
    accepted_tokens: usize,
}

#[pymethods]
impl Engine {
    /// Loads a checkpoint; `None`: the demo model.
    #[new]
    fn new(py: Python<'_>, model: Option<PathBuf>, settings: EngineSettings) -> PyResult<Self> {
        let source = match model {
            Some(folder) if !folder.is_dir() => {
                let folder = folder.display();
                return Err(PyOSError::new_err(format!(
                    "{folder}: there is no such folder; give one that holds config.json and \
                     safetensors files"
                )));
            }
            Some(folder) => Source::directory(folder),
            None if demo::MODEL.is_empty() => {
                let reason = "this package was built without the demo model; give a checkpoint";
                return Err(PyValueError::new_err(reason));
            }
            None => Source::Embedded(demo::MODEL),
        };
        let config = settings.config()?;
        let open = || deepinfer::engine::Engine::open(source, &config, &mut |_, _| {});
        let engine = py.detach(open).map_err(start_error)?;
        Ok(Self { engine })
    }

    /// Token ids of a text; special tokens that it spells stay text.
    fn encode(&self, text: &str, bos: bool) -> PyResult<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        let ids = if bos { chat::plain_prompt(tokenizer, text) } else { tokenizer.encode(text) };
        ids.map_err(value_error)
    }

    /// Token ids of a prompt. One that is certain not to fit is refused, before it takes long.
    fn encode_prompt(&self, text: &str) -> PyResult<Vec<u32>> {
        check_text(self.tokenizer()?, text, self.engine.bounds().max_tokens)
            .map_err(value_error)?;
        self.encode(text, true)
    }

    /// Token ids of a conversation, for the assistant's next turn, and whether that begins with
    /// thinking.
    fn encode_chat(
        &self,
        messages: Vec<(String, String)>,
        effort: &str,
    ) -> PyResult<(Vec<u32>, bool)> {
        let effort: Effort = effort.parse().map_err(value_error)?;
        let mut conversation = Conversation::default();
        for (role, content) in messages {
            conversation.messages.push(match role.as_str() {
                "system" => chat::system(content),
                "user" => chat::user(content),
                "assistant" => chat::assistant(content, None),
                _ => {
                    let reason = "the role of a message is system, user or assistant";
                    return Err(PyValueError::new_err(format!("{reason}, not {role:?}")));
                }
            });
        }
        let limit = self.engine.bounds().max_tokens;
        let options = chat::Options { effort: Some(effort) };
        let template = ChatTemplate::new(self.tokenizer()?).map_err(value_error)?;
        let ids = template.render_within(&conversation, &options, limit).map_err(value_error)?;
        Ok((ids, effort.thinks()))
    }

    /// Text of token ids.
    fn decode(&self, token_ids: Vec<u32>) -> PyResult<String> {
        Ok(decode(self.tokenizer()?, &token_ids))
    }

    /// Counters since the start.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let m = self.engine.metrics();
        let used = m.drafted.iter().rposition(|c| c.get() > 0).map_or(0, |last| last + 1);
        let counts = |c: &[Counter]| -> Vec<u64> { c[..used].iter().map(Counter::get).collect() };
        let dict = PyDict::new(py);
        dict.set_item("prompt_tokens", m.prompt_tokens.get())?;
        dict.set_item("cached_tokens", m.cached_tokens.get())?;
        dict.set_item("output_tokens", m.output_tokens.get())?;
        dict.set_item("drafted_tokens", counts(&m.drafted))?;
        dict.set_item("verified_tokens", counts(&m.verified))?;
        dict.set_item("accepted_tokens", counts(&m.accepted))?;
        Ok(dict)
    }

    /// Runs requests: for each, its `n` continuations. All are checked before any is run. With
    /// `thinks`, thinking comes before the answer. The interpreter is free meanwhile, but for signals
    /// and `progress(done, total, tokens)`.
    fn generate(
        &self,
        py: Python<'_>,
        requests: Vec<(Vec<u32>, Params)>,
        thinks: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Vec<Completion>>> {
        // A form holds for the answer: it begins after the thinking unless told otherwise.
        let end = || self.tokenizer()?.require_special(chat::THINKING_END).map_err(value_error);
        let end = thinks.then(end).transpose()?;
        let mut checked = Vec::with_capacity(requests.len());
        let mut counts = Vec::with_capacity(requests.len());
        for (i, (prompt, params)) in requests.into_iter().enumerate() {
            let at = |e: &dyn std::fmt::Display| PyValueError::new_err(format!("prompt {i}: {e}"));
            let params = params.sampling(end).map_err(|e| at(&e))?;
            params.check(&prompt, self.engine.bounds()).map_err(|e| at(&params::message(&e)))?;
            if let Some(constraint) = &params.constraint {
                let check = || self.engine.check_grammar(&constraint.grammar);
                py.detach(check).map_err(|e| at(&e))?;
            }
            counts.push(params.n);
            checked.push(Request::tokens(prompt, params));
        }
        let mut results = py.detach(|| self.run(checked, progress.as_ref()))?.into_iter();
        let each =
            |count| results.by_ref().take(count).map(|r| self.completion(r, thinks)).collect();
        counts.into_iter().map(each).collect()
    }
}

impl Engine {
    fn tokenizer(&self) -> PyResult<&Tokenizer> {
        let tokenizer = self.engine.tokenizer();
        tokenizer.map(|t| &**t).ok_or_else(|| PyRuntimeError::new_err("there is no tokenizer"))
    }

    /// Runs requests until they have ended, or a signal or `progress` says stop.
    fn run(
        &self,
        requests: Vec<Request>,
        progress: Option<&Py<PyAny>>,
    ) -> PyResult<Vec<Result<deepinfer::request::Completion, RequestError>>> {
        let mut stopped = None;
        let (mut looked, mut told) = (Instant::now(), None::<Instant>);
        let results = self.engine.generate_while(requests, |now: Progress| {
            let ended = now.done == now.total;
            let tell = progress.filter(|_| ended || told.is_none_or(|t| t.elapsed() > PROGRESS));
            if tell.is_none() && looked.elapsed() < SIGNALS {
                return true;
            }
            looked = Instant::now();
            let result = Python::attach(|py| {
                py.check_signals()?;
                if let Some(progress) = tell {
                    told = Some(Instant::now());
                    progress.call1(py, (now.done, now.total, now.tokens))?;
                }
                Ok(())
            });
            stopped = result.err();
            stopped.is_none()
        });
        match (stopped, results) {
            (Some(error), _) => Err(error),
            (None, Some(results)) => Ok(results),
            (None, None) => Err(PyRuntimeError::new_err("the requests were given up")),
        }
    }

    fn completion(
        &self,
        result: Result<deepinfer::request::Completion, RequestError>,
        thinks: bool,
    ) -> PyResult<Completion> {
        let found = match result {
            Ok(found) => found,
            Err(error) => {
                let error = Some(params::message(&error));
                return Ok(Completion { finish_reason: "error", error, ..Completion::default() });
            }
        };
        let ids = found.ids();
        let (reasoning, text) = match thinks {
            true => {
                let (thinking, answer) = chat::split_thinking(self.tokenizer()?, &ids, &found.text);
                (Some(thinking), answer)
            }
            false => (None, found.text),
        };
        let logprobs = found.tokens.iter().map(|t| t.logprobs.as_ref().map(logprobs_of)).collect();
        let prompt: Vec<Logprobs> = found.prompt_logprobs.iter().map(logprobs_of).collect();
        Ok(Completion {
            text,
            reasoning,
            token_ids: ids,
            logprobs,
            prompt_logprobs: (!prompt.is_empty()).then_some(prompt),
            finish_reason: match found.reason {
                Some(FinishReason::Stop) => "stop",
                Some(FinishReason::Length) => "length",
                Some(FinishReason::Aborted) | None => "abort",
            },
            error: None,
            seed: found.usage.seed,
            cached_tokens: found.usage.cached_tokens,
            drafted_tokens: found.usage.drafted,
            verified_tokens: found.usage.verified,
            accepted_tokens: found.usage.accepted,
        })
    }
}

impl EngineSettings {
    fn config(&self) -> PyResult<EngineConfig> {
        let d = EngineConfig::default();
        Ok(EngineConfig {
            kv_tokens: self.kv_tokens.unwrap_or(d.kv_tokens),
            fill_memory: self.kv_tokens.is_none(),
            max_seqs: self.max_num_seqs,
            max_batch_tokens: self.max_num_batched_tokens,
            prefill_chunk: d.prefill_chunk.min(self.max_num_batched_tokens),
            draft: self.draft.parse().map_err(start_error)?,
            draft_scheme: self.draft_scheme.parse().map_err(start_error)?,
            prefill: self.prefill.parse().map_err(start_error)?,
            prefix_cache: self.prefix_cache.parse().map_err(start_error)?,
            cache_format: match self.kv_cache_dtype.as_str() {
                "released" => CacheFormat::Released,
                "exact" => CacheFormat::Exact,
                other => {
                    let reason = "kv_cache_dtype must be released or exact, not";
                    return Err(PyValueError::new_err(format!("{reason} {other:?}")));
                }
            },
            costs_dir: Settings::get().cache_dir.clone(),
            device: self.device.parse().map_err(value_error)?,
            threads: self.threads,
            ..d
        })
    }
}

fn logprobs_of(found: &TokenLogprobs) -> Logprobs {
    (found.token, found.logprob, found.top.clone())
}

/// Text of tokens, without special ones.
fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = Decoder::new(true);
    let mut text = String::new();
    ids.iter().for_each(|&id| decoder.push(tokenizer, id, &mut text));
    decoder.finish(&mut text);
    text
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A wrong setting, by the name that it has here.
fn named(error: &EngineError) -> String {
    let message = error.to_string();
    let own = match error.setting() {
        Some("max_seqs") => ("max_seqs", "max_num_seqs"),
        Some("max_batch_tokens") => ("max_batch_tokens", "max_num_batched_tokens"),
        Some("draft-scheme") => ("draft-scheme", "draft_scheme"),
        Some("prefix-cache") => ("prefix-cache", "prefix_cache"),
        _ => return message,
    };
    message.replacen(own.0, own.1, 1)
}

/// Settings are the caller's; files and devices are not.
fn start_error(error: EngineError) -> PyErr {
    match error {
        error if error.is_setting() => value_error(named(&error)),
        EngineError::DoesNotFit(error) => PyMemoryError::new_err(
            error.told("lower kv_tokens, max_num_seqs or max_num_batched_tokens"),
        ),
        _ => PyOSError::new_err(error.to_string()),
    }
}

/// The native module.
#[pymodule]
mod _deepinfer {
    #[pymodule_export]
    use super::{Completion, Engine};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
