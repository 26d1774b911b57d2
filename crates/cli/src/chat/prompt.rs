//! What the user types: lines, blocks of lines, commands.

use super::history_file;
use crate::failure::Outcome;
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Context, Editor, Helper};
use std::io::IsTerminal;

const COMMANDS: [&str; 6] = ["/help", "/reset", "/effort", "/save", "/save!", "/quit"];
const QUOTES: &str = "\"\"\"";

/// Something typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// For the model.
    Text(String),
    /// `/name rest`.
    Command { name: String, rest: String },
}

/// Reads what the user types.
pub struct Prompt {
    editor: Editor<Rules, FileHistory>,
    terminal: bool,
}

impl Prompt {
    /// With the history of earlier talks.
    pub fn new() -> Outcome<Self> {
        let mut editor: Editor<Rules, FileHistory> = Editor::new()?;
        editor.set_helper(Some(Rules));
        if let Some(file) = history_file() {
            // A first talk has no history.
            let _ = editor.load_history(&file);
        }
        Ok(Self { editor, terminal: std::io::stdin().is_terminal() })
    }

    /// Whether somebody types.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// The next line that is not empty; `None` at the end.
    pub fn read(&mut self) -> Outcome<Option<Line>> {
        loop {
            let mark = if self.terminal { "> " } else { "" };
            match self.editor.readline(mark) {
                Ok(input) => {
                    if input.trim().is_empty() {
                        continue;
                    }
                    // Losing a line of history is no reason to stop.
                    let _ = self.editor.add_history_entry(input.as_str());
                    return Ok(Some(parse(&input)));
                }
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Keeps the history for the next talk.
    pub fn save(&mut self) {
        let Some(file) = history_file() else { return };
        let saved = file
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .map_err(ReadlineError::Io)
            .and_then(|()| self.editor.save_history(&file));
        if let Err(error) = saved {
            tell!("the history was not saved to {}: {error}", file.display());
        }
    }
}

fn parse(input: &str) -> Line {
    let trimmed = input.trim();
    if let Some(command) = trimmed.strip_prefix('/')
        && !trimmed.contains('\n')
    {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        return Line::Command { name: name.to_owned(), rest: rest.trim().to_owned() };
    }
    let block = trimmed.strip_prefix(QUOTES).and_then(|t| t.strip_suffix(QUOTES));
    Line::Text(match block {
        Some(block) => block.trim_matches('\n').to_owned(),
        None => trimmed.replace("\\\n", "\n"),
    })
}

/// How lines are edited: unfinished ones go on, commands are completed.
struct Rules;

impl Helper for Rules {}
impl Highlighter for Rules {}

impl Hinter for Rules {
    type Hint = String;
}

impl Validator for Rules {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_finished(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

fn is_finished(input: &str) -> bool {
    let in_block = input.trim_start().starts_with(QUOTES) && input.matches(QUOTES).count() < 2;
    !input.ends_with('\\') && !in_block
}

impl Completer for Rules {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = line.get(..at).unwrap_or_default();
        let fitting = COMMANDS.iter().filter(|c| typed.starts_with('/') && c.starts_with(typed));
        let pair = |c: &&str| Pair { display: (*c).to_owned(), replacement: format!("{c} ") };
        Ok((0, fitting.map(pair).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_text_are_told_apart() {
        let command =
            |name: &str, rest: &str| Line::Command { name: name.into(), rest: rest.into() };
        assert_eq!(parse("/save  a b.json "), command("save", "a b.json"));
        assert_eq!(parse("/quit"), command("quit", ""));
        assert_eq!(parse(" What is / ? "), Line::Text("What is / ?".into()));
        assert_eq!(parse("\"\"\"\n/a\nb\n\"\"\""), Line::Text("/a\nb".into()));
        assert_eq!(parse("one\\\ntwo"), Line::Text("one\ntwo".into()));
    }

    #[test]
    fn unfinished_input_goes_on() {
        assert!(is_finished("a line"));
        assert!(!is_finished("a line \\"));
        assert!(!is_finished("\"\"\"\nfirst"));
        assert!(is_finished("\"\"\"\nfirst\n\"\"\""));
    }
}
