//! The form that an answer must have: from the fields of a body to a grammar.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use deepinfer::chat::ResponseFormat;
use deepinfer::grammar::{GrammarSpec, Tool, ToolCalls, ToolChoice, Trigger};
use deepinfer::request::Constraint;
use deepseek_recipe::request::ConversationRequest;
use serde_json::Value;
use std::sync::Arc;

/// A form, and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// What is enforced.
    pub grammar: GrammarSpec,
    /// Path of the field.
    pub param: String,
    /// Whether the prompt says so, too.
    pub told: bool,
}

impl Form {
    /// What the prompt says of it.
    pub fn response_format(&self) -> ResponseFormat {
        match &self.grammar {
            GrammarSpec::JsonObject if self.told => ResponseFormat::JsonObject,
            GrammarSpec::JsonSchema(schema) if self.told => {
                ResponseFormat::JsonSchema(schema.clone())
            }
            _ => ResponseFormat::Text,
        }
    }

    /// The form as a rule for the engine. Compiles it, so that what cannot be enforced is refused
    /// here and by the field's name.
    pub fn constraint(
        self,
        app: &App,
        trigger: Option<Trigger>,
    ) -> Result<Arc<Constraint>, ApiError> {
        let Self { grammar, param, .. } = self;
        app.inference.check_grammar(&grammar).map_err(|error| match ApiError::from(error) {
            ApiError::Invalid { message, .. } => {
                ApiError::Invalid { message: format!("{param}: {message}"), param: Some(param) }
            }
            other => other,
        })?;
        Ok(Arc::new(Constraint { grammar, trigger }))
    }
}

/// Takes a format: `type`, and what belongs to it. `None` is text.
pub fn take_format(fields: &mut Fields, name: &str) -> Result<Option<Form>, ApiError> {
    let Some(mut format) = fields.object(name)? else { return Ok(None) };
    let kind: String = format.require("type")?;
    let (grammar, param) = match kind.as_str() {
        "text" => {
            format.finish()?;
            return Ok(None);
        }
        "json_object" => (GrammarSpec::JsonObject, format.path("type")),
        "json_schema" => match format.object("json_schema")? {
            Some(mut inner) => {
                let schema = take_schema(&mut inner)?;
                inner.finish()?;
                schema
            }
            None => take_schema(&mut format)?,
        },
        "regex" => (GrammarSpec::Regex(format.require("regex")?), format.path("regex")),
        "grammar" => (GrammarSpec::Lark(format.require("grammar")?), format.path("grammar")),
        "choice" => (GrammarSpec::Choice(format.require("choice")?), format.path("choice")),
        other => {
            let message = format!(
                "{other:?} is not supported; give text, json_object, json_schema, regex, grammar or \
                 choice"
            );
            return Err(format.invalid("type", message));
        }
    };
    format.finish()?;
    Ok(Some(Form { grammar, param, told: true }))
}

/// A schema is enforced whether or not it is called strict; its name is the caller's.
fn take_schema(fields: &mut Fields) -> Result<(GrammarSpec, String), ApiError> {
    fields.discard(&["name", "description", "strict"]);
    Ok((GrammarSpec::JsonSchema(fields.require("schema")?), fields.path("schema")))
}

/// Takes the extension `structured_outputs`: one of `json`, `json_object`, `regex`, `choice`, `grammar`.
fn take_structured_outputs(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    let Some(mut given) = fields.object("structured_outputs")? else { return Ok(None) };
    let mut forms = Vec::new();
    match given.value("json") {
        None => {}
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(schema) => forms.push((GrammarSpec::JsonSchema(schema), "json")),
            Err(error) => return Err(given.invalid("json", error)),
        },
        Some(schema) => forms.push((GrammarSpec::JsonSchema(schema), "json")),
    }
    if given.take("json_object")?.unwrap_or(false) {
        forms.push((GrammarSpec::JsonObject, "json_object"));
    }
    forms.extend(given.take("regex")?.map(|text| (GrammarSpec::Regex(text), "regex")));
    forms.extend(given.take("choice")?.map(|list| (GrammarSpec::Choice(list), "choice")));
    forms.extend(given.take("grammar")?.map(|text| (GrammarSpec::Lark(text), "grammar")));
    let form =
        forms.pop().map(|(grammar, name)| Form { grammar, param: given.path(name), told: false });
    if !forms.is_empty() || form.is_none() {
        let message = "give exactly one of json, json_object, regex, choice and grammar";
        return Err(fields.invalid("structured_outputs", message));
    }
    given.finish()?;
    Ok(form)
}

/// Takes the form of an answer: `format`, which the protocol's own fields asked for at `name`, or
/// what the extension asks for.
pub fn take_form(
    fields: &mut Fields,
    name: &str,
    format: Option<Form>,
) -> Result<Option<Form>, ApiError> {
    let extension = take_structured_outputs(fields)?;
    fields.refuse(
        &["guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"],
        "use structured_outputs",
    )?;
    match (format, extension) {
        (Some(_), Some(_)) => {
            Err(fields.invalid("structured_outputs", format!("{name} asks for another form")))
        }
        (format, extension) => Ok(format.or(extension)),
    }
}

/// What a request says of its tools.
#[derive(Clone, Debug)]
pub struct ToolRules {
    /// Which calls there must be.
    pub choice: ToolChoice,
    /// Tools whose arguments must follow their schemas: namespace, if any, and name.
    pub strict: Vec<(Option<String>, String)>,
    /// At most one call.
    pub one_call: bool,
}

impl Default for ToolRules {
    fn default() -> Self {
        Self { choice: ToolChoice::Auto, strict: Vec::new(), one_call: false }
    }
}

impl ToolRules {
    /// The form of an answer with these rules, if they need one. Without strict tools and a choice
    /// that requires a call, calls are read as the model writes them.
    pub fn form(&self, converted: &ConversationRequest) -> Result<Option<Form>, ApiError> {
        let tools = &converted.conversation.tools;
        let wants_call = self.choice != ToolChoice::Auto;
        if tools.is_empty() && wants_call {
            return Err(ApiError::invalid("tool_choice", "tool_choice: there are no tools"));
        }
        if tools.is_empty() || !wants_call && self.strict.is_empty() {
            return Ok(None);
        }
        if let ToolChoice::Named(name) = &self.choice
            && !tools.iter().any(|tool| tool.name == *name)
        {
            let message = format!("tool_choice: there is no tool {name:?}");
            return Err(ApiError::invalid("tool_choice", message));
        }
        let spaces = converted.response_options.namespace_tool_map.as_ref();
        let strict = |name: &str| {
            let own = spaces.and_then(|map| map.get(name));
            let (space, name) = match own {
                Some((space, name)) => (Some(space.as_str()), name.as_str()),
                None => (None, name),
            };
            self.strict.iter().any(|(s, n)| (s.as_deref(), n.as_str()) == (space, name))
        };
        let tools = tools.iter().map(|tool| Tool {
            name: tool.name.clone(),
            parameters: tool.parameters.clone(),
            strict: strict(&tool.name),
        });
        let calls = ToolCalls {
            tools: tools.collect(),
            choice: self.choice.clone(),
            parallel: !self.one_call,
            opened: false,
        };
        Ok(Some(Form {
            grammar: GrammarSpec::ToolCalls(calls),
            param: "tools".into(),
            told: false,
        }))
    }
}
