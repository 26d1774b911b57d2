//! Accounts in the words of OpenAI's protocols.

use crate::run::Accounts;
use serde_json::{Value, json};
use std::time::Duration;

/// `usage` of Chat Completions and Completions, over all answers of a request.
pub fn openai(all: &[Accounts], thinks: bool) -> Value {
    let Some(first) = all.first() else { return Value::Null };
    let output: usize = all.iter().map(|a| a.output_tokens).sum();
    let mut usage = json!({
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": first.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "prompt_cache_hit_tokens": first.cached_tokens,
        "prompt_cache_miss_tokens": first.prompt_tokens.saturating_sub(first.cached_tokens),
        "deepinfer": extension(all),
    });
    if thinks {
        let reasoning: usize = all.iter().map(|a| a.reasoning_tokens).sum();
        usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
    }
    usage
}

/// `usage` of Responses.
pub fn responses(all: &[Accounts]) -> Value {
    let Some(first) = all.first() else { return Value::Null };
    let sum = |get: fn(&Accounts) -> usize| all.iter().map(get).sum::<usize>();
    let output = sum(|a| a.output_tokens);
    json!({
        "input_tokens": first.prompt_tokens,
        "input_tokens_details": {"cached_tokens": first.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": sum(|a| a.reasoning_tokens)},
        "total_tokens": first.prompt_tokens + output,
        "deepinfer": extension(all),
    })
}

/// What the protocols have no words for.
pub fn extension(all: &[Accounts]) -> Value {
    let sum = |get: fn(&Accounts) -> usize| all.iter().map(get).sum::<usize>();
    let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    // Of several answers, the longest one's.
    let phase = |i: usize| all.iter().filter_map(|a| a.phases()[i].1).max().map(millis);
    json!({
        "drafted_tokens": sum(|a| a.drafted),
        "verified_tokens": sum(|a| a.verified),
        "accepted_tokens": sum(|a| a.accepted),
        "preemptions": sum(|a| a.preemptions),
        "seeds": all.iter().map(|a| a.seed).collect::<Vec<_>>(),
        "queue_ms": phase(0),
        "prefill_ms": phase(1),
        "decode_ms": phase(2),
        "first_token_ms": all.iter().filter_map(|a| a.first_token).min().map(millis),
        "total_ms": all.iter().map(|a| a.total).max().map(millis),
    })
}
