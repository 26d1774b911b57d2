//! `deepinfer selftest`.

use crate::args::Selftest;
use crate::failure::{Failure, Outcome};
use crate::open;
use deepinfer_device::selftest::{self, Case, Options};
use deepinfer_device::{Cpu, Device, DeviceChoice};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Serialize)]
struct Report {
    device: String,
    seed: u64,
    passed: usize,
    failed: usize,
    cases: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    operation: &'static str,
    shape: String,
    rows: usize,
    relative_rms_error: Option<f64>,
    relative_bias: Option<f64>,
    failure: Option<String>,
    seconds: f64,
}

pub fn run(args: &Selftest) -> Outcome {
    match args.device.resolve() {
        DeviceChoice::Cuda(ordinal) => {
            let cuda = open::gpu(ordinal)?;
            let (name, seconds) = (&cuda.info().name, cuda.load_seconds());
            let name = format!("cuda:{ordinal}, {name}, kernels loaded in {seconds:.2} s");
            test(&cuda, name, args)
        }
        DeviceChoice::Cpu | DeviceChoice::Auto => {
            let cpu = Cpu::new(args.threads.map(NonZeroUsize::get))?;
            let name = format!("cpu, {:?}, {} threads", cpu.isa(), cpu.threads());
            test(&cpu, name, args)
        }
    }
}

fn test<D: Device>(device: &D, name: String, args: &Selftest) -> Outcome {
    let seed = args.seed.unwrap_or_else(fresh_seed);
    let mut out = std::io::stdout().lock();
    let mut written = Ok(());
    if !args.json {
        writeln!(out, "{name}; seed {seed}")?;
        writeln!(out, "{}", line("operation", "shape", "rows", "rms error", "bias", "s", ""))?;
    }
    let options = Options { quick: args.quick, seed };
    let cases = selftest::run(device, options, &mut |case| {
        if !args.json && written.is_ok() {
            written = writeln!(out, "{}", describe(case)).and_then(|()| out.flush());
        }
    })?;
    written?;
    let failed = cases.iter().filter(|case| case.failure.is_some()).count();
    let passed = cases.len() - failed;
    if args.json {
        let cases = cases.into_iter().map(Line::from).collect();
        let report = Report { device: name, seed, passed, failed, cases };
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        writeln!(out, "{passed} cases passed, {failed} failed")?;
    }
    if failed > 0 { Err(Failure::Check) } else { Ok(()) }
}

/// Fresh inputs at every run; the seed repeats them.
fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |t| t.as_nanos() as u64)
}

/// The short form on a GPU that is about to serve. A CPU needs none: what it runs is what the tests
/// of this program ran.
pub fn before_serving(choice: DeviceChoice) -> Outcome {
    let DeviceChoice::Cuda(ordinal) = choice.resolve() else { return Ok(()) };
    let cuda = open::gpu(ordinal)?;
    tracing::info!(ordinal, seconds = cuda.load_seconds(), "kernels loaded");
    let options = Options { quick: true, seed: fresh_seed() };
    let bar = open::bar("testing the GPU", 0);
    let cases = selftest::run(&cuda, options, &mut |_| bar.inc(1));
    bar.finish_and_clear();
    let cases = cases?;
    let failed: Vec<&Case> = cases.iter().filter(|case| case.failure.is_some()).collect();
    for case in &failed {
        tell!("{}", describe(case));
    }
    if !failed.is_empty() {
        let (failed, all) = (failed.len(), cases.len());
        return Err(anyhow::anyhow!(
            "{failed} of {all} cases of the self-test fail on cuda:{ordinal}: nothing is served with \
             it; `deepinfer selftest --device cuda:{ordinal} --quick` shows more"
        )
        .into());
    }
    tracing::info!(ordinal, cases = cases.len(), "the GPU has passed its self-test");
    Ok(())
}

impl From<Case> for Line {
    fn from(case: Case) -> Self {
        Self {
            operation: case.operation,
            shape: case.shape,
            rows: case.rows,
            relative_rms_error: case.errors.map(|e| e.rms),
            relative_bias: case.errors.map(|e| e.bias),
            failure: case.failure,
            seconds: case.seconds,
        }
    }
}

fn line(
    operation: &str,
    shape: &str,
    rows: &str,
    rms: &str,
    bias: &str,
    seconds: &str,
    verdict: &str,
) -> String {
    let line =
        format!("{operation:<32} {shape:<48} {rows:>5} {rms:>9} {bias:>9} {seconds:>6}  {verdict}");
    line.trim_end().to_owned()
}

fn describe(case: &Case) -> String {
    let (rms, bias) = match case.errors {
        Some(errors) => (format!("{:.1e}", errors.rms), format!("{:.1e}", errors.bias)),
        None => ("equal".to_owned(), String::new()),
    };
    let (rows, seconds) = (case.rows.to_string(), format!("{:.2}", case.seconds));
    let verdict = case.failure.as_ref().map_or("ok".to_owned(), |f| format!("FAILED: {f}"));
    let rms = if case.failure.is_some() && case.errors.is_none() { String::new() } else { rms };
    line(case.operation, &case.shape, &rows, &rms, &bias, &seconds, &verdict)
}
