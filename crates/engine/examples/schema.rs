//! An answer that follows a JSON schema, after some thinking:
//!
//! ```text
//! cargo run --release -p deepinfer --example schema -- MODEL_DIR
//! ```

use deepinfer::chat::{ChatTemplate, Conversation, Effort, Options, ResponseFormat, user};
use deepinfer::checkpoint::Source;
use deepinfer::engine::{Engine, EngineConfig};
use deepinfer::grammar::{GrammarSpec, Trigger};
use deepinfer::request::{Constraint, Request, SamplingParams, ThinkingBudget};
use serde_json::json;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: schema MODEL_DIR")?;
    let engine = Engine::open(Source::directory(model), &EngineConfig::default(), &mut |_, _| {})?;
    let tokenizer = engine.tokenizer().ok_or("the checkpoint has a tokenizer")?;

    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let question = "Extract name, age as JSON.\nMy name is Ida. I am 34 years old.";
    let conversation = Conversation {
        messages: vec![user(question)],
        response_format: ResponseFormat::JsonSchema(schema.clone()),
        ..Conversation::default()
    };
    let options = Options { effort: Some(Effort::LOW) };
    let prompt = ChatTemplate::new(tokenizer)?.render(&conversation, &options)?;

    // The answer begins after the token that ends the thinking, of which there is a limit.
    let end = tokenizer.require_special("</think>")?;
    let params = SamplingParams {
        max_tokens: Some(400),
        thinking_budget: Some(ThinkingBudget { tokens: 200, end }),
        constraint: Some(Arc::new(Constraint {
            grammar: GrammarSpec::JsonSchema(schema),
            trigger: Some(Trigger::new(vec![end], None)?),
        })),
        ..SamplingParams::default()
    };
    let answer = engine.submit(Request::tokens(prompt, params))?.wait()?;
    let ids = answer.ids();
    let start = ids.iter().position(|&id| id == end).ok_or("the thinking has no end")? + 1;
    let ends = ids.len() - usize::from(ids.last().copied() == tokenizer.eos());
    let document: serde_json::Value = serde_json::from_str(&tokenizer.decode(&ids[start..ends]))?;
    println!("{document:#}");
    Ok(())
}
