//! Single rules of a configuration, and the errors that they give.

use super::ConfigError;
use serde_json::{Map, Value};
use std::fmt::{Debug, Display};

/// Fields without influence on what the model computes at inference.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "chunk_size_feed_forward",
    "dtype",
    "ep_size",
    "hidden_dropout",
    "id2label",
    "ignored_layers",
    "initializer_range",
    "intermediate_size",
    "label2id",
    "max_length",
    "modules_to_not_convert",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "type",
    "use_cache",
    "use_return_dict",
];

/// Fields of related models with the one value that means what this engine computes.
const FIXED: &[(&str, &str)] = &[
    ("attention_bias", "false"),
    ("attention_factor", "1"),
    ("first_k_dense_replace", "0"),
    ("hidden_act", "\"silu\""),
    ("mlp_bias", "false"),
    ("moe_layer_freq", "1"),
    ("n_group", "1"),
    ("num_hash_layers", "0"),
    ("rope_interleave", "true"),
    ("tie_word_embeddings", "false"),
    ("topk_group", "1"),
];

pub(super) fn section_type(
    field: &'static str,
    found: &Option<String>,
    expected: &'static str,
) -> Result<(), ConfigError> {
    match found {
        Some(found) if found != expected => {
            Err(ConfigError::ModelType { field, found: found.clone(), expected })
        }
        _ => Ok(()),
    }
}

/// Refuses fields that are neither known nor switched off.
pub(super) fn known_only(section: &str, fields: &Map<String, Value>) -> Result<(), ConfigError> {
    for (name, value) in fields {
        let switched_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            Value::Bool(true) => false,
        };
        let field = format!("{section}{name}");
        if let Some((_, supported)) = FIXED.iter().find(|(fixed, _)| fixed == name) {
            let text = value.to_string();
            let same =
                text == *supported || value.as_f64().is_some_and(|v| supported.parse() == Ok(v));
            if !same && !value.is_null() {
                let (found, supported) = (value.to_string(), (*supported).to_owned());
                return Err(ConfigError::Unsupported { field, found, supported });
            }
        } else if !switched_off && !HARMLESS.contains(&name.as_str()) {
            return Err(ConfigError::UnknownField { field, found: value.to_string() });
        }
    }
    Ok(())
}

pub(super) fn merge<T: Clone + PartialEq + Debug>(
    field: &str,
    top: &mut Option<T>,
    text: &Option<T>,
) -> Result<(), ConfigError> {
    match (&top, text) {
        (Some(a), Some(b)) if a != b => {
            let rule = format!("the same as text_config.{field} ({b:?})");
            Err(out_of_range(field, format!("{a:?}"), rule))
        }
        (None, Some(b)) => {
            *top = Some(b.clone());
            Ok(())
        }
        _ => Ok(()),
    }
}

pub(super) fn equal<T: PartialEq + Debug>(
    field: &str,
    found: T,
    supported: T,
) -> Result<(), ConfigError> {
    if found == supported {
        return Ok(());
    }
    let (found, supported) = (format!("{found:?}"), format!("{supported:?}"));
    Err(ConfigError::Unsupported { field: field.to_owned(), found, supported })
}

pub(super) fn out_of_range(field: &str, found: impl Display, rule: impl Display) -> ConfigError {
    ConfigError::OutOfRange {
        field: field.to_owned(),
        found: found.to_string(),
        rule: rule.to_string(),
    }
}

pub(super) fn range(
    field: &str,
    found: usize,
    least: usize,
    most: usize,
) -> Result<(), ConfigError> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(out_of_range(field, found, format!("from {least} to {most}")))
}

pub(super) fn within(
    name: &str,
    found: usize,
    least: usize,
    most: usize,
) -> Result<(), ConfigError> {
    range(&format!("text_config.{name}"), found, least, most)
}

pub(super) fn below(
    field: &str,
    found: usize,
    limit: usize,
    name: &str,
) -> Result<(), ConfigError> {
    if found < limit {
        return Ok(());
    }
    Err(out_of_range(field, found, format!("below {name} ({limit})")))
}

pub(super) fn multiple(name: &str, found: usize, of: usize) -> Result<(), ConfigError> {
    if found.is_multiple_of(of) {
        return Ok(());
    }
    Err(out_of_range(&format!("text_config.{name}"), found, format!("a multiple of {of}")))
}

pub(super) fn positive(name: &str, found: f64) -> Result<(), ConfigError> {
    if found.is_finite() && found > 0.0 {
        return Ok(());
    }
    Err(out_of_range(&format!("text_config.{name}"), found, "positive"))
}

pub(super) fn not_negative(name: &str, found: f64) -> Result<(), ConfigError> {
    if found.is_finite() && found >= 0.0 {
        return Ok(());
    }
    Err(out_of_range(&format!("text_config.{name}"), found, "zero or more"))
}

pub(super) fn ascending(field: &str, ids: &[usize], layers: usize) -> Result<(), ConfigError> {
    let field = format!("text_config.{field}");
    if let Some(&id) = ids.iter().find(|&&id| id >= layers) {
        return below(&field, id, layers, "num_hidden_layers");
    }
    if ids.windows(2).all(|pair| pair[0] < pair[1]) {
        return Ok(());
    }
    Err(out_of_range(&field, format!("{ids:?}"), "ascending, without repetition"))
}
