//! Conversations and tool calls in JSON, as OpenAI's chat format writes them.

mod calls;

pub use calls::tool_calls;

use deepinfer::chat::{self, InputMessage, ToolCall, ToolDefinition};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A message.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(default, alias = "reasoning")]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<Call>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    #[allow(dead_code, reason = "accepted, without influence on the prompt")]
    name: Option<String>,
    #[serde(default, rename = "refusal")]
    _refusal: Nothing,
    #[serde(default, rename = "annotations")]
    _annotations: Nothing,
    #[serde(default, rename = "audio")]
    _audio: Nothing,
    #[serde(default, rename = "function_call")]
    _function_call: Nothing,
}

/// A field of an answer that is taken, where it holds nothing, so that the answer may be sent back.
#[derive(Clone, Debug, Default)]
struct Nothing;

impl<'de> Deserialize<'de> for Nothing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let empty = match &value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        match empty {
            true => Ok(Self),
            false => Err(D::Error::custom("only text and tool_calls are supported")),
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
    #[default]
    None,
}

#[derive(Clone, Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
}

/// A tool call: OpenAI's form, or name and arguments alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Call {
    Nested {
        #[serde(default)]
        id: String,
        function: Function,
    },
    Flat {
        #[serde(default)]
        id: String,
        name: String,
        arguments: Value,
    },
}

#[derive(Clone, Debug, Deserialize)]
struct Function {
    name: String,
    arguments: String,
}

/// A tool: OpenAI's form, or the function alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Tool {
    /// `{"type": "function", "function": {...}}`.
    Nested {
        /// The function.
        function: ToolFunction,
    },
    /// The function.
    Flat(ToolFunction),
}

/// A function that a model may call.
#[derive(Clone, Debug, Deserialize)]
pub struct ToolFunction {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    parameters: Value,
    #[serde(default)]
    strict: Option<bool>,
}

/// Turns messages into those of the prompt renderer. The error says what cannot be taken.
pub fn messages(list: Vec<Message>) -> Result<Vec<InputMessage>, String> {
    if list.is_empty() {
        return Err("messages is empty; give at least one".into());
    }
    list.into_iter().map(message).collect()
}

fn message(m: Message) -> Result<InputMessage, String> {
    let text = match m.content {
        Content::Text(text) => text,
        Content::None => String::new(),
        Content::Parts(parts) => {
            if let Some(other) = parts.iter().find(|p| p.kind != "text") {
                return Err(format!(
                    "content of type {:?} is not supported; give text",
                    other.kind
                ));
            }
            parts.into_iter().map(|p| p.text).collect()
        }
    };
    Ok(match m.role.as_str() {
        "system" | "developer" => chat::system(text),
        "user" => chat::user(text),
        "tool" => chat::tool_result(m.tool_call_id.unwrap_or_default(), text),
        "assistant" => {
            let calls = m.tool_calls.into_iter().map(|call| match call {
                Call::Nested { id, function } => {
                    ToolCall { id, name: function.name, arguments: function.arguments }
                }
                Call::Flat { id, name, arguments } => {
                    ToolCall { id, name, arguments: arguments.to_string() }
                }
            });
            let calls: Vec<ToolCall> = calls.collect();
            InputMessage::Assistant {
                content: text,
                reasoning_content: m.reasoning_content,
                tool_calls: (!calls.is_empty()).then_some(calls),
                prefix: false,
            }
        }
        other => return Err(format!("role {other:?}: expected system, user, assistant or tool")),
    })
}

/// Names of the tools whose arguments must follow their schemas.
pub fn strict(list: &[Tool]) -> Vec<String> {
    let function = |tool: &'_ Tool| {
        let (Tool::Nested { function } | Tool::Flat(function)) = tool;
        (function.strict == Some(true)).then(|| function.name.clone())
    };
    list.iter().filter_map(function).collect()
}

/// Turns tools into those of the prompt renderer.
pub fn tools(list: Vec<Tool>) -> Vec<ToolDefinition> {
    list.into_iter()
        .map(|tool| {
            let (Tool::Nested { function } | Tool::Flat(function)) = tool;
            ToolDefinition {
                name: function.name,
                description: function.description,
                parameters: function.parameters,
                strict: None,
                defer_loading: false,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_strict_where_they_say_so() {
        let tool = |name: &str, value: &str| {
            let json = format!(
                r#"{{"type": "function", "function": {{"name": "{name}", "strict": {value}}}}}"#
            );
            serde_json::from_str::<Tool>(&json).expect("a tool")
        };
        let tools = [tool("a", "null"), tool("b", "true"), tool("c", "false")];
        assert_eq!(strict(&tools), ["b"]);
    }

    #[test]
    fn messages_are_refused_by_name() {
        let parse = |json: &str| serde_json::from_str::<Message>(json);
        let image = r#"{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}"#;
        let error = messages(vec![parse(image).expect("it is JSON")]).expect_err("is refused");
        assert!(error.contains("image_url"), "{error}");
        assert!(parse(r#"{"role": "user", "content": "a", "colour": 1}"#).is_err());
        let role = parse(r#"{"role": "king", "content": "a"}"#).expect("it is JSON");
        assert!(messages(vec![role]).expect_err("is refused").contains("king"));
    }
}
