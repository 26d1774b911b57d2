//! `/tokenize` and `/detokenize`.

use crate::app::App;
use crate::chat::blocking;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::sse;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Text to tokens.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    blocking(move || {
        let tokenizer = &app.info().tokenizer;
        let mut fields = Fields::of_body(&body)?;
        if let Some(model) = fields.take::<String>("model")? {
            app.check_model(&model)?;
        }
        let text: String = match fields.take("prompt")? {
            Some(text) => text,
            None => fields.require("text")?,
        };
        let scan = fields.take("parse_special")?.unwrap_or(false);
        let bos = fields.take("add_special_tokens")?.unwrap_or(false);
        let spell = fields.take("return_token_strs")?.unwrap_or(false);
        fields.finish()?;
        let encoded = match scan {
            true => tokenizer.encode_scanning_specials(&text),
            false => tokenizer.encode(&text),
        };
        let mut ids = encoded.map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
        if let Some(start) = tokenizer.bos().filter(|_| bos) {
            ids.insert(0, start);
        }
        let mut answer = json!({
            "count": ids.len(),
            "max_model_len": app.info().max_tokens,
            "tokens": ids,
        });
        if spell {
            let spelling = |&id: &u32| String::from_utf8_lossy(tokenizer.token_bytes(id));
            answer["token_strs"] = ids.iter().map(|id| Value::from(spelling(id))).collect();
        }
        Ok(sse::json(&answer))
    })
    .await
}

/// Tokens to text.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    blocking(move || {
        let tokenizer = &app.info().tokenizer;
        let mut fields = Fields::of_body(&body)?;
        if let Some(model) = fields.take::<String>("model")? {
            app.check_model(&model)?;
        }
        let ids: Vec<u32> = fields.require("tokens")?;
        fields.finish()?;
        let size = tokenizer.vocab_size();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= size) {
            let message = format!("token id {id} is not in the vocabulary of {size}");
            return Err(ApiError::invalid("tokens", message));
        }
        Ok(sse::json(&json!({"prompt": tokenizer.decode(&ids)})))
    })
    .await
}
