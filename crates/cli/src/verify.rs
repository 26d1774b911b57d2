//! `deepinfer verify`.

use crate::args::{KvChoice, Verify};
use crate::failure::{Failure, Outcome};
use crate::open::{AnyLoaded, Loaded};
use crate::{open, text};
use anyhow::Context;
use deepinfer::verify::{
    Options, Progress, Reference, Report, Variant, VerifyError, verify, verify_rounding,
};
use deepinfer_device::{Cpu, Cuda};
use std::io::Write;

/// Compares a model with a reference.
pub fn run(args: &Verify) -> Outcome {
    let reference = Reference::open(&args.reference)
        .map_err(|error| Failure::option("--reference", &error.into()))?;
    match open::any_model(&args.model, args.device, args.threads)? {
        AnyLoaded::Cpu(loaded) => on_cpu(args, &reference, &loaded),
        AnyLoaded::Cuda(loaded) => on_gpu(args, &reference, &loaded),
    }
}

fn on_cpu(args: &Verify, reference: &Reference, loaded: &Loaded<Cpu>) -> Outcome {
    let options = Options { variants: variants(args.kv), forced: args.forced };
    let Loaded { device, model } = loaded;
    let report = with_bar(|progress| verify(device, model, reference, &options, progress))?;
    print(args, reference, &report)
}

fn on_gpu(args: &Verify, reference: &Reference, loaded: &Loaded<Cuda>) -> Outcome {
    if !args.forced {
        return Err(Failure::Usage(
            "this device computes with bf16 activations, whose roundings add up over layers: \
             compare with --forced, or on --device cpu"
                .into(),
        ));
    }
    let cpu = open::model(&args.model, args.threads)?;
    let (own, exact) = ((&loaded.device, &loaded.model), (&cpu.device, &cpu.model));
    let variants = variants(args.kv);
    let report = with_bar(|progress| verify_rounding(own, exact, reference, &variants, progress))?;
    print(args, reference, &report)
}

fn variants(kv: KvChoice) -> Vec<Variant> {
    match kv {
        KvChoice::Released => vec![Variant::Quantized],
        KvChoice::Exact => vec![Variant::F32],
        KvChoice::Both => vec![Variant::F32, Variant::Quantized],
    }
}

fn with_bar(
    run: impl FnOnce(Progress<'_>) -> Result<Report, VerifyError>,
) -> anyhow::Result<Report> {
    let bar = open::bar("verifying", 0);
    let report = run(&mut |done, all, what| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
    });
    bar.finish_and_clear();
    report.context("cannot compare")
}

fn print(args: &Verify, reference: &Reference, report: &Report) -> Outcome {
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
