//! `/v1/responses`.

mod request;
pub mod store;

use crate::app::{App, Call, new_id, unix_time};
use crate::chat::{blocking, count_end};
use crate::error::ApiError;
use crate::load::Ended;
use crate::output::{self, Part};
use crate::sse;
use crate::status::{page, query};
use crate::usage;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, Path, State};
use axum::http::{Response, Uri};
use deepseek_recipe::openai::responses::response::{ResponsesResponse, ResponsesStreamEvent};
use deepseek_recipe::response::ProtocolResponse;
use deepseek_recipe::stream::ChunkGenerator;
use request::Request;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use store::Stored;
use tokio::sync::Notify;
use tokio_stream::{Stream, StreamExt};

type Events = Pin<Box<dyn Stream<Item = Result<(&'static str, Value), ApiError>> + Send>>;

/// `POST /v1/responses`.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    let ticket = app.ticket(&call)?;
    let owner = call.owner();
    let id = new_id("resp_");
    let (reader, reader_owner, reader_id) = (app.clone(), owner.clone(), id.clone());
    let request = blocking(move || {
        let find = |id: &str| reader.store.get(id, reader_owner.as_deref());
        Request::read(&reader, &reader_id, reader_owner.clone(), &body, false, find)
    })
    .await?;
    let run = app.start("responses", &call, request.turn.job, &ticket)?;
    let parts = output::parse(run, request.turn.reading, app.markup.clone());
    let keeper = Keeper {
        app: app.clone(),
        id,
        input: request.input,
        owner,
        keep: request.store,
        cancel: request.background.then(Arc::default),
    };
    let silence = app.silence(&call, &ticket);
    let accounts = ticket.ended();
    let mut generator = request.generator;
    let echo = request.echo;
    let counter = app.clone();
    let kept = keeper.clone();
    let mut events: Events = Box::pin(async_stream::stream! {
        let _ticket = ticket;
        let mut parts = std::pin::pin!(parts);
        while let Some(part) = parts.next().await {
            let part = match part {
                Ok(part) => part,
                Err(error) => {
                    yield Err(error);
                    return;
                }
            };
            count_end(&counter, &part);
            let (chunk, end) = match part {
                Part::Chunk(chunk) => (chunk, None),
                Part::End(end) => (end.chunk(), Some(end)),
            };
            for event in generator.generate(chunk).await {
                let name = ResponsesResponse::sse_event_name(&event).unwrap_or("message");
                let last = matches!(
                    event,
                    ResponsesStreamEvent::Completed { .. } | ResponsesStreamEvent::Incomplete { .. }
                );
                let mut value = serde_json::to_value(&event).unwrap_or_default();
                if let Some(response) = value.get_mut("response") {
                    repeat(response, &echo);
                    if let Some(end) = &end {
                        let accounts = std::slice::from_ref(&end.accounts);
                        response["usage"]["deepinfer"] = usage::extension(accounts);
                    }
                    if last {
                        kept.put(response.clone(), false);
                    }
                }
                yield Ok((name, value));
            }
        }
    });
    if request.background {
        return background(keeper, events, accounts).await;
    }
    if !request.stream {
        return Ok(sse::json(&last_response(&mut events).await?));
    }
    let bytes = async_stream::stream! {
        let mut last = (Value::Null, 0);
        while let Some(event) = events.next().await {
            match event {
                Ok((name, value)) => {
                    if let Some(response) = value.get("response") {
                        last.0 = response.clone();
                    }
                    last.1 = value["sequence_number"].as_u64().unwrap_or(last.1) + 1;
                    yield sse::event(Some(name), &value);
                }
                Err(error) => {
                    let (name, value) = failure(last.0, last.1, &error);
                    yield sse::event(Some(name), &value);
                    return;
                }
            }
        }
    };
    Ok(sse::response(bytes, silence))
}

/// Fields that repeat what was asked.
fn repeat(response: &mut Value, echo: &Map<String, Value>) {
    for (name, value) in echo {
        response[name.as_str()] = value.clone();
    }
}

async fn last_response(events: &mut Events) -> Result<Value, ApiError> {
    let mut response = Value::Null;
    while let Some(event) = events.next().await {
        let (_, mut value) = event?;
        if let Some(newer) = value.get_mut("response") {
            response = newer.take();
        }
    }
    match response.is_null() {
        true => Err(ApiError::internal("the answer has no end")),
        false => Ok(response),
    }
}

/// The event of a response that failed: with the response, if it had begun.
fn failure(response: Value, sequence: u64, error: &ApiError) -> (&'static str, Value) {
    let (code, message) = (error.code(), error.to_string());
    if response.is_null() {
        let event = json!({
            "type": "error", "code": code, "message": message, "param": null,
            "sequence_number": sequence,
        });
        return ("error", event);
    }
    let response = failed(response, code, &message);
    (
        "response.failed",
        json!({
            "type": "response.failed", "response": response, "sequence_number": sequence,
        }),
    )
}

fn failed(mut response: Value, code: &str, message: &str) -> Value {
    response["status"] = json!("failed");
    response["error"] = json!({"code": code, "message": message});
    response
}

/// Where a response is kept.
#[derive(Clone)]
struct Keeper {
    app: Arc<App>,
    id: String,
    input: Arc<Vec<Value>>,
    owner: Option<String>,
    keep: bool,
    cancel: Option<Arc<Notify>>,
}

impl Keeper {
    /// A response that runs in the background stays forgotten if it was deleted meanwhile.
    fn put(&self, response: Value, running: bool) {
        if self.keep {
            let response_began = response["status"] != "queued";
            let stored = Stored {
                response,
                input: self.input.clone(),
                owner: self.owner.clone(),
                cancel: self.cancel.clone().filter(|_| running),
            };
            match self.cancel.is_some() && response_began {
                true => self.app.store.replace(&self.id, stored),
                false => self.app.store.put(&self.id, stored),
            }
        }
    }
}

/// Answers at once with a response in progress, which goes on by itself.
async fn background(
    keeper: Keeper,
    mut events: Events,
    accounts: Ended,
) -> Result<Response<Body>, ApiError> {
    // The first event has the response as it begins. It comes when the prompt has been read, so
    // until then a response of the same shape stands in.
    let queued = json!({
        "id": keeper.id, "object": "response", "created_at": unix_time(), "status": "queued",
        "background": true, "output": [], "error": null, "incomplete_details": null,
        "model": keeper.app.model(), "usage": null,
    });
    keeper.put(queued.clone(), true);
    let cancel = keeper.cancel.clone().unwrap_or_default();
    let begun = queued.clone();
    tokio::spawn(async move {
        let mut response = begun;
        let finished = async {
            while let Some(event) = events.next().await {
                match event {
                    Ok((_, mut value)) => {
                        let Some(newer) = value.get_mut("response") else { continue };
                        response = newer.take();
                        if response["status"] == "in_progress" {
                            keeper.put(response.clone(), true);
                        }
                    }
                    Err(error) => {
                        let response = failed(response.take(), error.code(), &error.to_string());
                        return keeper.put(response, false);
                    }
                }
            }
        };
        let cancelled = tokio::select! {
            () = finished => false,
            () = cancel.notified() => true,
        };
        if cancelled {
            drop(events);
            response["status"] = json!("cancelled");
            response["usage"] = usage::responses(&accounts.all());
            keeper.put(response, false);
        }
    });
    Ok(sse::json(&queued))
}

/// `POST /v1/responses/input_tokens`.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    // Counting is work too: limits of keys hold.
    let _ticket = app.ticket(&call)?;
    let request = blocking(move || {
        let owner = call.owner();
        let find = |id: &str| app.store.get(id, owner.as_deref());
        Request::read(&app, "", owner.clone(), &body, true, find)
    })
    .await?;
    let input_tokens = request.turn.job.prompt.len();
    Ok(sse::json(&json!({"object": "response.input_tokens", "input_tokens": input_tokens})))
}

fn find(app: &App, call: &Call, id: &str) -> Result<Stored, ApiError> {
    let owner = call.key.as_ref().map(|key| key.name.as_str());
    app.store.get(id, owner).ok_or_else(|| ApiError::NotFound {
        param: Some("response_id".into()),
        message: format!("there is no response {id:?}, or not any more"),
    })
}

/// `GET /v1/responses/{id}`.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    Path(id): Path<String>,
) -> Result<Response<Body>, ApiError> {
    Ok(sse::json(&find(&app, &call, &id)?.response))
}

/// Items, each with an id that no other one has: its own, or else one by its place.
fn with_ids(items: &[Value]) -> Vec<(String, &Value)> {
    let mut taken = HashSet::new();
    let id = |(place, item): (usize, &Value)| {
        let own = item["id"].as_str().filter(|id| !id.is_empty() && !taken.contains(*id));
        let mut id = own.map_or_else(|| format!("item_{place}"), str::to_owned);
        while !taken.insert(id.clone()) {
            id.push('_');
        }
        id
    };
    items.iter().enumerate().map(id).zip(items).collect()
}

/// `GET /v1/responses/{id}/input_items`: the newest first, unless the query's `order` is `asc`.
pub async fn input_items(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&app, &call, &id)?;
    let query = query(&uri)?;
    let order = query.iter().find(|(name, _)| name == "order").map(|(_, order)| order.as_str());
    let mut items = with_ids(&stored.input);
    match order {
        Some("asc") => {}
        None | Some("desc") => items.reverse(),
        Some(other) => {
            let message = format!("order: {other:?} is neither asc nor desc");
            return Err(ApiError::invalid("order", message));
        }
    }
    let (items, more) = page(&uri, items)?;
    let with_id = |(id, item): &(String, &Value)| {
        let mut item = (*item).clone();
        if let Some(fields) = item.as_object_mut() {
            fields.insert("id".into(), json!(id));
        }
        item
    };
    Ok(sse::json(&json!({
        "object": "list",
        "first_id": items.first().map(|(id, _)| id),
        "last_id": items.last().map(|(id, _)| id),
        "data": items.iter().map(with_id).collect::<Vec<_>>(),
        "has_more": more,
    })))
}

/// `DELETE /v1/responses/{id}`.
pub async fn delete(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    Path(id): Path<String>,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&app, &call, &id)?;
    if let Some(cancel) = stored.cancel {
        cancel.notify_one();
    }
    let owner = call.key.as_ref().map(|key| key.name.as_str());
    app.store.remove(&id, owner);
    Ok(sse::json(&json!({"id": id, "object": "response", "deleted": true})))
}

/// `POST /v1/responses/{id}/cancel`.
pub async fn cancel(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    Path(id): Path<String>,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&app, &call, &id)?;
    let Some(cancel) = stored.cancel else {
        // One that has been cancelled may be cancelled again.
        if stored.response["status"] == "cancelled" {
            return Ok(sse::json(&stored.response));
        }
        let message = format!("response {id:?} does not run in the background");
        return Err(ApiError::Invalid { param: Some("response_id".into()), message });
    };
    cancel.notify_one();
    let mut response = stored.response;
    response["status"] = json!("cancelled");
    Ok(sse::json(&response))
}
