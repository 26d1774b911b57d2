//! From a conversation, whatever protocol it came by, to a job for the engine.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::form::{Form, ToolRules};
use crate::output::Reading;
use crate::run::Job;
use deepinfer::chat::{ChatError, ChatTemplate, Conversation, Effort, InputMessage, Options};
use deepinfer::grammar::Trigger;
use deepinfer::request::{RequestError, SamplingParams, ThinkingBudget};
use deepseek_recipe::request::{
    ConversationRequest, ConversionOptions, DEFAULT_MAX_EFFORT_MAX_TOKENS,
    DEFAULT_NON_THINKING_MAX_TOKENS, DEFAULT_THINKING_MAX_TOKENS, ModelVersion, WebSearchBehavior,
};
use serde_json::Value;

/// The name by which the protocol crate knows the model.
pub const RECIPE_MODEL: &str = "model";

/// How the protocol crate shall convert. Thinking is decided here, and told to it in each request.
pub fn conversion() -> ConversionOptions {
    ConversionOptions::new()
        .with_model_versions_by_name([(RECIPE_MODEL, ModelVersion::DeepseekV41Flash)])
        .with_thinking_max_tokens_upper_bound(u32::MAX)
        .with_non_thinking_max_tokens_upper_bound(u32::MAX)
        .with_responses_web_search(WebSearchBehavior::Reject)
        .with_messages_web_search(WebSearchBehavior::Reject)
}

/// A conversation's next turn, ready to run.
#[derive(Debug)]
pub struct Turn {
    /// For the engine.
    pub job: Job,
    /// For the parser.
    pub reading: Reading,
    /// Whether the model thinks first.
    pub thinks: bool,
}

/// What a request says beside its conversation.
#[derive(Clone, Debug)]
pub struct Asked {
    /// How thoroughly to think.
    pub effort: Effort,
    /// Most tokens of thinking.
    pub budget: Option<usize>,
    /// Sampling; `max_tokens` as asked for.
    pub params: SamplingParams,
    /// The form of the answer, if it must have one.
    pub form: Option<Form>,
    /// How tools are called.
    pub tools: ToolRules,
    /// Only the number of its tokens is wanted.
    pub counting: bool,
    /// Whose request it is.
    pub owner: Option<String>,
    /// For the prefix cache.
    pub cache_salt: Option<String>,
    /// For the scheduler.
    pub priority: i32,
}

/// Token ids of the prompt. What is certain not to fit is refused, unless it is only counted.
fn render(app: &App, conversation: &Conversation, asked: &Asked) -> Result<Vec<u32>, ApiError> {
    let unsuited = |error: ChatError| match error {
        ChatError::TooLong(RequestError::TextTooLong { bytes, tokens, .. }) => {
            let limit = app.info().max_tokens;
            RequestError::TextTooLong { bytes, tokens, limit }.into()
        }
        error => {
            let message = format!("messages: {error}");
            ApiError::Invalid { param: Some("messages".into()), message }
        }
    };
    let answered = |message: &InputMessage| matches!(message, InputMessage::Assistant { .. });
    let limit = match conversation.messages.iter().any(answered) {
        _ if asked.counting => usize::MAX,
        // Answers may be replaced by what was produced: calls written another way have other
        // numbers of tokens, but not so many.
        true => app.info().max_tokens.saturating_mul(4),
        false => app.info().max_tokens,
    };
    let template = ChatTemplate::new(&app.info().tokenizer).map_err(unsuited)?;
    let options = Options { effort: Some(asked.effort) };
    template.render_within(conversation, &options, limit).map_err(unsuited)
}

/// Renders the prompt and puts everything together.
pub fn prepare(
    app: &App,
    mut converted: ConversationRequest,
    asked: Asked,
) -> Result<Turn, ApiError> {
    if let Some(form) = &asked.form {
        converted.conversation.response_format = form.response_format();
    }
    let mut prompt = render(app, &converted.conversation, &asked)?;
    let remember = app.remember(format!("{:?} {:?}", asked.owner, asked.cache_salt));
    if let Some(remember) = &remember {
        let messages = &converted.conversation.messages;
        let (replayed, kept) =
            remember.memory.replay(&remember.scope, prompt, messages, remember.marks);
        app.metrics.replayed(kept);
        prompt = replayed;
    }
    let mut params = asked.params;
    if params.max_tokens.is_none() {
        let usual = match asked.effort {
            Effort::NONE => DEFAULT_NON_THINKING_MAX_TOKENS,
            Effort::MAX => DEFAULT_MAX_EFFORT_MAX_TOKENS,
            _ => DEFAULT_THINKING_MAX_TOKENS,
        };
        let room = app.info().max_tokens.saturating_sub(prompt.len());
        params.max_tokens = Some(room.clamp(1, usual as usize));
    }
    let thinks = converted.parsing_options.thinking_initial_stage;
    // What thinking comes first, if any.
    let end = app.markup.think_end().filter(|_| thinks.is_some_and(|s| s.starts_in_reasoning()));
    params.thinking_budget =
        asked.budget.zip(end).map(|(tokens, end)| ThinkingBudget { tokens, end });
    if let Some(form) = whole_form(&converted, asked.form, &asked.tools)? {
        let trigger = end.map(|end| Trigger::new(vec![end], None)).transpose();
        let trigger = trigger.map_err(ApiError::internal)?;
        params.constraint = Some(form.constraint(app, trigger)?);
    }
    let job = Job { prompt, params, cache_salt: asked.cache_salt, priority: asked.priority };
    let reading =
        Reading { parsing: converted.parsing_options, one_call: asked.tools.one_call, remember };
    Ok(Turn { job, reading, thinks: thinks.is_some() })
}

/// The form of an answer as a whole: that of its text, or that of its calls.
fn whole_form(
    converted: &ConversationRequest,
    form: Option<Form>,
    tools: &ToolRules,
) -> Result<Option<Form>, ApiError> {
    let calls = tools.form(converted)?;
    let Some(form) = form else { return Ok(calls) };
    let refused = |reason: &str| {
        let message = format!("{}: {reason}", form.param);
        Err(ApiError::Invalid { param: Some(form.param.clone()), message })
    };
    if converted.parsing_options.parse_tool_calls {
        return refused(
            "an answer of this form cannot call tools; leave them out or set tool_choice to none",
        );
    }
    let last = converted.conversation.messages.last();
    if matches!(last, Some(InputMessage::Assistant { prefix: true, .. })) {
        return refused("it cannot be combined with the continuation of a message");
    }
    Ok(Some(form))
}

/// Effort in words or as a number.
pub fn effort_of(value: &Value) -> Option<Effort> {
    match value {
        Value::Number(n) => n.as_u64().and_then(|n| Effort::new(n.try_into().ok()?)),
        Value::String(word) => word.parse().ok(),
        _ => None,
    }
}

/// Takes an effort.
pub fn take_effort(fields: &mut Fields, name: &str) -> Result<Option<Effort>, ApiError> {
    let Some(value) = fields.value(name) else { return Ok(None) };
    match effort_of(&value) {
        Some(effort) => Ok(Some(effort)),
        None => {
            let expected = Effort::EXPECTED;
            Err(fields.invalid(name, format!("{value} is not an effort; give {expected}")))
        }
    }
}

/// A `thinking` object: `type` and `budget_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// On or off, if it says so.
    pub on: Option<bool>,
    /// Most tokens.
    pub budget: Option<usize>,
}

/// Takes `thinking`.
pub fn take_thinking(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(Thinking::default()) };
    let kind: Option<String> = thinking.take("type")?;
    let on = match kind.as_deref() {
        None => None,
        Some("enabled" | "adaptive") => Some(true),
        Some("disabled") => Some(false),
        Some(other) => {
            let message = format!("{other:?} is neither enabled, adaptive nor disabled");
            return Err(thinking.invalid("type", message));
        }
    };
    let budget = thinking.take::<usize>("budget_tokens")?;
    if budget == Some(0) {
        return Err(thinking.invalid("budget_tokens", "it must be at least 1; or disable thinking"));
    }
    // How thinking shall be shown: always in full.
    if let Some(display) = thinking.take::<String>("display")?.filter(|d| d != "summarized") {
        return Err(thinking.invalid("display", format!("{display:?} is not supported")));
    }
    thinking.finish()?;
    Ok(Thinking { on, budget })
}

/// The effort that a `thinking` switch and an effort amount to. The switch wins.
pub fn resolve_effort(thinking: Thinking, effort: Option<Effort>, default: Effort) -> Effort {
    match (thinking.on, effort) {
        (Some(false), _) => Effort::NONE,
        (Some(true), Some(effort)) if effort.thinks() => effort,
        (Some(true), _) => match default.thinks() {
            true => default,
            false => Effort::HIGH,
        },
        (None, Some(effort)) => effort,
        (None, None) if thinking.budget.is_some() && !default.thinks() => Effort::HIGH,
        (None, None) => default,
    }
}

/// How the protocol crate is told to think.
pub fn recipe_thinking(effort: Effort) -> Value {
    serde_json::json!({"type": if effort.thinks() { "enabled" } else { "disabled" }})
}

/// Takes the extensions that are the same everywhere.
pub fn take_extensions(fields: &mut Fields) -> Result<(Option<String>, i32), ApiError> {
    let salt: Option<String> = fields.take("cache_salt")?;
    if salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > 256) {
        return Err(fields.invalid("cache_salt", "it must have 1 to 256 bytes"));
    }
    Ok((salt, fields.take("priority")?.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn efforts_are_words_and_numbers() {
        assert_eq!(effort_of(&json!("minimal")), Some(Effort::LOW));
        assert_eq!(effort_of(&json!("ultra")), Some(Effort::MAX));
        assert_eq!(effort_of(&json!(33)), Effort::new(33));
        assert_eq!(effort_of(&json!("33")), Effort::new(33));
        assert_eq!(effort_of(&json!(0)), Some(Effort::NONE));
        for bad in [json!(101), json!("much"), json!(-1), json!(1.5), json!(true)] {
            assert_eq!(effort_of(&bad), None, "{bad}");
        }
    }

    #[test]
    fn the_switch_wins_over_the_effort() {
        let on = Thinking { on: Some(true), budget: None };
        let off = Thinking { on: Some(false), budget: None };
        let silent = Thinking::default();
        assert_eq!(resolve_effort(off, Some(Effort::MAX), Effort::HIGH), Effort::NONE);
        assert_eq!(resolve_effort(on, Some(Effort::NONE), Effort::NONE), Effort::HIGH);
        assert_eq!(resolve_effort(on, Some(Effort::LOW), Effort::HIGH), Effort::LOW);
        assert_eq!(resolve_effort(silent, Some(Effort::NONE), Effort::HIGH), Effort::NONE);
        assert_eq!(resolve_effort(silent, None, Effort::LOW), Effort::LOW);
    }
}
