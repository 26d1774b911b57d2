//! From a specification to the library's own input.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use super::error::CompileError;
use super::schema;
use super::spec::GrammarSpec;
use super::tools;
use super::vocabulary::GrammarVocabulary;

pub(super) fn lower(
    spec: &GrammarSpec,
    vocabulary: &GrammarVocabulary,
    max_nodes: usize,
) -> Result<TopLevelGrammar, CompileError> {
    let of_schema = |value: &Value| {
        schema::normalize(value, value, "", max_nodes).map(TopLevelGrammar::from_json_schema)
    };
    match spec {
        GrammarSpec::JsonSchema(value) => of_schema(value),
        GrammarSpec::JsonObject => of_schema(&json!({"type": "object"})),
        GrammarSpec::Regex(expression) => Ok(TopLevelGrammar::from_regex(expression)),
        GrammarSpec::Lark(text) => {
            if text.trim().is_empty() {
                return Err(CompileError::Empty { what: "the grammar" });
            }
            Ok(TopLevelGrammar::from_lark(text.clone()))
        }
        GrammarSpec::Choice(choices) => {
            if choices.is_empty() {
                return Err(CompileError::Empty { what: "the list of choices" });
            }
            let quoted: Vec<String> = choices.iter().map(|c| quote(c)).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | "))))
        }
        GrammarSpec::ToolCalls(calls) => {
            tools::grammar(calls, vocabulary, max_nodes).map(TopLevelGrammar::from_lark)
        }
    }
}

/// A string as a Lark literal: the same escapes as in JSON.
pub(super) fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
