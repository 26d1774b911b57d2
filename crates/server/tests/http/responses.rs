//! Responses.

use crate::common::*;
use axum::http::{Request, StatusCode};
use deepinfer_server::Config;
use deepinfer_server::scripted::Reply;
use serde_json::{Value, json};
use std::time::Duration;

const PATH: &str = "/v1/responses";

fn body(extra: Value) -> Value {
    merge(json!({"model": "deepinfer", "input": "hi"}), extra)
}

pub fn responses_tools() -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    json!([
        {"type": "function", "name": "run", "parameters": schema},
        {"type": "function", "name": "look", "parameters": schema, "strict": false},
        {"type": "custom", "name": "apply_patch"},
    ])
}

/// The rules of this protocol's event order. Returns the last response.
pub fn validate(events: &[(Option<String>, Value)]) -> Value {
    let mut open: Option<(u64, String)> = None;
    let mut items = 0;
    let mut joined = String::new();
    for (i, (name, event)) in events.iter().enumerate() {
        let kind = event["type"].as_str().expect("a type");
        assert_eq!(name.as_deref(), Some(kind));
        assert_eq!(event["sequence_number"], i, "sequence numbers count");
        assert_eq!(kind == "response.created", i == 0);
        let last = matches!(kind, "response.completed" | "response.incomplete" | "response.failed");
        assert_eq!(last, i == events.len() - 1, "{kind} at {i}");
        if let Some(index) = event["output_index"].as_u64() {
            match kind {
                "response.output_item.added" => {
                    assert!(open.is_none() && index == items);
                    open = Some((index, event["item"]["id"].as_str().expect("an id").into()));
                    joined.clear();
                }
                "response.output_item.done" => {
                    let (at, id) = open.take().expect("an open item");
                    assert_eq!((at, event["item"]["id"].as_str()), (index, Some(id.as_str())));
                    items += 1;
                }
                _ => {
                    let (at, id) = open.as_ref().expect("an open item");
                    assert_eq!((*at, event["item_id"].as_str()), (index, Some(id.as_str())));
                    if let Some(delta) = event["delta"].as_str() {
                        joined.push_str(delta);
                    }
                    for field in ["text", "arguments", "input"] {
                        if kind.ends_with(".done") && event[field].is_string() {
                            assert_eq!(event[field], joined, "{kind}");
                        }
                    }
                }
            }
        }
    }
    assert!(open.is_none());
    let response = events.last().expect("events").1["response"].clone();
    assert_eq!(response["output"].as_array().map_or(0, Vec::len) as u64, items);
    response
}

#[tokio::test]
async fn items_come_in_order_and_whole() {
    let text = format!(
        "hm</think>Patch:{}{EOS}",
        calls(&[
            ("apply_patch", &[("input", true, "*** Begin\n\"x\"")]),
            ("run", &[("a", true, "b")])
        ])
    );
    let server = Server::saying(&text);
    let request =
        body(json!({"tools": responses_tools(), "temperature": 0.5, "metadata": {"k": "v"}}));
    let streamed = validate(&server.events(PATH, request.clone()).await);
    let whole = server.ok(PATH, request).await;
    for response in [&streamed, &whole] {
        let kinds: Vec<&Value> = response["output"]
            .as_array()
            .expect("items")
            .iter()
            .map(|item| &item["type"])
            .collect();
        assert_eq!(kinds, ["reasoning", "message", "custom_tool_call", "function_call"]);
        assert_eq!(response["output"][2]["input"], "*** Begin\n\"x\"");
        assert_eq!(response["output"][3]["arguments"], "{\"a\": \"b\"}");
        assert_eq!(response["status"], "completed");
        assert_eq!(response["temperature"], 0.5);
        assert_eq!(response["metadata"]["k"], "v");
        assert_eq!(response["model"], "deepinfer");
        assert_eq!(
            response["usage"]["output_tokens_details"]["reasoning_tokens"],
            tokens("hm").len()
        );
    }
    let cut = server.ok(PATH, body(json!({"max_output_tokens": 2}))).await;
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
}

#[tokio::test]
async fn responses_are_kept_continued_and_deleted() {
    let server = Server::saying(&format!("hm</think>First answer{EOS}"));
    let first = server.ok(PATH, body(json!({"input": "First question"}))).await;
    let id = first["id"].as_str().expect("an id");
    let (status, kept) = server.get(&format!("{PATH}/{id}")).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(serde_json::from_str::<Value>(&kept).expect("JSON"), first);
    let next = body(json!({"input": "Second question", "previous_response_id": id}));
    let second = server.ok(PATH, next).await;
    assert_eq!(second["previous_response_id"], id);
    let prompt = tokenizer().decode(&server.last_prompt());
    let places: Vec<_> = ["First question", "First answer", "Second question"]
        .into_iter()
        .map(|part| prompt.find(part).unwrap_or_else(|| panic!("{part} is not in {prompt}")))
        .collect();
    assert!(places.is_sorted());
    let list = format!("{PATH}/{}/input_items", second["id"].as_str().expect("an id"));
    let items = async |query: &str| -> Value {
        let (status, text) = server.get(&format!("{list}{query}")).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).expect("JSON")
    };
    let newest_first = items("").await;
    let data = newest_first["data"].as_array().expect("a list");
    assert_eq!((data.len(), &newest_first["has_more"]), (4, &json!(false)));
    assert_eq!(data[0]["content"][0]["text"], "Second question");
    let oldest = items("?order=asc&limit=1").await;
    assert_eq!(oldest["data"], json!([data[3]]));
    assert_eq!(oldest["has_more"], true);
    for order in ["asc", "desc"] {
        let mut all = items(&format!("?order={order}&limit=1")).await;
        let mut ids = vec![all["last_id"].clone()];
        while all["has_more"] == true {
            let last = all["data"][0]["id"].as_str().expect("an id");
            all = items(&format!("?order={order}&limit=1&after={last}")).await;
            assert!(!ids.contains(&all["last_id"]), "{all}");
            ids.push(all["last_id"].clone());
        }
        let mut expected: Vec<_> = data.iter().map(|item| item["id"].clone()).collect();
        if order == "asc" {
            expected.reverse();
        }
        assert_eq!(ids, expected);
    }
    for (query, name) in [("?order=up", "order"), ("?limit=0", "limit"), ("?after=x", "after")] {
        let (status, text) = server.get(&format!("{list}{query}")).await;
        let error: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!(name)), "{text}");
    }
    let (status, text) = server.get(&format!("{PATH}/{id}?stream=true")).await;
    assert!(status == 400 && text.contains("stream is not known here"), "{text}");

    let delete =
        Request::delete(format!("{PATH}/{id}")).body(Default::default()).expect("a request");
    assert_eq!(server.send(delete).await.status(), StatusCode::OK);
    assert_eq!(server.get(&format!("{PATH}/{id}")).await.0, StatusCode::NOT_FOUND);
    let unkept = server.ok(PATH, body(json!({"store": false}))).await;
    let path = format!("{PATH}/{}", unkept["id"].as_str().expect("an id"));
    assert_eq!(server.get(&path).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn items_of_an_input_are_told_apart() {
    let server = Server::saying(&format!("hm</think>a{EOS}"));
    let item = |id: Value| json!({"role": "user", "content": "x", "id": id});
    let given = ["same", "item_2", "same", ""].map(|id| item(json!(id)));
    let response = server.ok(PATH, body(json!({"input": given}))).await;
    let id = response["id"].as_str().expect("an id");
    let (_, text) = server.get(&format!("{PATH}/{id}/input_items?order=asc")).await;
    let list: Value = serde_json::from_str(&text).expect("JSON");
    let ids: Vec<_> = list["data"].as_array().expect("a list").iter().map(|i| &i["id"]).collect();
    assert_eq!(ids, ["same", "item_2", "item_2_", "item_3"]);
}

#[tokio::test]
async fn an_ill_formed_item_is_found_beside_a_long_text() {
    let server = Server::saying("x");
    let mut items = vec![json!({"role": "user", "content": "x"}); 20_000];
    items[19_999]["role"] = json!("judge");
    let long = "x".repeat(4 << 20);
    let refused = server.refused(PATH, body(json!({"input": items, "instructions": long}))).await;
    assert_eq!(refused, "input[19999]");
}

#[tokio::test]
async fn background_responses_run_and_can_be_cancelled() {
    let answer = tokens(&format!("hm</think>slow and long{EOS}"));
    let server = Server::scripted(Config::default(), move |_| {
        Ok(Reply { pace: Duration::from_millis(3), ..Reply::tokens(answer.clone()) })
    });
    let start = async || {
        let response = server.ok(PATH, body(json!({"background": true}))).await;
        assert_eq!(response["status"], "queued");
        response["id"].as_str().expect("an id").to_owned()
    };
    let status = async |id: &str| -> Value {
        serde_json::from_str(&server.get(&format!("{PATH}/{id}")).await.1).expect("JSON")
    };
    let id = start().await;
    let mut last = Value::Null;
    for _ in 0..500 {
        last = status(&id).await;
        if last["status"] == "completed" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(last["status"], "completed");
    assert_eq!(last["output"][1]["content"][0]["text"], "slow and long");

    let id = start().await;
    let cancelled = server.ok(&format!("{PATH}/{id}/cancel"), json!({})).await;
    assert_eq!(cancelled["status"], "cancelled");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(status(&id).await["status"], "cancelled");
    assert_eq!(server.app.open.load(std::sync::atomic::Ordering::Relaxed), 0);
    let path = format!("{PATH}/{}/cancel", last["id"].as_str().expect("an id"));
    assert_eq!(server.refused(&path, json!({})).await, "response_id");
}

#[tokio::test]
async fn an_agents_session_is_accepted_and_unknown_items_are_named() {
    let server = Server::saying(&format!("</think>ok{EOS}"));
    let input = json!([
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "look first"}],
         "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{\"a\":\"ls\"}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "function_call_output", "call_id": "c1", "output": "file"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]);
    let request = body(json!({
        "input": input, "tools": responses_tools(), "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "store": false, "parallel_tool_calls": true,
    }));
    server.ok(PATH, request).await;
    let prompt = tokenizer().decode(&server.last_prompt());
    for part in ["rules", "look first", "string=\"true\">ls<", "*** Begin Patch", "file", "done"] {
        assert!(prompt.contains(part), "{part} is not in {prompt}");
    }
    for (extra, field) in [
        (json!({"input": [{"type": "computer_call"}]}), "input[0].type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"include": ["file_search_call.results"]}), "include"),
        (json!({"input": null}), "input"),
        (json!({"input": [{"role": "user", "content": 5}]}), "input[0]"),
        (json!({"input": [{"role": "judge", "content": "x"}]}), "input[0]"),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}),
            "input[0].call_id",
        ),
        (json!({"tools": [{"type": "custom", "name": "sed"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "tool_search", "execution": "server"}]}), "tools[0].execution"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"background": true, "stream": true}), "background"),
        (json!({"banana": true}), "banana"),
    ] {
        assert_eq!(server.refused(PATH, body(extra)).await, field);
    }
    let (status, gone) = server.post(PATH, body(json!({"previous_response_id": "resp_x"}))).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(gone["error"]["param"], "previous_response_id");
}

#[tokio::test]
async fn prompts_are_counted_without_being_run() {
    let server = Server::saying(&format!("hm</think>First answer{EOS}"));
    let count = async |asked: Value| {
        let counted = server.ok("/v1/responses/input_tokens", asked).await;
        assert_eq!(counted["object"], "response.input_tokens");
        counted["input_tokens"].as_u64().expect("a number")
    };
    let asked = json!({
        "input": "hi", "instructions": "Be brief.", "tools": responses_tools(),
        "reasoning": {"effort": "none"},
    });
    // The model need not be named.
    let counted = count(asked.clone()).await;
    assert!(server.seen.lock().expect("not poisoned").is_empty(), "nothing has been run");
    let first = server.ok(PATH, body(asked)).await;
    assert_eq!(first["usage"]["input_tokens"], counted);
    let next = json!({"input": "And now?", "previous_response_id": first["id"]});
    let counted = count(next.clone()).await;
    let second = server.ok(PATH, body(next)).await;
    assert_eq!(second["usage"]["input_tokens"], counted);
    let refused = async |extra| server.refused("/v1/responses/input_tokens", extra).await;
    assert_eq!(refused(json!({})).await, "input");
    assert_eq!(refused(body(json!({"banana": 1}))).await, "banana");
    let (status, _) = server.get("/v1/responses/input_tokens").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
}
