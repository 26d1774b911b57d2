//! The description that is served at `/openapi.json`.

use serde_json::{Map, Value, json};

/// An operation: method, path, what it does, fields of its body (the required ones with a `!`).
pub struct Operation {
    /// In capitals.
    pub method: &'static str,
    /// As the router has it.
    pub path: &'static str,
    /// In words.
    pub summary: &'static str,
    /// Separated by spaces.
    pub fields: &'static str,
}

const SAMPLING: &str = "temperature top_p top_k min_p presence_penalty frequency_penalty \
     repetition_penalty logit_bias allowed_token_ids bad_words seed sample_index min_tokens stop_token_ids \
     ignore_eos priority cache_salt service_tier user metadata";

/// Every operation of the server.
pub const OPERATIONS: &[Operation] = &[
    get("/", "A page to talk to the model"),
    get("/health", "Whether the engine answers"),
    get("/ready", "Whether requests should be sent here"),
    get("/load", "Open, running and waiting requests; tokens"),
    get("/metrics", "Metrics in Prometheus's text format"),
    get("/openapi.json", "This description"),
    get("/v1/models", "Names of the model"),
    get("/v1/models/{name}", "One of them"),
    post(
        "/v1/chat/completions",
        "The next message of a conversation",
        "model! messages! stream stream_options n max_tokens max_completion_tokens logprobs \
         top_logprobs stop reasoning_effort thinking thinking_budget chat_template_kwargs tools \
         tool_choice parallel_tool_calls response_format structured_outputs continue_final_message \
         add_generation_prompt modalities",
    ),
    post(
        "/v1/completions",
        "Text that goes on",
        "model! prompt! stream stream_options n best_of echo max_tokens logprobs stop \
         parse_special add_special_tokens response_format structured_outputs",
    ),
    post(
        "/v1/messages",
        "The next message of a conversation",
        "model! messages! max_tokens! system stream stop_sequences tools tool_choice thinking \
         output_config context_management cache_control",
    ),
    post(
        "/v1/messages/count_tokens",
        "Tokens of a prompt",
        "model! messages! system tools tool_choice thinking output_config",
    ),
    post(
        "/v1/responses",
        "The next items of a conversation",
        "model! input instructions previous_response_id store background stream stream_options \
         max_output_tokens reasoning tools tool_choice parallel_tool_calls text include \
         top_logprobs truncation structured_outputs",
    ),
    post(
        "/v1/responses/input_tokens",
        "Tokens of a prompt",
        "model input instructions previous_response_id reasoning tools tool_choice \
         parallel_tool_calls text truncation structured_outputs",
    ),
    get("/v1/responses/{id}", "A kept response"),
    Operation {
        method: "DELETE",
        path: "/v1/responses/{id}",
        summary: "Forgets a kept response",
        fields: "",
    },
    get("/v1/responses/{id}/input_items", "The items before it"),
    post("/v1/responses/{id}/cancel", "Ends a response that runs in the background", ""),
    post(
        "/tokenize",
        "Text to tokens",
        "prompt! model add_special_tokens parse_special return_token_strs",
    ),
    post("/detokenize", "Tokens to text", "tokens! model"),
];

const fn get(path: &'static str, summary: &'static str) -> Operation {
    Operation { method: "GET", path, summary, fields: "" }
}

const fn post(path: &'static str, summary: &'static str, fields: &'static str) -> Operation {
    Operation { method: "POST", path, summary, fields }
}

impl Operation {
    /// Names of the body's fields, and whether they are required.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, bool)> {
        let samples = self.fields.contains("model!") && !self.path.ends_with("count_tokens");
        let sampling = if samples { SAMPLING } else { "" };
        let name = |field: &'static str| match field.strip_suffix('!') {
            Some(name) => (name, true),
            None => (field, false),
        };
        self.fields.split_whitespace().map(name).chain(sampling.split_whitespace().map(name))
    }

    fn describe(&self) -> Value {
        let mut operation = json!({
            "summary": self.summary,
            "responses": {
                "200": {"description": "The answer; events if \"stream\" is true"},
                "4XX": {"description": "A refusal that says why"},
                "5XX": {"description": "The server is stopping or its engine has failed"},
            },
        });
        let mut parameters: Vec<Value> = self
            .path
            .split('/')
            .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
            .map(|name| {
                json!({
                    "name": name, "in": "path", "required": true, "schema": {"type": "string"},
                })
            })
            .collect();
        if self.fields().any(|(name, _)| name == "stream") {
            parameters.push(json!({
                "name": "x-progress", "in": "header", "schema": {"enum": ["true", "false"]},
                "description": "Events that tell how far the prompt has been read",
            }));
        }
        if !parameters.is_empty() {
            operation["parameters"] = Value::Array(parameters);
        }
        if !self.fields.is_empty() {
            let properties: Map<String, Value> =
                self.fields().map(|(name, _)| (name.to_owned(), json!({}))).collect();
            let required: Vec<&str> =
                self.fields().filter(|(_, required)| *required).map(|(name, _)| name).collect();
            let schema = json!({
                "type": "object", "properties": properties, "required": required,
            });
            operation["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        operation
    }
}

/// The description as a whole.
pub fn description() -> Value {
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method.to_lowercase()] = operation.describe();
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "DeepInfer", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    })
}
