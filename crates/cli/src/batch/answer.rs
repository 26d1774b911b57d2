//! Lines of the output.

use super::body::Kind;
use crate::{conversation, speech};
use deepinfer::request::{Completion, FinishReason};
use deepinfer::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// A request that was served.
pub fn done(id: &str, body: Value) -> Value {
    json!({
        "id": format!("batch_req_{id}"),
        "custom_id": id,
        "response": { "status_code": 200, "request_id": id, "body": body },
        "error": null,
    })
}

/// A request that was not.
pub fn refused(id: &str, reason: &str) -> Value {
    let error = json!({ "message": reason, "type": "invalid_request_error" });
    json!({
        "id": format!("batch_req_{id}"),
        "custom_id": id,
        "response": { "status_code": 400, "request_id": id, "body": { "error": error } },
        "error": { "code": "invalid_request", "message": reason },
    })
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
