//! A server over a scripted engine, and a client without a network.

use axum::body::{Body, to_bytes};
use axum::http::{Request, Response, StatusCode, header};
use deepinfer::request::RequestError;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_server::scripted::{Reply, Scripted};
use deepinfer_server::{App, Config, Inference, router};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, OnceLock};
use tower::ServiceExt;

pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load = || {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/tokenizer.json");
        let json = std::fs::read(path).expect("the test tokenizer is there");
        Arc::new(Tokenizer::from_bytes(json).expect("and loads"))
    };
    TOKENIZER.get_or_init(load).clone()
}

/// Tokens of an answer that is written as text, special tokens included.
pub fn tokens(text: &str) -> Vec<u32> {
    tokenizer().encode_scanning_specials(text).expect("the text encodes")
}

pub const EOS: &str = "<｜end▁of▁sentence｜>";

/// What the engine has been asked.
pub type Seen = Arc<Mutex<Vec<deepinfer::request::Request>>>;

pub struct Server {
    pub app: Arc<App>,
    pub engine: Arc<Scripted>,
    pub seen: Seen,
}

impl Server {
    /// Answers everything with `text`.
    pub fn saying(text: &str) -> Self {
        let tokens = tokens(text);
        Self::scripted(Config::default(), move |_| Ok(Reply::tokens(tokens.clone())))
    }

    pub fn scripted(
        config: Config,
        script: impl Fn(&[u32]) -> Result<Reply, RequestError> + Send + Sync + 'static,
    ) -> Self {
        let seen = Seen::default();
        let notes = seen.clone();
        let engine = Scripted::new(tokenizer(), 1 << 16, move |request, prompt| {
            notes.lock().expect("not poisoned").push(request.clone());
            script(prompt)
        });
        let engine = Arc::new(engine);
        let app = App::new(config, engine.clone() as Arc<dyn Inference>);
        Self { app, engine, seen }
    }

    pub async fn send(&self, request: Request<Body>) -> Response<Body> {
        router(self.app.clone()).oneshot(request).await.expect("infallible")
    }

    pub async fn post_raw(&self, path: &str, body: impl Into<Body>) -> (StatusCode, Vec<u8>) {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.into())
            .expect("a request");
        let response = self.send(request).await;
        let status = response.status();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        (status, bytes.to_vec())
    }

    pub async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        let (status, bytes) = self.post_raw(path, body.to_string()).await;
        let value = serde_json::from_slice(&bytes).unwrap_or_else(|e| {
            panic!("{e}: {}", String::from_utf8_lossy(&bytes));
        });
        (status, value)
    }

    /// An answer that must be a success.
    pub async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, value) = self.post(path, body).await;
        assert_eq!(status, StatusCode::OK, "{value}");
        value
    }

    /// The field that a refusal names.
    pub async fn refused(&self, path: &str, body: Value) -> String {
        let (status, value) = self.post(path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{value}");
        value["error"]["param"].as_str().unwrap_or_default().to_owned()
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        let response = self.send(request).await;
        let status = response.status();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        (status, String::from_utf8(bytes.to_vec()).expect("text"))
    }

    /// Events of a stream: names and data.
    pub async fn events(&self, path: &str, mut body: Value) -> Vec<(Option<String>, Value)> {
        body["stream"] = json!(true);
        let (status, bytes) = self.post_raw(path, body.to_string()).await;
        let text = String::from_utf8(bytes).expect("events are UTF-8");
        assert_eq!(status, StatusCode::OK, "{text}");
        parse_events(&text)
    }

    /// Tokens of the prompt of the last request.
    pub fn last_prompt(&self) -> Vec<u32> {
        match &self.seen.lock().expect("not poisoned").last().expect("a request").prompt {
            deepinfer::request::Prompt::Tokens(tokens) => tokens.clone(),
            deepinfer::request::Prompt::Text(text) => tokens(text),
        }
    }

    pub fn last_params(&self) -> deepinfer::request::SamplingParams {
        self.seen.lock().expect("not poisoned").last().expect("a request").params.clone()
    }
}

pub fn parse_events(text: &str) -> Vec<(Option<String>, Value)> {
    let mut events = Vec::new();
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let mut name = None;
        let mut data = None;
        for line in block.lines() {
            if let Some(rest) = line.strip_prefix("event: ") {
                name = Some(rest.to_owned());
            } else if let Some(rest) = line.strip_prefix("data: ") {
                data = Some(match rest {
                    "[DONE]" => json!("[DONE]"),
                    rest => serde_json::from_str(rest).expect("data is JSON"),
                });
            } else {
                assert!(line.starts_with(':'), "{line:?}");
            }
        }
        if let Some(data) = data {
            events.push((name, data));
        }
    }
    events
}

/// A chat request.
pub fn chat(extra: Value) -> Value {
    merge(json!({"model": "deepinfer", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

pub fn merge(mut base: Value, extra: Value) -> Value {
    for (name, value) in extra.as_object().expect("an object") {
        base[name] = value.clone();
    }
    base
}

/// Two tools.
pub fn tools() -> Value {
    let tool = |name: &str| {
        json!({"type": "function", "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        }})
    };
    json!([tool("run"), tool("look")])
}

/// A call's parameter: name, whether text, value.
pub type Parameter<'a> = (&'a str, bool, &'a str);

/// Calls in the V4.1 markup.
pub fn calls(calls: &[(&str, &[Parameter])]) -> String {
    let mut text = "\n\n<｜DSML｜ calls>\n".to_owned();
    for (name, parameters) in calls {
        text.push_str(&format!("<｜DSML｜ invoke name=\"{name}\">\n"));
        for (name, is_text, value) in *parameters {
            text.push_str(&format!(
                "<｜DSML｜ parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜ parameter>\n"
            ));
        }
        text.push_str("</｜DSML｜ invoke>\n");
    }
    text.push_str("</｜DSML｜ calls>");
    text
}

/// A streamed chat answer put together again, checked on the way.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<(String, String)>,
    pub finish: String,
}

pub fn join_chat(events: &[(Option<String>, Value)]) -> Answer {
    let mut answer = Answer::default();
    let (last, chunks) = events.split_last().expect("events");
    assert_eq!(last.1, json!("[DONE]"));
    assert_eq!(chunks[0].1["choices"][0]["delta"]["role"], "assistant");
    let mut finished = 0;
    for (_, chunk) in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        let Some(choice) = chunk["choices"].get(0) else { continue };
        assert_eq!(finished, 0, "something after the finish: {chunk}");
        let delta = &choice["delta"];
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("an index") as usize;
            if let Some(name) = call["function"]["name"].as_str() {
                assert_eq!(index, answer.calls.len());
                assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_")));
                answer.calls.push((name.into(), String::new()));
            }
            assert_eq!(index + 1, answer.calls.len());
            answer.calls[index].1.push_str(call["function"]["arguments"].as_str().expect("text"));
        }
        answer.content.push_str(delta["content"].as_str().unwrap_or_default());
        answer.reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        if let Some(reason) = choice["finish_reason"].as_str() {
            finished += 1;
            answer.finish = reason.into();
        }
    }
    assert_eq!(finished, 1, "exactly one finish");
    answer
}

pub fn whole_chat(response: &Value) -> Answer {
    let choice = &response["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let call =
        |call: &Value| (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
    Answer {
        content: text(&choice["message"]["content"]),
        reasoning: text(&choice["message"]["reasoning_content"]),
        calls: choice["message"]["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        finish: text(&choice["finish_reason"]),
    }
}
