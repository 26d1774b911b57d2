//! The body of a Chat Completions request.

use crate::app::App;
use crate::convert::convert;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::form::{self, ToolRules};
use crate::sampling;
use crate::turn::{self, Asked, RECIPE_MODEL, Turn};
use deepinfer::chat::Effort;
use deepinfer::grammar::ToolChoice;
use deepseek_recipe::openai::ChatCompletionRequest;
use serde_json::{Map, Value, json};

/// A request that can run.
#[derive(Debug)]
pub struct ChatRequest {
    /// The name it called the model by.
    pub model: String,
    /// What to run.
    pub turn: Turn,
    /// As events.
    pub stream: bool,
    /// A chunk with the usage at the end of the events.
    pub include_usage: bool,
}

impl ChatRequest {
    /// Reads a body. Every field is honoured or refused.
    pub fn read(app: &App, owner: Option<String>, body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let model: String = fields.require("model")?;
        app.check_model(&model)?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let include_usage = take_stream_options(&mut fields, stream)?;
        let n = sampling::take_n(&mut fields, 16)?;
        let mut params = sampling::take(&mut fields, &app.info().tokenizer)?;
        params.n = n;
        params.max_tokens =
            sampling::take_limit(&mut fields, &["max_tokens", "max_completion_tokens"])?;
        params.logprobs = take_logprobs(&mut fields)?;
        let stop = sampling::take_stop(&mut fields, "stop")?;
        let (effort, budget) = take_effort(&mut fields, app.config.default_effort)?;
        let (cache_salt, priority) = turn::take_extensions(&mut fields)?;
        let mut tools = ToolRules {
            one_call: fields.take("parallel_tool_calls")? == Some(false),
            ..ToolRules::default()
        };

        let mut recipe = Map::new();
        recipe.insert("model".into(), json!(RECIPE_MODEL));
        recipe.insert("thinking".into(), turn::recipe_thinking(effort));
        recipe.insert("stop".into(), json!(stop));
        let goes_on = take_cue(&mut fields)?;
        recipe.insert("messages".into(), take_messages(&mut fields, goes_on)?);
        if let Some(list) = take_tools(&mut fields, &mut tools.strict)? {
            recipe.insert("tools".into(), list);
        }
        if let Some(choice) = take_tool_choice(&mut fields, &mut tools.choice)? {
            recipe.insert("tool_choice".into(), choice);
        }
        let format = form::take_format(&mut fields, "response_format")?;
        let form = form::take_form(&mut fields, "response_format", format)?;
        sampling::discard_labels(&mut fields);
        sampling::take_service_tier(&mut fields)?;
        fields.refuse(&["functions", "function_call"], "use tools and tool_choice")?;
        fields.refuse(
            &["audio", "prediction", "web_search_options"],
            "there is no such thing here",
        )?;
        fields.refuse(&["store"], "nothing is stored here")?;
        sampling::take_verbosity(&mut fields, "say it in a message")?;
        if let Some(kinds) = fields.take::<Vec<String>>("modalities")?
            && kinds != ["text"]
        {
            return Err(fields.invalid("modalities", "only text comes out"));
        }
        fields.finish()?;

        let converted = convert::<ChatCompletionRequest>(recipe, "messages")?;
        let asked = Asked {
            effort,
            budget,
            params,
            form,
            tools,
            counting: false,
            owner,
            cache_salt,
            priority,
        };
        let turn = turn::prepare(app, converted, asked)?;
        Ok(Self { model, turn, stream, include_usage })
    }
}

/// Takes `stream_options`. Returns whether the usage is wanted.
pub fn take_stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(fields.invalid("stream_options", "it goes with \"stream\": true only"));
    }
    let include_usage = options.take("include_usage")?.unwrap_or(false);
    // Padding against guessing by length; nothing is padded.
    options.discard(&["include_obfuscation"]);
    options.finish()?;
    Ok(include_usage)
}

fn take_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.take::<usize>("top_logprobs")?;
    match top {
        Some(_) if !wanted => {
            Err(fields.invalid("top_logprobs", "it goes with \"logprobs\": true only"))
        }
        Some(top) if top > 20 => Err(fields.invalid("top_logprobs", format!("{top} is above 20"))),
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Effort and budget from all the places where clients write them.
fn take_effort(fields: &mut Fields, default: Effort) -> Result<(Effort, Option<usize>), ApiError> {
    let mut thinking = turn::take_thinking(fields)?;
    let mut effort = turn::take_effort(fields, "reasoning_effort")?;
    if let Some(mut kwargs) = fields.object("chat_template_kwargs")? {
        for name in ["thinking", "enable_thinking"] {
            if let Some(on) = kwargs.take(name)? {
                if thinking.on.is_some_and(|other| other != on) {
                    return Err(kwargs.invalid(name, "this contradicts another field"));
                }
                thinking.on = Some(on);
            }
        }
        effort = effort.or(turn::take_effort(&mut kwargs, "reasoning_effort")?);
        kwargs.finish()?;
    }
    if let Some(budget) = fields.take::<usize>("thinking_budget")? {
        if budget == 0 {
            return Err(fields.invalid("thinking_budget", "it must be at least 1"));
        }
        thinking.budget = Some(thinking.budget.map_or(budget, |other| other.min(budget)));
    }
    Ok((turn::resolve_effort(thinking, effort, default), thinking.budget))
}

/// Whether the last message shall be continued.
fn take_cue(fields: &mut Fields) -> Result<bool, ApiError> {
    let goes_on = fields.take("continue_final_message")?.unwrap_or(false);
    match (fields.take("add_generation_prompt")?, goes_on) {
        (Some(true), true) => Err(fields.invalid(
            "add_generation_prompt",
            "a new turn cannot begin while continue_final_message continues the last one",
        )),
        (Some(false), false) => Err(fields.invalid(
            "add_generation_prompt",
            "without a new turn there is only the last one to continue: set continue_final_message",
        )),
        _ => Ok(goes_on),
    }
}

/// The messages as the protocol crate takes them.
fn take_messages(fields: &mut Fields, goes_on: bool) -> Result<Value, ApiError> {
    let messages: Vec<Value> = fields.require("messages")?;
    let last = messages.len().checked_sub(1);
    let mut out = Vec::with_capacity(messages.len());
    for (i, message) in messages.into_iter().enumerate() {
        let path = format!("messages[{i}]");
        let mut message = Fields::of_value(message, &path)?;
        let role: String = message.require("role")?;
        let mut recipe = Map::new();
        let kept: &[&str] = match role.as_str() {
            "system" | "developer" | "user" | "latest_reminder" => &["content"],
            "tool" => &["content", "tool_call_id"],
            "assistant" => {
                let reasoning = message.value("reasoning_content");
                let other = message.value("reasoning");
                if let Some(reasoning) = reasoning.or(other) {
                    recipe.insert("reasoning_content".into(), reasoning);
                }
                &["content", "tool_calls", "prefix"]
            }
            other => {
                let message = message.invalid("role", format!("{other:?} is not known here"));
                return Err(message);
            }
        };
        // The format has no names: they describe the caller's side only.
        message.discard(&["name", "id"]);
        for &name in kept {
            let Some(value) = message.value(name) else { continue };
            if name == "content" {
                refuse_images(&value, &format!("{path}.content"))?;
            }
            if name == "tool_calls" {
                check_calls(&value, &format!("{path}.tool_calls"))?;
            }
            if name == "tool_calls" && value.as_array().is_some_and(Vec::is_empty) {
                continue;
            }
            recipe.insert(name.into(), value);
        }
        if role == "assistant"
            && !recipe.contains_key("content")
            && !recipe.contains_key("tool_calls")
        {
            recipe.insert("content".into(), json!(""));
        }
        message.refuse(&["audio", "function_call"], "only text and tool_calls are")?;
        message.refuse(&["refusal", "annotations"], "send it as content")?;
        message.finish()?;
        let role = if role == "developer" { "system".to_owned() } else { role };
        if goes_on && Some(i) == last {
            if role != "assistant" {
                let text = "the last message is not the assistant's, so it cannot be continued";
                return Err(fields.invalid("continue_final_message", text));
            }
            recipe.insert("prefix".into(), json!(true));
        }
        recipe.insert("role".into(), json!(role));
        out.push(Value::Object(recipe));
    }
    Ok(Value::Array(out))
}

/// Fields of earlier calls that would be ignored are refused by name.
fn check_calls(calls: &Value, path: &str) -> Result<(), ApiError> {
    for (i, call) in calls.as_array().into_iter().flatten().enumerate() {
        let mut call = Fields::of_value(call.clone(), &format!("{path}[{i}]"))?;
        // Clients that put a streamed answer together may leave its places in it.
        call.discard(&["id", "type", "index"]);
        if let Some(mut function) = call.object("function")? {
            function.discard(&["name", "arguments"]);
            function.finish()?;
        }
        call.finish()?;
    }
    Ok(())
}

/// Content parts that are not text are refused by name.
fn refuse_images(content: &Value, path: &str) -> Result<(), ApiError> {
    for (i, part) in content.as_array().into_iter().flatten().enumerate() {
        let path = format!("{path}[{i}]");
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        if kind != "text" {
            let message = format!("{path}: type {kind:?} is not supported; this server takes text");
            return Err(ApiError::invalid(path, message));
        }
        let mut part = Fields::of_value(part.clone(), &path)?;
        part.discard(&["type", "text", "cache_control"]);
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
    for (i, given) in tools.iter_mut().enumerate() {
        let path = format!("tools[{i}]");
        let mut tool = Fields::of_value(given.clone(), &path)?;
        let kind: String = tool.require("type")?;
        if kind != "function" {
            return Err(tool.invalid("type", format!("{kind:?} is not supported; use function")));
        }
        let Some(mut function) = tool.object("function")? else {
            return Err(tool.invalid("function", "this field is required"));
        };
        if function.take("strict")?.unwrap_or(false) {
            strict.push((None, function.require("name")?));
        }
        function.discard(&["name", "description", "parameters"]);
        function.finish()?;
        tool.finish()?;
        // Strictness is seen to here.
        if let Some(function) = given["function"].as_object_mut() {
            function.remove("strict");
        }
    }
    Ok(Some(Value::Array(tools)))
}

/// The choice as the protocol crate takes it: one that requires a call is enforced while the answer
/// is written, after the thinking if there is any.
fn take_tool_choice(
    fields: &mut Fields,
    choice: &mut ToolChoice,
) -> Result<Option<Value>, ApiError> {
    match fields.value("tool_choice") {
        None => Ok(None),
        Some(Value::String(word)) if word == "auto" || word == "none" => Ok(Some(json!(word))),
        Some(Value::String(word)) if word == "required" => {
            *choice = ToolChoice::Required;
            Ok(Some(json!("auto")))
        }
        Some(given @ Value::Object(_)) => {
            let mut given = Fields::of_value(given, &fields.path("tool_choice"))?;
            let kind: String = given.require("type")?;
            if kind != "function" {
                let message = format!("{kind:?} is not supported; use function");
                return Err(given.invalid("type", message));
            }
            let Some(mut function) = given.object("function")? else {
                return Err(given.invalid("function", "this field is required"));
            };
            *choice = ToolChoice::Named(function.require("name")?);
            function.finish()?;
            given.finish()?;
            Ok(Some(json!("auto")))
        }
        Some(other) => Err(fields.invalid(
            "tool_choice",
            format!("{other} is not supported; give auto, none, required or a function"),
        )),
    }
}
