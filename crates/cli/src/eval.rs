//! `deepinfer eval`: the demo model's tasks.

mod drafts;
mod likelihood;
mod tasks;

use crate::args::{Eval, Suite};
use crate::failure::{Failure, Outcome};
use crate::open::{AnyLoaded, Loaded};
use crate::{conversation, demo, engine, named, open, speech, text};
use anyhow::Context;
use deepinfer::chat::{self, ChatTemplate, Conversation, Effort, ResponseFormat};
use deepinfer::engine::{DraftMode, EngineConfig, PrefillMode};
use deepinfer::plan_memory::MemoryPlan;
use deepinfer::request::{Request, SamplingParams};
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::Device;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use tasks::{Item, Score};

/// What was found.
#[derive(Serialize)]
struct Report {
    suite: &'static str,
    /// Most prompts of a task, where that was asked for.
    count: Option<usize>,
    /// How prompts were read.
    prefill: &'static str,
    tasks: Vec<TaskScore>,
    /// Drafts accepted a block, on the model's own text.
    mean_accepted: Option<f64>,
    /// Distance between the mean confidence and the share of accepted drafts.
    confidence_error: Option<f64>,
    /// Mean negative log likelihood of the tokens of the expected answers, in nats, where the model
    /// does not think first and the text has at most [`likelihood::LONGEST`] tokens.
    nll: Option<f64>,
    /// How many tokens that is the mean of.
    nll_tokens: usize,
    /// Tasks that were not run, and why.
    not_run: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct TaskScore {
    name: String,
    n: usize,
    correct: usize,
    accuracy: f64,
}

/// Runs the tasks and prints how many answers were right.
pub fn run(args: &Eval) -> Outcome {
    let mut items = match &args.tasks {
        Some(folder) => {
            tasks::read_folder(folder).map_err(|error| Failure::option("--tasks", &error))?
        }
        None if demo::TASKS.is_empty() => {
            return Err(Failure::Usage(
                "this program was built without tasks; give their folder with --tasks DIR".into(),
            ));
        }
        None => tasks::read_embedded(demo::TASKS)?,
    };
    items = tasks::only(items, &args.only).map_err(Failure::Usage)?;
    match args.count {
        Some(count) => items = tasks::first_of_each(items, count.get()),
        None if args.suite == Suite::Quick => items.retain(|item| item.quick),
        None => {}
    }
    let mut not_run = BTreeMap::new();
    items.retain(|item| {
        let image = item.has_image();
        if image {
            not_run.insert(item.task.clone(), "images are not supported yet".to_owned());
        }
        !image
    });
    if items.is_empty() {
        return Err(Failure::Usage("there is no task to run".into()));
    }
    let defaults = EngineConfig::default();
    let prefill = args.prefill.as_deref().map_or(Ok(PrefillMode::default()), engine::setting)?;
    if args.keep_tokens.is_some() && !matches!(prefill, PrefillMode::Compact | PrefillMode::Mask) {
        return Err(Failure::Usage(format!(
            "--keep-tokens has no meaning with --prefill {}; give compact or mask",
            prefill.name()
        )));
    }
    let config = EngineConfig {
        cache_format: args.run.kv.into(),
        device: args.run.device,
        threads: args.run.threads.map(NonZeroUsize::get),
        draft: DraftMode::Off,
        kv_tokens: 1 << 17,
        prefill,
        keep_tokens: args.keep_tokens.map_or(defaults.keep_tokens, NonZeroUsize::get),
        ..defaults
    };
    let engine = engine::start(&args.model, &config, &named::EVAL)?;
    let tokenizer = engine::tokenizer(&engine)?;
    let template = ChatTemplate::new(tokenizer)?;
    let longest = MemoryPlan::new(&open::checkpoint(&args.model)?, &config)?.longest_sequence;
    let (mut prompts, mut too_long) = (Vec::new(), BTreeMap::new());
    for item in items {
        let prompt = prompt(&template, &item).with_context(|| format!("task {}", item.id))?;
        let wanted = prompt.len().saturating_add(item.max_tokens);
        if wanted > longest {
            too_long.entry(item.task.clone()).or_insert_with(|| {
                format!("{} wants {wanted} tokens; the model has {longest}", item.id)
            });
        }
        prompts.push((item, prompt));
    }
    // The rest of a task would be another one.
    prompts.retain(|(item, _)| !too_long.contains_key(&item.task));
    not_run.extend(too_long);
    if prompts.is_empty() {
        let reasons = not_run.iter().map(|(task, reason)| format!("{task}: {reason}"));
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        return Err(Failure::Usage(format!("there is no task that can be run: {reasons}")));
    }
    let mut requests = Vec::new();
    for (item, prompt) in &prompts {
        let params =
            SamplingParams { max_tokens: Some(item.max_tokens), ..SamplingParams::greedy() };
        requests.push(Request::tokens(prompt.clone(), params));
    }
    let bar = open::bar("evaluating", prompts.len());
    let results = engine.generate(requests, |p| bar.set_position(p.done as u64));
    bar.finish_and_clear();
    let mut scores: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let (mut texts, mut fixed) = (Vec::new(), Vec::new());
    for ((item, prompt), result) in prompts.iter().zip(results) {
        let completion = result.with_context(|| format!("task {}", item.id))?;
        let ids = completion.ids();
        fixed.extend(likelihood::text(tokenizer, item, prompt)?);
        if item.draws_text() {
            texts.push((prompt.clone(), ids.clone()));
        }
        if item.score == Score::None {
            continue;
        }
        let entry = scores.entry(item.task.clone()).or_default();
        entry.0 += 1;
        entry.1 += usize::from(is_right(tokenizer, item, &ids, &completion.text));
    }
    drop(engine);
    let (drafts, likelihood) =
        match open::any_model(&args.model, args.run.device, args.run.threads)? {
            AnyLoaded::Cpu(loaded) => replay(args, &loaded, &texts, &fixed)?,
            AnyLoaded::Cuda(loaded) => replay(args, &loaded, &texts, &fixed)?,
        };
    let tasks = scores
        .into_iter()
        .map(|(name, (n, correct))| TaskScore {
            name,
            n,
            correct,
            accuracy: correct as f64 / n as f64,
        })
        .collect();
    let report = Report {
        suite: match args.suite {
            Suite::Quick if args.count.is_none() => "quick",
            _ => "full",
        },
        count: args.count.map(NonZeroUsize::get),
        prefill: config.prefill.name(),
        tasks,
        mean_accepted: drafts.as_ref().map(|d| d.mean_accepted),
        confidence_error: drafts.as_ref().map(|d| d.confidence_error),
        nll: likelihood.mean(),
        nll_tokens: likelihood.tokens,
        not_run,
    };
    if args.json {
        text::json(&report)?
    } else {
        print(&report)?
    }
    Ok(())
}

/// What is measured with the model itself, without the engine.
fn replay<D: Device>(
    args: &Eval,
    loaded: &Loaded<D>,
    texts: &[(Vec<u32>, Vec<u32>)],
    fixed: &[likelihood::Text],
) -> Outcome<(Option<drafts::Drafts>, likelihood::Likelihood)> {
    let drafts = drafts::measure(args, loaded, texts)?;
    Ok((drafts, likelihood::measure(args, loaded, fixed)?))
}

fn effort(item: &Item) -> Outcome<Effort> {
    if !item.thinking {
        return Ok(Effort::NONE);
    }
    let name = item.effort.as_deref().unwrap_or("high");
    Ok(name.parse::<Effort>()?)
}

fn prompt(template: &ChatTemplate<'_>, item: &Item) -> anyhow::Result<Vec<u32>> {
    let messages =
        conversation::messages(item.messages.clone()).map_err(|reason| anyhow::anyhow!(reason))?;
    let conversation = Conversation {
        messages,
        tools: conversation::tools(item.tools.clone()),
        response_format: match item.response_format.as_deref() {
            Some("json_object") => ResponseFormat::JsonObject,
            _ => ResponseFormat::Text,
        },
        ..Conversation::default()
    };
    let effort = match effort(item) {
        Ok(effort) => effort,
        Err(_) => anyhow::bail!("effort {:?} is unknown", item.effort),
    };
    Ok(template.render(&conversation, &chat::Options { effort: Some(effort) })?)
}

/// Whether the answer (what follows the thinking) is the expected one and ends. `text` is that of
/// `ids`.
fn is_right(tokenizer: &Tokenizer, item: &Item, ids: &[u32], text: &str) -> bool {
    if ids.is_empty() || tokenizer.eos() != ids.last().copied() {
        return false;
    }
    let (_, answer) = speech::split(tokenizer, item.thinking, ids, text);
    // The answer is the end of the text.
    let start = text.len() - answer.len();
    let answer = answer.trim();
    match item.score {
        Score::None => true,
        Score::Exact => item.expected.as_str() == Some(answer),
        Score::Json => {
            let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
            let expected = item.expected.as_str().and_then(parse);
            expected.is_some() && parse(answer) == expected
        }
        Score::ToolCall => {
            let made = conversation::tool_calls(tokenizer, ids, text, start);
            made.is_some_and(|(before, calls)| match calls.as_slice() {
                [call] if before.trim().is_empty() => {
                    let arguments: Option<serde_json::Value> =
                        serde_json::from_str(&call.arguments).ok();
                    item.expected["name"] == call.name.as_str()
                        && arguments.as_ref() == item.expected.get("arguments")
                }
                _ => false,
            })
        }
    }
}

fn print(report: &Report) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let head = ["task", "n", "correct", "accuracy"].map(str::to_owned).to_vec();
    let mut rows = vec![head];
    for t in &report.tasks {
        let percent = format!("{:.1}%", 100.0 * t.accuracy);
        rows.push(vec![t.name.clone(), t.n.to_string(), t.correct.to_string(), percent]);
    }
    text::table(&rows)?;
    if let (Some(accepted), Some(error)) = (report.mean_accepted, report.confidence_error) {
        writeln!(out, "\ndrafts accepted a block: {accepted:.2}; confidence error: {error:.3}")?;
    }
    if let Some(nll) = report.nll {
        writeln!(
            out,
            "negative log likelihood of {} tokens of answers: {nll:.5} nats each",
            report.nll_tokens
        )?;
    }
    for (task, reason) in &report.not_run {
        writeln!(out, "{task}: not run, {reason}")?;
    }
    Ok(())
}
