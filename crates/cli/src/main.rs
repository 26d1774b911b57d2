//! The `deepinfer` command.

// `println!` and `eprintln!` panic where nobody reads, or where the disk is full.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// A line on standard error; whether anybody reads it changes nothing.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod args;
mod batch;
mod bench;
mod chat;
mod conversation;
mod demo;
mod engine;
mod eval;
mod failure;
mod files;
mod form;
mod generate;
mod inspect;
mod man;
mod named;
mod open;
mod plan;
mod selftest;
mod serve;
mod speech;
mod synth;
mod text;
mod verify;

use args::{Cli, Command};
use clap::Parser;
use failure::{Failure, Outcome};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => return show(&told),
    };
    // What is still in the buffer would be lost without a word.
    match run(cli.command).and_then(|()| Ok(std::io::stdout().flush()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Prints a help text, or what is wrong with the command line.
fn show(told: &clap::Error) -> ExitCode {
    match told.print().and_then(|()| std::io::stdout().flush()) {
        Err(error) if !told.use_stderr() => Failure::from(error).report(),
        _ => ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(1)),
    }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Batch(args) => batch::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Selftest(args) => selftest::run(&args),
        Command::Completions { shell } => man::completions(shell),
        Command::Man { out } => man::pages(&out),
    }
}
