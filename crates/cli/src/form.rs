//! The form of an answer, from the command line.

use crate::args::FormArgs;
use crate::failure::{Failure, Outcome};
use crate::{files, named};
use anyhow::Context;
use deepinfer::chat::{self, ToolDefinition};
use deepinfer::engine::Engine;
use deepinfer::grammar::{GrammarSpec, Tool, ToolCalls, ToolChoice, Trigger};
use deepinfer::request::{Constraint, ThinkingBudget};
use deepinfer::tokenizer::Tokenizer;
use std::sync::Arc;

/// The grammar that was asked for.
pub fn grammar(args: &FormArgs) -> Outcome<Option<GrammarSpec>> {
    if let Some(path) = &args.json_schema {
        let schema = serde_json::from_str(&files::given(path, "--json-schema")?)
            .map_err(|e| Failure::Usage(format!("--json-schema: {}: {e}", path.display())))?;
        return Ok(Some(GrammarSpec::JsonSchema(schema)));
    }
    if let Some(path) = &args.grammar {
        return Ok(Some(GrammarSpec::Lark(files::given(path, "--grammar")?)));
    }
    if args.json_object {
        return Ok(Some(GrammarSpec::JsonObject));
    }
    let regex = args.regex.clone().map(GrammarSpec::Regex);
    Ok(regex.or_else(|| args.choice.clone().map(GrammarSpec::Choice)))
}

/// The option that the form was asked for with.
fn option(args: &FormArgs) -> &'static str {
    match args {
        FormArgs { json_schema: Some(_), .. } => "--json-schema",
        FormArgs { grammar: Some(_), .. } => "--grammar",
        FormArgs { regex: Some(_), .. } => "--regex",
        FormArgs { choice: Some(_), .. } => "--choice",
        _ => "--json-object",
    }
}

/// Whether the engine can keep to a form.
pub fn check(engine: &Engine, grammar: &GrammarSpec, args: &FormArgs) -> Outcome {
    engine.check_grammar(grammar).map_err(|error| match named::request(error) {
        Failure::Usage(message) => Failure::Usage(format!("{}: {message}", option(args))),
        failure => failure,
    })
}

/// The rule that an answer has this form, after the thinking if there is any.
pub fn constraint(
    grammar: Option<GrammarSpec>,
    end: Option<u32>,
) -> Outcome<Option<Arc<Constraint>>> {
    let Some(grammar) = grammar else { return Ok(None) };
    let trigger = end.map(|end| Trigger::new(vec![end], None)).transpose();
    let trigger = trigger.map_err(anyhow::Error::new)?;
    Ok(Some(Arc::new(Constraint { grammar, trigger })))
}

/// The token that ends thinking, if the turn `thinks`.
pub fn thinking_end(tokenizer: &Tokenizer, thinks: bool) -> Outcome<Option<u32>> {
    let token = || tokenizer.require_special(chat::THINKING_END);
    Ok(thinks.then(token).transpose().context("the end of thinking")?)
}

/// A limit of the thinking.
pub fn budget(tokens: Option<usize>, end: Option<u32>) -> Outcome<Option<ThinkingBudget>> {
    match (tokens, end) {
        (None, _) => Ok(None),
        (Some(tokens), Some(end)) => Ok(Some(ThinkingBudget { tokens, end })),
        (Some(_), None) => {
            Err(Failure::Usage("--thinking-budget needs an answer that thinks: --effort".into()))
        }
    }
}

/// Calls of `tools`; the arguments of those named `strict` follow their schemas. At most one unless
/// they may be `parallel`.
pub fn calls(
    tools: &[ToolDefinition],
    strict: &[String],
    choice: ToolChoice,
    parallel: bool,
) -> GrammarSpec {
    let tools = tools.iter().map(|tool| Tool {
        name: tool.name.clone(),
        parameters: tool.parameters.clone(),
        strict: strict.contains(&tool.name),
    });
    GrammarSpec::ToolCalls(ToolCalls { tools: tools.collect(), choice, parallel, opened: false })
}
