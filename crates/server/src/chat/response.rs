//! Parsed answers in the shape of Chat Completions.

use crate::output::{End, Part};
use crate::run::Accounts;
use crate::usage;
use deepseek_recipe::stream::{FinishReason, OutputChunk, TokenLogprob};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What is the same in every chunk of a response.
#[derive(Clone, Debug)]
pub struct Head {
    /// Of the response.
    pub id: String,
    /// When it began, in seconds since 1970.
    pub created: u64,
    /// The name that the request called the model by.
    pub model: String,
    /// Of the engine.
    pub fingerprint: Option<String>,
    /// Whether chunks say that there is no usage yet.
    pub include_usage: bool,
}

impl Head {
    fn object(&self, kind: &str) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        })
    }

    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Value) -> Value {
        let mut chunk = self.object("chat.completion.chunk");
        chunk["choices"] = json!([
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        ]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The last chunk of a stream that was asked for its usage.
    pub fn usage_chunk(&self, all: &[Accounts], thinks: bool) -> Value {
        let mut chunk = self.object("chat.completion.chunk");
        chunk["choices"] = json!([]);
        chunk["usage"] = usage::openai(all, thinks);
        chunk
    }

    /// The response as a whole.
    pub fn response(&self, choices: &[Choice], thinks: bool) -> Value {
        let mut response = self.object("chat.completion");
        let all: Vec<Accounts> =
            choices.iter().filter_map(|c| c.end.as_ref()).map(|end| end.accounts.clone()).collect();
        response["choices"] =
            choices.iter().enumerate().map(|(i, choice)| choice.object(i)).collect();
        response["usage"] = usage::openai(&all, thinks);
        response
    }
}

/// One answer while it grows: gives chunks, and is the whole at the end.
#[derive(Debug, Default)]
pub struct Choice {
    content: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Call>,
    logprobs: Vec<Value>,
    reasoning_logprobs: Vec<Value>,
    with_logprobs: bool,
    last_logprobs: Option<Arc<[TokenLogprob]>>,
    /// How it ended.
    pub end: Option<End>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

impl Choice {
    /// An empty answer.
    pub fn new(with_logprobs: bool) -> Self {
        Self { with_logprobs, ..Self::default() }
    }

    /// Takes a part; returns the chunk that says the same, if it says anything.
    pub fn push(&mut self, head: &Head, index: usize, part: Part) -> Option<Value> {
        let plain = |delta: Value| Some(head.chunk(index, delta, Value::Null, Value::Null));
        match part {
            Part::Chunk(OutputChunk::Start { .. }) => {
                plain(json!({"role": "assistant", "content": ""}))
            }
            Part::Chunk(OutputChunk::Content { content, logprobs }) => {
                let entries = self.entries(logprobs);
                self.logprobs.extend(entries.iter().cloned());
                self.content.get_or_insert_default().push_str(&content);
                let logprobs = self.report(&entries, &[]);
                Some(head.chunk(index, json!({"content": content}), logprobs, Value::Null))
            }
            Part::Chunk(OutputChunk::Reasoning { content, logprobs }) => {
                let entries = self.entries(logprobs);
                self.reasoning_logprobs.extend(entries.iter().cloned());
                self.reasoning.get_or_insert_default().push_str(&content);
                let logprobs = self.report(&[], &entries);
                let delta = json!({"reasoning_content": content});
                Some(head.chunk(index, delta, logprobs, Value::Null))
            }
            Part::Chunk(OutputChunk::ToolCallNamed { tool_name }) => {
                let id = crate::app::new_id("call_");
                let place = self.calls.len();
                let call = Call { id, name: tool_name, arguments: String::new() };
                let mut delta = call.object();
                delta["index"] = json!(place);
                self.calls.push(call);
                plain(json!({"tool_calls": [delta]}))
            }
            Part::Chunk(OutputChunk::ToolCallArgumentsDelta { arguments }) => {
                let place = self.calls.len().checked_sub(1)?;
                self.calls[place].arguments.push_str(&arguments);
                let function = json!({"arguments": arguments});
                plain(json!({"tool_calls": [{"index": place, "function": function}]}))
            }
            Part::Chunk(OutputChunk::ToolCallBegin | OutputChunk::Finish { .. }) => None,
            Part::End(end) => {
                let reason = json!(finish_reason(end.reason));
                self.end = Some(end);
                Some(head.chunk(index, json!({}), Value::Null, reason))
            }
        }
    }

    /// Log-probabilities of one piece of text. A text that was cut into several pieces carries
    /// those of all its tokens in each; only the first is taken.
    fn entries(&mut self, logprobs: Option<Arc<[TokenLogprob]>>) -> Vec<Value> {
        let Some(logprobs) = logprobs.filter(|_| self.with_logprobs) else { return Vec::new() };
        if self.last_logprobs.as_ref().is_some_and(|last| Arc::ptr_eq(last, &logprobs)) {
            return Vec::new();
        }
        let entries = logprobs.iter().map(entry).collect();
        self.last_logprobs = Some(logprobs);
        entries
    }

    fn report(&self, content: &[Value], reasoning: &[Value]) -> Value {
        match self.with_logprobs {
            true => json!({"content": content, "reasoning_content": reasoning, "refusal": null}),
            false => Value::Null,
        }
    }

    fn object(&self, index: usize) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        // An answer without text is null beside calls, and empty text otherwise.
        let content = match (&self.content, self.calls.is_empty()) {
            (None, false) => Value::Null,
            (content, _) => json!(content.as_deref().unwrap_or_default()),
        };
        message.insert("content".into(), content);
        message.insert("refusal".into(), Value::Null);
        if let Some(reasoning) = &self.reasoning {
            message.insert("reasoning_content".into(), json!(reasoning));
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".into(), self.calls.iter().map(Call::object).collect());
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.report(&self.logprobs, &self.reasoning_logprobs),
            "finish_reason": self.end.as_ref().map(|end| finish_reason(end.reason)),
        })
    }
}

impl Call {
    fn object(&self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::ContentFilter => "content_filter",
        FinishReason::Stop | FinishReason::StopSequence | FinishReason::EndOfStream => "stop",
    }
}

fn entry(logprob: &TokenLogprob) -> Value {
    let top: Vec<Value> = logprob
        .top_logprobs
        .iter()
        .map(|top| json!({"token": top.token, "logprob": top.logprob, "bytes": top.bytes}))
        .collect();
    json!({
        "token": logprob.token,
        "logprob": logprob.logprob,
        "bytes": logprob.bytes,
        "top_logprobs": top,
    })
}
