//! Clients that are slow, malformed or mean: they get an error or are cut, and nobody else notices.

use crate::common::*;
use crate::network::*;
use axum::http::StatusCode;
use deepinfer_server::Config;
use deepinfer_server::scripted::Reply;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LIMIT: Duration = Duration::from_millis(400);

async fn server() -> Running {
    let config = Config { read_timeout: LIMIT, ..Config::default() };
    start_with(config, |_| Ok(Reply::tokens(tokens("a").repeat(8)))).await
}

/// A request that must be answered at once.
async fn others_are_served(running: &Running) {
    let body = chat(json!({"max_tokens": 2})).to_string();
    let answer = running.exchange(&request(CHAT, "", &body)).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn trickling_heads_and_bodies_are_cut() {
    let running = server().await;
    // One byte every 20 ms: 40 seconds for the padding of either.
    let padding = "y".repeat(2000);
    let body = chat(json!({"max_tokens": 2, "user": padding})).to_string();
    let whole = request(CHAT, &format!("x-padding: {padding}\r\n"), &body);
    let head = whole.len() - body.len();
    for start in [0, head] {
        let mut stream = running.send(&whole[..start]).await;
        let begin = Instant::now();
        let mut answer = Vec::new();
        let mut buffer = [0; 1024];
        let mut cut = false;
        for byte in &whole.as_bytes()[start..] {
            cut = stream.write_all(&[*byte]).await.is_err();
            if !cut {
                let pause = Duration::from_millis(20);
                match tokio::time::timeout(pause, stream.read(&mut buffer)).await {
                    Ok(Ok(0) | Err(_)) => cut = true,
                    Ok(Ok(n)) => answer.extend_from_slice(&buffer[..n]),
                    Err(_) => {}
                }
            }
            if cut {
                break;
            }
        }
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(cut && begin.elapsed() < LIMIT * 20, "it was not cut: {answer}");
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(answer.starts_with("HTTP/1.1 408"), start == head, "{answer}");
        others_are_served(&running).await;
    }
    running.settle(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_are_closed() {
    let running = server().await;
    // One that says nothing, and one that has had its answer.
    let silent = running.connect().await;
    let mut served = running.send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    read_until(&mut served, "ok").await;
    for stream in [silent, served] {
        let closed = tokio::time::timeout(LIMIT * 20, read_all(stream)).await;
        closed.expect("the server closes it");
    }
    others_are_served(&running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_do_not_read_block_nobody() {
    let script = |_: &[u32]| {
        Ok(Reply { pace: Duration::from_micros(1), ..Reply::tokens(tokens("a").repeat(60_000)) })
    };
    let running = start_with(Config::default(), script).await;
    let mut stuck = Vec::new();
    for _ in 0..4 {
        let body = chat(json!({"stream": true, "max_tokens": 60_000})).to_string();
        stuck.push(running.send(&request(CHAT, "", &body)).await);
    }
    for _ in 0..3 {
        others_are_served(&running).await;
    }
    drop(stuck);
    running.settle(0).await;
}

/// A request whose answer is much larger than what sockets hold: about 1 KB for each of `tokens`.
fn large_answer(tokens: usize) -> String {
    let extra = json!({
        "stream": true, "reasoning_effort": "none", "max_tokens": tokens, "logprobs": true,
        "top_logprobs": 20,
    });
    request(CHAT, "connection: close\r\n", &chat(extra).to_string())
}

async fn server_of_large_answers(write_timeout: Duration) -> Running {
    let config = Config { write_timeout, ..Config::default() };
    start_with(config, |_| Ok(Reply::tokens(tokens("a").repeat(30_000)))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_never_read_on_are_cut() {
    let running = server_of_large_answers(LIMIT).await;
    let mut stuck = running.send(&large_answer(30_000)).await;
    read_until(&mut stuck, "\"content\":\"a").await;
    // The connection is still there, and its request is not.
    running.settle(0).await;
    let (_, metrics) = running.server.get("/metrics").await;
    let cut = "deepinfer_answers_total{protocol=\"chat\",outcome=\"aborted\"} 1";
    assert!(metrics.contains(cut), "{metrics}");
    let rest = read_all(stuck).await;
    assert!(!rest.contains("[DONE]"), "{} bytes came", rest.len());
    others_are_served(&running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_get_everything() {
    let limit = Duration::from_secs(1);
    let running = server_of_large_answers(limit).await;
    // More than sockets hold, so that the server has to wait for the reader.
    let mut stream = running.send(&large_answer(4500)).await;
    let begin = Instant::now();
    let mut answer = Vec::new();
    let mut buffer = vec![0; 48 << 10];
    loop {
        tokio::time::sleep(Duration::from_millis(60)).await;
        match stream.read(&mut buffer).await.expect("it is not cut") {
            0 => break,
            n => answer.extend_from_slice(&buffer[..n]),
        }
    }
    let size = answer.len();
    assert!(answer.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "{size} bytes came");
    assert!(begin.elapsed() > 2 * limit, "{size} bytes are too few to show anything");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_get_an_error_or_are_cut() {
    let running = server().await;
    let post = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n");
    let many = (0..300).map(|i| format!("x-{i}: y\r\n")).collect::<String>();
    let long = "y".repeat(1 << 20);
    let cases = [
        "\r\n\r\n\r\n".to_owned(),
        "\u{0}\u{1}\u{2}\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}\u{1}\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
        "GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
        format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a/".repeat(40_000)),
        format!("GET / HTTP/1.1\r\nhost: x\r\nx: {long}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{many}\r\n\r\n"),
        "GET / HTTP/1.1\r\nno colon here\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: x\r\nbad\u{0}name: y\r\n\r\n".to_owned(),
        format!("{post}content-length: -1\r\n\r\n{{}}"),
        format!("{post}content-length: 99999999999999999999\r\n\r\n{{}}"),
        format!("{post}content-length: 2\r\ncontent-length: 3\r\n\r\n{{}}"),
        format!("{post}transfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n"),
        format!("{post}transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n"),
        format!("{post}transfer-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}"),
        format!("{post}content-length: 400\r\n\r\n{{\"half\":"),
        format!("{post}content-length: 2\r\n\r\n{{}}GARBAGE\r\n\r\n"),
    ];
    for case in cases {
        let answer = tokio::time::timeout(Duration::from_secs(20), async {
            let mut stream = running.connect().await;
            // The server may hang up before all of it has been sent.
            let _ = stream.write_all(case.as_bytes()).await;
            read_all(stream).await
        });
        let answer = answer.await.expect("it is answered or cut");
        let shown: String = case.chars().take(60).collect();
        let served = ["HTTP/1.1 200 OK\r\ncontent-type: text/event-stream", "HTTP/1.1 5"];
        assert!(!served.iter().any(|start| answer.starts_with(start)), "{shown:?}: {answer}");
    }
    others_are_served(&running).await;
    running.settle(0).await;
}

/// Text that cannot fit is refused without being encoded, in every protocol; it can be counted.
#[tokio::test]
async fn text_far_beyond_the_context_is_refused_before_it_is_encoded() {
    let server = Server::saying("x");
    let text = "somewhat long ".repeat(40_000);
    let talk = json!([{"role": "user", "content": text}]);
    let message = json!({"model": "deepinfer", "max_tokens": 9, "messages": talk});
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"messages": talk}))),
        ("/v1/completions", json!({"model": "deepinfer", "prompt": text})),
        ("/v1/completions", json!({"model": "deepinfer", "prompt": ["a", text]})),
        ("/v1/responses", json!({"model": "deepinfer", "input": text})),
        ("/v1/messages", message.clone()),
    ] {
        let (status, answer) = server.post(path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}: {answer}");
        let said = answer["error"]["message"].as_str().expect("a message");
        let bytes: usize =
            said.split([' ', '\'']).find_map(|word| word.parse().ok()).expect("bytes");
        assert!((text.len()..text.len() + 200).contains(&bytes), "{path}: {said}");
        assert!(said.contains("65536 tokens or more"), "{path}: {said}");
        if path != "/v1/messages" {
            assert_eq!(answer["error"]["code"], "context_length_exceeded", "{path}");
        }
    }
    let counted = server.ok("/v1/messages/count_tokens", message).await;
    assert!(counted["input_tokens"].as_u64().is_some_and(|n| n > 65_536), "{counted}");
    let body = json!({"model": "deepinfer", "input": text});
    let counted = server.ok("/v1/responses/input_tokens", body).await;
    assert!(counted["input_tokens"].as_u64().is_some_and(|n| n > 65_536), "{counted}");
    // An answer that comes back may be replaced by other tokens: they are known only then.
    let said = json!({"role": "assistant", "content": "yes"});
    let refused = async |text: &str| {
        let question = json!({"role": "user", "content": text});
        let history = json!([{"role": "user", "content": "hi"}, said, question]);
        let body = chat(json!({"messages": history}));
        let (_, answer) = server.post("/v1/chat/completions", body).await;
        answer["error"]["message"].as_str().expect("a message").to_owned()
    };
    let end = "tokens or more, but a sequence holds at most 65536 with its output";
    assert!(refused(&text).await.ends_with(&format!(" 262144 {end}")));
    let encoded = refused(&text[..200_000]).await;
    assert!(encoded.ends_with(" tokens, but a sequence holds at most 65536 with its output"));
}
