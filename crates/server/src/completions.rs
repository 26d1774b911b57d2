//! `/v1/completions`: text goes on, without a conversation and without a parser.

use crate::app::{App, Call, new_id, unix_time};
use crate::chat::{blocking, take_stream_options};
use crate::error::{ApiError, Shape};
use crate::fields::Fields;
use crate::form;
use crate::inference::Info;
use crate::run::{Accounts, Job, Run, Step};
use crate::sampling;
use crate::sse;
use crate::turn;
use crate::usage;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, State};
use axum::http::Response;
use deepinfer::request::{FinishReason, SamplingParams, Token, TokenLogprobs, check_text};
use deepinfer::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::pin::Pin;
use std::sync::Arc;
use tokio_stream::{Stream, StreamExt, StreamMap};

/// Most prompts times answers of one request.
const MOST_CHOICES: usize = 128;

#[derive(Debug)]
struct Completions {
    model: String,
    prompts: Vec<Vec<u32>>,
    params: SamplingParams,
    echo: bool,
    stream: bool,
    include_usage: bool,
    cache_salt: Option<String>,
    priority: i32,
}

impl Completions {
    fn read(app: &App, body: &[u8]) -> Result<Self, ApiError> {
        let tokenizer = &app.info().tokenizer;
        let mut fields = Fields::of_body(body)?;
        let model: String = fields.require("model")?;
        app.check_model(&model)?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let include_usage = take_stream_options(&mut fields, stream)?;
        let n = sampling::take_n(&mut fields, MOST_CHOICES)?;
        if fields.take::<usize>("best_of")?.is_some_and(|best| best != n) {
            return Err(fields.invalid("best_of", "answers are not ranked; it must equal n"));
        }
        let echo = fields.take("echo")?.unwrap_or(false);
        let mut params = sampling::take(&mut fields, tokenizer)?;
        params.n = n;
        params.max_tokens = Some(sampling::take_limit(&mut fields, &["max_tokens"])?.unwrap_or(16));
        params.stop = sampling::take_stop(&mut fields, "stop")?;
        params.logprobs = fields.take("logprobs")?;
        if let Some(n) = params.logprobs.filter(|&n| n > 20) {
            return Err(fields.invalid("logprobs", format!("{n} is above 20")));
        }
        params.prompt_logprobs = params.logprobs.filter(|_| echo);
        let (cache_salt, priority) = turn::take_extensions(&mut fields)?;
        let scan = fields.take("parse_special")?.unwrap_or(false);
        let bos = fields.take("add_special_tokens")?.unwrap_or(true);
        let prompts = match fields.value("prompt") {
            Some(prompt) => read_prompts(&fields, prompt, app.info(), scan, bos)?,
            None => return Err(fields.invalid("prompt", "this field is required")),
        };
        if prompts.len().saturating_mul(n) > MOST_CHOICES {
            let message = format!("{} prompts times n {n} exceed {MOST_CHOICES}", prompts.len());
            return Err(fields.invalid("prompt", message));
        }
        sampling::discard_labels(&mut fields);
        sampling::take_service_tier(&mut fields)?;
        fields.refuse(&["suffix"], "text is continued only")?;
        let format = form::take_format(&mut fields, "response_format")?;
        let form = form::take_form(&mut fields, "response_format", format)?;
        fields.finish()?;
        if let Some(form) = form {
            params.constraint = Some(form.constraint(app, None)?);
        }
        Ok(Self { model, prompts, params, echo, stream, include_usage, cache_salt, priority })
    }
}

fn read_prompts(
    fields: &Fields,
    prompt: Value,
    info: &Info,
    scan: bool,
    bos: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let expected = "a text, a list of texts, a list of token ids, or a list of such lists";
    let wrong = || fields.invalid("prompt", format!("it must be {expected}"));
    let tokenizer = &info.tokenizer;
    let encode = |text: &str| {
        check_text(tokenizer, text, info.max_tokens)?;
        let ids = match scan {
            true => tokenizer.encode_scanning_specials(text),
            false => tokenizer.encode(text),
        };
        let start = tokenizer.bos().filter(|_| bos);
        let ids = ids.map_err(|error| fields.invalid("prompt", error))?;
        Ok(start.filter(|start| ids.first() != Some(start)).into_iter().chain(ids).collect())
    };
    let ids = |list: &[Value]| -> Option<Vec<u32>> {
        list.iter().map(|id| id.as_u64().and_then(|id| id.try_into().ok())).collect()
    };
    match prompt {
        Value::String(text) => Ok(vec![encode(&text)?]),
        Value::Array(list) if list.is_empty() => Err(fields.invalid("prompt", "the list is empty")),
        Value::Array(list) if list[0].is_number() => Ok(vec![ids(&list).ok_or_else(wrong)?]),
        Value::Array(list) => list
            .iter()
            .map(|item| match item {
                Value::String(text) => encode(text),
                Value::Array(list) => ids(list).ok_or_else(wrong),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

/// One part of one answer.
struct Part {
    text: String,
    logprobs: Option<Value>,
    end: Option<(FinishReason, Accounts)>,
}

/// Parts of an answer. With `echo`, the first one is the prompt.
fn parts(
    mut run: Run,
    tokenizer: Arc<Tokenizer>,
    echo: bool,
) -> impl Stream<Item = Result<Part, ApiError>> + Send {
    async_stream::stream! {
        let with_logprobs = run.job().params.logprobs.is_some();
        // Where the next token's text starts in the whole, in characters.
        let mut offset = 0;
        while let Some(step) = run.next().await {
            let mut part = Part { text: String::new(), logprobs: None, end: None };
            match step {
                Ok(Step::Ready { prompt_logprobs }) if echo => {
                    let prompt = &run.job().prompt;
                    // Its first token has no probability.
                    let mut tokens = vec![Token { id: prompt[0], logprobs: None }];
                    let rest = prompt_logprobs.into_iter().zip(&prompt[1..]);
                    tokens.extend(rest.map(|(l, &id)| Token { id, logprobs: Some(l) }));
                    part.logprobs =
                        with_logprobs.then(|| logprobs(&tokens, &tokenizer, &mut offset));
                    part.text = plain(prompt, &tokenizer);
                }
                Ok(Step::Ready { .. }) => continue,
                Ok(Step::Tokens { tokens, text }) => {
                    part.logprobs =
                        with_logprobs.then(|| logprobs(&tokens, &tokenizer, &mut offset));
                    part.text = text;
                }
                Ok(Step::End(reason)) => part.end = Some((reason, run.accounts().clone())),
                Err(error) => {
                    yield Err(error);
                    return;
                }
            }
            yield Ok(part);
        }
    }
}

fn plain(ids: &[u32], tokenizer: &Tokenizer) -> String {
    let shown: Vec<u32> = ids.iter().copied().filter(|&id| !tokenizer.is_special(id)).collect();
    tokenizer.decode(&shown)
}

/// Log-probabilities in the shape of this protocol.
fn logprobs(tokens: &[Token], tokenizer: &Tokenizer, offset: &mut usize) -> Value {
    let text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(*offset);
        // Special tokens have a name but leave no text.
        let shown = !tokenizer.is_special(token.id);
        *offset += if shown { text(token.id).chars().count() } else { 0 };
    }
    let top = |logprobs: &TokenLogprobs| -> Value {
        let entry = |&(id, logprob): &(u32, f32)| (text(id), json!(logprob));
        logprobs.top.iter().map(entry).collect::<Map<_, _>>().into()
    };
    json!({
        "tokens": tokens.iter().map(|token| text(token.id)).collect::<Vec<_>>(),
        "token_logprobs":
            tokens.iter().map(|t| t.logprobs.as_ref().map(|l| l.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(|t| t.logprobs.as_ref().map(top)).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

fn extend_logprobs(whole: &mut Option<Value>, more: Option<Value>) {
    match (whole.as_mut(), more) {
        (Some(Value::Object(whole)), Some(Value::Object(more))) => {
            for (name, list) in more {
                if let (Some(Value::Array(whole)), Value::Array(list)) =
                    (whole.get_mut(&name), list)
                {
                    whole.extend(list);
                }
            }
        }
        (None, more) => *whole = more,
        _ => {}
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::Aborted => "stop",
    }
}

/// Usage over several prompts, each answered `n` times.
fn usage_of(accounts: &[Accounts], n: usize) -> Value {
    let mut usage = usage::openai(accounts, false);
    let first_of_each = || accounts.iter().step_by(n.max(1));
    let prompt: usize = first_of_each().map(|a| a.prompt_tokens).sum();
    let cached: usize = first_of_each().map(|a| a.cached_tokens).sum();
    let output: usize = accounts.iter().map(|a| a.output_tokens).sum();
    if usage.is_object() {
        usage["prompt_tokens"] = json!(prompt);
        usage["total_tokens"] = json!(prompt + output);
        usage["prompt_tokens_details"]["cached_tokens"] = json!(cached);
        usage["prompt_cache_hit_tokens"] = json!(cached);
        usage["prompt_cache_miss_tokens"] = json!(prompt.saturating_sub(cached));
    }
    usage
}

/// Answers a request.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    let ticket = app.ticket(&call)?;
    let reader = app.clone();
    let request = blocking(move || Completions::read(&reader, &body)).await?;
    let head = json!({
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": unix_time(),
        "model": request.model,
        "system_fingerprint": app.info().fingerprint,
    });
    let n = request.params.n;
    let count = request.prompts.len() * n;
    type Parts = Pin<Box<dyn Stream<Item = Result<Part, ApiError>> + Send>>;
    let mut streams: StreamMap<usize, Parts> = StreamMap::new();
    for (i, prompt) in request.prompts.into_iter().enumerate() {
        let job = Job {
            prompt,
            params: request.params.clone(),
            cache_salt: request.cache_salt.clone(),
            priority: request.priority,
        };
        let runs = app.start_all("completions", &call, job, &ticket)?;
        for (index, run) in runs.into_iter().enumerate() {
            let parts = parts(run, app.info().tokenizer.clone(), request.echo);
            streams.insert(i * n + index, Box::pin(parts));
        }
    }
    let mut accounts = vec![Accounts::default(); count];
    if !request.stream {
        let mut choices: Vec<(String, Option<Value>, Option<FinishReason>)> =
            vec![(String::new(), None, None); count];
        while let Some((index, part)) = streams.next().await {
            let part = part?;
            let choice = &mut choices[index];
            choice.0.push_str(&part.text);
            extend_logprobs(&mut choice.1, part.logprobs);
            if let Some((reason, ended)) = part.end {
                choice.2 = Some(reason);
                accounts[index] = ended;
            }
        }
        let choice = |(index, (text, logprobs, reason)): (usize, (_, _, Option<FinishReason>))| {
            json!({
                "index": index,
                "text": text as String,
                "logprobs": logprobs as Option<Value>,
                "finish_reason": reason.map(finish_reason),
            })
        };
        let mut response = head;
        response["choices"] = choices.into_iter().enumerate().map(choice).collect();
        response["usage"] = usage_of(&accounts, n);
        return Ok(sse::json(&response));
    }
    let include_usage = request.include_usage;
    let silence = app.silence(&call, &ticket);
    let events = async_stream::stream! {
        let _ticket = ticket;
        while let Some((index, part)) = streams.next().await {
            let part = match part {
                Ok(part) => part,
                Err(error) => {
                    yield sse::event(None, &error.body(Shape::OpenAi));
                    yield sse::DONE;
                    return;
                }
            };
            if part.text.is_empty() && part.logprobs.is_none() && part.end.is_none() {
                continue;
            }
            let reason = part.end.as_ref().map(|&(reason, _)| finish_reason(reason));
            let mut chunk = head.clone();
            chunk["choices"] = json!([{
                "index": index,
                "text": part.text,
                "logprobs": part.logprobs,
                "finish_reason": reason,
            }]);
            if include_usage {
                chunk["usage"] = Value::Null;
            }
            yield sse::event(None, &chunk);
            if let Some((_, ended)) = part.end {
                accounts[index] = ended;
            }
        }
        if include_usage {
            let mut chunk = head.clone();
            chunk["choices"] = json!([]);
            chunk["usage"] = usage_of(&accounts, n);
            yield sse::event(None, &chunk);
        }
        yield sse::DONE;
    };
    Ok(sse::response(events, silence))
}
