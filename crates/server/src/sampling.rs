//! The fields of a body that say how tokens are chosen.

use crate::error::ApiError;
use crate::fields::Fields;
use deepinfer::request::SamplingParams;
use deepinfer::tokenizer::Tokenizer;
use serde_json::Value;
use std::collections::BTreeMap;

/// Takes the fields of OpenAI's protocols and the usual extensions. Ranges are checked by the
/// engine.
pub fn take(fields: &mut Fields, tokenizer: &Tokenizer) -> Result<SamplingParams, ApiError> {
    let base = SamplingParams::default();
    let mut params = SamplingParams {
        temperature: number(fields, "temperature")?.unwrap_or(base.temperature),
        top_p: number(fields, "top_p")?.unwrap_or(base.top_p),
        top_k: take_top_k(fields)?,
        min_p: number(fields, "min_p")?.unwrap_or(base.min_p),
        repetition_penalty: number(fields, "repetition_penalty")?
            .unwrap_or(base.repetition_penalty),
        presence_penalty: number(fields, "presence_penalty")?.unwrap_or(base.presence_penalty),
        frequency_penalty: number(fields, "frequency_penalty")?.unwrap_or(base.frequency_penalty),
        logit_bias: take_logit_bias(fields)?,
        allowed_tokens: fields.take("allowed_token_ids")?.unwrap_or_default(),
        bad_words: Vec::new(),
        seed: take_seed(fields)?,
        sample: fields.take("sample_index")?.unwrap_or(0),
        min_tokens: fields.take("min_tokens")?.unwrap_or(0),
        stop_tokens: fields.take("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        ..base
    };
    for word in fields.take::<Vec<String>>("bad_words")?.unwrap_or_default() {
        // A word inside a text usually stands after a space.
        for text in [word.clone(), format!(" {word}")] {
            let ids = tokenizer.encode(&text).map_err(|e| fields.invalid("bad_words", e))?;
            if word.is_empty() || ids.is_empty() {
                return Err(fields.invalid("bad_words", "a word must not be empty"));
            }
            params.bad_words.push(ids);
        }
    }
    Ok(params)
}

/// Takes `stop`: a text or a list of texts.
pub fn take_stop(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let stop = match fields.value(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => {
            let text = |value| match value {
                Value::String(text) => Ok(text),
                other => Err(fields.invalid(name, format!("{other} is not a text"))),
            };
            list.into_iter().map(text).collect::<Result<_, _>>()?
        }
        Some(other) => {
            return Err(fields.invalid(name, format!("{other} is neither a text nor a list")));
        }
    };
    if stop.len() > 16 {
        return Err(
            fields.invalid(name, format!("{} texts, at most 16 are looked for", stop.len()))
        );
    }
    if stop.iter().any(String::is_empty) {
        return Err(fields.invalid(name, "an empty text stops everything; leave it out"));
    }
    Ok(stop)
}

/// Takes the most tokens to produce. If more than one of `names` is given, the least counts.
pub fn take_limit(fields: &mut Fields, names: &[&str]) -> Result<Option<usize>, ApiError> {
    let mut limit: Option<usize> = None;
    for name in names {
        if let Some(n) = fields.take::<usize>(name)? {
            if n == 0 {
                return Err(fields.invalid(name, "it must be at least 1"));
            }
            limit = Some(limit.map_or(n, |other| other.min(n)));
        }
    }
    Ok(limit)
}

/// Takes the number of answers.
pub fn take_n(fields: &mut Fields, most: usize) -> Result<usize, ApiError> {
    let n = fields.take::<usize>("n")?.unwrap_or(1);
    match (1..=most).contains(&n) {
        true => Ok(n),
        false => Err(fields.invalid("n", format!("{n} is not in 1 to {most}"))),
    }
}

/// Takes the fields that no engine needs and that never change an answer.
pub fn discard_labels(fields: &mut Fields) {
    fields.discard(&[
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]);
}

/// Takes `service_tier`: there is one.
pub fn take_service_tier(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take::<String>("service_tier")?.as_deref() {
        None | Some("auto" | "default" | "standard_only") => Ok(()),
        Some(other) => {
            Err(fields.invalid("service_tier", format!("{other:?}: there is only \"default\"")))
        }
    }
}

/// Takes `verbosity`: there is one; `instead` says how to ask for another.
pub fn take_verbosity(fields: &mut Fields, instead: &str) -> Result<(), ApiError> {
    match fields.take::<String>("verbosity")?.filter(|verbosity| verbosity != "medium") {
        None => Ok(()),
        Some(other) => {
            Err(fields.invalid("verbosity", format!("{other:?} is not supported; {instead}")))
        }
    }
}

fn number(fields: &mut Fields, name: &str) -> Result<Option<f32>, ApiError> {
    let value: Option<f64> = fields.take(name)?;
    match value.map(|value| value as f32) {
        Some(value) if !value.is_finite() => Err(fields.invalid(name, "the number is too large")),
        value => Ok(value),
    }
}

fn take_top_k(fields: &mut Fields) -> Result<u32, ApiError> {
    // -1 means all, as 0 does.
    match fields.take::<i64>("top_k")?.unwrap_or(0) {
        -1 => Ok(0),
        k => u32::try_from(k).map_err(|_| fields.invalid("top_k", format!("{k} is out of range"))),
    }
}

fn take_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    match fields.value("seed") {
        None => Ok(None),
        Some(Value::Number(n)) if n.is_u64() => Ok(n.as_u64()),
        // The same 64 bits.
        Some(Value::Number(n)) if n.is_i64() => Ok(n.as_i64().map(|n| n as u64)),
        Some(other) => Err(fields.invalid("seed", format!("{other} is not a 64-bit integer"))),
    }
}

fn take_logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let bias: BTreeMap<String, f64> = fields.take("logit_bias")?.unwrap_or_default();
    bias.into_iter()
        .map(|(token, bias)| match token.parse() {
            Ok(id) if (-100.0..=100.0).contains(&bias) => Ok((id, bias as f32)),
            Ok(_) => Err(fields
                .invalid("logit_bias", format!("{bias} for token {token} is not in -100 to 100"))),
            Err(_) => Err(fields.invalid("logit_bias", format!("{token:?} is not a token id"))),
        })
        .collect()
}
