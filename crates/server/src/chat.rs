//! `/v1/chat/completions`.

mod request;
mod response;

pub use request::ChatRequest;
pub use request::take_stream_options;

use crate::app::{App, Call, new_id, unix_time};
use crate::error::{ApiError, Shape};
use crate::output::{self, Part};
use crate::sse;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, State};
use axum::http::Response;
use response::{Choice, Head};
use std::pin::Pin;
use std::sync::Arc;
use tokio_stream::{Stream, StreamExt, StreamMap};

type Parts = Pin<Box<dyn Stream<Item = Result<Part, ApiError>> + Send>>;

/// Answers a request.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    let ticket = app.ticket(&call)?;
    let reader = app.clone();
    let owner = call.owner();
    let request = blocking(move || ChatRequest::read(&reader, owner, &body)).await?;
    let head = Head {
        id: new_id("chatcmpl-"),
        created: unix_time(),
        model: request.model,
        fingerprint: app.info().fingerprint.clone(),
        include_usage: request.include_usage,
    };
    let turn = request.turn;
    let (n, thinks) = (turn.job.params.n, turn.thinks);
    let with_logprobs = turn.job.params.logprobs.is_some();
    let mut parts: StreamMap<usize, Parts> = StreamMap::new();
    for (index, run) in app.start_all("chat", &call, turn.job, &ticket)?.into_iter().enumerate() {
        let parsed = output::parse(run, turn.reading.clone(), app.markup.clone());
        parts.insert(index, Box::pin(parsed));
    }
    let mut choices: Vec<Choice> = (0..n).map(|_| Choice::new(with_logprobs)).collect();
    if !request.stream {
        while let Some((index, part)) = parts.next().await {
            let part = part?;
            count_end(&app, &part);
            choices[index].push(&head, index, part);
        }
        return Ok(sse::json(&head.response(&choices, thinks)));
    }
    let silence = app.silence(&call, &ticket);
    let events = async_stream::stream! {
        let _ticket = ticket;
        while let Some((index, part)) = parts.next().await {
            match part {
                Ok(part) => {
                    count_end(&app, &part);
                    if let Some(chunk) = choices[index].push(&head, index, part) {
                        yield sse::event(None, &chunk);
                    }
                }
                Err(error) => {
                    yield sse::event(None, &error.body(Shape::OpenAi));
                    yield sse::DONE;
                    return;
                }
            }
        }
        if head.include_usage {
            let ends = choices.iter().filter_map(|choice| choice.end.as_ref());
            let all: Vec<_> = ends.map(|end| end.accounts.clone()).collect();
            yield sse::event(None, &head.usage_chunk(&all, thinks));
        }
        yield sse::DONE;
    };
    Ok(sse::response(events, silence))
}

/// Counts what the end of an answer tells.
pub fn count_end(app: &App, part: &Part) {
    if let Part::End(end) = part
        && end.ended_in_thinking
    {
        app.metrics.ended_in_thinking();
    }
}

/// Runs work that takes a while: long texts are rendered and encoded off the threads that serve
/// connections.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(error)),
    }
}
