//! Any body gets an answer or a refusal, never a fault.

use crate::common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config as Runner, TestRunner};
use serde_json::{Map, Value, json};

const PATHS: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
];

const NAMES: [&str; 62] = [
    "model",
    "messages",
    "prompt",
    "input",
    "role",
    "content",
    "type",
    "text",
    "tools",
    "tool_choice",
    "function",
    "name",
    "parameters",
    "input_schema",
    "arguments",
    "tool_calls",
    "tool_call_id",
    "id",
    "call_id",
    "output",
    "thinking",
    "budget_tokens",
    "reasoning",
    "reasoning_effort",
    "effort",
    "reasoning_content",
    "output_config",
    "stream",
    "stream_options",
    "include_usage",
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_sequences",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "schema",
    "instructions",
    "system",
    "previous_response_id",
    "store",
    "echo",
    "best_of",
    "suffix",
    "user",
    "metadata",
    "chat_template_kwargs",
    "prefix",
    "tokens",
    "include",
    "stop_token_ids",
    "bad_words",
    "properties",
];

const WORDS: [&str; 30] = [
    "deepinfer",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "function",
    "object",
    "enabled",
    "disabled",
    "auto",
    "none",
    "required",
    "high",
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "input_text",
    "output_text",
    "tool_use",
    "tool_result",
    "custom",
    "json_object",
    "",
    "é漢",
    "<｜User｜>",
    "</think>",
    "{\"a\": 1}",
];

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3i64..300).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(&WORDS[..]).prop_map(Value::from),
        "\\PC{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let name = prop::sample::select(&NAMES[..]).prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::btree_map(name, inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Bodies that work, so that mutations of them get far.
fn seeds() -> Vec<Value> {
    let mut history = chat(json!({"tools": tools(), "max_tokens": 5}));
    history["messages"] = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{\"a\": \"b\"}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ]);
    vec![
        history,
        json!({"model": "deepinfer", "prompt": "p", "max_tokens": 3}),
        json!({"model": "deepinfer", "max_tokens": 3, "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "run", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t"}]}]}),
        json!({"model": "deepinfer", "input": [
            {"role": "user", "content": "u"},
            {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "t"}]}),
        json!({"prompt": "text"}),
        json!({"tokens": [1, 2]}),
    ]
}

/// Puts `new` somewhere into `body`: `at` chooses where.
fn mutate(body: &mut Value, at: &[usize], name: &str, new: Value) {
    match (body, at.split_first()) {
        (Value::Object(map), Some((i, rest))) if !map.is_empty() && !rest.is_empty() => {
            let len = map.len();
            if let Some((_, inner)) = map.iter_mut().nth(i % len) {
                mutate(inner, rest, name, new);
            }
        }
        (Value::Array(list), Some((i, rest))) if !list.is_empty() => {
            let len = list.len();
            mutate(&mut list[i % len], rest, name, new);
        }
        (Value::Object(map), _) => {
            map.insert(name.to_owned(), new);
        }
        (other, _) => *other = new,
    }
}

#[test]
fn bodies_get_answers_or_refusals() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let server =
        Server::saying(&format!("hm</think>yes{}{EOS}", calls(&[("run", &[("a", true, "b")])])));
    // Longer with DEEPINFER_FUZZ_CASES.
    let cases =
        std::env::var("DEEPINFER_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let mut runner =
        TestRunner::new(Runner { cases, failure_persistence: None, ..Runner::default() });
    let name = prop::sample::select(&NAMES[..]);
    let change = (prop::collection::vec(0usize..8, 0..6), name, value());
    let changes = prop::collection::vec(change, 0..3);
    // Mostly a body that the path takes, with a few changes.
    let seed = prop_oneof![6 => Just(None), 1 => (0..seeds().len()).prop_map(Some)];
    let case = (0..PATHS.len(), seed, changes, prop::option::weighted(0.1, value()));
    let case = case.prop_map(|(path, seed, changes, other)| {
        const SEEDS: [usize; PATHS.len()] = [0, 1, 2, 2, 3, 3, 4, 5];
        let mut body = seeds()[seed.unwrap_or(SEEDS[path])].clone();
        for (at, name, new) in changes {
            mutate(&mut body, &at, name, new);
        }
        (path, other.unwrap_or(body))
    });
    let good = std::cell::Cell::new(0);
    runner
        .run(&case, |(path, body)| {
            let (status, answer) = runtime.block_on(server.post_raw(PATHS[path], body.to_string()));
            prop_assert!(
                status.is_success() || status.is_client_error(),
                "{} {status}: {body}\n{}",
                PATHS[path],
                String::from_utf8_lossy(&answer)
            );
            good.set(good.get() + u32::from(status.is_success()));
            Ok(())
        })
        .expect("no fault");
    assert!(
        good.get() * 10 > cases,
        "{} of {cases} bodies were good: this tests little",
        good.get()
    );
    // Bytes that are no JSON at all.
    for bytes in [&b"\xff\xfe"[..], b"", b"{\"a\":", b"nul", b"\"x\""] {
        let (status, _) = runtime.block_on(server.post_raw(PATHS[0], bytes.to_vec()));
        assert!(status.is_client_error());
    }
}
