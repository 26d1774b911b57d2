//! From the fields of a body to a conversation, by the protocol crate. Its errors do not say which
//! field they are about; here they get its name.

use crate::error::ApiError;
use crate::turn;
use deepseek_recipe::request::{ConversationRequest, ConversionError, ProtocolRequest};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The conversation that the fields of a request `R` amount to. `main` is the field that holds the
/// conversation: errors that name no field are about it.
pub fn convert<R: ProtocolRequest + DeserializeOwned>(
    fields: Map<String, Value>,
    main: &str,
) -> Result<ConversationRequest, ApiError> {
    let body = Value::Object(fields);
    let request = R::deserialize(&body).map_err(|error| ill_formed::<R>(&body, error))?;
    request.convert(turn::conversion()).map_err(|error| match error {
        ConversionError::BadRequest { detail } => refused(&detail, main),
        ConversionError::Internal { detail } => ApiError::Internal { message: detail },
    })
}

/// The error of the first field, or item of a list, that is not read by itself, or else `error`.
fn ill_formed<R: DeserializeOwned>(body: &Value, error: serde_json::Error) -> ApiError {
    let read = |fields: &Map<String, Value>| R::deserialize(fields);
    let named = |param: String, error: serde_json::Error| {
        let message = format!("{param}: {error}");
        ApiError::Invalid { param: Some(param), message }
    };
    let empty = || Value::Array(Vec::new());
    let (lists, mut rest): (Map<String, Value>, Map<String, Value>) = {
        let fields = body.as_object().cloned().unwrap_or_default();
        fields.into_iter().partition(|(_, value)| value.is_array())
    };
    rest.extend(lists.keys().map(|name| (name.clone(), empty())));
    if let Err(error) = read(&rest) {
        let without = |name: &str| {
            let mut others = rest.clone();
            others.remove(name);
            read(&others).is_ok()
        };
        let name = rest.keys().find(|name| without(name)).cloned();
        return match name {
            Some(name) => named(name, error),
            None => ApiError::Invalid { param: None, message: error.to_string() },
        };
    }
    // The other fields are read again with every item: those that may be absent, which may be
    // large, are not.
    for name in rest.keys().cloned().collect::<Vec<_>>() {
        let Some(value) = rest.remove(&name) else { continue };
        if read(&rest).is_err() {
            rest.insert(name, value);
        }
    }
    for (name, items) in lists {
        let without = rest.get(&name).cloned();
        for (i, item) in items.as_array().into_iter().flatten().enumerate() {
            rest.insert(name.clone(), Value::Array(vec![item.clone()]));
            if let Err(error) = read(&rest) {
                return named(format!("{name}[{i}]"), error);
            }
        }
        match without {
            Some(list) => rest.insert(name, list),
            None => rest.remove(&name),
        };
    }
    ApiError::Invalid { param: None, message: error.to_string() }
}

/// What was refused, with the name of the field.
fn refused(detail: &str, main: &str) -> ApiError {
    const ABOUT_TOOLS: [&str; 5] = [
        "Tool names",
        "Invalid schema for function",
        "Invalid tool parameters",
        "The top level of the function",
        "Server tools",
    ];
    let tools = ABOUT_TOOLS.iter().any(|start| detail.starts_with(start));
    let param = path_in(detail).unwrap_or_else(|| if tools { "tools" } else { main }.to_owned());
    let message = match detail.contains(&param) {
        true => detail.to_owned(),
        false => format!("{param}: {detail}"),
    };
    ApiError::Invalid { param: Some(param), message }
}

/// The first path into a body that a text mentions: `messages.3.content[0]` as
/// `messages[3].content[0]`.
fn path_in(text: &str) -> Option<String> {
    const FIELDS: [(&str, &str); 4] =
        [("messages", "messages"), ("message", "messages"), ("tools", "tools"), ("input", "input")];
    let found = text.char_indices().find_map(|(at, _)| {
        let (name, rest) = FIELDS
            .iter()
            .find_map(|(word, name)| text[at..].strip_prefix(word).map(|rest| (name, rest)))?;
        let indexed = rest.strip_prefix(['.', '['])?;
        indexed.starts_with(|c: char| c.is_ascii_digit()).then_some((name, rest))
    });
    let (name, rest) = found?;
    let inside = |c: char| c.is_ascii_alphanumeric() || "_.[]".contains(c);
    let end = rest.find(|c| !inside(c)).unwrap_or(rest.len());
    let mut path = (*name).to_owned();
    for step in rest[..end].split('.').filter(|step| !step.is_empty()) {
        match step.bytes().all(|b| b.is_ascii_digit()) {
            true => path.push_str(&format!("[{step}]")),
            false if step.starts_with('[') => path.push_str(step),
            false => path.push_str(&format!(".{step}")),
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Deserializer};
    use serde_json::json;
    use std::cell::Cell;

    thread_local! {
        static TIMES_READ: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts how often it is read.
    struct Counted;

    impl<'de> Deserialize<'de> for Counted {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            TIMES_READ.set(TIMES_READ.get() + 1);
            String::deserialize(deserializer).map(|_| Self)
        }
    }

    #[derive(Deserialize)]
    struct Form {
        #[serde(rename = "model")]
        _model: String,
        #[serde(rename = "text")]
        _text: Option<Counted>,
        #[serde(rename = "must")]
        _must: Vec<u8>,
        #[serde(rename = "may", default)]
        _may: Vec<u8>,
    }

    #[test]
    fn other_fields_are_not_read_with_every_item() {
        let mut items = vec![json!(1); 1000];
        items.push(json!("x"));
        for (must, may, name) in [
            (json!(items), json!([1]), "must[1000]"),
            (json!(vec![1; 1000]), json!(items), "may[1000]"),
        ] {
            let body = json!({"model": "m", "text": "t", "must": must, "may": may});
            let error = Form::deserialize(&body).err().expect("an item is no number");
            TIMES_READ.set(0);
            let error = ill_formed::<Form>(&body, error);
            assert!(TIMES_READ.get() <= 5, "read {} times", TIMES_READ.get());
            assert_eq!(error.body(crate::error::Shape::OpenAi)["error"]["param"], name);
        }
    }

    #[test]
    fn paths_are_found_in_texts() {
        for (text, path) in [
            ("Invalid 'tools[0].function.name': empty", Some("tools[0].function.name")),
            (".messages[2]: no image", Some("messages[2]")),
            ("messages.3.content.1: each tool_use", Some("messages[3].content[1]")),
            ("messages.3:`tool_use` ids", Some("messages[3]")),
            ("unexpected `messages.4.content.0: tool_use_id`", Some("messages[4].content[0]")),
            ("Duplicate value in message[12]", Some("messages[12]")),
            ("Invalid 'input[5].call_id': empty", Some("input[5].call_id")),
            ("Empty input messages", None),
            ("the messages.", None),
        ] {
            assert_eq!(path_in(text).as_deref(), path, "{text}");
        }
    }
}
