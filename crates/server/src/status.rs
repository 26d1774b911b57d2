//! What the server says of itself: models, health, readiness, load, metrics.

use crate::app::App;
use crate::error::ApiError;
use crate::sse;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, Response, StatusCode, Uri, header};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

fn model(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.started,
        "owned_by": "deepinfer",
        "root": app.model(),
        "max_model_len": app.info().max_tokens,
        // What Anthropic's clients read.
        "type": "model",
        "display_name": name,
    })
}

/// Parameters of a query, in order.
pub fn query(uri: &Uri) -> Result<Vec<(String, String)>, ApiError> {
    match Query::try_from_uri(uri) {
        Ok(Query(parameters)) => Ok(parameters),
        Err(error) => Err(ApiError::Invalid { param: None, message: error.to_string() }),
    }
}

/// The page of a list of ids and items that a query asks for, and whether there are more in its
/// direction: the first `limit` items, those that come after the id `after` or `after_id`, or the
/// last ones before `before_id`.
pub fn page<T>(
    uri: &Uri,
    mut items: Vec<(String, T)>,
) -> Result<(Vec<(String, T)>, bool), ApiError> {
    let mut most = usize::MAX;
    let mut edge = None;
    for (name, value) in query(uri)? {
        match name.as_str() {
            "limit" => match value.parse() {
                Ok(limit) if limit > 0 => most = limit,
                _ => return Err(ApiError::invalid(name, format!("limit: {value:?} is no count"))),
            },
            "after" | "after_id" | "before_id" => {
                if edge.is_some() {
                    let message = format!("{name}: a page begins or ends at one id only");
                    return Err(ApiError::invalid(name, message));
                }
                let Some(at) = items.iter().position(|(id, _)| *id == value) else {
                    let message = format!("{name}: there is no {value:?} in this list");
                    return Err(ApiError::invalid(name, message));
                };
                match name == "before_id" {
                    true => items.truncate(at),
                    false => drop(items.drain(..=at)),
                }
                edge = Some(name);
            }
            _ => {}
        }
    }
    let more = items.len() > most;
    match edge.as_deref() {
        Some("before_id") => drop(items.drain(..items.len().saturating_sub(most))),
        _ => items.truncate(most),
    }
    Ok((items, more))
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>, uri: Uri) -> Result<Response<Body>, ApiError> {
    let mut names: Vec<(String, ())> = Vec::new();
    for name in &app.config.model_names {
        if !names.iter().any(|(known, ())| known == name) {
            names.push((name.clone(), ()));
        }
    }
    let (names, more) = page(&uri, names)?;
    let data: Vec<Value> = names.iter().map(|(name, ())| model(&app, name)).collect();
    Ok(sse::json(&json!({
        "object": "list",
        "data": data,
        "has_more": more,
        "first_id": names.first().map(|(name, ())| name),
        "last_id": names.last().map(|(name, ())| name),
    })))
}

/// `GET /v1/models/{name}`.
pub async fn one_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response<Body>, ApiError> {
    app.check_model(&name)?;
    Ok(sse::json(&model(&app, &name)))
}

fn state(status: StatusCode, body: Value) -> Response<Body> {
    let mut response = sse::json(&body);
    *response.status_mut() = status;
    response
}

/// `GET /health`: whether the engine answers.
pub async fn health(State(app): State<Arc<App>>) -> Response<Body> {
    match app.failure() {
        None => state(StatusCode::OK, json!({"status": "ok"})),
        Some(reason) => {
            state(StatusCode::SERVICE_UNAVAILABLE, json!({"status": "failed", "reason": reason}))
        }
    }
}

/// `GET /ready`: whether requests should be sent here.
pub async fn ready(State(app): State<Arc<App>>) -> Response<Body> {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    match app.failure() {
        Some(reason) => state(unavailable, json!({"status": "failed", "reason": reason})),
        None if app.draining.load(Relaxed) => state(unavailable, json!({"status": "draining"})),
        None if !app.ready.load(Relaxed) => state(unavailable, json!({"status": "testing"})),
        None => state(StatusCode::OK, json!({"status": "ready"})),
    }
}

/// `GET /load`: the numbers that a balancer needs.
pub async fn load(State(app): State<Arc<App>>) -> Response<Body> {
    let figures = app.inference.figures();
    sse::json(&json!({
        "open": app.open.load(Relaxed),
        "running": figures.running,
        "waiting": figures.waiting,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "output_tokens": app.metrics.produced(),
        "drafted_tokens": figures.drafted.iter().sum::<u64>(),
        "verified_tokens": figures.verified.iter().sum::<u64>(),
        "accepted_tokens": figures.accepted.iter().sum::<u64>(),
    }))
}

/// `GET /`: a page to talk to the model.
pub async fn console() -> Response<Body> {
    let mut response = Response::new(Body::from(include_str!("page.html")));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    // It needs nothing from elsewhere.
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  connect-src 'self'; img-src data:";
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    response
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Response<Body> {
    let healthy = app.failure().is_none();
    let open = app.open.load(Relaxed);
    let text = app.metrics.text(open, healthy, &app.inference.figures());
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
