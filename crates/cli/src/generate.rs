//! `deepinfer generate`.

use crate::args::Generate;
use crate::failure::{Failure, Outcome};
use crate::speech::Speech;
use crate::{engine, files, form, named, open, speech, text};
use anyhow::Context;
use deepinfer::chat::{self, ChatError, ChatTemplate, Conversation};
use deepinfer::engine::Engine;
use deepinfer::metrics::Metrics;
use deepinfer::request::{Completion, Event, Request, RequestHandle, TokenLogprobs, check_text};
use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

/// Tokens to produce where the command line does not say.
const MAX_TOKENS: usize = 256;

/// What the prompt is.
enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// Continues a prompt.
pub fn run(args: &Generate) -> Outcome {
    let input = input(args)?;
    let effort = args.effort;
    let (n, max_tokens) = (usize::from(args.n), args.sampling.max_tokens);
    let max_tokens = max_tokens.map_or(MAX_TOKENS, NonZeroUsize::get);
    let grammar = form::grammar(&args.form)?;
    // A token is at least one byte; the chat format adds some tokens of its own.
    let most = match &input {
        Input::Text(text) => text.len() + args.system.as_ref().map_or(0, String::len) + 64,
        Input::Tokens(ids) => ids.len(),
    };
    let longest = open::checkpoint(&args.model)?.config().text_config.max_position_embeddings;
    let room = most.saturating_add(max_tokens).saturating_add(512);
    let mut config = engine::single(&args.run, &args.draft, room.min(longest))?;
    config.max_seqs = n;
    config.kv_tokens *= n;
    config.max_batch_tokens = config.max_batch_tokens.max(8 * n);
    let start = Instant::now();
    let engine = engine::start(&args.model, &config, &named::GENERATE)?;
    let loaded = start.elapsed();
    let tokenizer = engine::tokenizer(&engine)?;
    let end = form::thinking_end(tokenizer, args.chat && effort.thinks())?;
    let mut params = engine::sampling(&args.sampling, tokenizer, Some(max_tokens))?;
    params.n = n;
    (params.logprobs, params.prompt_logprobs) = (args.logprobs, args.prompt_logprobs);
    if let Some(grammar) = &grammar {
        form::check(&engine, grammar, &args.form)?;
    }
    params.constraint = form::constraint(grammar, end)?;
    params.thinking_budget = form::budget(args.thinking_budget, end)?;
    let limit = engine.bounds().max_tokens;
    let ids = match input {
        Input::Tokens(ids) => ids,
        Input::Text(prompt) if args.chat => {
            let messages = args.system.iter().map(chat::system).chain([chat::user(prompt)]);
            let conversation = Conversation { messages: messages.collect(), ..Default::default() };
            let options = chat::Options { effort: Some(effort) };
            let template = ChatTemplate::new(tokenizer).context("--chat")?;
            match template.render_within(&conversation, &options, limit) {
                Err(ChatError::TooLong(error)) => return Err(named::request(error)),
                rendered => rendered.context("--chat")?,
            }
        }
        Input::Text(prompt) => {
            check_text(tokenizer, &prompt, limit).map_err(named::request)?;
            chat::plain_prompt(tokenizer, &prompt)?
        }
    };
    let prompt_tokens = ids.len();
    let request = Request::tokens(ids, params);
    let start = Instant::now();
    let handles = engine.submit_all(request).map_err(named::request)?;
    let mut answers = Vec::new();
    for (i, handle) in handles.iter().enumerate() {
        let mut speech = args.chat.then(|| Speech::new(tokenizer, effort.thinks()));
        let mut printer = Printer::new(!args.json);
        if handles.len() > 1 && !args.json {
            writeln!(std::io::stdout(), "{}--- {}", if i > 0 { "\n" } else { "" }, i + 1)?;
        }
        let (completion, first) =
            follow(&engine, handle, prompt_tokens, &|| false, &mut |event| {
                let Event::Tokens { tokens, text } = event else { return Ok(()) };
                match &mut speech {
                    None => printer.answer(text),
                    Some(speech) => {
                        let piece = speech.push(tokens, text);
                        printer.thinking(piece.thinking)?;
                        printer.answer(piece.answer)
                    }
                }
            })?;
        let decode = start.elapsed().saturating_sub(first);
        if !args.json {
            printer.end()?;
            continue;
        }
        let usage = completion.usage;
        let thinks = effort.thinks();
        let (thinking, answer) =
            speech::split(tokenizer, thinks, &completion.ids(), &completion.text);
        let mut found = serde_json::json!({
            "text": answer,
            "thinking": args.chat.then(|| thinking.unwrap_or_default()),
            "tokens": completion.ids(),
            "finish_reason": completion.reason.map(|r| format!("{r:?}").to_lowercase()),
            "seed": usage.seed,
            "prompt_tokens": prompt_tokens,
            "output_tokens": usage.output_tokens,
            "drafted": usage.drafted,
            "verified": usage.verified,
            "accepted": usage.accepted,
        });
        if args.logprobs.is_some() {
            let all = completion.tokens.iter().filter_map(|token| token.logprobs.as_ref());
            found["logprobs"] = all.map(logprobs).collect();
        }
        if args.prompt_logprobs.is_some() {
            found["prompt_logprobs"] = completion.prompt_logprobs.iter().map(logprobs).collect();
        }
        // Several continuations run side by side: none has a time of its own.
        if handles.len() == 1 {
            found["drafts_by_position"] = drafts_by_position(engine.metrics()).into();
            let tokens = usage.output_tokens.saturating_sub(1) as f64;
            found["load_seconds"] = loaded.as_secs_f64().into();
            found["prompt_seconds"] = first.as_secs_f64().into();
            found["decode_seconds"] = decode.as_secs_f64().into();
            found["decode_tokens_per_s"] = (tokens / decode.as_secs_f64().max(1e-9)).into();
        }
        answers.push(found);
    }
    match answers.as_slice() {
        [] => Ok(()),
        [one] => Ok(text::json(one)?),
        all => Ok(text::json(&all)?),
    }
}

/// A token, its log-probability, and the most probable tokens with theirs.
fn logprobs(found: &TokenLogprobs) -> serde_json::Value {
    serde_json::json!({"token": found.token, "logprob": found.logprob, "top": found.top})
}

/// Drafted, verified and accepted tokens at each position of a block.
fn drafts_by_position(metrics: &Metrics) -> Vec<serde_json::Value> {
    let counters = metrics.drafted.iter().zip(&metrics.verified).zip(&metrics.accepted);
    let counts = counters.map(|((d, v), a)| (d.get(), v.get(), a.get()));
    let used = counts.take_while(|&(drafted, ..)| drafted > 0);
    let each = |(drafted, verified, accepted)| serde_json::json!({"drafted": drafted, "verified": verified, "accepted": accepted});
    used.map(each).collect()
}

fn input(args: &Generate) -> Outcome<Input> {
    match (&args.prompt, &args.prompt_file, &args.token_ids) {
        (Some(text), _, _) => Ok(Input::Text(text.clone())),
        (_, Some(path), _) => Ok(Input::Text(files::given(path, "--prompt-file")?)),
        (_, _, Some(_)) if args.chat => {
            Err(Failure::Usage("--chat needs text; --token-ids are taken as they are".into()))
        }
        (_, _, Some(ids)) => Ok(Input::Tokens(ids.clone())),
        _ => Err(Failure::Usage("give --prompt, --prompt-file or --token-ids".into())),
    }
}

/// Reads a request's events until it ends, with a progress bar while the prompt is read; once `stop`
/// says so, it is given up. Returns the whole completion and the time to its first token.
pub fn follow(
    engine: &Engine,
    handle: &RequestHandle,
    prompt_tokens: usize,
    stop: &dyn Fn() -> bool,
    seen: &mut dyn FnMut(&Event) -> std::io::Result<()>,
) -> Outcome<(Completion, Duration)> {
    let start = Instant::now();
    let bar = open::bar("reading the prompt", prompt_tokens);
    let rows = || engine.metrics().prefill_rows.get();
    let before = rows();
    let mut first = None;
    let mut completion = Completion::default();
    loop {
        if stop() {
            handle.abort();
        }
        let Some(event) = handle.recv_timeout(Duration::from_millis(100)) else {
            if handle.is_done() {
                break;
            }
            if first.is_none() {
                bar.set_position(rows().saturating_sub(before).min(prompt_tokens as u64));
            }
            continue;
        };
        if matches!(event, Event::Tokens { .. }) && first.is_none() {
            first = Some(start.elapsed());
            bar.finish_and_clear();
        }
        seen(&event)?;
        if completion.push(event).map_err(named::request)? {
            break;
        }
    }
    bar.finish_and_clear();
    Ok((completion, first.unwrap_or_else(|| start.elapsed())))
}

/// Writes text as it comes; thinking is dimmed on a terminal.
pub struct Printer {
    on: bool,
    colour: bool,
    in_thinking: bool,
    fresh: bool,
}

impl Printer {
    /// Prints, or keeps silent.
    pub fn new(on: bool) -> Self {
        let colour = std::io::stdout().is_terminal();
        Self { on, colour, in_thinking: false, fresh: true }
    }

    /// Part of the thinking.
    pub fn thinking(&mut self, text: &str) -> std::io::Result<()> {
        if self.on && !self.in_thinking && !text.is_empty() {
            self.in_thinking = true;
            if self.colour {
                write!(std::io::stdout(), "\x1b[2m")?;
            }
        }
        self.write(text)
    }

    /// Part of the answer.
    pub fn answer(&mut self, text: &str) -> std::io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.leave_thinking()?;
        self.write(text)
    }

    /// The end of the turn.
    pub fn end(&mut self) -> std::io::Result<()> {
        self.leave_thinking()?;
        let mut out = std::io::stdout();
        if self.on && !self.fresh {
            writeln!(out)?;
        }
        self.fresh = true;
        out.flush()
    }

    fn leave_thinking(&mut self) -> std::io::Result<()> {
        if !std::mem::take(&mut self.in_thinking) {
            return Ok(());
        }
        let end = if self.colour { "\x1b[0m\n\n" } else { "\n\n" };
        std::io::stdout().write_all(end.as_bytes())
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        if !self.on || text.is_empty() {
            return Ok(());
        }
        self.fresh = text.ends_with('\n');
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}
