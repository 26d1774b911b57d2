//! `deepinfer chat`: a talk in the terminal.

mod interrupt;
mod prompt;

use crate::args::Chat;
use crate::failure::Outcome;
use crate::generate::{Printer, follow};
use crate::speech::Speech;
use crate::{engine, named, open, speech};
use anyhow::{Context, bail};
use deepinfer::chat::{self, ChatError, ChatTemplate, Conversation, Effort, InputMessage};
use deepinfer::engine::{Engine, EngineConfig, PrefixCache};
use deepinfer::request::{Event, FinishReason, Request, RequestError, SamplingParams};
use interrupt::Interrupt;
use prompt::{Line, Prompt};
use serde::Serialize;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// What `/help` shows.
fn help() -> String {
    format!(
        "\
/help            this text
/reset           forget the conversation
/effort [E]      show or set how thoroughly to think:
                 {}
/save FILE       write the conversation as JSON, to a file that is not there yet
/save! FILE      the same, over what is there
/quit            leave (so does Ctrl-D)
Ctrl-C stops an answer.
A line that ends with \\ goes on in the next one. So does text between two lines of \"\"\".",
        Effort::EXPECTED
    )
}

/// Tokens that a talk may have.
const TALK_TOKENS: usize = 1 << 16;

/// One turn of the talk, as it is saved.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
}

struct Talk<'a> {
    args: &'a Chat,
    engine: &'a Engine,
    template: ChatTemplate<'a>,
    params: SamplingParams,
    effort: Effort,
    turns: Vec<Turn>,
    interrupt: Interrupt,
}

/// Talks until the input ends.
pub fn run(args: &Chat) -> Outcome {
    let effort = args.effort;
    let longest = open::checkpoint(&args.model)?.config().text_config.max_position_embeddings;
    let config = EngineConfig {
        prefix_cache: PrefixCache::Device,
        device_snapshots: 8,
        ..engine::single(&args.run, &args.draft, TALK_TOKENS.min(longest))?
    };
    let engine = engine::start(&args.model, &config, &named::CHAT)?;
    let tokenizer = engine::tokenizer(&engine)?;
    let template = ChatTemplate::new(tokenizer)?;
    let params = engine::sampling(&args.sampling, tokenizer, None)?;
    // What no turn could be answered with is refused at once; any prompt of text will do.
    let any = u32::from(engine.bounds().image_token == Some(0));
    params.check(&[any], engine.bounds()).map_err(named::request)?;
    let interrupt = Interrupt::new()?;
    let turns = Vec::new();
    let mut talk = Talk { args, engine: &engine, template, params, effort, turns, interrupt };
    talk.reset();
    let mut prompt = Prompt::new()?;
    if prompt.is_terminal() {
        writeln!(std::io::stdout(), "/help shows the commands")?;
    }
    while let Some(line) = prompt.read()? {
        match line {
            Line::Text(text) => talk.answer(&text)?,
            Line::Command { name, rest } => {
                if !talk.command(&name, &rest)? {
                    break;
                }
            }
        }
    }
    prompt.save();
    Ok(())
}

impl Talk<'_> {
    fn reset(&mut self) {
        self.turns.clear();
        let system = self.args.system.iter().cloned();
        self.turns.extend(system.map(|content| Turn {
            role: "system",
            content,
            reasoning_content: None,
        }));
    }

    /// Carries out a command. Returns whether the talk goes on.
    fn command(&mut self, name: &str, rest: &str) -> std::io::Result<bool> {
        let mut out = std::io::stdout();
        match (name, rest) {
            ("quit" | "exit", _) => return Ok(false),
            ("help", _) => writeln!(out, "{}", help())?,
            ("reset", _) => {
                self.reset();
                writeln!(out, "forgotten")?;
            }
            ("effort", "") => writeln!(out, "effort {}", self.effort)?,
            ("effort", text) => match text.parse::<Effort>() {
                Ok(effort) => {
                    self.effort = effort;
                    writeln!(out, "effort {effort}")?;
                }
                Err(error) => tell!("{error}"),
            },
            ("save" | "save!", "") => tell!("/{name} needs a file name"),
            ("save" | "save!", file) => match self.save(Path::new(file), name == "save!") {
                Ok(()) => writeln!(out, "saved to {file}")?,
                Err(error) => tell!("{error:#}"),
            },
            (other, _) => tell!("there is no /{other}; /help shows the commands"),
        }
        Ok(true)
    }

    /// Writes the talk to `file`. One that is there is left as it is, unless the talk goes `over` it.
    fn save(&self, file: &Path, over: bool) -> anyhow::Result<()> {
        let json = serde_json::to_string_pretty(&self.turns)? + "\n";
        let mut options = File::options();
        options.write(true);
        match over {
            true => options.create(true).truncate(true),
            false => options.create_new(true),
        };
        let name = file.display();
        let mut out = match options.open(file) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!("{name} exists; /save! {name} writes over it")
            }
            opened => opened.with_context(|| format!("cannot write {name}"))?,
        };
        out.write_all(json.as_bytes()).with_context(|| format!("cannot write {name}"))
    }

    /// Takes back a turn that cannot be answered.
    fn refuse(&mut self, error: &RequestError) {
        tell!("{error}; /reset starts again");
        self.turns.pop();
    }

    fn messages(&self) -> Vec<InputMessage> {
        let message = |turn: &Turn| match turn.role {
            "system" => chat::system(&turn.content),
            "user" => chat::user(&turn.content),
            _ => chat::assistant(&turn.content, turn.reasoning_content.clone()),
        };
        self.turns.iter().map(message).collect()
    }

    /// Adds the user's turn, streams the answer, and keeps it.
    fn answer(&mut self, text: &str) -> Outcome {
        let turn = Turn { role: "user", content: text.to_owned(), reasoning_content: None };
        self.turns.push(turn);
        let conversation = Conversation { messages: self.messages(), ..Default::default() };
        let options = chat::Options { effort: Some(self.effort) };
        let limit = self.engine.bounds().max_tokens;
        let prompt = match self.template.render_within(&conversation, &options, limit) {
            // The fault is this turn's: the talk goes on without it.
            Err(ChatError::TooLong(error)) => {
                self.refuse(&error);
                return Ok(());
            }
            rendered => rendered?,
        };
        let prompt_tokens = prompt.len();
        let tokenizer = engine::tokenizer(self.engine)?;
        let request = Request::tokens(prompt, self.params.clone());
        let handle = match self.engine.submit(request) {
            Ok(handle) => handle,
            Err(error) => {
                self.refuse(&error);
                return Ok(());
            }
        };
        let mut speech = Speech::new(tokenizer, self.effort.thinks());
        let mut printer = Printer::new(true);
        let answering = self.interrupt.answering();
        let stop = || answering.stopped();
        let (completion, _) = follow(self.engine, &handle, prompt_tokens, &stop, &mut |event| {
            let Event::Tokens { tokens, text } = event else { return Ok(()) };
            let piece = speech.push(tokens, text);
            printer.thinking(piece.thinking)?;
            printer.answer(piece.answer)
        })?;
        printer.end()?;
        if completion.reason == Some(FinishReason::Length) {
            tell!("(cut off: the sequence is full, or --max-tokens was reached)");
        }
        let thinks = self.effort.thinks();
        let (thinking, answer) =
            speech::split(tokenizer, thinks, &completion.ids(), &completion.text);
        let thinking = thinking.filter(|t| !t.is_empty());
        let content = answer.trim_start().to_owned();
        if completion.reason == Some(FinishReason::Aborted) {
            tell!("(stopped)");
            if content.is_empty() {
                // Nothing was said that the talk could go on from.
                self.turns.pop();
                return Ok(());
            }
        }
        self.turns.push(Turn { role: "assistant", content, reasoning_content: thinking });
        Ok(())
    }
}

/// Where the input history is kept.
fn history_file() -> Option<PathBuf> {
    Some(dirs::data_local_dir()?.join("deepinfer").join("chat_history"))
}
