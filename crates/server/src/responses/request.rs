//! The body of a Responses request.

use super::store::Stored;
use crate::app::App;
use crate::convert::convert;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::form::{self, Form, ToolRules};
use crate::sampling;
use crate::turn::{self, Asked, RECIPE_MODEL, Turn};
use deepinfer::grammar::ToolChoice;
use deepseek_recipe::openai::ResponsesRequest;
use deepseek_recipe::openai::responses::response::ResponsesChunkGenerator;
use deepseek_recipe::request::ProtocolRequest;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A request that can run.
pub struct Request {
    /// What to run.
    pub turn: Turn,
    /// Makes its events.
    pub generator: ResponsesChunkGenerator,
    /// All items before the answer.
    pub input: Arc<Vec<Value>>,
    /// Fields of the response that repeat the request.
    pub echo: Map<String, Value>,
    /// As events.
    pub stream: bool,
    /// Answer later.
    pub background: bool,
    /// Keep the response.
    pub store: bool,
}

impl Request {
    /// Reads a body. `find` finds an earlier response. `counting`: only the prompt matters, and the
    /// model need not be named.
    pub fn read(
        app: &App,
        id: &str,
        owner: Option<String>,
        body: &[u8],
        counting: bool,
        find: impl Fn(&str) -> Option<Stored>,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let model: String = match fields.take("model")? {
            None if counting => app.model().to_owned(),
            Some(model) => model,
            None => return Err(fields.invalid("model", "this field is required")),
        };
        app.check_model(&model)?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let background = fields.take("background")?.unwrap_or(false);
        let store = fields.take("store")?.unwrap_or(true);
        if background && stream {
            return Err(fields.invalid("background", "it cannot be combined with stream"));
        }
        if background && !store {
            return Err(fields.invalid("background", "the response must be stored to be found"));
        }
        if let Some(mut options) = fields.object("stream_options")? {
            options.discard(&["include_obfuscation"]);
            options.finish()?;
        }
        let mut echo = Map::new();
        for name in ["temperature", "top_p", "presence_penalty", "frequency_penalty"] {
            echo.insert(name.into(), fields.peek(name).cloned().unwrap_or(json!(null)));
        }
        let mut params = sampling::take(&mut fields, &app.info().tokenizer)?;
        echo.insert("temperature".into(), json!(params.temperature));
        echo.insert("top_p".into(), json!(params.top_p));
        echo.insert("presence_penalty".into(), json!(params.presence_penalty));
        echo.insert("frequency_penalty".into(), json!(params.frequency_penalty));
        params.max_tokens = sampling::take_limit(&mut fields, &["max_output_tokens"])?;
        params.logprobs = take_logprobs(&mut fields)?;
        let (effort, budget) = take_effort(&mut fields, app, &mut echo)?;
        let (cache_salt, priority) = turn::take_extensions(&mut fields)?;
        let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);

        let mut recipe = Map::new();
        recipe.insert("model".into(), json!(RECIPE_MODEL));
        let word = if effort.thinks() { "high" } else { "none" };
        recipe.insert("reasoning".into(), json!({"effort": word}));
        let instructions = fields.take::<String>("instructions")?;
        let input = take_input(&mut fields, find, &mut echo)?;
        if !input.is_empty() {
            recipe.insert("input".into(), Value::Array(input.clone()));
        } else if instructions.is_none() {
            return Err(fields.invalid("input", "this field is required"));
        }
        echo.insert("instructions".into(), json!(instructions));
        recipe.insert("instructions".into(), json!(instructions));
        recipe.insert("max_output_tokens".into(), json!(params.max_tokens));
        recipe.insert("top_logprobs".into(), json!(params.logprobs.unwrap_or(0)));
        let mut tools = ToolRules { one_call: !parallel, ..ToolRules::default() };
        if let Some(list) = take_tools(&mut fields, &mut tools.strict)? {
            recipe.insert("tools".into(), list);
        }
        if let Some(choice) = take_tool_choice(&mut fields, &mut tools.choice, &mut echo)? {
            recipe.insert("tool_choice".into(), choice);
        }
        let form = take_text(&mut fields, &mut echo)?;
        take_rest(&mut fields, &mut echo)?;
        fields.finish()?;
        echo.insert("model".into(), json!(model));
        echo.insert("parallel_tool_calls".into(), json!(parallel));
        echo.insert("store".into(), json!(store));
        echo.insert("background".into(), json!(background));

        let converted = convert::<ResponsesRequest>(recipe, "input")?;
        let generator = ResponsesRequest::chunk_generator(&converted, id.to_owned(), model);
        let asked =
            Asked { effort, budget, params, form, tools, counting, owner, cache_salt, priority };
        let turn = turn::prepare(app, converted, asked)?;
        Ok(Self { turn, generator, input: Arc::new(input), echo, stream, background, store })
    }
}

/// Log-probabilities are asked for by `top_logprobs`, or by `include` alone.
fn take_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let top = fields.take::<usize>("top_logprobs")?;
    if let Some(top) = top.filter(|&top| top > 20) {
        return Err(fields.invalid("top_logprobs", format!("{top} is above 20")));
    }
    let mut wanted = top.filter(|&top| top > 0);
    for item in fields.take::<Vec<String>>("include")?.unwrap_or_default() {
        match item.as_str() {
            "message.output_text.logprobs" => wanted = wanted.or(Some(0)),
            // Reasoning is always sent as it is.
            "reasoning.encrypted_content" => {}
            other => return Err(fields.invalid("include", format!("{other:?} is not supported"))),
        }
    }
    Ok(wanted)
}

fn take_effort(
    fields: &mut Fields,
    app: &App,
    echo: &mut Map<String, Value>,
) -> Result<(deepinfer::chat::Effort, Option<usize>), ApiError> {
    let default = app.config.default_effort;
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok((default, None)) };
    let given = reasoning.peek("effort").cloned();
    let effort = turn::take_effort(&mut reasoning, "effort")?;
    let budget = reasoning.take::<usize>("max_tokens")?;
    if budget == Some(0) {
        return Err(reasoning.invalid("max_tokens", "it must be at least 1"));
    }
    // Reasoning is sent in full, so nothing is summarized; clients ask for it by default.
    reasoning.discard(&["summary", "generate_summary"]);
    reasoning.finish()?;
    echo.insert("reasoning".into(), json!({"effort": given, "summary": null}));
    let thinking = turn::Thinking { on: None, budget };
    Ok((turn::resolve_effort(thinking, effort, default), budget))
}

/// The items of earlier responses and of this request.
fn take_input(
    fields: &mut Fields,
    find: impl Fn(&str) -> Option<Stored>,
    echo: &mut Map<String, Value>,
) -> Result<Vec<Value>, ApiError> {
    let mut items = Vec::new();
    let previous: Option<String> = fields.take("previous_response_id")?;
    if let Some(id) = &previous {
        let param = Some("previous_response_id".to_owned());
        let Some(stored) = find(id) else {
            let message = format!("there is no response {id:?}, or not any more");
            return Err(ApiError::NotFound { param, message });
        };
        if stored.response["status"] != "completed" && stored.response["status"] != "incomplete" {
            let message = format!("response {id:?} is {}", stored.response["status"]);
            return Err(ApiError::Invalid { param, message });
        }
        items.extend(stored.input.iter().cloned());
        items.extend(stored.response["output"].as_array().into_iter().flatten().cloned());
    }
    echo.insert("previous_response_id".into(), json!(previous));
    match fields.value("input") {
        None => {}
        Some(Value::String(text)) => {
            let content = json!([{"type": "input_text", "text": text}]);
            items.push(json!({"type": "message", "role": "user", "content": content}));
        }
        Some(Value::Array(list)) => {
            for (i, item) in list.into_iter().enumerate() {
                items.push(checked_item(item, &format!("input[{i}]"))?);
            }
        }
        Some(_) => return Err(fields.invalid("input", "it must be a text or a list of items")),
    }
    Ok(items)
}

/// An item that will be understood.
fn checked_item(item: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::of_value(item.clone(), path)?;
    let kind: Option<String> = fields.take("type")?;
    fields.discard(&["id", "status"]);
    match kind.as_deref().unwrap_or("message") {
        "message" => {
            fields.discard(&["role", "phase"]);
            let content = fields.value("content").unwrap_or_default();
            check_parts(&content, &format!("{path}.content"), &["input_text", "output_text"])?;
        }
        "function_call" | "custom_tool_call" => {
            fields.discard(&["call_id", "name", "arguments", "namespace", "input"]);
        }
        "function_call_output" | "custom_tool_call_output" => {
            fields.discard(&["call_id"]);
            let output = fields.value("output").unwrap_or_default();
            check_parts(&output, &format!("{path}.output"), &["input_text"])?;
        }
        "reasoning" => fields.discard(&["summary", "content", "encrypted_content"]),
        "tool_search_call" | "tool_search_output" => {
            fields.discard(&["call_id", "execution", "arguments", "tools"]);
        }
        other => {
            let message = format!("items of type {other:?} are not supported");
            return Err(fields.invalid("type", message));
        }
    }
    fields.finish()?;
    Ok(item)
}

fn check_parts(content: &Value, path: &str, kinds: &[&str]) -> Result<(), ApiError> {
    for (i, part) in content.as_array().into_iter().flatten().enumerate() {
        let mut part = Fields::of_value(part.clone(), &format!("{path}[{i}]"))?;
        let kind: String = part.require("type")?;
        if !kinds.contains(&kind.as_str()) {
            let message = format!("{kind:?} is not supported; this may be {}", kinds.join(", "));
            return Err(part.invalid("type", message));
        }
        part.discard(&["text", "annotations", "logprobs"]);
        part.finish()?;
    }
    Ok(())
}

/// The tools as the protocol crate takes them; notes those that are strict.
fn take_tools(
    fields: &mut Fields,
    strict: &mut Vec<(Option<String>, String)>,
) -> Result<Option<Value>, ApiError> {
    let Some(mut tools) = fields.take::<Vec<Value>>("tools")? else { return Ok(None) };
    for (i, tool) in tools.iter_mut().enumerate() {
        check_tool(tool, &format!("tools[{i}]"), None, strict)?;
    }
    Ok(Some(Value::Array(tools)))
}

fn check_tool(
    tool: &mut Value,
    path: &str,
    space: Option<&str>,
    strict: &mut Vec<(Option<String>, String)>,
) -> Result<(), ApiError> {
    let mut fields = Fields::of_value(tool.clone(), path)?;
    let kind: String = fields.require("type")?;
    match kind.as_str() {
        "function" => {
            if fields.take("strict")?.unwrap_or(false) {
                strict.push((space.map(str::to_owned), fields.require("name")?));
            }
            fields.discard(&["name", "description", "parameters", "defer_loading"]);
            // Strictness is seen to here.
            if let Some(tool) = tool.as_object_mut() {
                tool.remove("strict");
            }
        }
        // The model knows this one; its own description and format take the place of the caller's.
        "custom" => {
            let name: String = fields.require("name")?;
            if name != "apply_patch" {
                let message = format!(
                    "{name:?} is not supported: of custom tools only apply_patch is; declare a function"
                );
                return Err(fields.invalid("name", message));
            }
            fields.discard(&["description", "format"]);
        }
        "namespace" => {
            let name: Option<String> = fields.take("name")?;
            fields.discard(&["description", "tools"]);
            for (i, tool) in tool["tools"].as_array_mut().into_iter().flatten().enumerate() {
                check_tool(tool, &format!("{path}.tools[{i}]"), name.as_deref(), strict)?;
            }
        }
        "tool_search" => {
            if fields.take::<String>("execution")?.as_deref() != Some("client") {
                let message = "tools are searched at the caller's side only: give client";
                return Err(fields.invalid("execution", message));
            }
            fields.discard(&["description", "parameters"]);
        }
        other => {
            return Err(fields.invalid("type", format!("{other:?} is not supported")));
        }
    }
    fields.finish()
}

/// The choice as the protocol crate takes it: one that requires a call is enforced while the answer
/// is written, after the thinking if there is any.
fn take_tool_choice(
    fields: &mut Fields,
    choice: &mut ToolChoice,
    echo: &mut Map<String, Value>,
) -> Result<Option<Value>, ApiError> {
    let Some(given) = fields.value("tool_choice") else { return Ok(None) };
    echo.insert("tool_choice".into(), given.clone());
    match given {
        Value::String(word) if word == "auto" || word == "none" => Ok(Some(json!(word))),
        Value::String(word) if word == "required" => {
            *choice = ToolChoice::Required;
            Ok(Some(json!("auto")))
        }
        Value::Object(_) => {
            let mut given = Fields::of_value(given, &fields.path("tool_choice"))?;
            let kind: String = given.require("type")?;
            if kind != "function" {
                let message = format!("{kind:?} is not supported; use function");
                return Err(given.invalid("type", message));
            }
            *choice = ToolChoice::Named(given.require("name")?);
            given.finish()?;
            Ok(Some(json!("auto")))
        }
        other => Err(fields.invalid(
            "tool_choice",
            format!("{other} is not supported; give auto, none, required or a function"),
        )),
    }
}

/// The form of the answer: `text.format`, or the extension.
fn take_text(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<Option<Form>, ApiError> {
    let mut format = None;
    if let Some(mut text) = fields.object("text")? {
        if let Some(given) = text.peek("format").filter(|format| !format.is_null()) {
            echo.insert("text".into(), json!({"format": given}));
        }
        format = form::take_format(&mut text, "format")?;
        sampling::take_verbosity(&mut text, "say it in the instructions")?;
        text.finish()?;
    }
    form::take_form(fields, "text.format", format)
}

fn take_rest(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    for name in ["user", "metadata", "safety_identifier", "prompt_cache_key"] {
        if let Some(value) = fields.value(name) {
            echo.insert(name.into(), value);
        }
    }
    sampling::discard_labels(fields);
    sampling::take_service_tier(fields)?;
    if let Some(other) = fields.take::<String>("truncation")?.filter(|t| t != "disabled") {
        return Err(fields.invalid("truncation", format!("{other:?}: input is never cut")));
    }
    fields.refuse(&["conversation"], "use previous_response_id")?;
    fields.refuse(&["prompt"], "there are no stored prompts")?;
    fields.refuse(&["max_tool_calls"], "tools run at the caller's side only")
}
