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
            let reason = if called { "tool_calls" } else { reason };
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
    let (thinking, answer) = speech::split(tokenizer, thinks, &completion.ids(), &completion.text);
    let mut message = json!({ "role": "assistant", "content": answer });
    if let Some(thinking) = thinking {
        message["reasoning_content"] = Value::String(thinking);
    }
    let Some((before, calls)) = tools.then(|| conversation::tool_calls(&answer)).flatten() else {
        return (message, false);
    };
    message["content"] = Value::String(before.to_owned());
    let calls = calls.into_iter().enumerate().map(|(i, call)| {
        let arguments = Value::Object(call.arguments).to_string();
        let function = json!({ "name": call.name, "arguments": arguments });
        json!({ "id": format!("call_{i}"), "type": "function", "function": function })
    });
    message["tool_calls"] = calls.collect();
    (message, true)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
