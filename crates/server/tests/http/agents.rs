//! Agent loops: what a client sends back renders to the tokens that were produced.

use crate::common::*;
use crate::matrix::bytewise;
use crate::messages::messages_tools;
use deepinfer_server::Config;
use deepinfer_server::scripted::Reply;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const TURNS: usize = 20;

/// A model that calls a tool every turn, in tokens that no encoder would choose, over a cache of
/// everything it has read and produced.
fn agent_server() -> Server {
    let past: Arc<Mutex<Vec<Vec<u32>>>> = Arc::default();
    Server::scripted(Config::default(), move |prompt| {
        let mut past = past.lock().expect("not poisoned");
        let turn = past.len();
        let shared = |old: &Vec<u32>| old.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let cached = past.iter().map(shared).max().unwrap_or(0);
        let value = format!("{{\"z\": {turn}, \"a\": \"x\"}}");
        let call =
            calls(&[("run", &[("cmd", true, "make 2>&1"), ("opts", false, value.as_str())])]);
        let text = format!("Step {turn}: think a while</think>I go on. \n{call}{EOS}");
        let reply = bytewise(&text);
        past.push([prompt, &reply].concat());
        Ok(Reply { cached, ..Reply::tokens(reply) })
    })
}

/// Arguments as another serializer writes them: names sorted, no spaces.
fn rewritten(arguments: &str) -> String {
    let value: Value = serde_json::from_str(arguments).expect("JSON");
    let names: std::collections::BTreeMap<String, Value> =
        serde_json::from_value(value).expect("an object");
    serde_json::to_string(&names).expect("JSON")
}

#[tokio::test]
async fn chat_loops_hit_the_cache() {
    let server = agent_server();
    let system = "You are a careful agent. ".repeat(40);
    let mut messages = vec![
        json!({"role": "system", "content": system}),
        json!({"role": "user", "content": "build it"}),
    ];
    for turn in 0..TURNS {
        let body =
            chat(json!({"messages": messages, "tools": tools(), "reasoning_effort": "high"}));
        let whole = server.ok("/v1/chat/completions", body).await;
        check_share(
            turn,
            &whole["usage"]["prompt_tokens"],
            &whole["usage"]["prompt_tokens_details"]["cached_tokens"],
        );
        let message = &whole["choices"][0]["message"];
        let call = &message["tool_calls"][0];
        let arguments = rewritten(call["function"]["arguments"].as_str().expect("text"));
        // Reasoning dropped, white space cut, arguments written another way.
        messages.push(json!({
            "role": "assistant",
            "content": message["content"].as_str().expect("text").trim(),
            "tool_calls": [{"id": call["id"], "type": "function",
                            "function": {"name": "run", "arguments": arguments}}],
        }));
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "ok"}));
    }
    let (_, metrics) = server.get("/metrics").await;
    let replayed = metrics.lines().find_map(|l| l.strip_prefix("deepinfer_replayed_tokens_total "));
    assert!(replayed.is_some_and(|n| n != "0"));
}

#[tokio::test]
async fn messages_loops_hit_the_cache() {
    let server = agent_server();
    let mut messages = vec![json!({"role": "user", "content": "build it"})];
    for turn in 0..TURNS {
        let body = json!({
            "model": "deepinfer", "max_tokens": 5000, "messages": messages, "tools": messages_tools(),
            "system": "You are a careful agent. ".repeat(40), "thinking": {"type": "enabled"},
        });
        let whole = server.ok("/v1/messages", body).await;
        let usage = &whole["usage"];
        let cached = usage["cache_read_input_tokens"].as_u64().expect("a number");
        let all = cached + usage["input_tokens"].as_u64().expect("a number");
        check_share(turn, &json!(all), &json!(cached));
        let blocks = whole["content"].as_array().expect("blocks");
        let kept: Vec<&Value> = blocks.iter().filter(|block| block["type"] != "thinking").collect();
        messages.push(json!({"role": "assistant", "content": kept}));
        let id = &blocks.last().expect("a call")["id"];
        messages.push(json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": id, "content": "ok"}]}));
    }
}

fn check_share(turn: usize, all: &Value, cached: &Value) {
    let (all, cached) = (all.as_u64().expect("a number"), cached.as_u64().expect("a number"));
    assert!(turn == 0 || cached * 100 >= all * 95, "turn {turn}: {cached} of {all} from the cache");
}
