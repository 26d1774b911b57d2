//! Completions, tokens, models.

use crate::common::*;
use axum::http::StatusCode;
use deepinfer_server::Config;
use deepinfer_server::scripted::Reply;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

fn body(extra: Value) -> Value {
    merge(json!({"model": "deepinfer", "prompt": "Once", "max_tokens": 100}), extra)
}

#[tokio::test]
async fn text_goes_on_whole_and_as_events() {
    let server = Server::saying(&format!(" upon a time ✅{EOS}"));
    let whole = server.ok(PATH, body(json!({}))).await;
    assert_eq!(whole["choices"][0]["text"], " upon a time ✅");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["usage"]["completion_tokens"], tokens(&format!(" upon a time ✅{EOS}")).len());
    let events =
        server.events(PATH, body(json!({"stream_options": {"include_usage": true}}))).await;
    let joined: String =
        events.iter().filter_map(|(_, e)| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, " upon a time ✅");
    assert_eq!(events[events.len() - 2].1["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
    assert_eq!(events[events.len() - 1].1, "[DONE]");
}

#[tokio::test]
async fn prompts_come_in_four_forms() {
    let server = Server::saying(&format!("x{EOS}"));
    let bos = tokenizer().bos().expect("a bos");
    server.ok(PATH, body(json!({"prompt": "ab"}))).await;
    assert_eq!(server.last_prompt(), [vec![bos], tokens("ab")].concat());
    server.ok(PATH, body(json!({"prompt": [5, 6, 7]}))).await;
    assert_eq!(server.last_prompt(), [5, 6, 7]);
    let two = server.ok(PATH, body(json!({"prompt": [[5], [6, 7]], "n": 2}))).await;
    assert_eq!(two["choices"].as_array().map(Vec::len), Some(4));
    assert_eq!(two["usage"]["prompt_tokens"], 3);
    let texts = server.ok(PATH, body(json!({"prompt": ["a", "b"]}))).await;
    assert_eq!(texts["choices"][1]["index"], 1);
    let scan =
        body(json!({"prompt": "<｜User｜>", "parse_special": true, "add_special_tokens": false}));
    server.ok(PATH, scan).await;
    assert_eq!(server.last_prompt().len(), 1);
    for bad in [json!([]), json!(5), json!([[-1]]), json!([1, "a"]), json!({})] {
        assert_eq!(server.refused(PATH, body(json!({"prompt": bad}))).await, "prompt");
    }
}

#[tokio::test]
async fn echo_and_logprobs() {
    let server = Server::saying(&format!(" up{EOS}"));
    let whole = server.ok(PATH, body(json!({"echo": true, "logprobs": 2}))).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["text"], "Once up");
    let logprobs = &choice["logprobs"];
    let count = server.last_prompt().len() + tokens(&format!(" up{EOS}")).len();
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().map(Vec::len), Some(count), "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
}

#[tokio::test]
async fn stop_texts_end_the_text() {
    let server = Server::saying(&format!("a b STOP c{EOS}"));
    let whole = server.ok(PATH, body(json!({"stop": "STOP"}))).await;
    assert_eq!(whole["choices"][0]["text"], "a b ");
    assert_eq!(server.last_params().stop, ["STOP"]);
}

#[tokio::test]
async fn overload_is_told() {
    let server = Server::scripted(Config::default(), |_| {
        Err::<Reply, _>(deepinfer::request::RequestError::QueueFull { waiting: 9, limit: 9 })
    });
    let request = axum::http::Request::post(PATH)
        .body(axum::body::Body::from(body(json!({})).to_string()))
        .expect("a request");
    let response = server.send(request).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn tokens_go_there_and_back() {
    let server = Server::saying("x");
    let text = "héllo <｜User｜> ✅";
    let answer = server.ok("/tokenize", json!({"prompt": text, "return_token_strs": true})).await;
    assert_eq!(answer["count"], answer["tokens"].as_array().map_or(0, Vec::len));
    let back = server.ok("/detokenize", json!({"tokens": answer["tokens"]})).await;
    assert_eq!(back["prompt"], text);
    let special =
        server.ok("/tokenize", json!({"prompt": "<｜User｜>", "parse_special": true})).await;
    assert_eq!(special["count"], 1);
    assert_eq!(server.refused("/detokenize", json!({"tokens": [1 << 30]})).await, "tokens");
    assert_eq!(server.refused("/tokenize", json!({})).await, "text");
}

#[tokio::test]
async fn models_come_in_pages() {
    let model_names = ["a", "b", "a", "c"].map(str::to_owned).to_vec();
    let config = Config { model_names, ..Config::default() };
    let server = Server::scripted(config, |_| Ok(Reply::tokens(tokens("x"))));
    for (query, names, more) in [
        ("?beta=true", json!(["a", "b", "c"]), false),
        ("?limit=2", json!(["a", "b"]), true),
        ("?limit=2&after_id=b", json!(["c"]), false),
        ("?limit=1&after_id=a", json!(["b"]), true),
        ("?after_id=c", json!([]), false),
        ("?limit=1&before_id=c", json!(["b"]), true),
        ("?limit=2&before_id=c", json!(["a", "b"]), false),
    ] {
        let (status, text) = server.get(&format!("/v1/models{query}")).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        let page: Value = serde_json::from_str(&text).expect("JSON");
        let data = page["data"].as_array().expect("a list");
        let found: Vec<_> = data.iter().map(|model| model["id"].clone()).collect();
        assert_eq!((json!(found), &page["has_more"]), (names, &json!(more)), "{query}");
        assert_eq!(page["last_id"], found.last().cloned().unwrap_or_default(), "{query}");
    }
    for (query, name) in [("after_id=x", "after_id"), ("after_id=a&before_id=c", "before_id")] {
        let (status, text) = server.get(&format!("/v1/models?{query}")).await;
        let error: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!(name)), "{text}");
    }
}

#[tokio::test]
async fn models_and_unknown_paths() {
    let server = Server::saying("x");
    let (status, text) = server.get("/v1/models").await;
    let models: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &models["data"][0]["id"]), (StatusCode::OK, &json!("deepinfer")));
    assert_eq!(server.get("/v1/models?limit=1").await.0, StatusCode::OK);
    assert_eq!(server.get("/v1/models?after_id=x").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(server.get("/v1/models/deepinfer?beta=true").await.0, StatusCode::OK);
    assert_eq!(server.get("/v1/models/other").await.0, StatusCode::NOT_FOUND);
    assert_eq!(server.get("/nothing").await.0, StatusCode::NOT_FOUND);
    let (status, text) = server.get(PATH).await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(text.contains("does not take GET"), "{text}");
}
