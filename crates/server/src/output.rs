//! Tokens to reasoning, answer and tool calls: DeepSeek's own streaming parser, with what it trusts
//! the model for checked here.

use crate::error::ApiError;
use crate::repair::Arguments;
use crate::replay::{Marks, Memory, Said};
use crate::run::{Accounts, Run, Step};
use async_stream::stream;
use deepinfer::request::{FinishReason as EngineReason, Token};
use deepinfer::tokenizer::Tokenizer;
use deepseek_recipe::stream::{
    ChunkGenerator, CompletionUsage, FinishReason, InferenceChunk, InferenceFinishReason,
    InferenceTokenLogprob, OutputChunk, ParsingOptions, PromptUsage, StreamProcessor,
    StreamTokenizer,
};
use deepseek_recipe_core::special_tokens::SpecialToken;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_stream::{Stream, StreamExt};

/// A part of a parsed answer.
#[derive(Debug)]
pub enum Part {
    /// A chunk; [`OutputChunk::Finish`] never comes so.
    Chunk(OutputChunk),
    /// The end; nothing follows.
    End(End),
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Why.
    pub reason: FinishReason,
    /// The stop text that ended it.
    pub stop: Option<String>,
    /// Accounts.
    pub accounts: Accounts,
    /// The tokens, if the answer is whole: what ended it was produced by the model.
    pub tokens: Option<Vec<u32>>,
    /// Whether the model ended its turn before it ended its thinking.
    pub ended_in_thinking: bool,
}

impl End {
    /// The chunk that a protocol's generator takes.
    pub fn chunk(&self) -> OutputChunk {
        OutputChunk::Finish {
            finish_reason: self.reason,
            stop_sequence: self.stop.clone(),
            completion_usage: CompletionUsage {
                completion_tokens: self.accounts.output_tokens,
                reasoning_tokens: Some(self.accounts.reasoning_tokens),
            },
        }
    }
}

/// How to read an answer.
#[derive(Clone, Debug)]
pub struct Reading {
    /// For the parser.
    pub parsing: ParsingOptions,
    /// End after the first tool call.
    pub one_call: bool,
    /// Where the answer's tokens are kept.
    pub remember: Option<Remember>,
}

/// Where the tokens of answers are kept.
#[derive(Clone)]
pub struct Remember {
    /// There.
    pub memory: Arc<Memory>,
    /// Who gets them back.
    pub scope: String,
    /// What encloses them.
    pub marks: Marks,
}

impl std::fmt::Debug for Remember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remember").field("marks", &self.marks).finish_non_exhaustive()
    }
}

/// Parses the answer of `run`.
pub fn parse(
    mut run: Run,
    reading: Reading,
    markup: Markup,
) -> impl Stream<Item = Result<Part, ApiError>> + Send {
    let markup = markup.with_calls(reading.parsing.parse_tool_calls);
    let thinks = reading.parsing.thinking_initial_stage.is_some_and(|s| s.starts_in_reasoning());
    let shared = Arc::new(Mutex::new(Shared { thinking: thinks, ..Shared::default() }));
    let writer = shared.clone();
    let complete = run.complete();
    let remember = reading.remember;
    let prompt = remember.as_ref().map(|_| run.job().prompt.clone()).unwrap_or_default();
    let source_markup = markup.clone();
    let inference = stream! {
        while let Some(step) = run.next().await {
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    lock(&writer).error = Some(error);
                    return;
                }
            };
            match step {
                Step::Ready { .. } => {
                    let accounts = run.accounts();
                    lock(&writer).accounts = accounts.clone();
                    yield InferenceChunk::Ready {
                        system_fingerprint: None,
                        prompt_usage: PromptUsage {
                            prompt_tokens: accounts.prompt_tokens,
                            prompt_cache_hit_tokens: accounts.cached_tokens,
                        },
                    };
                }
                Step::Tokens { tokens, .. } => {
                    let thought = lock(&writer).take(&tokens, run.accounts(), &source_markup);
                    run.thought(thought);
                    let ends = &run.job().params.stop_tokens;
                    if let Some(chunk) = source_markup.chunk(tokens, ends) {
                        yield chunk;
                    }
                }
                Step::End(reason) => {
                    {
                        let mut shared = lock(&writer);
                        let reasoning_tokens = shared.accounts.reasoning_tokens;
                        shared.accounts = Accounts { reasoning_tokens, ..run.accounts().clone() };
                        shared.whole = reason == EngineReason::Stop;
                    }
                    let finish_reason = match reason {
                        EngineReason::Length => InferenceFinishReason::Length,
                        EngineReason::Stop | EngineReason::Aborted => InferenceFinishReason::Stop,
                    };
                    yield InferenceChunk::Finish { finish_reason };
                }
            }
        }
    };
    let processor =
        StreamProcessor::new(Passthrough, reading.parsing).with_tokenizer(markup.clone());
    stream! {
        let mut chunks = pin!(processor.into_protocol_stream(inference));
        let mut calls = Calls::default();
        let mut said = Said::default();
        let mut answered = false;
        while let Some(chunk) = chunks.next().await {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(error) => {
                    yield Err(ApiError::internal(error));
                    return;
                }
            };
            let (mut reason, stop) = match chunk {
                OutputChunk::Finish { finish_reason, stop_sequence, .. } => {
                    (finish_reason, stop_sequence)
                }
                OutputChunk::ToolCallBegin if reading.one_call && calls.count > 0 => {
                    (FinishReason::ToolCalls, None)
                }
                other => {
                    answered |= matches!(&other, OutputChunk::Content { content, .. } if !content.trim().is_empty());
                    for chunk in calls.push(other) {
                        note(&mut said, &chunk);
                        yield Ok(Part::Chunk(chunk));
                    }
                    continue;
                }
            };
            let (error, mut end) = {
                let mut shared = lock(&shared);
                (shared.error.take(), shared.end(stop))
            };
            if let Some(error) = error {
                yield Err(error);
                return;
            }
            // Arguments that the length limit cut stay cut; the model's own end closes them.
            if reason != FinishReason::Length
                && let Some(chunk) = calls.close()
            {
                note(&mut said, &chunk);
                yield Ok(Part::Chunk(chunk));
            }
            if calls.count > 0 && reason == FinishReason::Stop {
                reason = FinishReason::ToolCalls;
            } else if calls.count == 0 && reason == FinishReason::ToolCalls {
                reason = FinishReason::Stop;
            }
            // Markup that no call came out of is shown as text, rather than an empty answer.
            let opened = lock(&shared).markup;
            if opened && calls.count == 0 && !answered {
                let content = markup.plain_answer(&lock(&shared).tokens);
                if !content.trim().is_empty() {
                    yield Ok(Part::Chunk(OutputChunk::Content { content, logprobs: None }));
                }
            }
            end.reason = reason;
            complete.store(true, Ordering::Relaxed);
            if let (Some(remember), Some(tokens)) = (&remember, end.tokens.take())
                && tokens.last() == Some(&remember.marks.end)
            {
                remember.memory.keep(&remember.scope, &prompt, tokens, said);
            }
            yield Ok(Part::End(end));
            return;
        }
    }
}

/// Adds a chunk to what the answer says.
fn note(said: &mut Said, chunk: &OutputChunk) {
    match chunk {
        OutputChunk::Content { content, .. } => said.content.push_str(content),
        OutputChunk::Reasoning { content, .. } => said.reasoning.push_str(content),
        OutputChunk::ToolCallNamed { tool_name } => {
            said.calls.push((tool_name.clone(), String::new()));
        }
        OutputChunk::ToolCallArgumentsDelta { arguments } => {
            if let Some((_, whole)) = said.calls.last_mut() {
                whole.push_str(arguments);
            }
        }
        _ => {}
    }
}

struct Passthrough;

impl ChunkGenerator for Passthrough {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// What the reader of events tells the reader of chunks.
#[derive(Default)]
struct Shared {
    accounts: Accounts,
    tokens: Vec<u32>,
    thinking: bool,
    markup: bool,
    whole: bool,
    error: Option<ApiError>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Returns how many tokens of thinking there are.
    fn take(&mut self, tokens: &[Token], accounts: &Accounts, markup: &Markup) -> usize {
        let mut reasoning_tokens = self.accounts.reasoning_tokens;
        for token in tokens {
            self.markup |= Some(token.id) == markup.dsml;
            self.thinking &= Some(token.id) != markup.think_end && Some(token.id) != markup.dsml;
            reasoning_tokens += usize::from(self.thinking && Some(token.id) != markup.eos);
            self.tokens.push(token.id);
        }
        self.accounts = Accounts { reasoning_tokens, ..accounts.clone() };
        reasoning_tokens
    }

    fn end(&self, stop: Option<String>) -> End {
        End {
            reason: FinishReason::Stop,
            tokens: (self.whole && stop.is_none()).then(|| self.tokens.clone()),
            stop,
            accounts: self.accounts.clone(),
            ended_in_thinking: self.thinking && self.whole,
        }
    }
}

/// The calls of an answer, with valid arguments.
#[derive(Default)]
struct Calls {
    count: usize,
    open: Option<Arguments>,
}

impl Calls {
    fn push(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        match chunk {
            OutputChunk::ToolCallBegin => {
                self.close().into_iter().chain([OutputChunk::ToolCallBegin]).collect()
            }
            OutputChunk::ToolCallNamed { tool_name } => {
                self.count += 1;
                self.open = Some(Arguments::default());
                vec![OutputChunk::ToolCallNamed { tool_name }]
            }
            OutputChunk::ToolCallArgumentsDelta { arguments } => {
                let grown = self.open.as_mut().map(|open| open.push(&arguments));
                let delta = |arguments| OutputChunk::ToolCallArgumentsDelta { arguments };
                grown.filter(|text| !text.is_empty()).map(delta).into_iter().collect()
            }
            other => vec![other],
        }
    }

    fn close(&mut self) -> Option<OutputChunk> {
        let arguments = self.open.take()?.finish();
        (!arguments.is_empty()).then_some(OutputChunk::ToolCallArgumentsDelta { arguments })
    }
}

/// The tokenizer as the parser sees it: every token of the added vocabulary is a piece of its own,
/// and those that are neither markup nor part of an answer leave no text. Made once, cheap to clone.
#[derive(Clone)]
pub struct Markup {
    tokenizer: Arc<Tokenizer>,
    think_end: Option<u32>,
    dsml: Option<u32>,
    eos: Option<u32>,
    kinds: Arc<[Kind]>,
    calls: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Added,
    Hidden,
}

impl Markup {
    /// The tokens of `tokenizer`.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let id = |token: SpecialToken| tokenizer.special_id(token.default_str());
        let mut kinds: Vec<Kind> = (0..tokenizer.vocab_size() as u32)
            .map(|id| match tokenizer.spelling(id) {
                _ if tokenizer.is_special(id) => Kind::Hidden,
                Some(spelling) if tokenizer.special_id(spelling) == Some(id) => Kind::Added,
                _ => Kind::Plain,
            })
            .collect();
        let template = [
            SpecialToken::Bos,
            SpecialToken::Eos,
            SpecialToken::ThinkingStart,
            SpecialToken::System,
            SpecialToken::User,
            SpecialToken::Assistant,
            SpecialToken::LatestReminder,
            SpecialToken::Image,
        ];
        let answer = [
            SpecialToken::ThinkingEnd,
            SpecialToken::Dsml,
            SpecialToken::Ref,
            SpecialToken::RefEnd,
            SpecialToken::Box,
            SpecialToken::BoxEnd,
            SpecialToken::Point,
            SpecialToken::PointEnd,
            SpecialToken::Polygon,
            SpecialToken::PolygonEnd,
        ];
        template.into_iter().filter_map(id).for_each(|id| kinds[id as usize] = Kind::Hidden);
        answer.into_iter().filter_map(id).for_each(|id| kinds[id as usize] = Kind::Added);
        Self {
            think_end: id(SpecialToken::ThinkingEnd),
            dsml: id(SpecialToken::Dsml),
            eos: tokenizer.eos(),
            kinds: kinds.into(),
            calls: true,
            tokenizer,
        }
    }

    /// The token that ends thinking.
    pub fn think_end(&self) -> Option<u32> {
        self.think_end
    }

    /// The same, with or without the markup of tool calls.
    pub fn with_calls(mut self, calls: bool) -> Self {
        self.calls = calls;
        self
    }

    fn hidden(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Hidden) || (!self.calls && Some(id) == self.dsml)
    }

    /// The parser's chunk of `tokens`, without those that leave no text.
    fn chunk(&self, tokens: Vec<Token>, ends: &[u32]) -> Option<InferenceChunk> {
        let shown = |token: &Token| !self.hidden(token.id) && !ends.contains(&token.id);
        let tokens: Vec<Token> = tokens.into_iter().filter(shown).collect();
        if tokens.is_empty() {
            return None;
        }
        let token_ids = tokens.iter().map(|token| token.id).collect();
        let entry = |token: Token| {
            let logprobs = token.logprobs?;
            Some(InferenceTokenLogprob { logprob: logprobs.logprob, top_logprobs: logprobs.top })
        };
        let logprobs = tokens.into_iter().map(entry).collect();
        Some(InferenceChunk::Tokens { token_ids, logprobs })
    }

    /// The text after thinking, without special tokens.
    fn plain_answer(&self, tokens: &[u32]) -> String {
        let start =
            tokens.iter().rposition(|&id| Some(id) == self.think_end).map_or(0, |at| at + 1);
        let plain: Vec<u32> =
            tokens[start..].iter().copied().filter(|&id| !self.is_special_token(id)).collect();
        self.tokenizer.decode(&plain)
    }
}

impl StreamTokenizer for Markup {
    fn decode_ids(&self, ids: &[u32], _skip_special_tokens: bool) -> Result<String, String> {
        Ok(self.tokenizer.decode(ids))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokenizer.spelling(id).map(str::to_owned)
    }

    fn is_special_token(&self, id: u32) -> bool {
        self.kinds.get(id as usize).is_some_and(|&kind| kind != Kind::Plain)
    }
}
