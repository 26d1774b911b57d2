//! Errors of the HTTP interface, in the shapes of the two families of protocols.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use deepinfer::grammar::CompileError;
use deepinfer::request::RequestError;
use serde_json::{Value, json};
use std::time::Duration;

/// Why a request was not served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// A field, or the body as a whole, that cannot be honoured.
    #[error("{message}")]
    Invalid {
        /// The field, as a path into the body.
        param: Option<String>,
        /// What is wrong and what to do.
        message: String,
    },
    /// Prompt and output together are too long.
    #[error("{message}")]
    TooLong {
        /// With the numbers.
        message: String,
    },
    /// No key, or one that is not known.
    #[error(
        "no valid API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )]
    Unauthorized,
    /// A path, a model or a stored response that is not there.
    #[error("{message}")]
    NotFound {
        /// The field that names it.
        param: Option<String>,
        /// What was looked for.
        message: String,
    },
    /// The path exists, the method does not.
    #[error("{path} does not take {method}")]
    Method {
        /// The path.
        path: String,
        /// The method.
        method: String,
    },
    /// The body is larger than allowed.
    #[error("the body is larger than the limit of {limit} bytes")]
    TooLarge {
        /// Bytes.
        limit: usize,
    },
    /// The body did not arrive in time.
    #[error("the request did not arrive within {seconds} s")]
    TooSlow {
        /// The limit.
        seconds: u64,
    },
    /// Too much at a time: come back later.
    #[error("{message}")]
    Busy {
        /// Which limit.
        message: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is stopping, or its engine has stopped.
    #[error("{message}")]
    Unavailable {
        /// Why.
        message: String,
    },
    /// A fault of the server.
    #[error("internal error: {message}")]
    Internal {
        /// What is known.
        message: String,
    },
}

/// Which shape an error body has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
}

impl Shape {
    /// The shape that clients of `path` expect.
    pub fn of_path(path: &str) -> Self {
        match path.starts_with("/v1/messages") {
            true => Shape::Anthropic,
            false => Shape::OpenAi,
        }
    }
}

impl ApiError {
    /// A field that cannot be honoured.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { param: Some(param.into()), message: message.into() }
    }

    /// A fault of the server.
    pub fn internal(message: impl ToString) -> Self {
        Self::Internal { message: message.to_string() }
    }

    /// HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::TooLong { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooSlow { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Type and code in OpenAI's vocabulary.
    fn openai_kind(&self) -> (&'static str, &'static str) {
        match self {
            Self::Invalid { .. } => ("invalid_request_error", "invalid_value"),
            Self::TooLong { .. } => ("invalid_request_error", "context_length_exceeded"),
            Self::Unauthorized => ("authentication_error", "invalid_api_key"),
            Self::NotFound { param: Some(p), .. } if p == "model" => {
                ("invalid_request_error", "model_not_found")
            }
            Self::NotFound { .. } => ("invalid_request_error", "not_found"),
            Self::Method { .. } => ("invalid_request_error", "method_not_allowed"),
            Self::TooLarge { .. } => ("invalid_request_error", "request_too_large"),
            Self::TooSlow { .. } => ("invalid_request_error", "request_timeout"),
            Self::Busy { .. } => ("rate_limit_error", "rate_limit_exceeded"),
            Self::Unavailable { .. } => ("server_error", "unavailable"),
            Self::Internal { .. } => ("server_error", "internal_error"),
        }
    }

    /// Type in Anthropic's vocabulary.
    fn anthropic_kind(&self) -> &'static str {
        match self {
            Self::Invalid { .. } | Self::TooLong { .. } | Self::TooSlow { .. } => {
                "invalid_request_error"
            }
            Self::Unauthorized => "authentication_error",
            Self::NotFound { .. } | Self::Method { .. } => "not_found_error",
            Self::TooLarge { .. } => "request_too_large",
            Self::Busy { .. } => "rate_limit_error",
            Self::Unavailable { .. } => "overloaded_error",
            Self::Internal { .. } => "api_error",
        }
    }

    /// Code in OpenAI's vocabulary.
    pub fn code(&self) -> &'static str {
        self.openai_kind().1
    }

    /// The body.
    pub fn body(&self, shape: Shape) -> Value {
        let message = self.to_string();
        match shape {
            Shape::OpenAi => {
                let (kind, code) = self.openai_kind();
                let param = match self {
                    Self::Invalid { param, .. } | Self::NotFound { param, .. } => param.as_deref(),
                    _ => None,
                };
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Shape::Anthropic => {
                json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": message}})
            }
        }
    }

    /// The whole answer.
    pub fn response(&self, shape: Shape) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body(shape).to_string()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Self::Busy { retry_after, .. } = self {
            let seconds = retry_after.as_secs_f64().ceil().max(1.0) as u64;
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Parameters of the engine that have other names in the protocols.
const ENGINE_NAMES: [(&str, &str); 3] = [
    ("stop_tokens", "stop_token_ids"),
    ("allowed_tokens", "allowed_token_ids"),
    ("prompt_logprobs", "echo"),
];

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::PromptTooLong { .. }
            | RequestError::TextTooLong { .. }
            | RequestError::TooManyTokens { .. } => Self::TooLong { message },
            RequestError::QueueFull { .. }
            | RequestError::QueueTokensFull { .. }
            | RequestError::WaitedTooLong { .. } => {
                Self::Busy { message, retry_after: Duration::from_secs(1) }
            }
            RequestError::Grammar(CompileError::Busy { .. }) => {
                Self::Busy { message, retry_after: Duration::from_secs(1) }
            }
            RequestError::Grammar(CompileError::Fault { .. }) | RequestError::GrammarFault(_) => {
                Self::Internal { message }
            }
            RequestError::Stopped { .. } => Self::Unavailable { message },
            RequestError::UnknownToken { field, .. }
            | RequestError::OutOfRange { field, .. }
            | RequestError::Unsupported { field, .. } => {
                let own = ENGINE_NAMES.iter().find(|(engine, _)| *engine == field);
                let name = own.map_or(field, |(_, name)| name);
                Self::invalid(name, message.replacen(field, name, 1))
            }
            RequestError::EmptyPrompt => Self::invalid("prompt", message),
            _ => Self::Invalid { param: None, message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overload_says_when_to_come_back() {
        let error = ApiError::from(RequestError::QueueFull { waiting: 4, limit: 4 });
        let response = error.response(Shape::OpenAi);
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert_eq!(error.body(Shape::OpenAi)["error"]["code"], "rate_limit_exceeded");
        assert_eq!(error.body(Shape::Anthropic)["error"]["type"], "rate_limit_error");
    }

    #[test]
    fn errors_of_fields_name_them() {
        let error = ApiError::from(RequestError::OutOfRange {
            field: "top_p",
            value: "2".into(),
            expected: "it must be in (0, 1]",
        });
        let body = error.body(Shape::OpenAi);
        assert_eq!(body["error"]["param"], "top_p");
        let field = "stop_tokens";
        let error = ApiError::from(RequestError::UnknownToken { field, token: 900, vocab: 500 });
        let body = error.body(Shape::OpenAi);
        assert_eq!(body["error"]["param"], "stop_token_ids");
        let message = body["error"]["message"].as_str().expect("text");
        assert!(message.starts_with("stop_token_ids holds token id 900"), "{message}");
        assert_eq!(error.status(), StatusCode::BAD_REQUEST);
    }
}
