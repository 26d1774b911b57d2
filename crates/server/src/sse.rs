//! Server-sent events.

use crate::load::Prompts;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use serde::Serialize;
use serde_json::json;
use std::convert::Infallible;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio_stream::{Stream, StreamExt};

/// An event's bytes. `name` is for protocols whose events have names.
pub fn event(name: Option<&str>, data: &impl Serialize) -> Bytes {
    let mut text = Vec::with_capacity(256);
    if let Some(name) = name {
        text.extend_from_slice(b"event: ");
        text.extend_from_slice(name.as_bytes());
        text.push(b'\n');
    }
    text.extend_from_slice(b"data: ");
    // JSON text has no line breaks, so one line holds it.
    if serde_json::to_writer(&mut text, data).is_err() {
        text.extend_from_slice(b"null");
    }
    text.extend_from_slice(b"\n\n");
    text.into()
}

/// The end of OpenAI's streams.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// What is sent while there are no events.
pub struct Silence {
    /// Longest time without anything.
    pub keep_alive: Duration,
    /// Prompts whose progress was asked for.
    pub prompts: Option<Prompts>,
}

/// Time between two progress events.
const PROGRESS: Duration = Duration::from_millis(250);

/// A response that sends `events` as they come. When there was nothing to send for a while, it sends
/// a comment, which clients skip; if asked for, also how far the prompt has been read.
pub fn response(
    events: impl Stream<Item = Bytes> + Send + 'static,
    silence: Silence,
) -> Response<Body> {
    let events = async_stream::stream! {
        let mut events = pin!(events);
        let mut reported = None;
        let mut sent = Instant::now();
        let pause = match silence.prompts {
            Some(_) => PROGRESS.min(silence.keep_alive),
            None => silence.keep_alive,
        };
        loop {
            match tokio::time::timeout(pause, events.next()).await {
                Ok(Some(event)) => yield Ok::<_, Infallible>(event),
                Ok(None) => return,
                Err(_) => match silence.prompts.as_ref().map(Prompts::read) {
                    Some(read) if reported != Some(read) => {
                        reported = Some(read);
                        yield Ok(progress(read));
                    }
                    _ if sent.elapsed() >= silence.keep_alive => {
                        yield Ok(Bytes::from_static(b": keep-alive\n\n"));
                    }
                    _ => continue,
                },
            }
            sent = Instant::now();
        }
    };
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies not to collect the events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Prompt tokens that have been read, of all. With empty choices, so that clients which take every
/// event for a chunk of an answer find nothing in it.
fn progress((done, total): (usize, usize)) -> Bytes {
    let data = json!({"type": "progress", "done": done, "total": total, "choices": []});
    event(Some("progress"), &data)
}

/// A JSON response.
pub fn json(value: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_vec(value).unwrap_or_else(|_| b"null".to_vec());
    let mut response = Response::new(Body::from(text));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_data() {
        assert_eq!(&event(None, &"a\nb")[..], b"data: \"a\\nb\"\n\n");
        assert_eq!(&event(Some("ping"), &1)[..], b"event: ping\ndata: 1\n\n");
    }
}
