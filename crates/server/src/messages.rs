//! `/v1/messages`: Anthropic's protocol.

use crate::app::{App, Call, new_id};
use crate::chat::{blocking, count_end};
use crate::convert::convert;
use crate::error::{ApiError, Shape};
use crate::fields::Fields;
use crate::form::{self, Form, ToolRules};
use crate::output::{self, End, Part};
use crate::sampling;
use crate::sse;
use crate::turn::{self, Asked, RECIPE_MODEL, Turn};
use crate::usage;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, State};
use axum::http::Response;
use deepinfer::chat::Effort;
use deepinfer::grammar::ToolChoice;
use deepseek_recipe::anthropic::messages::response::MessagesChunkGenerator;
use deepseek_recipe::anthropic::{MessagesRequest, MessagesResponse, MessagesStreamEvent};
use deepseek_recipe::response::{Accumulate, ProtocolResponse};
use deepseek_recipe::stream::ChunkGenerator;
use serde_json::{Map, Value, json};
use std::pin::pin;
use std::sync::Arc;
use tokio_stream::StreamExt;

#[derive(Debug)]
struct Messages {
    model: String,
    turn: Turn,
    stream: bool,
}

impl Messages {
    /// Reads a body. `counting`: only the prompt matters.
    fn read(
        app: &App,
        owner: Option<String>,
        body: &[u8],
        counting: bool,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let model: String = fields.require("model")?;
        app.check_model(&model)?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let mut params = sampling::take(&mut fields, &app.info().tokenizer)?;
        params.max_tokens = sampling::take_limit(&mut fields, &["max_tokens"])?;
        if params.max_tokens.is_none() && !counting {
            return Err(fields.invalid("max_tokens", "this field is required"));
        }
        let stop = sampling::take_stop(&mut fields, "stop_sequences")?;
        let (effort, budget, format) = take_effort(&mut fields)?;
        let form = form::take_form(&mut fields, "output_config.format", format)?;
        let (cache_salt, priority) = turn::take_extensions(&mut fields)?;

        let mut recipe = Map::new();
        recipe.insert("model".into(), json!(RECIPE_MODEL));
        recipe.insert("thinking".into(), turn::recipe_thinking(effort));
        recipe.insert("stop_sequences".into(), json!(stop));
        recipe.insert("messages".into(), take_messages(&mut fields)?);
        if let Some(system) = fields.value("system") {
            check_blocks(&system, "system", &["text"])?;
            recipe.insert("system".into(), system);
        }
        let mut tools = ToolRules::default();
        if let Some(list) = take_tools(&mut fields, &mut tools.strict)? {
            recipe.insert("tools".into(), list);
        }
        take_tool_choice(&mut fields, &mut tools, &mut recipe)?;
        sampling::discard_labels(&mut fields);
        // Caching needs no marks: every prefix is cached.
        fields.discard(&["cache_control"]);
        sampling::take_service_tier(&mut fields)?;
        fields.refuse(&["mcp_servers", "container"], "this server calls no other servers")?;
        take_context_management(&mut fields)?;
        fields.finish()?;

        let converted = convert::<MessagesRequest>(recipe, "messages")?;
        let asked =
            Asked { effort, budget, params, form, tools, counting, owner, cache_salt, priority };
        Ok(Self { model, turn: turn::prepare(app, converted, asked)?, stream })
    }
}

/// Earlier thinking is used as it is sent; nothing else is edited.
fn take_context_management(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut context) = fields.object("context_management")? else { return Ok(()) };
    for edit in context.take::<Vec<Value>>("edits")?.unwrap_or_default() {
        if edit["type"] != "clear_thinking_20251015" || edit["keep"] != "all" {
            let message = format!("{edit} is not supported: messages are used as they are sent");
            return Err(context.invalid("edits", message));
        }
    }
    context.finish()
}

/// Thinking is off unless the request says otherwise.
fn take_effort(fields: &mut Fields) -> Result<(Effort, Option<usize>, Option<Form>), ApiError> {
    let thinking = turn::take_thinking(fields)?;
    let (mut effort, mut format) = (None, None);
    if let Some(mut config) = fields.object("output_config")? {
        effort = turn::take_effort(&mut config, "effort")?;
        format = form::take_format(&mut config, "format")?;
        config.finish()?;
    }
    Ok((turn::resolve_effort(thinking, effort, Effort::NONE), thinking.budget, format))
}

fn take_messages(fields: &mut Fields) -> Result<Value, ApiError> {
    let messages: Vec<Value> = fields.require("messages")?;
    for (i, message) in messages.iter().enumerate() {
        let path = format!("messages[{i}]");
        let mut message = Fields::of_value(message.clone(), &path)?;
        let role: String = message.require("role")?;
        let kinds: &[&str] = match role.as_str() {
            "user" => &["text", "tool_result"],
            "system" => &["text", "tool_addition"],
            _ => &["text", "thinking", "tool_use"],
        };
        let content = message.value("content").unwrap_or_default();
        check_blocks(&content, &format!("{path}.content"), kinds)?;
        message.finish()?;
    }
    Ok(Value::Array(messages))
}

/// Blocks of other kinds, and fields that would be ignored, are refused by name.
fn check_blocks(content: &Value, path: &str, kinds: &[&str]) -> Result<(), ApiError> {
    for (i, block) in content.as_array().into_iter().flatten().enumerate() {
        let path = format!("{path}[{i}]");
        let mut block = Fields::of_value(block.clone(), &path)?;
        let kind: String = block.require("type")?;
        if !kinds.contains(&kind.as_str()) {
            let message =
                format!("{kind:?} is not supported here; this may be {}", kinds.join(", "));
            return Err(block.invalid("type", message));
        }
        block.discard(&["cache_control"]);
        match kind.as_str() {
            "text" => {
                block.discard(&["text"]);
                block.refuse(&["citations"], "nothing is cited here")?;
            }
            "thinking" => block.discard(&["thinking", "signature"]),
            "tool_use" => block.discard(&["id", "name", "input", "caller"]),
            "tool_result" => {
                // Whether a tool failed stands in its content too.
                block.discard(&["tool_use_id", "is_error"]);
                let content = block.value("content").unwrap_or_default();
                check_blocks(&content, &format!("{path}.content"), &["text", "tool_reference"])?;
            }
            _ => block.discard(&["tool", "tool_name"]),
        }
        block.finish()?;
    }
    Ok(())
}

/// The tools as the protocol crate takes them: a client tool has no `type` there.
fn take_tools(
    fields: &mut Fields,
    strict: &mut Vec<(Option<String>, String)>,
) -> Result<Option<Value>, ApiError> {
    let Some(tools) = fields.take::<Vec<Value>>("tools")? else { return Ok(None) };
    let mut out = Vec::with_capacity(tools.len());
    for (i, tool) in tools.into_iter().enumerate() {
        let mut tool = Fields::of_value(tool, &format!("tools[{i}]"))?;
        if let Some(kind) = tool.take::<String>("type")?.filter(|kind| kind != "custom") {
            let message = format!("{kind:?} runs on a server, which this one does not; use custom");
            return Err(tool.invalid("type", message));
        }
        let mut recipe = Map::new();
        for name in ["name", "description", "input_schema", "defer_loading"] {
            if let Some(value) = tool.value(name) {
                recipe.insert(name.into(), value);
            }
        }
        tool.discard(&["cache_control", "eager_input_streaming"]);
        if tool.take("strict")?.unwrap_or(false)
            && let Some(name) = recipe.get("name").and_then(Value::as_str)
        {
            strict.push((None, name.to_owned()));
        }
        tool.refuse(&["input_examples"], "write examples into the description")?;
        tool.refuse(&["allowed_callers"], "tools are called by the model only")?;
        tool.finish()?;
        out.push(Value::Object(recipe));
    }
    Ok(Some(Value::Array(out)))
}

/// A choice that requires a call is enforced while the answer is written, after the thinking if
/// there is any.
fn take_tool_choice(
    fields: &mut Fields,
    tools: &mut ToolRules,
    recipe: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok(()) };
    let kind: String = choice.require("type")?;
    tools.one_call = choice.take("disable_parallel_tool_use")?.unwrap_or(false);
    tools.choice = match kind.as_str() {
        "auto" | "none" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::Named(choice.require("name")?),
        other => return Err(choice.invalid("type", format!("{other:?} is not known here"))),
    };
    choice.finish()?;
    let kind = if kind == "none" { "none" } else { "auto" };
    recipe.insert("tool_choice".into(), json!({"type": kind}));
    Ok(())
}

/// The end of a message, with what the protocol has no words for.
fn with_extension(mut event: Value, end: &End) -> Value {
    if event.get("usage").is_some_and(Value::is_object) {
        event["usage"]["deepinfer"] = usage::extension(std::slice::from_ref(&end.accounts));
    }
    event
}

/// `POST /v1/messages`.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    let ticket = app.ticket(&call)?;
    let reader = app.clone();
    let owner = call.owner();
    let request = blocking(move || Messages::read(&reader, owner, &body, false)).await?;
    let (id, model) = (new_id("msg_"), request.model);
    let turn = request.turn;
    let run = app.start("messages", &call, turn.job, &ticket)?;
    let parts = output::parse(run, turn.reading, app.markup.clone());
    let mut generator = MessagesChunkGenerator::new(id.clone(), model.clone(), turn.thinks);
    if !request.stream {
        let mut parts = pin!(parts);
        let mut whole = MessagesResponse::new(id, model, 0, 0, 0);
        while let Some(part) = parts.next().await {
            let part = part?;
            count_end(&app, &part);
            let (chunk, end) = match part {
                Part::Chunk(chunk) => (chunk, None),
                Part::End(end) => (end.chunk(), Some(end)),
            };
            for event in generator.generate(chunk).await {
                whole.accumulate(event);
            }
            if let Some(end) = end {
                let value = serde_json::to_value(&whole).map_err(ApiError::internal)?;
                return Ok(sse::json(&with_extension(value, &end)));
            }
        }
        return Err(ApiError::internal("the answer has no end"));
    }
    let silence = app.silence(&call, &ticket);
    let events = async_stream::stream! {
        let _ticket = ticket;
        let mut parts = pin!(parts);
        while let Some(part) = parts.next().await {
            let part = match part {
                Ok(part) => part,
                Err(error) => {
                    yield sse::event(Some("error"), &error.body(Shape::Anthropic));
                    return;
                }
            };
            count_end(&app, &part);
            match part {
                Part::Chunk(chunk) => {
                    for event in generator.generate(chunk).await {
                        yield sse::event(Some(event.event_type()), &event);
                    }
                }
                Part::End(end) => {
                    for event in generator.generate(end.chunk()).await {
                        yield end_event(&event, &end);
                    }
                }
            }
        }
    };
    Ok(sse::response(events, silence))
}

fn end_event(event: &MessagesStreamEvent, end: &End) -> Bytes {
    let value = serde_json::to_value(event).unwrap_or_default();
    sse::event(Some(event.event_type()), &with_extension(value, end))
}

/// `POST /v1/messages/count_tokens`.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    // Counting is work too: limits of keys hold.
    let _ticket = app.ticket(&call)?;
    let request = blocking(move || Messages::read(&app, call.owner(), &body, true)).await?;
    Ok(sse::json(&json!({"input_tokens": request.turn.job.prompt.len()})))
}
