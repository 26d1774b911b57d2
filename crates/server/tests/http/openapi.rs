//! The served description says what is there.

use crate::common::*;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};

fn good_body(path: &str) -> Value {
    match path {
        "/v1/completions" => json!({"model": "deepinfer", "prompt": "p"}),
        "/v1/responses" | "/v1/responses/input_tokens" => {
            json!({"model": "deepinfer", "input": "p"})
        }
        "/tokenize" => json!({"prompt": "p"}),
        "/detokenize" => json!({"tokens": [1]}),
        path if path.starts_with("/v1/messages") => chat(json!({"max_tokens": 5})),
        _ => chat(json!({})),
    }
}

#[tokio::test]
async fn every_operation_and_every_field_is_there() {
    let server = Server::saying(&format!("x{EOS}"));
    let (_, text) = server.get("/openapi.json").await;
    let description: Value = serde_json::from_str(&text).expect("JSON");
    let paths = description["paths"].as_object().expect("paths");
    let mut fields = 0;
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().expect("methods") {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            let names = schema["properties"].as_object().into_iter().flatten();
            let mut bodies = vec![(json!({}), true)];
            if schema.is_object() {
                bodies.push((merge(good_body(path), json!({"banana": 1})), false));
            }
            for (name, _) in names {
                fields += 1;
                // No field takes this, so one that is known is refused in other words.
                bodies.push((merge(good_body(path), json!({name: [[{"x": 1}]]})), true));
            }
            for (body, known) in bodies {
                let request = Request::builder()
                    .method(method.to_uppercase().as_str())
                    .uri(path.replace("{name}", "deepinfer").replace("{id}", "resp_1"))
                    .body(Body::from(body.to_string()))
                    .expect("a request");
                let response = server.send(request).await;
                let status = response.status().as_u16();
                assert_ne!(status, 405, "{method} {path}");
                let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
                let text = String::from_utf8_lossy(&bytes);
                assert!(!text.contains("there is no /"), "{method} {path}: {text}");
                assert_eq!(
                    !text.contains("not known here"),
                    known,
                    "{method} {path} {body}: {text}"
                );
            }
        }
    }
    assert!(fields > 100, "{fields} fields");
    for operation in ["/v1/messages", "/v1/responses/{id}/cancel", "/metrics"] {
        assert!(paths.contains_key(operation));
    }
}

#[tokio::test]
async fn the_page_needs_nothing_from_elsewhere() {
    let server = Server::saying("x");
    let (status, page) = server.get("/").await;
    assert!(status.is_success() && page.contains("<!doctype html>"));
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
}
