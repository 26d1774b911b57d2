//! Parameters of a request, as Python gives them.

use deepinfer::grammar::{GrammarSpec, Trigger};
use deepinfer::request::{Constraint, SamplingParams};
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
    /// The engine's parameters; errors name the field. A form that does not say where it begins
    /// begins after the token `after`, if there is one.
    pub fn sampling(self, after: Option<u32>) -> Result<SamplingParams, String> {
        let constraint = self.so_args.map(|form| form.constraint(after)).transpose()?;
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
            ..SamplingParams::default()
        })
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
