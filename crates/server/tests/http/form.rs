//! The form of answers: what requests ask for reaches the engine, and an engine keeps to it.

use crate::common::*;
use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig};
use deepinfer::grammar::{GrammarSpec, ToolChoice};
use deepinfer::request::ThinkingBudget;
use deepinfer_server::{App, Config, Inference, Live, router};
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bc"]}, "on": {"type": "boolean"}},
        "required": ["kind", "on"],
        "additionalProperties": false,
    })
}

fn message(extra: Value) -> Value {
    merge(chat(json!({"max_tokens": 200})), extra)
}

fn response(extra: Value) -> Value {
    merge(json!({"model": "deepinfer", "input": "hi"}), extra)
}

fn think_end() -> u32 {
    tokens("</think>")[0]
}

#[tokio::test]
async fn forms_reach_the_engine_in_every_protocol() {
    let server = Server::saying(&format!("thinking</think>x{EOS}"));
    let schema_form = GrammarSpec::JsonSchema(schema());
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}});
    let flat = json!({"type": "json_schema", "name": "x", "schema": schema()});
    let regex = GrammarSpec::Regex("a+".into());
    let choice = GrammarSpec::Choice(vec!["a".into(), "b".into()]);
    let outputs = |form: Value| json!({"structured_outputs": form});
    let cases = [
        (CHAT, chat(json!({"response_format": {"type": "json_object"}})), GrammarSpec::JsonObject),
        (CHAT, chat(json!({"response_format": format})), schema_form.clone()),
        (CHAT, chat(json!({"response_format": {"type": "regex", "regex": "a+"}})), regex.clone()),
        (CHAT, chat(outputs(json!({"json": schema()}))), schema_form.clone()),
        (CHAT, chat(outputs(json!({"json": schema().to_string()}))), schema_form.clone()),
        (CHAT, chat(outputs(json!({"choice": ["a", "b"]}))), choice),
        (RESPONSES, response(json!({"text": {"format": flat}})), schema_form.clone()),
        (RESPONSES, response(outputs(json!({"regex": "a+"}))), regex),
        (
            MESSAGES,
            message(json!({
                "thinking": {"type": "enabled", "budget_tokens": 9},
                "output_config": {"format": {"type": "json_schema", "schema": schema()}},
            })),
            schema_form.clone(),
        ),
    ];
    for (path, body, grammar) in cases {
        server.ok(path, body.clone()).await;
        let constraint = server.last_params().constraint.expect("there is one");
        assert_eq!(constraint.grammar, grammar, "{body}");
        // Thinking is free.
        let trigger = constraint.trigger.as_ref().expect("thinking comes first");
        assert_eq!(trigger.tokens(), [think_end()], "{body}");
    }
    // Without thinking the form holds from the first token on.
    let body = chat(json!({
        "reasoning_effort": "none", "response_format": {"type": "json_object"},
    }));
    server.ok(CHAT, body).await;
    assert_eq!(server.last_params().constraint.expect("there is one").trigger, None);
    let prompt = tokenizer().decode(&server.last_prompt());
    assert!(prompt.contains("json_object"), "the prompt says so, too: {prompt}");
    let text = json!({"response_format": {"type": "text"}});
    server.ok(CHAT, chat(text)).await;
    assert_eq!(server.last_params().constraint, None);

    let body =
        json!({"model": "deepinfer", "prompt": "x", "response_format": {"type": "json_object"}});
    server.ok("/v1/completions", body).await;
    let constraint = server.last_params().constraint.expect("there is one");
    assert_eq!((&constraint.grammar, &constraint.trigger), (&GrammarSpec::JsonObject, &None));
}

#[tokio::test]
async fn calls_that_must_come_reach_the_engine() {
    let call = calls(&[("run", &[("a", true, "x")])]);
    let server = Server::saying(&format!("thinking</think>{call}{EOS}"));
    let chosen = async |path: &str, body: Value| {
        let answer = server.ok(path, body).await;
        let constraint = server.last_params().constraint.expect("there is one");
        let GrammarSpec::ToolCalls(calls) = &constraint.grammar else { panic!("{constraint:?}") };
        (answer, calls.clone())
    };
    let named = json!({"type": "function", "function": {"name": "run"}});
    let (answer, form) = chosen(CHAT, chat(json!({"tools": tools(), "tool_choice": named}))).await;
    assert_eq!(form.choice, ToolChoice::Named("run".into()));
    assert!(form.parallel && form.tools.iter().all(|tool| !tool.strict));
    let answer = whole_chat(&answer);
    assert_eq!(answer.calls, [("run".to_owned(), r#"{"a": "x"}"#.to_owned())]);
    assert_eq!((answer.finish.as_str(), answer.reasoning.as_str()), ("tool_calls", "thinking"));

    let mut strict = tools();
    strict[1]["function"]["strict"] = json!(true);
    let body = json!({"tools": strict, "tool_choice": "required", "parallel_tool_calls": false});
    let (_, form) = chosen(CHAT, chat(body)).await;
    assert_eq!((form.choice, form.parallel), (ToolChoice::Required, false));
    assert_eq!(form.tools.iter().map(|tool| tool.strict).collect::<Vec<_>>(), [false, true]);
    // Strict tools are kept to without a call being required, too.
    let (_, form) = chosen(CHAT, chat(json!({"tools": strict}))).await;
    assert_eq!(form.choice, ToolChoice::Auto);

    let tool = json!({"name": "run", "input_schema": {"type": "object"}, "strict": false});
    let body = json!({"tools": [tool], "tool_choice": {"type": "any"}});
    assert_eq!(chosen(MESSAGES, message(body)).await.1.choice, ToolChoice::Required);
    let tool = json!({"type": "function", "name": "run", "parameters": schema(), "strict": true});
    let body = json!({"tools": [tool], "tool_choice": {"type": "function", "name": "run"}});
    let (_, form) = chosen(RESPONSES, response(body)).await;
    assert!(form.tools[0].strict && form.choice == ToolChoice::Named("run".into()));
    // Without any of this, calls are read as the model writes them.
    server.ok(CHAT, chat(json!({"tools": tools()}))).await;
    assert_eq!(server.last_params().constraint, None);
}

#[tokio::test]
async fn forms_that_cannot_be_kept_are_refused_by_name() {
    let server = Server::saying("x");
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let place = "response_format.json_schema.schema";
    for bad in [
        json!({"type": "text"}),
        json!({"enum": []}),
        json!({"$ref": "#/nowhere"}),
        json!({"type": "string", "pattern": "("}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
        json!({"not": {}}),
    ] {
        assert_eq!(server.refused(CHAT, chat(schema(bad.clone()))).await, place, "{bad}");
    }
    let (_, body) = server.post(CHAT, chat(schema(json!({"items": {"not": {}}})))).await;
    let text = body["error"]["message"].as_str().unwrap_or_default();
    assert!(text.contains("/items") && text.contains("not"), "{text}");

    let refused = async |extra: Value| server.refused(CHAT, chat(extra)).await;
    let outputs = |form: Value| json!({"structured_outputs": form});
    assert_eq!(refused(outputs(json!({"regex": "("}))).await, "structured_outputs.regex");
    assert_eq!(refused(outputs(json!({"grammar": "x"}))).await, "structured_outputs.grammar");
    assert_eq!(refused(outputs(json!({"choice": []}))).await, "structured_outputs.choice");
    assert_eq!(refused(outputs(json!({}))).await, "structured_outputs");
    assert_eq!(
        refused(outputs(json!({"regex": "a", "choice": ["b"]}))).await,
        "structured_outputs"
    );
    assert_eq!(refused(json!({"guided_json": {"type": "object"}})).await, "guided_json");
    let mut two = outputs(json!({"regex": "a"}));
    two["response_format"] = json!({"type": "json_object"});
    assert_eq!(refused(two).await, "structured_outputs");
    assert_eq!(refused(json!({"response_format": {"type": "xml"}})).await, "response_format.type");
    let both = json!({"tools": tools(), "response_format": {"type": "json_object"}});
    assert_eq!(refused(both).await, "response_format.type");
    assert_eq!(refused(json!({"tool_choice": "required"})).await, "tool_choice");
    let other = json!({"type": "function", "function": {"name": "other"}});
    assert_eq!(refused(json!({"tools": tools(), "tool_choice": other})).await, "tool_choice");
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    strict[0]["function"]["parameters"]["properties"]["a"] = json!({"not": {}});
    assert_eq!(refused(json!({"tools": strict})).await, "tools");
}

#[tokio::test]
async fn a_thinking_budget_reaches_the_engine() {
    let server = Server::saying(&format!("think</think>Done{EOS}"));
    let body = chat(json!({"thinking": {"type": "enabled", "budget_tokens": 4}}));
    server.ok(CHAT, body).await;
    let budget = ThinkingBudget { tokens: 4, end: think_end() };
    assert_eq!(server.last_params().thinking_budget, Some(budget));
    server.ok(CHAT, chat(json!({"reasoning_effort": "none", "thinking_budget": 4}))).await;
    assert_eq!(server.last_params().thinking_budget, None);
}

/// A server over an engine with the test checkpoint, whose answers are random.
fn live() -> Arc<App> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a");
    let config = EngineConfig {
        max_seqs: 4,
        kv_tokens: 8192,
        threads: Some(1),
        draft: DraftMode::Fixed(3),
        ..EngineConfig::default()
    };
    let engine = Engine::open(Source::directory(path), &config, &mut |_, _| {}).expect("starts");
    let live = Live::new(engine, None).expect("it has a tokenizer");
    App::new(Config::default(), Arc::new(live) as Arc<dyn Inference>)
}

async fn post(app: &Arc<App>, path: &str, body: Value) -> Value {
    use tower::ServiceExt;
    let request = axum::http::Request::post(path)
        .header("content-type", "application/json")
        .body(axum::body::Body::from(body.to_string()))
        .expect("a request");
    let response = router(app.clone()).oneshot(request).await.expect("infallible");
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    let value: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert!(status.is_success(), "{value}");
    value
}

#[tokio::test]
async fn answers_of_an_engine_have_their_form() {
    let app = live();
    let follows = |text: &str| {
        let value: Value = serde_json::from_str(text).expect(text);
        assert!(["a", "bc"].contains(&value["kind"].as_str().unwrap_or_default()), "{text}");
        assert!(value["on"].is_boolean(), "{text}");
    };
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}});
    // White space is free in JSON, and a random model likes it too well.
    let blank: serde_json::Map<String, Value> = (0..tokenizer().vocab_size() as u32)
        .filter(|&id| tokenizer().token_bytes(id).iter().any(u8::is_ascii_whitespace))
        .map(|id| (id.to_string(), json!(-100)))
        .collect();
    for temperature in [0.0, 1.0] {
        let body = chat(json!({
            "response_format": format, "thinking_budget": 7, "temperature": temperature,
            "seed": 3, "n": 3, "max_tokens": 150, "logit_bias": blank, "logprobs": true,
        }));
        let answer = post(&app, CHAT, body).await;
        let choices = answer["choices"].as_array().expect("a list");
        assert_eq!(choices.len(), 3);
        for choice in choices {
            follows(choice["message"]["content"].as_str().unwrap_or_default());
            assert_eq!(choice["finish_reason"], "stop");
            assert!(choice["logprobs"]["content"].as_array().is_some_and(|l| !l.is_empty()));
        }
        assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 3 * 7);
    }
    let tool = json!({"type": "function", "function": {
        "name": "run", "parameters": schema(), "strict": true,
    }});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "run"}})] {
        let body = chat(json!({
            "tools": [tool], "tool_choice": choice, "thinking_budget": 5, "temperature": 1,
            "seed": 1, "parallel_tool_calls": false, "max_tokens": 300,
        }));
        let answer = whole_chat(&post(&app, CHAT, body).await);
        assert_eq!(answer.finish, "tool_calls");
        assert_eq!(answer.calls[0].0, "run");
        follows(&answer.calls[0].1);
    }
}
