//! Over real connections: leaving clients, slow clients, keys, signals, a dying engine.

use crate::common::*;
use deepinfer::request::RequestError;
use deepinfer_server::scripted::Reply;
use deepinfer_server::{Config, Inference, Key, ServeError, serve_until};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, MutexGuard, Notify};
use tokio::task::JoinHandle;

/// One server at a time: some tests measure time.
static ALONE: Mutex<()> = Mutex::const_new(());

pub struct Running {
    _alone: MutexGuard<'static, ()>,
    pub server: Server,
    pub address: SocketAddr,
    drain: Arc<Notify>,
    stop: Arc<Notify>,
    task: JoinHandle<Result<(), ServeError>>,
}

/// Sockets of a server's port that the process holds, the listening one not counted. Other handles
/// belong to the tests that run beside.
fn open_sockets(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap_or_default();
    let own = format!(":{port:04X}");
    let held = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [local, state, inode] = [1, 3, 9].map(|i| fields.get(i).copied().unwrap_or("0"));
        local.ends_with(&own) && state != "0A" && inode != "0"
    };
    table.lines().skip(1).filter(held).count()
}

/// Answers slowly and for long, unless told otherwise.
async fn start(config: Config, pace: Duration, count: usize) -> Running {
    start_with(config, move |_| {
        let tokens = tokens("a").repeat(count);
        Ok(Reply { pace, ..Reply::tokens(tokens) })
    })
    .await
}

/// Answers as told.
pub async fn start_with(
    config: Config,
    script: impl Fn(&[u32]) -> Result<Reply, RequestError> + Send + Sync + 'static,
) -> Running {
    let alone = ALONE.lock().await;
    let server = Server::scripted(config, script);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (drain, stop) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (d, s) = (drain.clone(), stop.clone());
    let app = server.app.clone();
    let task =
        tokio::spawn(async move { serve_until(app, listener, d.notified(), s.notified()).await });
    Running { _alone: alone, server, address, drain, stop, task }
}

pub fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

pub fn stream_body() -> String {
    chat(json!({"stream": true, "reasoning_effort": "none", "max_tokens": 20_000})).to_string()
}

pub const CHAT: &str = "/v1/chat/completions";

impl Running {
    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("a connection")
    }

    pub async fn send(&self, text: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(text.as_bytes()).await.expect("sent");
        stream
    }

    /// The whole answer, on a connection that closes after it.
    pub async fn exchange(&self, text: &str) -> String {
        let text = text.replacen("\r\n", "\r\nconnection: close\r\n", 1);
        read_all(self.send(&text).await).await
    }

    pub async fn get(&self, path: &str) -> String {
        self.exchange(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await
    }

    /// Waits until the server works on `open` requests and the engine on as many.
    pub async fn settle(&self, open: usize) {
        for _ in 0..1000 {
            let running = self.server.engine.figures().running as usize;
            if self.server.app.open.load(Relaxed) == open && running == open {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let running = self.server.engine.figures().running;
        panic!("{} open, {running} running, not {open}", self.server.app.open.load(Relaxed));
    }
}

pub async fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A connection that is cut gives what came before.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads until `wanted` has come.
pub async fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains(wanted) {
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut buffer)).await;
        let n = read.expect("something comes").expect("no error");
        assert!(n > 0, "the connection ended after {text:?}");
        text.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_request() {
    let running = start(Config::default(), Duration::from_millis(5), 15_000).await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
        read_until(&mut stream, "\"content\":\"a\"").await;
        streams.push(stream);
    }
    // And one that waits for the whole answer.
    let whole = chat(json!({"max_tokens": 20_000})).to_string();
    let waiting = running.send(&request(CHAT, "", &whole)).await;
    running.settle(9).await;
    drop(streams);
    running.settle(1).await;
    drop(waiting);
    running.settle(0).await;
    let metrics = running.get("/metrics").await;
    assert!(
        metrics.contains("answers_total{protocol=\"chat\",outcome=\"aborted\"} 9"),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn aborts_at_any_point_leave_nothing_behind() {
    let count = std::env::var("DEEPINFER_ABORTS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let running = start(Config::default(), Duration::from_millis(1), 3000).await;
    running.get("/health").await;
    running.settle(0).await;
    for i in 0..count {
        let text = request(CHAT, "", &stream_body());
        // Cut in the head, in the body, before, in and after the first events.
        let part = [text.len() / 9, text.len() - 5, text.len()][i % 3];
        let stream = running.send(&text[..part]).await;
        tokio::time::sleep(Duration::from_micros((i as u64 * 37) % 4000)).await;
        drop(stream);
    }
    running.settle(0).await;
    let port = running.address.port();
    for _ in 0..500 {
        if open_sockets(port) == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(open_sockets(port), 0, "sockets that clients have left");
    assert!(running.get("/health").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_come_at_once_and_silence_is_filled() {
    let config = Config { keep_alive: Duration::from_millis(30), ..Config::default() };
    // The first event of the engine comes after two seconds.
    let running = start(config, Duration::from_secs(2), 2).await;
    let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
    let text = read_until(&mut stream, ": keep-alive\n\n").await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(text.contains("text/event-stream") && !text.contains("data:"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_checked_and_limited() {
    let keys = Key::parse_file("good-key name=alice concurrency=1").expect("a key");
    let running =
        start(Config { keys, ..Config::default() }, Duration::from_millis(5), 15_000).await;
    assert!(running.get("/health").await.starts_with("HTTP/1.1 200"));
    let answer = running.get("/v1/models").await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("invalid_api_key"), "{answer}");
    for headers in
        ["authorization: Bearer bad\r\n", "authorization: good-key\r\n", "x-api-key: \r\n"]
    {
        let answer = running.exchange(&request(CHAT, headers, &stream_body())).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{headers:?}: {answer}");
    }
    let bad = running.exchange(&request("/v1/messages", "", "{}")).await;
    assert!(bad.contains("authentication_error"), "{bad}");
    let headers = "authorization: Bearer good-key\r\n";
    let mut first = running.send(&request(CHAT, headers, &stream_body())).await;
    read_until(&mut first, "\"content\":\"a\"").await;
    let second = running.exchange(&request(CHAT, "x-api-key: good-key\r\n", &stream_body())).await;
    assert!(second.starts_with("HTTP/1.1 429") && second.contains("retry-after: 1"), "{second}");
    assert!(second.contains("alice") && !second.contains("good-key"), "{second}");
    let count = chat(json!({})).to_string();
    let count = request("/v1/messages/count_tokens", "x-api-key: good-key\r\n", &count);
    let counted = running.exchange(&count).await;
    assert!(counted.starts_with("HTTP/1.1 429"), "{counted}");
    drop(first);
    running.settle(0).await;
    let counted = running.exchange(&count).await;
    assert!(counted.starts_with("HTTP/1.1 200"), "{counted}");
    let third = running.send(&request(CHAT, headers, &stream_body())).await;
    running.settle(1).await;
    drop(third);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_heads_have_limits() {
    let config =
        Config { max_body: 1000, read_timeout: Duration::from_millis(300), ..Config::default() };
    let running = start(config, Duration::from_millis(1), 5).await;
    let long = running.exchange(&request(CHAT, "", &"x".repeat(1001))).await;
    assert!(long.starts_with("HTTP/1.1 413"), "{long}");
    let chunked = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n{}\r\n0\r\n\r\n",
        "x".repeat(2000)
    );
    let long = running.exchange(&chunked).await;
    assert!(long.starts_with("HTTP/1.1 413"), "{long}");
    // A body that never comes, and a head that never ends.
    let slow = running
        .send(&format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{{"))
        .await;
    let answer = read_all(slow).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let head = running.send("GET /health HTTP/1.1\r\nhost").await;
    let answer = read_all(head).await;
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    for garbage in
        ["\0\0\0\0\r\n\r\n", "GET\r\n\r\n", "POST / HTTP/9.9\r\n\r\n", "A B C D E\r\n\r\n"]
    {
        let answer = read_all(running.send(garbage).await).await;
        assert!(!answer.starts_with("HTTP/1.1 2"), "{garbage:?}: {answer}");
    }
    assert!(running.get("/health").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_lets_requests_end_and_takes_no_new_ones() {
    let running = start(Config::default(), Duration::from_millis(3), 200).await;
    let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
    read_until(&mut stream, "\"content\":\"a\"").await;
    running.drain.notify_one();
    while !running.server.app.draining.load(Relaxed) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let rest = read_all(stream).await;
    assert!(rest.contains("data: [DONE]"), "{rest}");
    running.task.await.expect("no panic").expect("ends well");
    assert!(TcpStream::connect(running.address).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once() {
    let running = start(Config::default(), Duration::from_millis(5), 15_000).await;
    let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
    read_until(&mut stream, "\"content\":\"a\"").await;
    running.drain.notify_one();
    running.stop.notify_one();
    running.task.await.expect("no panic").expect("ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_engine_ends_everything_with_errors() {
    let running = start(Config::default(), Duration::from_millis(5), 15_000).await;
    let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
    read_until(&mut stream, "\"content\":\"a\"").await;
    running.server.engine.kill("the device is gone");
    let rest = read_all(stream).await;
    assert!(
        rest.contains("\"code\":\"unavailable\"") && rest.contains("the device is gone"),
        "{rest}"
    );
    let result = running.task.await.expect("no panic");
    assert!(
        matches!(&result, Err(ServeError::Engine { reason }) if reason.contains("device is gone"))
    );
    let (status, _) = running.server.get("/health").await;
    assert_eq!(status.as_u16(), 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_hangs_counts_as_dead() {
    let config = Config { stall_limit: Some(Duration::from_millis(300)), ..Config::default() };
    let running = start(config, Duration::from_millis(5), 15_000).await;
    let mut stream = running.send(&request(CHAT, "", &stream_body())).await;
    read_until(&mut stream, "\"content\":\"a\"").await;
    running.server.engine.hang();
    let rest = read_all(stream).await;
    assert!(rest.contains("has not taken a turn"), "{rest}");
    assert!(matches!(running.task.await.expect("no panic"), Err(ServeError::Engine { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_takes_long_and_gets_on_is_no_hang() {
    let config = Config { stall_limit: Some(Duration::from_millis(300)), ..Config::default() };
    let running = start(config, Duration::from_millis(5), 15_000).await;
    running.server.engine.take_long();
    // Several looks of the watch.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(running.server.app.failure(), None);
    running.server.engine.hang();
    assert!(matches!(running.task.await.expect("no panic"), Err(ServeError::Engine { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_follows_the_self_test() {
    let ids = tokens("aaa");
    let test = |tokens: Vec<u32>| deepinfer_server::SelfTest { prompt: vec![1], tokens };
    let config = Config { self_test: Some(test(ids.clone())), ..Config::default() };
    let running = start(config, Duration::from_millis(1), 3).await;
    while !running.server.app.ready.load(Relaxed) {
        assert_eq!(running.server.app.failure(), None);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(running.get("/ready").await.starts_with("HTTP/1.1 200"));
    drop(running);
    let config = Config { self_test: Some(test(vec![ids[0], 7, 7])), ..Config::default() };
    let running = start(config, Duration::from_millis(1), 3).await;
    let result = running.task.await.expect("no panic");
    assert!(matches!(&result, Err(ServeError::Engine { reason }) if reason.contains("self-test")));
}

#[tokio::test]
async fn request_ids_come_back() {
    let server = Server::saying("x");
    let request = axum::http::Request::get("/health")
        .header("x-request-id", "mine-1")
        .body(axum::body::Body::empty())
        .expect("a request");
    assert_eq!(server.send(request).await.headers()["x-request-id"], "mine-1");
}
