//! The demo model under grammars: with thinking and drafting on, every answer has its form.

use deepinfer::chat::{
    ChatTemplate, Conversation, Effort, Options, ResponseFormat, ToolDefinition, user,
};
use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig};
use deepinfer::grammar::{GrammarSpec, Tool, ToolCalls, ToolChoice, Trigger};
use deepinfer::request::{Completion, Constraint, FinishReason, Request, SamplingParams};
use flate2::read::GzDecoder;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Answers of each kind; every other one at temperature 1.
const RUNS: usize = 40;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// The first items of a task whose answers begin with thinking.
fn items(task: &str, count: usize) -> Vec<Value> {
    let path = demo().join(format!("eval/{task}.jsonl.gz"));
    let mut text = String::new();
    let file = File::open(path).expect("the demo model's tasks are there");
    GzDecoder::new(file).read_to_string(&mut text).expect("and can be read");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|item| item["thinking"] == true).take(count).collect()
}

fn tools(item: &Value) -> Vec<ToolDefinition> {
    let tool = |tool: &Value| ToolDefinition {
        name: tool["name"].as_str().expect("a name").into(),
        description: tool["description"].as_str().map(str::to_owned),
        parameters: tool["parameters"].clone(),
        strict: None,
        defer_loading: false,
    };
    item["tools"].as_array().into_iter().flatten().map(tool).collect()
}

/// Runs `items` under their grammars, once with drafts and once without; gives the answers.
fn answers(items: &[Value], grammar: impl Fn(usize, &Value) -> GrammarSpec) -> Vec<String> {
    let open = |draft| {
        let config = EngineConfig { draft, ..EngineConfig::default() };
        Engine::open(Source::directory(demo()), &config, &mut |_, _| {}).expect("starts")
    };
    let engine = open(DraftMode::Fixed(5));
    let tokenizer = engine.tokenizer().expect("there is one").clone();
    let template = ChatTemplate::new(&tokenizer).expect("the chat format");
    let end = tokenizer.require_special("</think>").expect("of the chat format");
    let request = |(i, item): (usize, &Value)| {
        let text = item["messages"][0]["content"].as_str().expect("one question");
        let conversation = Conversation {
            messages: vec![user(text)],
            tools: tools(item),
            response_format: match item["response_format"].as_str() {
                Some("json_object") => ResponseFormat::JsonObject,
                _ => ResponseFormat::Text,
            },
            ..Conversation::default()
        };
        let effort = item["effort"].as_str().unwrap_or("high").parse::<Effort>();
        let options = Options { effort: Some(effort.expect("is known")) };
        let prompt = template.render(&conversation, &options).expect("renders");
        let trigger = Some(Trigger::new(vec![end], None).expect("not empty"));
        let params = SamplingParams {
            temperature: (i % 2) as f32,
            seed: Some(i as u64),
            max_tokens: Some(600),
            constraint: Some(Arc::new(Constraint { grammar: grammar(i, item), trigger })),
            ..SamplingParams::default()
        };
        Request::tokens(prompt, params)
    };
    let requests: Vec<Request> = items.iter().enumerate().map(request).collect();
    let served = |engine: &Engine| -> Vec<Completion> {
        let results = engine.generate(requests.clone(), |_| {});
        results.into_iter().map(|result| result.expect("served")).collect()
    };
    let found = served(&engine);
    let accepted: usize = found.iter().map(|c| c.usage.accepted).sum();
    assert!(accepted > items.len(), "drafts are accepted: {accepted}");
    let plain = served(&open(DraftMode::Off));
    let answer = |(i, (found, plain)): (usize, (&Completion, &Completion))| {
        let ids = found.ids();
        assert_eq!(ids, plain.ids(), "answer {i} does not depend on drafts");
        assert_eq!(found.reason, Some(FinishReason::Stop), "answer {i}");
        let at = ids.iter().position(|&id| id == end).expect("the thinking ends");
        assert!(at > 0, "answer {i} begins with thinking");
        tokenizer.decode(&ids[at + 1..ids.len() - 1])
    };
    found.iter().zip(&plain).enumerate().map(answer).collect()
}

/// A schema that the expected answer follows.
fn schema(expected: &Map<String, Value>) -> Value {
    let kind = |value: &Value| match value {
        Value::Number(_) => json!({"type": "integer", "minimum": 0, "maximum": 200}),
        _ => json!({"type": "string", "maxLength": 30}),
    };
    let properties: Map<String, Value> =
        expected.iter().map(|(key, value)| (key.clone(), kind(value))).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": expected.keys().collect::<Vec<_>>(),
        "additionalProperties": false,
    })
}

fn expected(item: &Value) -> Map<String, Value> {
    let text = item["expected"].as_str().expect("a text");
    serde_json::from_str(text).expect("that is an object")
}

#[test]
fn every_json_answer_is_valid() {
    let items = items("json", RUNS / 2);
    let items: Vec<Value> = items.iter().flat_map(|item| [item.clone(), item.clone()]).collect();
    assert_eq!(items.len(), RUNS);
    // Half of the items follow a schema, the others are any object.
    let strict = |i: usize| i / 2 % 2 == 1;
    let grammar = |i: usize, item: &Value| match strict(i) {
        true => GrammarSpec::JsonSchema(schema(&expected(item))),
        false => GrammarSpec::JsonObject,
    };
    let (mut valid, mut right) = (0, 0);
    for (i, (answer, item)) in answers(&items, grammar).iter().zip(&items).enumerate() {
        let document: Value = serde_json::from_str(answer).expect(answer);
        assert!(document.is_object(), "{answer}");
        if strict(i) {
            assert!(jsonschema::is_valid(&schema(&expected(item)), &document), "{answer}");
        }
        valid += 1;
        right += usize::from(document.as_object() == Some(&expected(item)));
    }
    assert_eq!(valid, RUNS);
    assert!(right > RUNS / 2, "and most are right: {right}");
}

/// Name and arguments of the calls in an answer, read without the grammar's help.
fn calls(answer: &str) -> Vec<(String, Map<String, Value>)> {
    let inner = answer
        .strip_prefix("\n\n<｜DSML｜ calls>\n")
        .and_then(|rest| rest.strip_suffix("\n</｜DSML｜ calls>"))
        .expect("a block of calls");
    let call = |call: &str| {
        let (name, rest) = call.split_once("\">").expect("a name");
        let parameter = |parameter: &str| {
            let (head, value) = parameter.split_once("\">").expect("a head");
            let (name, string) = head.split_once("\" string=\"").expect("a kind");
            let value = value.split("</｜DSML｜").next().expect("a value");
            let value = match string {
                "true" => Value::from(value),
                _ => serde_json::from_str(value).expect(value),
            };
            (name.to_owned(), value)
        };
        let parameters = rest.split("<｜DSML｜ parameter name=\"").skip(1);
        (name.to_owned(), parameters.map(parameter).collect())
    };
    inner.split("<｜DSML｜ invoke name=\"").skip(1).map(call).collect()
}

#[test]
fn every_call_is_valid() {
    let items = items("tool_call", RUNS / 2);
    let items: Vec<Value> = items.iter().flat_map(|item| [item.clone(), item.clone()]).collect();
    assert_eq!(items.len(), RUNS);
    let grammar = |_: usize, item: &Value| {
        let tools = tools(item).into_iter().map(|tool| Tool {
            name: tool.name,
            parameters: tool.parameters,
            strict: true,
        });
        GrammarSpec::ToolCalls(ToolCalls {
            tools: tools.collect(),
            choice: ToolChoice::Required,
            parallel: true,
            opened: false,
        })
    };
    let (mut valid, mut right) = (0, 0);
    for (answer, item) in answers(&items, grammar).iter().zip(&items) {
        let calls = calls(answer);
        assert!(!calls.is_empty(), "{answer}");
        for (name, arguments) in &calls {
            let tool = tools(item).into_iter().find(|tool| tool.name == *name).expect("is listed");
            let arguments = Value::Object(arguments.clone());
            assert!(jsonschema::is_valid(&tool.parameters, &arguments), "{answer}");
        }
        valid += 1;
        let expected = item["expected"]["arguments"].as_object().expect("an object");
        let name = item["expected"]["name"].as_str().unwrap_or_default();
        right += usize::from(calls.len() == 1 && calls[0].0 == name && calls[0].1 == *expected);
    }
    assert_eq!(valid, RUNS);
    assert!(right > RUNS / 2, "and most are right: {right}");
}

#[test]
fn a_complete_form_ends_whatever_the_least_number_of_tokens() {
    let engine = Engine::open(Source::directory(demo()), &EngineConfig::default(), &mut |_, _| {})
        .expect("starts");
    let grammar = GrammarSpec::Choice(vec!["yes".into()]);
    let params = SamplingParams {
        min_tokens: 20,
        max_tokens: Some(40),
        constraint: Some(Arc::new(Constraint { grammar, trigger: None })),
        ..SamplingParams::greedy()
    };
    let request = Request::text("Answer: ", params);
    let found = engine.submit(request).expect("valid").wait().expect("served");
    assert_eq!(found.text, "yes");
    assert_eq!(found.reason, Some(FinishReason::Stop));
    assert!(found.tokens.len() <= 4, "{} tokens", found.tokens.len());
}
