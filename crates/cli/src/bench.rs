//! `deepinfer bench`: the model's speed, against the machine's in the same minutes.

mod bytes;
mod layer;
mod limits;
mod memory;
mod ops;
mod plot;
mod report;

pub use layer::Slice;

use crate::args::{Bench, BenchCommand};
use crate::failure::{Failure, Outcome};
use crate::{open, text};
use bytes::{Counting, Work};
use deepinfer::model::NoProbe;
use deepinfer::plan::StepPlan;
use deepinfer::session::Session;
use deepinfer_device::bench::median;
use deepinfer_device::cpu::Read;
use deepinfer_device::{Cpu, DeviceChoice, DeviceError};
use limits::{Gemm, Weights};
use memory::PeakPrivate;
use serde::Serialize;
use std::time::Instant;

/// What was measured: medians over interleaved pairs.
#[derive(Serialize)]
struct Report {
    threads: usize,
    instruction_set: String,
    prompt_tokens: usize,
    new_tokens: usize,
    batch: usize,
    prefill_tokens_per_s: f64,
    prefill_gflop_per_s: f64,
    gemm_gflop_per_s: f64,
    prefill_share_of_gemm: f64,
    decode_tokens_per_s: f64,
    decode_bytes_per_token: f64,
    decode_gb_per_s: f64,
    memory_read_gb_per_s: f64,
    decode_share_of_memory_read: f64,
    decode_gflop_per_s: f64,
    decode_share_of_gemm: f64,
    fp8_gb_per_s: f64,
    fp8_share_of_memory_read: f64,
    fp4_gb_per_s: f64,
    fp4_share_of_memory_read: f64,
    one_token_private_mb: f64,
    peak_private_mb: f64,
}

/// Rows of one prefill step.
const CHUNK: usize = 512;
/// Prefill is measured at most this often: it is slow and steady.
const PREFILLS: usize = 3;

/// Measures what the command line asks for, and prints.
pub fn run(args: &Bench) -> Outcome {
    match &args.what {
        None => model(args),
        Some(BenchCommand::Ops(args)) => ops::run(args),
        Some(BenchCommand::Plot(args)) => plot::run(args),
        Some(BenchCommand::Layer(args)) => layer::run(args),
    }
}

/// The whole model.
fn model(args: &Bench) -> Outcome {
    for (name, value) in [
        ("prompt-tokens", args.prompt_tokens),
        ("new-tokens", args.new_tokens),
        ("batch", args.batch),
        ("repeats", args.repeats),
    ] {
        if value == 0 {
            return Err(Failure::Usage(format!("--{name} must be at least 1")));
        }
    }
    if let DeviceChoice::Cuda(_) = DeviceChoice::Auto.resolve() {
        tell!("bench measures the CPU; the GPU of this machine is left alone");
    }
    let peak = PeakPrivate::start();
    let loaded = open::model(&args.model, args.threads)?;
    let text = &loaded.model.config.text_config;
    let tokens = args.prompt_tokens.saturating_add(args.new_tokens).saturating_add(1);
    if tokens > text.max_position_embeddings {
        return Err(Failure::Usage(format!(
            "--prompt-tokens {} and --new-tokens {} exceed the model's {} positions",
            args.prompt_tokens, args.new_tokens, text.max_position_embeddings
        )));
    }
    let (device, model) = (loaded.device.clone(), loaded.model.clone());
    one_token(&loaded, args)?;
    let one_token_private_mb = peak.megabytes();

    let rows = args.prompt_tokens.min(CHUNK);
    let mut session =
        Session::new(device.clone(), model, args.kv.into(), args.batch, tokens, rows)?;
    let checkpoint = open::checkpoint(&args.model)?;
    let work = Work::new(&checkpoint);
    let bar = open::bar("measuring", PREFILLS.min(args.repeats) + args.repeats);

    let mut gemm = Gemm::new(&device);
    let mut prefill = Pairs::default();
    for _ in 0..PREFILLS.min(args.repeats) {
        let limit = gemm.gflop_per_s();
        let seconds = read_prompt(&mut session, 0, args.prompt_tokens)?;
        let flops = work.flops(args.prompt_tokens, 1);
        prefill.push(flops / seconds / 1e9, limit);
        bar.inc(1);
    }
    for slot in 1..args.batch {
        read_prompt(&mut session, slot, args.prompt_tokens)?;
    }

    let mut weights = Weights::new(&checkpoint, &device)?;
    let peak_before_limits = peak.megabytes();
    let read = Read::new(&device);
    let (mut decode, mut fp8, mut fp4) = (Pairs::default(), Pairs::default(), Pairs::default());
    let (mut step_bytes, mut step_seconds) = (Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        let limit = read.gb_per_s(&device);
        let (seconds, bytes) = decode_tokens(&mut session, args, &work)?;
        decode.push(bytes / seconds / 1e9, limit);
        step_seconds.push(seconds);
        step_bytes.push(bytes);
        let limit = read.gb_per_s(&device);
        fp8.push(weights.fp8_gb_per_s()?, limit);
        let limit = read.gb_per_s(&device);
        fp4.push(weights.fp4_gb_per_s()?, limit);
        bar.inc(1);
    }
    bar.finish_and_clear();

    let produced = (args.batch * args.new_tokens) as f64;
    let seconds = median(&mut step_seconds);
    let decode_flops = work.flops(args.batch * args.new_tokens, args.batch * args.new_tokens);
    let gemm_gflop_per_s = median(&mut prefill.limits);
    let report = Report {
        threads: device.threads(),
        instruction_set: format!("{:?}", device.isa()).to_lowercase(),
        prompt_tokens: args.prompt_tokens,
        new_tokens: args.new_tokens,
        batch: args.batch,
        prefill_tokens_per_s: median(&mut prefill.values) * 1e9
            / (work.flops(args.prompt_tokens, 1) / args.prompt_tokens as f64),
        prefill_gflop_per_s: median(&mut prefill.values),
        gemm_gflop_per_s,
        prefill_share_of_gemm: prefill.share(),
        decode_tokens_per_s: produced / seconds,
        decode_bytes_per_token: median(&mut step_bytes) / produced,
        decode_gb_per_s: median(&mut decode.values),
        memory_read_gb_per_s: median(&mut decode.limits),
        decode_share_of_memory_read: decode.share(),
        decode_gflop_per_s: decode_flops / seconds / 1e9,
        decode_share_of_gemm: decode_flops / seconds / 1e9 / gemm_gflop_per_s,
        fp8_gb_per_s: median(&mut fp8.values),
        fp8_share_of_memory_read: fp8.share(),
        fp4_gb_per_s: median(&mut fp4.values),
        fp4_share_of_memory_read: fp4.share(),
        one_token_private_mb,
        peak_private_mb: peak_before_limits,
    };
    if args.json {
        text::json(&report)?
    } else {
        print(&report)?
    }
    Ok(())
}

/// A value and the machine's limit, measured one after the other.
#[derive(Default)]
struct Pairs {
    values: Vec<f64>,
    limits: Vec<f64>,
}

impl Pairs {
    fn push(&mut self, value: f64, limit: f64) {
        self.values.push(value);
        self.limits.push(limit);
    }

    /// Median of value over limit, pair by pair: the machine's speed changes between pairs.
    fn share(&self) -> f64 {
        let mut shares: Vec<f64> =
            self.values.iter().zip(&self.limits).map(|(v, l)| v / l).collect();
        median(&mut shares)
    }
}

/// Any tokens will do.
fn token(session: &Session<Cpu>, slot: usize, position: usize) -> u32 {
    let vocab = session.model.config.text_config.vocab_size as u64;
    let mixed = ((slot as u64) << 32 | position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 20) % vocab) as u32
}

/// What opening a checkpoint and generating one token takes, with room for little more.
fn one_token(loaded: &open::Loaded<Cpu>, args: &Bench) -> Outcome {
    let (device, model) = (loaded.device.clone(), loaded.model.clone());
    let mut session = Session::new(device, model, args.kv.into(), 1, 128, 1)?;
    let first = token(&session, 0, 0);
    let plan = StepPlan { sequences: vec![session.extend(0, &[first], &[0])] };
    session.run(&plan, &mut NoProbe)?;
    Ok(())
}

/// Reads a prompt from its beginning; the last row's logits are computed. Returns seconds.
fn read_prompt(session: &mut Session<Cpu>, slot: usize, tokens: usize) -> Outcome<f64> {
    session.truncate(slot, 0);
    let prompt: Vec<u32> = (0..tokens).map(|p| token(session, slot, p)).collect();
    on_pool(session, |session| {
        let mut done = 0;
        for chunk in prompt.chunks(CHUNK) {
            done += chunk.len();
            let outputs = if done == tokens { vec![chunk.len() as u32 - 1] } else { Vec::new() };
            let plan = StepPlan { sequences: vec![session.extend(slot, chunk, &outputs)] };
            session.run(&plan, &mut NoProbe)?;
        }
        Ok(())
    })
}

/// Decodes `new_tokens` steps in every slot after the prompt. Returns seconds and the bytes of
/// weights read.
fn decode_tokens(session: &mut Session<Cpu>, args: &Bench, work: &Work) -> Outcome<(f64, f64)> {
    for slot in 0..args.batch {
        // What follows the prompt is written again: the next steps overwrite it.
        session.truncate(slot, args.prompt_tokens);
    }
    let experts_per_row = session.model.config.text_config.num_experts_per_tok;
    let mut counting = Counting { experts_per_row, experts: 0 };
    let (first, steps, batch) = (args.prompt_tokens, args.new_tokens, args.batch);
    let seconds = on_pool(session, |session| {
        for step in 0..steps {
            let sequences = (0..batch)
                .map(|slot| {
                    let next = token(session, slot, first + step);
                    session.extend(slot, &[next], &[0])
                })
                .collect();
            session.run(&StepPlan { sequences }, &mut counting)?;
        }
        Ok(())
    })?;
    let bytes = work.bytes(args.new_tokens, args.batch, counting.experts);
    Ok((seconds, bytes))
}

/// Runs steps on a thread of the pool, where operations follow each other without waking anybody.
/// Returns seconds.
fn on_pool(
    session: &mut Session<Cpu>,
    run: impl FnOnce(&mut Session<Cpu>) -> Result<(), DeviceError> + Send,
) -> Outcome<f64> {
    let device = session.device.clone();
    let seconds = device.pool().install(|| {
        let start = Instant::now();
        run(session)?;
        Ok::<f64, DeviceError>(start.elapsed().as_secs_f64())
    })?;
    Ok(seconds)
}

fn print(r: &Report) -> std::io::Result<()> {
    let percent = |x: f64| format!("{:.1}% of it", 100.0 * x);
    let head = |s: &str| vec![s.to_owned(), String::new(), String::new()];
    let line = |name: &str, value: f64, unit: &str, share: Option<f64>| {
        let value = format!("{value:.1} {unit}");
        vec![format!("  {name}"), value, share.map(percent).unwrap_or_default()]
    };
    text::table(&[
        head(&format!("{} threads, {}", r.threads, r.instruction_set)),
        head(&format!("prefill of {} tokens", r.prompt_tokens)),
        line("tokens", r.prefill_tokens_per_s, "/s", None),
        line("limit: gemm crate, f32", r.gemm_gflop_per_s, "GFLOP/s", None),
        line("multiply-adds", r.prefill_gflop_per_s, "GFLOP/s", Some(r.prefill_share_of_gemm)),
        head(&format!("decode, {} tokens in each of {} sequences", r.new_tokens, r.batch)),
        line("tokens", r.decode_tokens_per_s, "/s", None),
        line("weights read a token", r.decode_bytes_per_token / 1e6, "MB", None),
        line("limit: memory read", r.memory_read_gb_per_s, "GB/s", None),
        line("whole decode", r.decode_gb_per_s, "GB/s", Some(r.decode_share_of_memory_read)),
        line("fp8 parts alone", r.fp8_gb_per_s, "GB/s", Some(r.fp8_share_of_memory_read)),
        line("fp4 parts alone", r.fp4_gb_per_s, "GB/s", Some(r.fp4_share_of_memory_read)),
        head("private memory"),
        line("opening, one token", r.one_token_private_mb, "MB", None),
        line("at most", r.peak_private_mb, "MB", None),
    ])
}
