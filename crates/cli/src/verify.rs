//! `deepinfer verify`.

use crate::args::{KvChoice, Verify};
use crate::failure::{Failure, Outcome};
use crate::open::{AnyLoaded, Loaded};
use crate::{open, text};
use anyhow::Context;
use deepinfer::verify::{Options, Reference, Variant, runs_free, verify};
use deepinfer_device::Device;
use std::io::Write;

/// Compares a model with a reference.
pub fn run(args: &Verify) -> Outcome {
    let reference = Reference::open(&args.reference).context("cannot read the reference")?;
    match open::any_model(&args.model, args.device, args.threads)? {
        AnyLoaded::Cpu(loaded) => compare(args, &reference, &loaded),
        AnyLoaded::Cuda(loaded) => compare(args, &reference, &loaded),
    }
}

fn compare<D: Device>(args: &Verify, reference: &Reference, loaded: &Loaded<D>) -> Outcome {
    if !args.forced && !runs_free(&*loaded.device) {
        return Err(Failure::Usage(
            "this device computes with bf16 activations, whose roundings add up over layers: \
             compare with --forced, or on --device cpu"
                .into(),
        ));
    }
    let variants = match args.kv {
        KvChoice::Released => vec![Variant::Quantized],
        KvChoice::Exact => vec![Variant::F32],
        KvChoice::Both => vec![Variant::F32, Variant::Quantized],
    };
    let options = Options { variants, forced: args.forced };
    let bar = open::bar("verifying", 0);
    let mut progress = |done: usize, all: usize, what: &str| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
    };
    let report = verify(&loaded.device, &loaded.model, reference, &options, &mut progress)
        .context("cannot compare")?;
    bar.finish_and_clear();
    let failed = report.failed();
    if args.json {
        text::json(&serde_json::json!({
            "reference": reference.path(),
            "passed": !failed,
            "checks": report.checks,
        }))?;
    } else {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{report}")?;
        writeln!(out, "{}", if failed { "FAILED" } else { "passed" })?;
    }
    if failed { Err(Failure::Check) } else { Ok(()) }
}
