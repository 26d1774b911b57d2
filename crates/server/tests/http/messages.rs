//! Messages: Anthropic's protocol.

use crate::common::*;
use axum::http::StatusCode;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

fn messages(extra: Value) -> Value {
    let body = json!({
        "model": "deepinfer",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": "hi"}],
    });
    merge(body, extra)
}

pub fn messages_tools() -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    json!([
        {"name": "run", "description": "does it", "input_schema": schema},
        {"type": "custom", "name": "look", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
    ])
}

/// The rules of this protocol's event order. Returns the blocks: type and joined content.
pub fn validate(events: &[(Option<String>, Value)]) -> (Vec<(String, String)>, Value) {
    let mut blocks: Vec<(String, String)> = Vec::new();
    let mut open = false;
    let mut delta = Value::Null;
    for (i, (name, event)) in events.iter().enumerate() {
        let kind = event["type"].as_str().expect("a type");
        assert_eq!(name.as_deref(), Some(kind));
        assert_eq!(kind == "message_start", i == 0, "message_start comes first, once");
        assert_eq!(kind == "message_stop", i == events.len() - 1, "message_stop comes last");
        let index = || event["index"].as_u64().expect("an index") as usize;
        match kind {
            "content_block_start" => {
                assert!(!open, "a block opens in an open one");
                assert!(delta.is_null(), "a block after message_delta");
                assert_eq!(index(), blocks.len(), "indices rise by one");
                let block = event["content_block"]["type"].as_str().expect("a type");
                blocks.push((block.into(), String::new()));
                open = true;
            }
            "content_block_delta" => {
                assert!(open && index() + 1 == blocks.len());
                let block = blocks.last_mut().expect("open");
                let (kind, field) = match block.0.as_str() {
                    "text" => ("text_delta", "text"),
                    "thinking" => ("thinking_delta", "thinking"),
                    _ => ("input_json_delta", "partial_json"),
                };
                if event["delta"]["type"] == "signature_delta" {
                    assert_eq!(block.0, "thinking");
                } else {
                    assert_eq!(event["delta"]["type"], kind);
                    block.1.push_str(event["delta"][field].as_str().expect("text"));
                }
            }
            "content_block_stop" => {
                assert!(open && index() + 1 == blocks.len());
                open = false;
            }
            "message_delta" => {
                assert!(!open && delta.is_null());
                assert!(event["delta"]["stop_reason"].is_string());
                assert!(event["usage"]["output_tokens"].is_u64());
                delta = event.clone();
            }
            "message_start" | "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert!(!delta.is_null(), "message_delta is missing");
    (blocks, delta)
}

#[tokio::test]
async fn events_keep_their_order_in_every_combination() {
    let call = calls(&[("run", &[("a", true, "x > y 2>&1")])]);
    let three =
        calls(&[("run", &[]), ("look", &[("a", false, "[1]")]), ("run", &[("a", true, "")])]);
    for thinking in [json!({"type": "enabled"}), json!({"type": "disabled"}), json!(null)] {
        let on = thinking["type"] == "enabled";
        for (text, wanted) in [("Hello", 0), ("", 1), ("Look:", 3)] {
            let markup = match wanted {
                0 => "",
                1 => call.as_str(),
                _ => three.as_str(),
            };
            let start = if on { "hm</think>" } else { "" };
            let server = Server::saying(&format!("{start}{text}{markup}{EOS}"));
            let body = messages(json!({"thinking": thinking, "tools": messages_tools()}));
            let (blocks, delta) = validate(&server.events(PATH, body.clone()).await);
            let whole = server.ok(PATH, body).await;
            let kinds: Vec<&str> = blocks.iter().map(|(kind, _)| kind.as_str()).collect();
            assert_eq!(kinds.contains(&"thinking"), on, "{kinds:?}");
            assert_eq!(kinds.iter().filter(|k| **k == "tool_use").count(), wanted);
            let reason = if wanted > 0 { "tool_use" } else { "end_turn" };
            assert_eq!(delta["delta"]["stop_reason"], reason);
            assert_eq!(whole["stop_reason"], reason);
            for ((kind, content), block) in
                blocks.iter().zip(whole["content"].as_array().expect("blocks"))
            {
                assert_eq!(block["type"], *kind);
                match kind.as_str() {
                    "text" => assert_eq!(block["text"], *content),
                    "thinking" => assert_eq!(block["thinking"], *content),
                    _ => {
                        let input: Value = serde_json::from_str(content).expect("JSON");
                        assert_eq!(block["input"], input);
                    }
                }
            }
            assert_eq!(blocks.len(), whole["content"].as_array().map_or(0, Vec::len));
        }
    }
}

#[tokio::test]
async fn a_tool_loop_renders_as_the_official_encoder_does() {
    let server = Server::saying(&format!("done{EOS}"));
    let body = messages(json!({
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": messages_tools(),
        "thinking": {"type": "enabled"},
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I run it", "signature": "s"},
                {"type": "text", "text": "Running."},
                {"type": "tool_use", "id": "t1", "name": "run", "input": {"a": "007"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]},
            ]},
        ],
    }));
    server.ok(PATH, body).await;
    let prompt = tokenizer().decode(&server.last_prompt());
    for part in ["Be brief.", "<think>I run it</think>Running.", "string=\"true\">007<", "ok"] {
        assert!(prompt.contains(part), "{part} is not in {prompt}");
    }
}

#[tokio::test]
async fn limits_stops_and_counts() {
    let server = Server::saying(&format!("one STOP two{EOS}"));
    let whole = server.ok(PATH, messages(json!({"stop_sequences": ["STOP"]}))).await;
    assert_eq!(
        (&whole["stop_reason"], &whole["stop_sequence"]),
        (&json!("stop_sequence"), &json!("STOP"))
    );
    let whole = server.ok(PATH, messages(json!({"max_tokens": 2}))).await;
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 2);
    let count = server.ok("/v1/messages/count_tokens", messages(json!({}))).await;
    assert_eq!(count["input_tokens"], server.last_prompt().len());
    assert_eq!(whole["usage"]["input_tokens"], count["input_tokens"]);
}

#[tokio::test]
async fn refusals_name_the_field_in_this_protocols_shape() {
    let server = Server::saying("x");
    for (extra, field) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (
            json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
            "tools[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "thinking.budget_tokens"),
        (json!({"messages": [{"role": "judge", "content": "x"}]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": []}]}), "messages[0]"),
        (
            json!({"messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
            ]}),
            "messages[0].content[0]",
        ),
        (json!({"tools": [{"name": "f"}]}), "tools"),
        (json!({"system": 5}), "system"),
        (json!({"banana": 1}), "banana"),
    ] {
        let (status, body) = server.post(PATH, messages(extra)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let message = body["error"]["message"].as_str().expect("text");
        assert!(message.contains(field), "{message} does not name {field}");
    }
    let (status, body) = server.post(PATH, messages(json!({"model": "m"}))).await;
    assert_eq!(
        (status, &body["error"]["type"]),
        (StatusCode::NOT_FOUND, &json!("not_found_error"))
    );
}
