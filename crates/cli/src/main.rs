//! The `deepinfer` command.

mod args;
mod batch;
mod bench;
mod chat;
mod conversation;
mod demo;
mod engine;
mod eval;
mod failure;
mod form;
mod generate;
mod inspect;
mod man;
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
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
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
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
