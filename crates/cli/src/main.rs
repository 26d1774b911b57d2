//! The `deepinfer` command.

mod args;
mod demo;
mod failure;
mod inspect;
mod man;
mod open;
mod sizes;
mod text;
mod verify;

use args::{Cli, Command};
use clap::Parser;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Completions { shell } => man::completions(shell),
        Command::Man { out } => man::pages(&out),
        _ => Err(Failure::Usage("not there yet".into())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
