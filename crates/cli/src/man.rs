//! Completion scripts and man pages, made from the command line itself.

use crate::args::Cli;
use crate::failure::Outcome;
use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::Path;

/// Prints a completion script.
pub fn completions(shell: Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "deepinfer", &mut script);
    std::io::Write::write_all(&mut std::io::stdout(), &script)?;
    Ok(())
}

/// Writes `deepinfer.1` and a page for every command.
pub fn pages(out: &Path) -> Outcome {
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    clap_mangen::generate_to(Cli::command(), out)
        .with_context(|| format!("cannot write man pages to {}", out.display()))?;
    Ok(())
}
