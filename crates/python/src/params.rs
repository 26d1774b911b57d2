//! Parameters of a request, as Python gives them.

use deepinfer::grammar::{GrammarSpec, Trigger};
use deepinfer::request::{Constraint, RequestError, SamplingParams, ThinkingBudget};
use pyo3::prelude::*;
use std::sync::Arc;

/// Fields of `SamplingParams`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Params {
    n: usize,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    seed: Option<u64>,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    max_tokens: Option<usize>,
    min_tokens: usize,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    bad_words: Vec<Vec<u32>>,
    allowed_token_ids: Vec<u32>,
    logit_bias: Vec<(u32, f32)>,
    thinking_token_budget: Option<usize>,
    golden_token_ids: Vec<u32>,
    so_args: Option<StructuredOutput>,
}

/// Fields of `so_args`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct StructuredOutput {
    schema_type: String,
    schema: String,
    #[pyo3(default)]
    trigger_token_ids: Option<Vec<u32>>,
    #[pyo3(default)]
    bound_token_id: Option<u32>,
}

impl Params {
    /// The engine's parameters; errors name the field. `end` is the token that ends thinking, if
    /// there is some: a form that does not say where it begins begins after it.
    pub fn sampling(self, end: Option<u32>) -> Result<SamplingParams, String> {
        let constraint = self.so_args.map(|form| form.constraint(end)).transpose()?;
        let thinking_budget = match (self.thinking_token_budget, end) {
            (None, _) => None,
            (Some(tokens), Some(end)) => Some(ThinkingBudget { tokens, end }),
            (Some(_), None) => {
                let reason = "nothing thinks here; it goes with LLM.chat and an effort";
                return Err(format!("thinking_token_budget: {reason}"));
            }
        };
        Ok(SamplingParams {
            n: self.n,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            stop: self.stop,
            stop_tokens: self.stop_token_ids,
            ignore_eos: self.ignore_eos,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            bad_words: self.bad_words,
            allowed_tokens: self.allowed_token_ids,
            logit_bias: self.logit_bias,
            constraint: constraint.map(Arc::new),
            thinking_budget,
            forced: self.golden_token_ids,
            ..SamplingParams::default()
        })
    }
}

/// An error of the engine, with the names that parameters have in Python.
pub fn message(error: &RequestError) -> String {
    let names = [
        ("stop_tokens", "stop_token_ids"),
        ("allowed_tokens", "allowed_token_ids"),
        ("forced", "golden_token_ids"),
    ];
    let text = error.to_string();
    let renamed = names.iter().find(|(engine, _)| text.starts_with(engine));
    match renamed {
        Some((engine, own)) => text.replacen(engine, own, 1),
        None => text,
    }
}

impl StructuredOutput {
    fn constraint(self, after: Option<u32>) -> Result<Constraint, String> {
        let grammar = match self.schema_type.as_str() {
            "json" => {
                let schema = serde_json::from_str(&self.schema);
                GrammarSpec::JsonSchema(schema.map_err(|e| format!("so_args: schema: {e}"))?)
            }
            "regex" => GrammarSpec::Regex(self.schema),
            "ebnf" => GrammarSpec::Lark(self.schema),
            other => {
                let kinds = "json, regex or ebnf";
                return Err(format!("so_args: schema_type is {other:?}; it must be {kinds}"));
            }
        };
        let tokens = self.trigger_token_ids.filter(|tokens| !tokens.is_empty());
        let trigger = match tokens {
            Some(tokens) => Some(Trigger::new(tokens, self.bound_token_id)).transpose(),
            None => after.map(|after| Trigger::new(vec![after], None)).transpose(),
        };
        Ok(Constraint { grammar, trigger: trigger.map_err(|e| format!("so_args: {e}"))? })
    }
}
