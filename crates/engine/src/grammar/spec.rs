//! What a request can ask its output to be.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A constraint on the text of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSpec {
    /// A JSON document that validates against this schema (2020-12; the older spellings of
    /// `items`, `definitions` and boolean exclusive bounds are understood). Properties come in
    /// the schema's order.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// The whole answer matches this regular expression (syntax of Rust's `regex` crate, without
    /// look-around and back references).
    Regex(String),
    /// The answer is derived from rule `start` of this grammar, in llguidance's variant of Lark.
    Lark(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// Tool calls in the V4.1 format.
    ToolCalls(ToolCalls),
}

/// Tools, and how an answer may call them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCalls {
    /// The tools on offer. Names are unique.
    pub tools: Vec<Tool>,
    /// Which calls there must be.
    pub choice: ToolChoice,
    /// Whether more than one call may be made.
    pub parallel: bool,
    /// The prompt already ends with the opening of the calls block, as the prompt encoder writes
    /// it when a call is required. Then the answer starts with the first call.
    pub opened: bool,
}

/// One tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Its name, without `"` and line breaks.
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
    /// Whether arguments must follow `parameters`. Without it only the form is enforced: any
    /// names, values that are text or JSON.
    pub strict: bool,
}

/// Which calls an answer must make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// Text, then calls or none.
    Auto,
    /// At least one call, of any tool.
    Required,
    /// At least one call, of this tool.
    Named(String),
}
