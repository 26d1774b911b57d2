//! What operators and accountants see: encryption, traces, times, progress, shares of the queue.

use crate::common::*;
use crate::network::*;
use deepinfer_server::scripted::Reply;
use deepinfer_server::{Config, Key, SelfTest, Tls, Traces};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data")).join(name)
}

fn tls() -> Tls {
    Tls::from_files(&data("certificate.pem"), &data("key.pem")).expect("a pair")
}

fn connector() -> tokio_rustls::TlsConnector {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(data("certificate.pem")).expect("read");
    roots.add(certificate).expect("a certificate");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_encrypted() {
    let limit = Duration::from_millis(500);
    let config = Config { tls: Some(tls()), read_timeout: limit, ..Config::default() };
    let running = start_with(config, |_| Ok(Reply::tokens(tokens("a")))).await;
    // One that never says hello, and one that does not encrypt, disturb nobody.
    let silent = running.connect().await;
    let plain = running.get("/health").await;
    assert!(!plain.starts_with("HTTP/1.1 200"), "{plain}");
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = connector().connect(name, running.connect().await).await;
    let mut stream = stream.expect("the handshake succeeds");
    let body = chat(json!({"reasoning_effort": "none", "max_tokens": 1})).to_string();
    let text = request(CHAT, "connection: close\r\n", &body);
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("read to the end");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\"content\":\"a\""), "{answer}");
    assert_eq!(read_all(silent).await, "");
}

#[test]
fn files_without_a_certificate_are_refused_by_name() {
    let refused = |certificate: &str, key: &str| {
        Tls::from_files(&data(certificate), &data(key)).expect_err("refused").to_string()
    };
    let error = refused("key.pem", "key.pem");
    assert!(error.contains("key.pem") && error.contains("certificate"), "{error}");
    let error = refused("certificate.pem", "certificate.pem");
    assert!(error.contains("certificate.pem") && error.contains("private key"), "{error}");
    let error = refused("nowhere.pem", "key.pem");
    assert!(error.contains("nowhere.pem"), "{error}");
}

/// Takes requests, answers them with 200, and keeps their bytes.
async fn collect(listener: TcpListener, sender: tokio::sync::mpsc::UnboundedSender<Vec<u8>>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let n = stream.read(&mut buffer).await.unwrap_or(0);
            bytes.extend_from_slice(&buffer[..n]);
            let text = String::from_utf8_lossy(&bytes).to_lowercase();
            let head = text.find("\r\n\r\n").map(|at| text[..at].to_owned());
            let length = head.as_ref().and_then(|head| {
                let line = head.lines().find(|line| line.starts_with("content-length:"))?;
                line[15..].trim().parse::<usize>().ok()
            });
            // The head is ASCII, so lengths in text are lengths in bytes.
            let whole = head.zip(length).is_some_and(|(head, n)| bytes.len() >= head.len() + 4 + n);
            if whole || n == 0 {
                break;
            }
        }
        // Whoever has the answer may count on the bytes being there.
        let _ = sender.send(bytes);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    }
}

fn holds(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_reach_a_collector_and_hold_no_text() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(collect(listener, sender));
    let traces = Traces::to(&endpoint, tokio::runtime::Handle::current()).expect("traces");
    let config = Config { traces: Some(traces.clone()), ..Config::default() };
    let pace = Duration::from_millis(2);
    let running =
        start_with(config, move |_| Ok(Reply { pace, ..Reply::tokens(tokens("SECRET")) })).await;
    let body = json!({
        "model": "deepinfer", "stream": true, "reasoning_effort": "none",
        "messages": [{"role": "user", "content": "PRIVATE"}],
    });
    let parent = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    let answer = running.exchange(&request(CHAT, parent, &body.to_string())).await;
    assert!(answer.contains("[DONE]"), "{answer}");
    running.settle(0).await;
    tokio::task::spawn_blocking(move || traces.shutdown()).await.expect("no panic");
    let mut all = Vec::new();
    while let Ok(bytes) = received.try_recv() {
        all.extend(bytes);
    }
    for wanted in [
        "POST /v1/traces HTTP/1.1",
        "POST /v1/chat/completions",
        "queue",
        "prefill",
        "decode",
        "gen_ai.usage.output_tokens",
    ] {
        assert!(holds(&all, wanted.as_bytes()), "{wanted}: {}", String::from_utf8_lossy(&all));
    }
    let trace = [10, 0xf7, 0x65, 0x19, 0x16, 0xcd, 0x43, 0xdd];
    assert!(holds(&all, &trace), "the caller's trace goes on");
    for text in ["SECRET", "PRIVATE"] {
        assert!(!holds(&all, text.as_bytes()), "{text} is in the traces");
    }
}

#[tokio::test]
async fn a_collector_must_be_an_address() {
    let refused = Traces::to("https://x", tokio::runtime::Handle::current());
    let error = refused.expect_err("refused").to_string();
    assert!(error.contains("https://x") && error.contains("http://HOST"), "{error}");
}

/// 40 ms in the queue, 60 ms of reading, 10 ms a token.
fn slow(text: &'static str) -> impl Fn(&[u32]) -> Result<Reply, deepinfer::request::RequestError> {
    move |_| {
        Ok(Reply {
            wait: Duration::from_millis(40),
            reading: Duration::from_millis(60),
            pace: Duration::from_millis(10),
            drafts: (3, 2),
            ..Reply::tokens(tokens(text))
        })
    }
}

#[tokio::test]
async fn usage_tells_where_the_time_went() {
    let server = Server::scripted(Config::default(), slow("aaaa"));
    let body = chat(json!({"reasoning_effort": "none", "seed": 5}));
    let whole = server.ok(CHAT, body.clone()).await;
    let streamed = merge(body, json!({"stream_options": {"include_usage": true}}));
    let events = server.events(CHAT, streamed).await;
    let last = &events[events.len() - 2].1;
    for usage in [&whole["usage"], &last["usage"]] {
        let own = &usage["deepinfer"];
        let steps = usage["completion_tokens"].as_u64().expect("a count");
        assert_eq!(own["drafted_tokens"], 3 * steps, "{usage}");
        assert_eq!(own["accepted_tokens"], 2 * steps, "{usage}");
        assert_eq!(own["seeds"], json!([5]), "{usage}");
        let time = |name: &str| own[name].as_f64().unwrap_or_else(|| panic!("{name}: {usage}"));
        assert!(time("queue_ms") >= 40.0 && time("prefill_ms") >= 60.0, "{usage}");
        assert!(time("decode_ms") >= 10.0 * (steps - 1) as f64, "{usage}");
        let sum = time("queue_ms") + time("prefill_ms") + time("decode_ms");
        assert!((sum - time("total_ms")).abs() < 0.01, "{usage}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_comes_when_asked_for() {
    let script =
        |_: &[u32]| Ok(Reply { reading: Duration::from_millis(900), ..Reply::tokens(tokens("a")) });
    let running = start_with(Config::default(), script).await;
    let plain = running.exchange(&request(CHAT, "", &stream_body())).await;
    assert!(plain.contains("[DONE]") && !plain.contains("progress"), "{plain}");
    let asked = running.exchange(&request(CHAT, "x-progress: true\r\n", &stream_body())).await;
    let body = asked.split_once("\r\n\r\n").expect("a head").1;
    let mut last = 0;
    let mut count = 0;
    for line in body.lines().filter(|line| line.contains("\"progress\"")) {
        let data: serde_json::Value =
            serde_json::from_str(line.strip_prefix("data: ").expect("data")).expect("JSON");
        let (done, total) = (data["done"].as_u64(), data["total"].as_u64());
        let (done, total) = done.zip(total).expect("numbers");
        assert!(last <= done && done <= total && total > 0, "{data}");
        assert_eq!(data["choices"], json!([]));
        last = done;
        count += 1;
    }
    assert!(count >= 2 && last > 0, "{asked}");
    let wrong = running.exchange(&request(CHAT, "x-progress: maybe\r\n", &stream_body())).await;
    assert!(wrong.starts_with("HTTP/1.1 400") && wrong.contains("x-progress"), "{wrong}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_gets_its_share_of_the_queue() {
    // The scripted engine says that 1024 requests may wait.
    let keys = Key::parse_file("a name=alice queue_share=0.001\nb name=bob").expect("two keys");
    let script = |prompt: &[u32]| {
        // The self-test does not wait.
        let wait = Duration::from_secs(if prompt.len() > 1 { 60 } else { 0 });
        Ok(Reply { wait, ..Reply::tokens(tokens("a")) })
    };
    let self_test = Some(SelfTest { prompt: vec![1], tokens: tokens("a") });
    let running = start_with(Config { keys, self_test, ..Config::default() }, script).await;
    let ask = |key: &str| request(CHAT, &format!("x-api-key: {key}\r\n"), &stream_body());
    // Each answer of a request waits for itself. As many as never fit need not come again.
    let several = |n: usize| {
        let body = merge(serde_json::from_str(&stream_body()).expect("JSON"), json!({"n": n}));
        request(CHAT, "x-api-key: a\r\n", &body.to_string())
    };
    let refused = running.exchange(&several(3)).await;
    assert!(refused.starts_with("HTTP/1.1 400") && !refused.contains("retry-after"), "{refused}");
    assert!(refused.contains("\"param\":\"n\""), "{refused}");
    let mut waiting = Vec::new();
    for i in 0..2 {
        if i == 1 {
            let refused = running.exchange(&several(2)).await;
            let busy = refused.starts_with("HTTP/1.1 429") && refused.contains("asks for 2");
            assert!(busy, "{refused}");
        }
        let mut stream = running.send(&ask("a")).await;
        read_until(&mut stream, "\r\n\r\n").await;
        waiting.push(stream);
    }
    let refused = running.exchange(&ask("a")).await;
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("retry-after"), "{refused}");
    assert!(refused.contains("alice") && refused.contains("2 requests waiting"), "{refused}");
    let mut other = running.send(&ask("b")).await;
    let head = read_until(&mut other, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    // Whoever leaves makes room.
    drop(waiting);
    running.settle(1).await;
    let mut again: TcpStream = running.send(&ask("a")).await;
    let head = read_until(&mut again, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_response_has_its_usage() {
    let script = |_: &[u32]| {
        let pace = Duration::from_millis(5);
        Ok(Reply { pace, drafts: (3, 1), ..Reply::tokens(tokens("a").repeat(4000)) })
    };
    let server = Server::scripted(Config::default(), script);
    let body = json!({
        "model": "deepinfer", "input": "hi", "background": true, "reasoning": {"effort": "none"},
    });
    let response = server.ok("/v1/responses", body).await;
    let path = format!("/v1/responses/{}", response["id"].as_str().expect("an id"));
    let stored = async || {
        let (_, text) = server.get(&path).await;
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
    };
    while server.app.metrics.produced() < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.ok(&format!("{path}/cancel"), json!({})).await;
    let mut usage = serde_json::Value::Null;
    for _ in 0..1000 {
        usage = stored().await["usage"].clone();
        if usage.is_object() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(usage["output_tokens"].as_u64() >= Some(3), "{usage}");
    assert!(usage["input_tokens"].as_u64() > Some(0), "{usage}");
    assert!(usage["deepinfer"]["drafted_tokens"].as_u64() >= Some(9), "{usage}");
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains("outcome=\"aborted\"} 1"), "{metrics}");
}
