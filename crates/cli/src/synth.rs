//! `deepinfer synth`.

use crate::args::Synth;
use crate::failure::{Failure, Outcome};
use crate::{open, text};
use anyhow::Context;
use deepinfer::synth::{Options, SynthError, write};
use std::io::Write;

/// Writes a random checkpoint.
pub fn run(args: &Synth) -> Outcome {
    let usage = |option: &str, e: SynthError| Failure::option(option, &e.into());
    let options = Options {
        preset: args.preset.parse().map_err(|e| usage("--preset", e))?,
        seed: args.seed,
        engram_rows: args.engram_rows,
        positions: args.positions,
    };
    let bar = open::bar("writing", 0);
    let mut progress = |done: u64, all: u64| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let summary = match write(&args.out, &options, &mut progress) {
        Err(error @ SynthError::Layers { .. }) => return Err(usage("--preset", error)),
        Err(error @ SynthError::NotEmpty { .. }) => return Err(usage("--out", error)),
        Err(SynthError::Config(error)) => {
            let options = "--preset, --engram-rows and --positions make no model";
            return Err(Failure::Usage(format!("{options}: {error}")));
        }
        other => other.with_context(|| format!("cannot write {}", args.out.display()))?,
    };
    bar.finish_and_clear();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{}: {} tensors in {} files, {}",
        args.out.display(),
        text::count(summary.tensors as u64),
        summary.shards,
        text::bytes(summary.bytes)
    )?;
    Ok(())
}
