//! What a long prompt does to others, and they to it:
//!
//! ```text
//! cargo bench -p deepinfer --bench fairness -- MODEL_DIR [PROMPT_TOKENS, default 100000]
//! ```
//! Prints the time of the prompt alone; then, while it is read beside two running requests, the
//! time to the first token of a newcomer of 100 tokens, the rate that the running requests keep,
//! and the prompt's own time.

use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::metrics::Histogram;
use deepinfer::request::{Event, Request, RequestHandle, SamplingParams};
use std::time::{Duration, Instant};

/// Tokens of the requests that run: enough for as long as the prompt takes.
const RUN: usize = 100_000;

fn request(len: usize, seed: u32, tokens: usize) -> Request {
    let prompt: Vec<u32> =
        (0..len as u32).map(|i| 3 + (i * 31 + i / 7 + seed * 97) % 400).collect();
    let params =
        SamplingParams { max_tokens: Some(tokens), ignore_eos: true, ..SamplingParams::greedy() };
    Request::tokens(prompt, params)
}

/// Seconds to the first token.
fn first_token(handle: &RequestHandle, start: Instant) -> f64 {
    while let Some(event) = handle.recv() {
        if matches!(event, Event::Tokens { .. }) {
            break;
        }
    }
    start.elapsed().as_secs_f64()
}

fn count(handle: &RequestHandle) -> usize {
    let mut tokens = 0;
    while let Some(event) = handle.try_recv() {
        if let Event::Tokens { tokens: new, .. } = event {
            tokens += new.len();
        }
    }
    tokens
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let Some(model) = arguments.next() else {
        println!("no MODEL_DIR given");
        return Ok(());
    };
    let len: usize = arguments.next().map_or(Ok(100_000), |n| n.parse())?;
    let config = EngineConfig {
        kv_tokens: len + 2 * RUN + 65_536,
        prefix_cache: PrefixCache::Off,
        draft: DraftMode::Off,
        ..EngineConfig::default()
    };
    let engine = Engine::open(Source::directory(model), &config, &mut |_, _| {})?;
    let start = Instant::now();
    let alone = first_token(&engine.submit(request(len, 1, 1))?, start);
    println!("the prompt of {len} tokens alone: {alone:.2} s");

    let runners = [engine.submit(request(50, 2, RUN))?, engine.submit(request(50, 3, RUN))?];
    let counted = std::cell::Cell::new(Instant::now());
    // Over the time since the last count, at least so long.
    let rate = |seconds: f64| {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let tokens: usize = runners.iter().map(count).sum();
        tokens as f64 / counted.replace(Instant::now()).elapsed().as_secs_f64()
    };
    rate(1.0);
    // Steps and their seconds.
    let steps = |histogram: &Histogram| (histogram.counts().iter().sum::<u64>(), histogram.sum());
    let start = steps(&engine.metrics().decode_steps);
    let quiet = rate(4.0);
    let end = steps(&engine.metrics().decode_steps);
    println!(
        "decoding alone: {quiet:.0} tokens/s, {:.2} ms a step",
        1e3 * (end.1 - start.1) / (end.0 - start.0) as f64
    );
    let start = Instant::now();
    counted.set(start);
    let metrics = engine.metrics();
    let before = [steps(&metrics.decode_steps), steps(&metrics.prefill_steps)];
    let long = engine.submit(request(len, 4, 1))?;
    let reader = std::thread::spawn(move || first_token(&long, start));
    let mut rates: Vec<f64> = Vec::new();
    let mut newcomers: Vec<f64> = Vec::new();
    loop {
        let speed = rate(2.0);
        if reader.is_finished() {
            break;
        }
        rates.push(speed);
        let arrival = Instant::now();
        let newcomer = engine.submit(request(100, 5 + newcomers.len() as u32, 4))?;
        newcomers.push(first_token(&newcomer, arrival));
    }
    let after = [steps(&metrics.decode_steps), steps(&metrics.prefill_steps)];
    let beside = reader.join().map_err(|_| "the reader of the prompt's answer failed")?;
    if rates.is_empty() {
        return Err("the prompt is too short to measure rates beside it".into());
    }
    if runners.iter().any(RequestHandle::is_done) {
        return Err("the running requests ended before the prompt was read".into());
    }
    let worst = newcomers.iter().copied().fold(0.0, f64::max);
    println!(
        "newcomers of 100 tokens: {worst:.3} s at worst, {:.2}% of the prompt",
        100.0 * worst / alone
    );
    // Contexts grow meanwhile, and steps with them: what would be without the prompt lies between
    // the rates before and after it.
    rate(1.0);
    let later = rate(4.0);
    let count = rates.len() as f64;
    let alone_then = |i: usize| quiet + (later - quiet) * (i as f64 + 0.5) / count;
    let mut shares: Vec<f64> =
        rates.iter().enumerate().map(|(i, rate)| 100.0 * rate / alone_then(i)).collect();
    shares.sort_by(f64::total_cmp);
    let (slowest, middle) = (shares[0], shares[shares.len() / 2]);
    println!(
        "running requests keep {slowest:.0}% of their rate ({quiet:.0} tokens/s before, {later:.0} \
         after) at worst, {middle:.0}% at the median, over {} times of 2 s or more",
        rates.len()
    );
    println!("the prompt beside them: {beside:.2} s, {:.2} times alone", beside / alone);
    for (name, before, after) in
        [("only decoded", before[0], after[0]), ("read prompts", before[1], after[1])]
    {
        let (count, seconds) = (after.0 - before.0, after.1 - before.1);
        println!(
            "{count} steps that {name}: {seconds:.2} s, {:.2} ms each",
            1e3 * seconds / count as f64
        );
    }
    Ok(())
}
