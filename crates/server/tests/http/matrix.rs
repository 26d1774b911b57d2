//! Every protocol x thinking x tools x way of cutting the stream: events in order, one finish, deltas
//! that join to the whole answer, valid arguments.

use crate::common::*;
use crate::messages::{messages_tools, validate as validate_messages};
use crate::responses::{responses_tools, validate as validate_responses};
use deepinfer_server::Config;
use deepinfer_server::scripted::Reply;
use serde_json::{Value, json};

/// Text that is cut in awkward places: characters of several tokens, joiners, half tags.
const TEXT: &str = "é 漢字 👩‍👩‍👧 2 < 3 </ ｜ <｜ x\u{301} 2 <";
const THOUGHT: &str = "思 <think <｜ 🤔 hm </thin";

/// A reply of single bytes: the same text, cut everywhere.
pub fn bytewise(text: &str) -> Vec<u32> {
    let tokenizer = tokenizer();
    let mut out = Vec::new();
    for id in tokens(text) {
        let spelling = tokenizer.spelling(id).expect("a token");
        if tokenizer.special_id(spelling) == Some(id) {
            out.push(id);
            continue;
        }
        for byte in tokenizer.token_bytes(id) {
            let single = (0..tokenizer.vocab_size() as u32)
                .find(|&t| tokenizer.token_bytes(t) == [*byte])
                .expect("every byte has a token");
            out.push(single);
        }
    }
    out
}

#[tokio::test]
async fn every_cell() {
    let call = [
        (
            "run",
            &[
                ("cmd", true, "make 2>&1 > out && echo '</' 👍"),
                ("n", false, "{\"a\": [1, \"}\"]}"),
            ][..],
        ),
        ("look", &[][..]),
    ];
    let arguments =
        [json!({"cmd": "make 2>&1 > out && echo '</' 👍", "n": {"a": [1, "}"]}}), json!({})];
    for thinking in [true, false] {
        for with_calls in [true, false] {
            let start = if thinking { format!("{THOUGHT}</think>") } else { String::new() };
            let end = if with_calls { calls(&call) } else { String::new() };
            // The parser takes a lone "<" before the line breaks of calls for a part of the answer.
            let said = if with_calls { format!("{TEXT} 4") } else { TEXT.to_owned() };
            let text = format!("{start}{said}{end}{EOS}");
            for burst in [1, 3, 1000, 0] {
                let reply = if burst == 0 { bytewise(&text) } else { tokens(&text) };
                let server = Server::scripted(Config::default(), move |_| {
                    Ok(Reply { burst: burst.max(1), ..Reply::tokens(reply.clone()) })
                });
                let name = format!("thinking {thinking}, calls {with_calls}, burst {burst}");
                let expected = Answer {
                    content: said.clone(),
                    reasoning: if thinking { THOUGHT.into() } else { String::new() },
                    calls: Vec::new(),
                    finish: if with_calls { "tool_calls" } else { "stop" }.into(),
                };
                let wanted = if with_calls { &arguments[..] } else { &[] };
                check_chat(&server, thinking, &expected, wanted, &name).await;
                check_messages(&server, thinking, &expected, wanted, &name).await;
                check_responses(&server, thinking, &expected, wanted, &name).await;
            }
        }
    }
}

/// A form beside the tools' place: each protocol's own field for it.
#[tokio::test]
async fn every_cell_of_structured_output() {
    let said = "{\"a\": \"é 漢字 👩‍👩‍👧 </ ｜ <｜ x\u{301} }\", \"n\": [1, {\"b\": \"]\"}]}";
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let forms = [
        json!({"type": "json_object"}),
        json!({"type": "json_schema", "name": "f", "schema": schema}),
    ];
    for thinking in [true, false] {
        let start = if thinking { format!("{THOUGHT}</think>") } else { String::new() };
        let text = format!("{start}{said}{EOS}");
        let expected = Answer {
            content: said.into(),
            reasoning: if thinking { THOUGHT.into() } else { String::new() },
            calls: Vec::new(),
            finish: "stop".into(),
        };
        for (form, burst) in forms.iter().flat_map(|form| [1, 3, 1000, 0].map(|b| (form, b))) {
            let reply = if burst == 0 { bytewise(&text) } else { tokens(&text) };
            let server = Server::scripted(Config::default(), move |_| {
                Ok(Reply { burst: burst.max(1), ..Reply::tokens(reply.clone()) })
            });
            let name = format!("thinking {thinking}, form {}, burst {burst}", form["type"]);
            let mut in_chat = json!({"type": form["type"]});
            if form["type"] == "json_schema" {
                in_chat["json_schema"] = json!({"name": "f", "schema": schema});
            }
            let body =
                chat(json!({"response_format": in_chat, "reasoning_effort": effort(thinking)}));
            let whole = whole_chat(&server.ok("/v1/chat/completions", body.clone()).await);
            assert_eq!(whole, expected, "{name}");
            let joined = join_chat(&server.events("/v1/chat/completions", body).await);
            assert_eq!(joined, expected, "{name}");
            json_of(&joined.content, &name);

            let kind = if thinking { "enabled" } else { "disabled" };
            let body = json!({
                "model": "deepinfer", "max_tokens": 10_000, "thinking": {"type": kind},
                "messages": [{"role": "user", "content": "hi"}],
                "output_config": {"format": form},
            });
            let (blocks, delta) = validate_messages(&server.events("/v1/messages", body).await);
            let text: String =
                blocks.iter().filter(|(k, _)| k == "text").map(|(_, t)| t.as_str()).collect();
            assert_eq!((text.as_str(), &delta["delta"]["stop_reason"]), (said, &json!("end_turn")));

            let body = json!({
                "model": "deepinfer", "input": "hi", "reasoning": {"effort": effort(thinking)},
                "text": {"format": form},
            });
            let response = validate_responses(&server.events("/v1/responses", body).await);
            let items = response["output"].as_array().expect("items");
            let message = items.iter().find(|item| item["type"] == "message").expect("a message");
            assert_eq!(message["content"][0]["text"], said, "{name}");
        }
    }
}

fn effort(thinking: bool) -> &'static str {
    if thinking { "high" } else { "none" }
}

fn json_of(text: &str, name: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{name}: {text}: {e}"))
}

async fn check_chat(
    s: &Server,
    thinking: bool,
    expected: &Answer,
    arguments: &[Value],
    name: &str,
) {
    let body = chat(json!({"tools": tools(), "reasoning_effort": effort(thinking)}));
    let whole = whole_chat(&s.ok("/v1/chat/completions", body.clone()).await);
    let joined = join_chat(&s.events("/v1/chat/completions", body).await);
    assert_eq!(joined, whole, "{name}");
    let found: Vec<Value> = whole.calls.iter().map(|(_, a)| json_of(a, name)).collect();
    assert_eq!(found, arguments, "{name}");
    assert_eq!(Answer { calls: Vec::new(), ..whole }, *expected, "{name}");
}

async fn check_messages(
    s: &Server,
    thinking: bool,
    expected: &Answer,
    arguments: &[Value],
    name: &str,
) {
    let kind = if thinking { "enabled" } else { "disabled" };
    let body = json!({
        "model": "deepinfer", "max_tokens": 10_000, "thinking": {"type": kind},
        "messages": [{"role": "user", "content": "hi"}], "tools": messages_tools(),
    });
    let (blocks, _) = validate_messages(&s.events("/v1/messages", body).await);
    let joined = |kind: &str| -> Vec<&str> {
        blocks.iter().filter(|(k, _)| k == kind).map(|(_, text)| text.as_str()).collect()
    };
    assert_eq!(joined("text"), [expected.content.as_str()], "{name}");
    assert_eq!(joined("thinking").concat(), expected.reasoning, "{name}");
    let found: Vec<Value> = joined("tool_use").iter().map(|text| json_of(text, name)).collect();
    assert_eq!(found, arguments, "{name}");
}

async fn check_responses(
    s: &Server,
    thinking: bool,
    expected: &Answer,
    arguments: &[Value],
    name: &str,
) {
    let body = json!({
        "model": "deepinfer", "input": "hi", "reasoning": {"effort": effort(thinking)},
        "tools": responses_tools(),
    });
    let response = validate_responses(&s.events("/v1/responses", body).await);
    let items = response["output"].as_array().expect("items");
    let of_kind = |kind: &'static str| items.iter().filter(move |item| item["type"] == kind);
    let texts: Vec<&Value> = of_kind("message").map(|item| &item["content"][0]["text"]).collect();
    assert_eq!(texts, [&json!(expected.content)], "{name}");
    let thoughts: String =
        of_kind("reasoning").filter_map(|item| item["content"][0]["text"].as_str()).collect();
    assert_eq!(thoughts, expected.reasoning, "{name}");
    let found: Vec<Value> = of_kind("function_call")
        .map(|item| json_of(item["arguments"].as_str().expect("text"), name))
        .collect();
    assert_eq!(found, arguments, "{name}");
}
