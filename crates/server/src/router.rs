//! Paths, and what happens around every request.

use crate::app::{App, Call, new_id};
use crate::error::{ApiError, Shape};
use crate::load::Key;
use crate::openapi::{self, OPERATIONS};
use crate::traces::Traces;
use crate::{chat, completions, messages, responses, sse, status, text};
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use std::sync::Arc;
use std::time::Instant;

const REQUEST_ID: &str = "x-request-id";
const PROGRESS: &str = "x-progress";

/// All paths over `app`.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(status::console))
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/load", get(status::load))
        .route("/openapi.json", get(async || sse::json(&openapi::description())))
        .route("/metrics", get(status::metrics))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{name}", get(status::one_model))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
        // `around` bounds bodies.
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(app.clone(), around))
        .with_state(app)
}

async fn unknown_path(request: Request) -> ApiError {
    let message = format!("there is no {}", request.uri().path());
    ApiError::NotFound { param: None, message }
}

async fn wrong_method(request: Request) -> ApiError {
    let (path, method) = (request.uri().path().to_owned(), request.method().to_string());
    ApiError::Method { path, method }
}

/// The error travels to `around`, which knows the shape that the path's clients expect.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status();
        response.extensions_mut().insert(self);
        response
    }
}

/// Around every request: its id, its key, its body, its error's shape, its line in the log.
async fn around(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    let started = Instant::now();
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let id = request_id(request.headers());
    let route = route_name(&path);
    // Questions about the server itself are asked all the time and have no spans.
    let traces = app.config.traces.as_ref().filter(|_| method == Method::POST);
    let span = traces.map(|traces| traces.request(method.as_str(), route, request.headers()));
    let mut response = match admit(&app, &id, span.clone(), request).await {
        Ok(request) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    let mut reason = None;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        if error.status().is_server_error() {
            reason = Some(error.to_string());
        }
        response = error.response(Shape::of_path(&path));
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id.clone());
        if Shape::of_path(&path) == Shape::Anthropic {
            response.headers_mut().insert("request-id", id);
        }
    }
    let status = response.status().as_u16();
    app.metrics.http(route, status);
    if let Some(span) = &span {
        Traces::response(span, &id, status);
    }
    let millis = started.elapsed().as_millis() as u64;
    match reason {
        Some(reason) => {
            tracing::error!(request = %id, %method, route, status, millis, %reason, "response");
        }
        None => tracing::info!(request = %id, %method, route, status, millis, "response"),
    }
    response
}

/// Checks the key and reads the body.
async fn admit(
    app: &App,
    id: &str,
    span: Option<opentelemetry::Context>,
    request: Request,
) -> Result<Request, ApiError> {
    let (mut parts, body) = request.into_parts();
    let key = match app.config.keys.is_empty() || is_open(parts.uri.path()) {
        true => None,
        false => Some(find_key(&app.config.keys, &parts.headers).ok_or(ApiError::Unauthorized)?),
    };
    check_query(&parts.uri)?;
    let progress = wants_progress(&parts.headers)?;
    parts.extensions.insert(Call { id: id.to_owned(), key, progress, span });
    let body = match parts.method {
        Method::POST => read_body(app, &parts.headers, body).await?,
        _ => Bytes::new(),
    };
    Ok(Request::from_parts(parts, Body::from(body)))
}

async fn read_body(app: &App, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let limit = app.config.max_body;
    let too_large = ApiError::TooLarge { limit };
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > limit as u64) {
        return Err(too_large);
    }
    match tokio::time::timeout(app.config.read_timeout, to_bytes(body, limit)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if is_length_limit(&error) => Err(too_large),
        Ok(Err(error)) => {
            let message = format!("the body could not be read: {error}");
            Err(ApiError::Invalid { param: None, message })
        }
        Err(_) => Err(ApiError::TooSlow { seconds: app.config.read_timeout.as_secs() }),
    }
}

fn is_length_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<http_body_util::LengthLimitError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Paths that say nothing about anybody's requests.
fn is_open(path: &str) -> bool {
    matches!(path, "/" | "/health" | "/ready")
}

fn find_key(keys: &[Arc<Key>], headers: &HeaderMap) -> Option<Arc<Key>> {
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, secret) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(secret)
    });
    let secret = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))?;
    Key::find(keys, secret)
}

/// Refuses query parameters that nothing reads.
fn check_query(uri: &Uri) -> Result<(), ApiError> {
    let path = uri.path();
    if !path.starts_with("/v1/") {
        return Ok(());
    }
    let known: &[&str] = match path {
        // `beta` marks what the client calls a trial of the same interface.
        "/v1/models" => &["limit", "after_id", "before_id", "beta"],
        path if path.starts_with("/v1/models/") => &["beta"],
        path if path.starts_with("/v1/messages") => &["beta"],
        path if path.ends_with("/input_items") => &["limit", "order", "after"],
        _ => &[],
    };
    for (name, _) in status::query(uri)? {
        if !known.contains(&name.as_str()) {
            let message = format!("the query parameter {name} is not known here");
            return Err(ApiError::invalid(name, message));
        }
    }
    Ok(())
}

/// Whether streams shall have progress events.
fn wants_progress(headers: &HeaderMap) -> Result<bool, ApiError> {
    match headers.get(PROGRESS).map(HeaderValue::as_bytes) {
        None | Some(b"false") => Ok(false),
        Some(b"true") => Ok(true),
        Some(_) => {
            Err(ApiError::invalid(PROGRESS, format!("the header {PROGRESS} is true or false")))
        }
    }
}

/// The caller's name for the request, if it is harmless, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let harmless = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic() && b != b'"')
    };
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(harmless);
    given.map_or_else(|| new_id("req_"), str::to_owned)
}

/// A route's name in metrics and logs: one of few, whatever clients ask for.
fn route_name(path: &str) -> &'static str {
    let same = |route: &str| {
        let (mut wanted, mut found) = (route.split('/'), path.split('/'));
        loop {
            match (wanted.next(), found.next()) {
                (None, None) => return true,
                (Some(wanted), Some(found)) if wanted.starts_with('{') || wanted == found => {}
                _ => return false,
            }
        }
    };
    OPERATIONS.iter().map(|o| o.path).find(|route| same(route)).unwrap_or("other")
}
