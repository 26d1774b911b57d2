//! Lines of the output.

use super::body::Kind;
use crate::{conversation, speech};
use deepinfer::request::{Completion, FinishReason};
use deepinfer::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// What every line begins with.
const START: &str = "{\"id\":\"batch_req_";

/// Whether a line that was cut off is one of these.
pub fn begins(half: &[u8]) -> bool {
    half.starts_with(START.as_bytes()) || START.as_bytes().starts_with(half)
}

fn line(id: &str, response: &Value, error: &Value) -> String {
    let (name, id) = (json!(format!("batch_req_{id}")), json!(id));
    format!("{{\"id\":{name},\"custom_id\":{id},\"response\":{response},\"error\":{error}}}\n")
}

/// The line of a request that was served.
pub fn done(id: &str, body: Value) -> String {
    line(id, &json!({ "status_code": 200, "request_id": id, "body": body }), &Value::Null)
}

/// The line of a request that was not.
pub fn refused(id: &str, reason: &str) -> String {
    let error = json!({ "message": reason, "type": "invalid_request_error" });
    let response = json!({ "status_code": 400, "request_id": id, "body": { "error": error } });
    line(id, &response, &json!({ "code": "invalid_request", "message": reason }))
}

/// The body of an answer.
pub fn body(kind: &Kind, tokenizer: &Tokenizer, completion: &Completion) -> Value {
    let usage = &completion.usage;
    let reason = match completion.reason {
        Some(FinishReason::Stop) => "stop",
        _ => "length",
    };
    let usage = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    });
    let seed = completion.usage.seed;
    match kind {
        Kind::Text { echo, model } => {
            let text = echo.clone().unwrap_or_default() + &completion.text;
            let choice =
                json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": reason });
            json!({
                "object": "text_completion",
                "model": model,
                "choices": [choice],
                "usage": usage,
                "seed": seed,
            })
        }
        Kind::Chat { thinks, tools, model } => {
            let (message, called) = message(tokenizer, completion, *thinks, *tools);
            let reason = if called && reason == "stop" { "tool_calls" } else { reason };
            let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": reason });
            json!({
                "object": "chat.completion",
                "model": model,
                "choices": [choice],
                "usage": usage,
                "seed": seed,
            })
        }
    }
}

/// The assistant's message, and whether it calls tools.
fn message(
    tokenizer: &Tokenizer,
    completion: &Completion,
    thinks: bool,
    tools: bool,
) -> (Value, bool) {
    let (ids, text) = (completion.ids(), &completion.text);
    let (thinking, answer) = speech::split(tokenizer, thinks, &ids, text);
    // The answer is the end of the text.
    let start = text.len() - answer.len();
    let mut message = json!({ "role": "assistant", "content": answer });
    if let Some(thinking) = thinking {
        message["reasoning_content"] = Value::String(thinking);
    }
    let calls = tools.then(|| conversation::tool_calls(tokenizer, &ids, text, start));
    let Some((before, calls)) = calls.flatten() else {
        return (message, false);
    };
    message["content"] = Value::String(before.trim_end().to_owned());
    let calls = calls.into_iter().enumerate().map(|(i, call)| {
        let function = json!({ "name": call.name, "arguments": call.arguments });
        json!({ "id": format!("call_{i}"), "type": "function", "function": function })
    });
    message["tool_calls"] = calls.collect();
    (message, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer::request::Token;

    #[test]
    fn lines_are_json_and_known_by_their_beginning() {
        for line in [done("a\"\n", json!({"x": 1})), refused("a\"\n", "why")] {
            let value: Value = serde_json::from_str(&line).expect("it is JSON");
            assert_eq!(value["custom_id"], "a\"\n");
            assert_eq!(value.as_object().map(serde_json::Map::len), Some(4));
            assert_eq!(line.matches('\n').count(), 1);
            for end in 0..line.len() {
                assert!(begins(&line.as_bytes()[..end]));
            }
        }
        assert!(!begins(b"{\"custom_id\":"));
    }

    #[test]
    fn a_call_that_the_length_cut_is_none() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(std::fs::read(path).expect("it is there"));
        let tokenizer = tokenizer.expect("it loads");
        let parameter = |name: &str| {
            let value = "<p>hi</p></｜DSML｜ parameter>\n";
            format!("<｜DSML｜ parameter name=\"{name}\" string=\"true\">{value}")
        };
        let half =
            ["\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n", &parameter("a")].concat();
        let whole =
            [&half, parameter("b").as_str(), "</｜DSML｜ invoke>\n</｜DSML｜ calls>"].concat();
        let choice = |answer: &str, thinks: bool, reason: FinishReason| {
            let start = if thinks { "so 23 + 58</think>" } else { "" };
            let text = [start, answer].concat();
            let ids = tokenizer.encode_scanning_specials(&text).expect("it encodes");
            let tokens = ids.into_iter().map(|id| Token { id, logprobs: None }).collect();
            let reason = Some(reason);
            let completion = Completion { tokens, text, reason, ..Completion::default() };
            let kind = Kind::Chat { thinks, tools: true, model: String::new() };
            body(&kind, &tokenizer, &completion)["choices"][0].clone()
        };
        for thinks in [false, true] {
            for (reason, told) in
                [(FinishReason::Stop, "tool_calls"), (FinishReason::Length, "length")]
            {
                let choice = choice(&whole, thinks, reason);
                let (message, told) = (&choice["message"], json!(told));
                let arguments = &message["tool_calls"][0]["function"]["arguments"];
                assert_eq!(arguments, r#"{"a":"<p>hi</p>","b":"<p>hi</p>"}"#);
                assert_eq!((&message["content"], &choice["finish_reason"]), (&json!(""), &told));
            }
            let choice = choice(&half, thinks, FinishReason::Length);
            assert_eq!(choice["message"].get("tool_calls"), None);
            assert_eq!(choice["message"]["content"], half);
            assert_eq!(choice["finish_reason"], "length");
        }
    }
}
