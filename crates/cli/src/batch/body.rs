//! What a request of a batch asks for. Fields that are not served are refused by name.

use crate::conversation::{self, Message, Tool};
use crate::form;
use deepinfer::chat::{self, ChatTemplate, Conversation, Effort, ResponseFormat, ToolChoice};
use deepinfer::grammar::{GrammarSpec, ToolChoice as CallChoice};
use deepinfer::request::{Request, SamplingParams, check_text};
use deepinfer::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Number, Value};
use std::collections::BTreeMap;

/// A line of the input.
#[derive(Debug, Deserialize)]
pub struct Line {
    custom_id: String,
    #[serde(default)]
    method: Option<String>,
    url: String,
    body: Value,
}

/// What an answer looks like.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A plain completion.
    Text {
        /// Put before the completion.
        echo: Option<String>,
        /// Name of the model, as asked for.
        model: String,
    },
    /// An assistant's turn.
    Chat {
        /// It begins with thinking.
        thinks: bool,
        /// It may call tools.
        tools: bool,
        /// Name of the model, as asked for.
        model: String,
    },
}

/// A request that can be run.
pub struct Job {
    /// For the engine.
    pub request: Request,
    /// For the answer.
    pub kind: Kind,
}

/// Fields that both kinds have.
#[derive(Debug, Deserialize)]
struct Common {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<u32>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    repetition_penalty: Option<f32>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    #[serde(default)]
    frequency_penalty: Option<f32>,
    #[serde(default)]
    logit_bias: BTreeMap<String, f32>,
    #[serde(default)]
    seed: Option<Number>,
    #[serde(default)]
    stop: Stop,
    #[serde(default)]
    n: Option<usize>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    user: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
    #[default]
    None,
}

#[derive(Debug, Deserialize)]
struct ChatBody {
    messages: Vec<Message>,
    #[serde(default)]
    max_completion_tokens: Option<usize>,
    #[serde(default)]
    tools: Vec<Tool>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    reasoning_effort: Option<Value>,
    #[serde(default)]
    response_format: Option<Format>,
}

/// A `tool_choice` that is an object.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Choice {
    Function { function: Named },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Format {
    Text,
    JsonObject,
    JsonSchema { json_schema: Schema },
    Regex { regex: String },
    Grammar { grammar: String },
    Choice { choice: Vec<String> },
}

/// A schema; it is enforced, whether or not it is called strict.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Schema {
    schema: Value,
    #[allow(dead_code, reason = "accepted, without influence")]
    name: Option<String>,
    #[allow(dead_code, reason = "accepted, without influence")]
    description: Option<String>,
    #[allow(dead_code, reason = "accepted, without influence")]
    strict: Option<bool>,
}

impl Format {
    /// What the prompt says of it.
    fn told(&self) -> ResponseFormat {
        match self {
            Format::JsonObject => ResponseFormat::JsonObject,
            Format::JsonSchema { json_schema } => {
                ResponseFormat::JsonSchema(json_schema.schema.clone())
            }
            _ => ResponseFormat::Text,
        }
    }

    fn grammar(self) -> Option<GrammarSpec> {
        match self {
            Format::Text => None,
            Format::JsonObject => Some(GrammarSpec::JsonObject),
            Format::JsonSchema { json_schema } => Some(GrammarSpec::JsonSchema(json_schema.schema)),
            Format::Regex { regex } => Some(GrammarSpec::Regex(regex)),
            Format::Grammar { grammar } => Some(GrammarSpec::Lark(grammar)),
            Format::Choice { choice } => Some(GrammarSpec::Choice(choice)),
        }
    }
}

#[derive(Debug, Deserialize)]
struct TextBody {
    prompt: TextPrompt,
    #[serde(default)]
    echo: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TextPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

const COMMON: &[&str] = &[
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "n",
    "stream",
    "user",
];
const CHAT: &[&str] = &[
    "messages",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
];
const TEXT: &[&str] = &["prompt", "echo"];

/// What is wrong is said with the field's path.
fn read<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T, String> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        match error.path().to_string().as_str() {
            "." => format!("body: {}", error.inner()),
            path => format!("body.{path}: {}", error.inner()),
        }
    })
}

/// Objects whose names are no fields of a request: what is `null` there says something.
const OPAQUE: &[&str] = &["arguments", "logit_bias", "parameters", "schema"];

/// Fields that are `null` count as absent.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            let inner = fields.iter_mut().filter(|(name, _)| !OPAQUE.contains(&name.as_str()));
            inner.for_each(|(_, value)| drop_nulls(value));
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

impl Line {
    /// Reads a line. What is wrong is said so that it can follow `line 3`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(mut value @ Value::Object(_)) => {
                drop_nulls(&mut value);
                serde_path_to_error::deserialize(value).map_err(|error| {
                    match error.path().to_string().as_str() {
                        "." => format!(": {}", error.inner()),
                        path => format!(": {path}: {}", error.inner()),
                    }
                })
            }
            Ok(_) => Err(" is no JSON object".into()),
            Err(error) => Err(format!(" is no JSON object (column {})", error.column())),
        }
    }

    /// What its answer is found by.
    pub fn id(&self) -> &str {
        &self.custom_id
    }

    /// The request, or why it cannot be run. `limit`: tokens that a sequence may have.
    pub fn job(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate<'_>>,
        limit: usize,
    ) -> Result<Job, String> {
        if let Some(method) = self.method.as_deref().filter(|m| *m != "POST") {
            return Err(format!("method {method:?}: expected POST"));
        }
        match self.url.as_str() {
            "/v1/chat/completions" => {
                let template = template.ok_or("the tokenizer lacks tokens of the chat format")?;
                self.chat(tokenizer, template, limit)
            }
            "/v1/completions" => self.text(tokenizer, limit),
            other => {
                Err(format!("url {other:?}: expected /v1/chat/completions or /v1/completions"))
            }
        }
    }

    fn parsed<T: serde::de::DeserializeOwned>(&self, own: &[&str]) -> Result<(T, Common), String> {
        let object = self.body.as_object().ok_or("body: expected an object")?;
        let known =
            |field: &&String| !own.contains(&field.as_str()) && !COMMON.contains(&field.as_str());
        if let Some(field) = object.keys().find(known) {
            return Err(format!("body.{field} is not supported"));
        }
        Ok((read(&self.body)?, read(&self.body)?))
    }

    fn chat(
        &self,
        tokenizer: &Tokenizer,
        template: &ChatTemplate<'_>,
        limit: usize,
    ) -> Result<Job, String> {
        let (body, common): (ChatBody, Common) = self.parsed(CHAT)?;
        let mut params = params(&common)?;
        params.max_tokens = body.max_completion_tokens.or(params.max_tokens);
        let effort = match &body.reasoning_effort {
            None => Effort::NONE,
            Some(Value::String(text)) => {
                text.parse().map_err(|e| format!("reasoning_effort: {e}"))?
            }
            Some(other) => {
                other.to_string().parse().map_err(|e| format!("reasoning_effort: {e}"))?
            }
        };
        let calls = match &body.tool_choice {
            None => Some(CallChoice::Auto),
            Some(Value::String(word)) if word == "auto" => Some(CallChoice::Auto),
            Some(Value::String(word)) if word == "none" => None,
            Some(Value::String(word)) if word == "required" => Some(CallChoice::Required),
            Some(other) => Some(named(other)?),
        };
        let calls_none = calls.is_none();
        let strict = conversation::strict(&body.tools);
        let tools = conversation::tools(body.tools);
        let has_tools = !tools.is_empty();
        let parallel = body.parallel_tool_calls.unwrap_or(true);
        let format = body.response_format.unwrap_or(Format::Text);
        let response_format = format.told();
        let form = format.grammar();
        let grammar = match calls {
            // A call that must come, and arguments that must follow a schema, are enforced.
            Some(choice)
                if choice != CallChoice::Auto || has_tools && (!strict.is_empty() || !parallel) =>
            {
                if form.is_some() {
                    return Err("response_format cannot be combined with tools to be called".into());
                }
                Some(form::calls(&tools, &strict, choice, parallel))
            }
            Some(_) if has_tools && form.is_some() => {
                return Err("response_format cannot be combined with tools to be called".into());
            }
            _ => form,
        };
        let end = form::thinking_end(tokenizer, effort.thinks());
        let end = end.map_err(|_| "the tokenizer has no token that ends thinking")?;
        params.constraint = form::constraint(grammar, end)
            .map_err(|_| "the end of thinking cannot start a grammar")?;
        let conversation = Conversation {
            messages: conversation::messages(body.messages)?,
            tools,
            tool_choice: if calls_none { ToolChoice::None } else { ToolChoice::Auto },
            response_format,
            ..Conversation::default()
        };
        let options = chat::Options { effort: Some(effort) };
        let prompt = template.render_within(&conversation, &options, limit);
        let prompt = prompt.map_err(|e| e.to_string())?;
        Ok(Job {
            request: Request::tokens(prompt, params),
            kind: Kind::Chat {
                thinks: effort.thinks(),
                tools: has_tools && !calls_none,
                model: common.model.unwrap_or_default(),
            },
        })
    }

    fn text(&self, tokenizer: &Tokenizer, limit: usize) -> Result<Job, String> {
        let (body, common): (TextBody, Common) = self.parsed(TEXT)?;
        let mut params = params(&common)?;
        params.max_tokens = params.max_tokens.or(Some(16));
        let (prompt, text) = match body.prompt {
            TextPrompt::Tokens(ids) => {
                let text = tokenizer.decode(&ids);
                (ids, text)
            }
            TextPrompt::Text(text) => {
                check_text(tokenizer, &text, limit).map_err(|e| e.to_string())?;
                (chat::plain_prompt(tokenizer, &text).map_err(|e| e.to_string())?, text)
            }
        };
        let echo = body.echo.then_some(text);
        let kind = Kind::Text { echo, model: common.model.unwrap_or_default() };
        Ok(Job { request: Request::tokens(prompt, params), kind })
    }
}

/// The tool that must be called, of a `tool_choice` that is no word known.
fn named(choice: &Value) -> Result<CallChoice, String> {
    if !choice.is_object() {
        let expected = "auto, none, required or a function";
        return Err(format!("tool_choice {choice}: expected {expected}"));
    }
    let Choice::Function { function } =
        Choice::deserialize(choice).map_err(|e| format!("tool_choice: {e}"))?;
    Ok(CallChoice::Named(function.name))
}

/// Negative ones are the same 64 bits.
fn seed(number: &Number) -> Result<u64, String> {
    let seed = number.as_u64().or_else(|| number.as_i64().map(|n| n as u64));
    seed.ok_or_else(|| format!("body.seed: {number} is not a 64-bit integer"))
}

fn params(c: &Common) -> Result<SamplingParams, String> {
    if c.stream == Some(true) {
        return Err("body.stream is not supported in a batch".into());
    }
    if c.n.is_some_and(|n| n != 1) {
        return Err("body.n is not supported in a batch; write the request several times".into());
    }
    let _ = &c.user;
    let mut logit_bias = Vec::new();
    for (token, &bias) in &c.logit_bias {
        let id = token.parse().map_err(|_| format!("body.logit_bias: {token:?} is no token id"))?;
        logit_bias.push((id, bias));
    }
    let d = SamplingParams::default();
    Ok(SamplingParams {
        temperature: c.temperature.unwrap_or(d.temperature),
        top_p: c.top_p.unwrap_or(d.top_p),
        top_k: c.top_k.unwrap_or(d.top_k),
        min_p: c.min_p.unwrap_or(d.min_p),
        repetition_penalty: c.repetition_penalty.unwrap_or(d.repetition_penalty),
        presence_penalty: c.presence_penalty.unwrap_or(d.presence_penalty),
        frequency_penalty: c.frequency_penalty.unwrap_or(d.frequency_penalty),
        logit_bias,
        seed: c.seed.as_ref().map(seed).transpose()?,
        max_tokens: c.max_tokens,
        stop: match &c.stop {
            Stop::One(text) => vec![text.clone()],
            Stop::Many(list) => list.clone(),
            Stop::None => Vec::new(),
        },
        ..d
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer::chat::InputMessage;
    use serde_json::json;

    fn refused(body: &str, own: &[&str]) -> String {
        let text = format!(r#"{{"custom_id":"a","url":"/v1/completions","body":{body}}}"#);
        let line = Line::parse(&text).expect("it is JSON");
        match line.parsed::<TextBody>(own).and_then(|(_, c)| params(&c)) {
            Err(reason) => reason,
            Ok(_) => panic!("{body} was taken"),
        }
    }

    #[test]
    fn a_choice_of_a_tool_is_read_whole() {
        let read = |json: &str| named(&serde_json::from_str(json).expect("it is JSON"));
        let chosen = read(r#"{"type":"function","function":{"name":"run"}}"#);
        assert_eq!(chosen, Ok(CallChoice::Named("run".into())));
        for (json, wanted) in [
            (r#"{"type":"custom","function":{"name":"run"}}"#, "custom"),
            (r#"{"type":"function","function":{"name":"run"},"colour":1}"#, "colour"),
            (r#"{"type":"function","function":{"name":"run","colour":1}}"#, "colour"),
            (r#"{"type":"function","name":"run"}"#, "name"),
            (r#"{"function":{"name":"run"}}"#, "type"),
            (r#""sometimes""#, "sometimes"),
        ] {
            let reason = read(json).expect_err(json);
            assert!(reason.contains("tool_choice") && reason.contains(wanted), "{reason}");
        }
    }

    /// Calls are read where they may be made, and nowhere else.
    #[test]
    fn calls_that_are_not_allowed_are_not_read() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(std::fs::read(path).expect("it is there"));
        let tokenizer = tokenizer.expect("it loads");
        let template = ChatTemplate::new(&tokenizer).expect("it has the tokens");
        let reads = |extra: Value| {
            let function = json!({"name": "f", "parameters": {"type": "object"}});
            let mut body = json!({"messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": function}]});
            body.as_object_mut().expect("one").extend(extra.as_object().expect("one").clone());
            let line = json!({"custom_id": "a", "url": "/v1/chat/completions", "body": body});
            let line = Line::parse(&line.to_string()).expect("it is JSON");
            match line.job(&tokenizer, Some(&template), 1 << 20).expect("it is taken").kind {
                Kind::Chat { tools, .. } => tools,
                _ => panic!("no chat"),
            }
        };
        assert!(reads(json!({})) && reads(json!({"tool_choice": "auto"})));
        assert!(!reads(json!({"tool_choice": "none"})));
        assert!(!reads(json!({"tools": []})));
    }

    fn taken<T: serde::de::DeserializeOwned>(body: &str, own: &[&str]) -> (T, Common) {
        let text = format!(r#"{{"custom_id":"a","url":"/v1/completions","body":{body}}}"#);
        let line = Line::parse(&text).expect("it is JSON");
        line.parsed(own).unwrap_or_else(|reason| panic!("{body}: {reason}"))
    }

    #[test]
    fn a_seed_is_any_64_bits() {
        for (text, seed) in [
            ("18446744073709551615", u64::MAX),
            ("-1", u64::MAX),
            ("-9223372036854775808", 1 << 63),
            ("7", 7),
        ] {
            let (_, common): (TextBody, _) =
                taken(&format!(r#"{{"prompt":"x","seed":{text}}}"#), TEXT);
            assert_eq!(params(&common).expect("parameters").seed, Some(seed), "{text}");
        }
        for text in ["18446744073709551616", "-9223372036854775809", "1.5", r#""7""#] {
            let reason = refused(&format!(r#"{{"prompt":"x","seed":{text}}}"#), TEXT);
            assert!(reason.contains("body.seed"), "{reason}");
        }
    }

    #[test]
    fn fields_that_are_null_are_absent() {
        for name in [COMMON, TEXT, &["suffix"]].concat() {
            if name != "prompt" {
                let body = format!(r#"{{"prompt":"x","{name}":null}}"#);
                let (_, common): (TextBody, _) = taken(&body, TEXT);
                params(&common).expect(name);
            }
        }
        for name in [COMMON, CHAT, &["audio"]].concat() {
            if name != "messages" {
                let body = format!(r#"{{"messages":[],"{name}":null}}"#);
                taken::<ChatBody>(&body, CHAT);
            }
        }
        let tool = r#"{"type":"function","function":{"name":"f","description":null,"strict":null,
            "parameters":{"properties":{"a":{"enum":[1,null],"default":null}}}}}"#;
        let form = r#"{"type":"json_schema","json_schema":{"name":null,"strict":null,
            "schema":{"const":null}}}"#;
        let body = format!(r#"{{"messages":[],"tools":[{tool}],"response_format":{form}}}"#);
        let (body, _): (ChatBody, _) = taken(&body, CHAT);
        assert_eq!(
            conversation::tools(body.tools)[0].parameters,
            json!({"properties": {"a": {"enum": [1, null], "default": null}}})
        );
        let Some(Format::JsonSchema { json_schema }) = body.response_format else {
            panic!("another form");
        };
        assert_eq!(json_schema.schema, json!({"const": null}));
        // What is no field is not dropped.
        assert!(
            refused(r#"{"prompt":"x","logit_bias":{"1":null}}"#, TEXT).contains("logit_bias.1")
        );
        assert!(refused(r#"{"prompt":"x","stop":["a",null]}"#, TEXT).contains("body.stop"));
    }

    /// Answers as OpenAI's SDK dumps them.
    #[test]
    fn answers_are_sent_back_as_they_came() {
        let body = json!({"messages": [
            {"content": "Hello.", "refusal": null, "role": "assistant", "annotations": [],
             "audio": null, "function_call": null, "tool_calls": null},
            {"content": null, "refusal": null, "role": "assistant", "annotations": null,
             "audio": null, "function_call": null, "reasoning_content": null, "tool_calls": [
                {"id": "call_0", "type": "function",
                 "function": {"name": "f", "arguments": "{\"a\":null}"}},
                {"id": null, "name": "g", "arguments": {"a": null}},
            ]},
            {"role": "user", "name": null, "content": [{"type": "text", "text": "x"}]},
        ]});
        let (body, _): (ChatBody, _) = taken(&body.to_string(), CHAT);
        let messages = conversation::messages(body.messages).expect("messages");
        let said = |message: &InputMessage| match message {
            InputMessage::Assistant { content, tool_calls, .. } => {
                let calls = tool_calls.iter().flatten().map(|call| call.arguments.clone());
                (content.clone(), calls.collect::<Vec<_>>())
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(said(&messages[0]), ("Hello.".into(), vec![]));
        let arguments = r#"{"a":null}"#.to_owned();
        assert_eq!(said(&messages[1]), (String::new(), vec![arguments.clone(), arguments]));
        for field in [r#""refusal":"no""#, r#""annotations":[{}]"#, r#""function_call":{}"#] {
            let body = format!(r#"{{"messages":[{{"role":"assistant","content":"x",{field}}}]}}"#);
            let line = format!(r#"{{"custom_id":"a","url":"x","body":{body}}}"#);
            let line = Line::parse(&line).expect("it is JSON");
            let Err(reason) = line.parsed::<ChatBody>(CHAT) else { panic!("{body} was taken") };
            assert!(reason.contains("body.messages[0]."), "{reason}");
        }
    }

    #[test]
    fn fields_are_refused_by_name() {
        assert!(refused(r#"{"prompt":"x","suffix":"y"}"#, TEXT).contains("body.suffix"));
        assert!(refused(r#"{"prompt":"x","stream":true}"#, TEXT).contains("stream"));
        assert!(refused(r#"{"prompt":"x","logit_bias":{"b":1}}"#, TEXT).contains("\"b\""));
        assert!(refused(r#"{"prompt":7}"#, TEXT).contains("body.prompt"));
        assert!(refused(r#"{"prompt":"x","top_p":"much"}"#, TEXT).contains("body.top_p"));
        assert!(refused(r#"{"prompt":"x","logit_bias":{"1":"b"}}"#, TEXT).contains("logit_bias.1"));
        assert!(refused(r#"{"prompt":"x","n":2}"#, TEXT).contains("body.n"));
    }
}
