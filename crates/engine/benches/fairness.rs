//! What a long prompt does to others, and they to it:
//!
//! ```text
//! cargo bench -p deepinfer --bench fairness -- MODEL_DIR [PROMPT_TOKENS, default 100000]
//! ```
//! Prints, for a prompt that is read beside two running requests: the time to the first token of
//! newcomers of 100 tokens; how much of their rate the running requests keep; and the prompt's time.
//! What these are compared with, the same tokens of the same requests alone and the same prompt
//! alone, is the mean of a measurement before and one after, and how far apart the two were is
//! printed: the speed of a machine drifts. So rates are also compared with the steps of the same
//! seconds that only decoded.

use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::metrics::{Histogram, Metrics};
use deepinfer::request::{Event, Request, RequestHandle, SamplingParams};
use std::time::{Duration, Instant};

/// Seconds over which rates are measured.
const WINDOW: f64 = 2.0;

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

/// Two requests that run, and what they have produced.
struct Runners {
    handles: [RequestHandle; 2],
    tokens: usize,
    start: Instant,
}

/// Steps so far, and their seconds.
#[derive(Clone, Copy)]
struct Steps {
    count: f64,
    seconds: f64,
}

impl Steps {
    fn of(histogram: &Histogram) -> Self {
        let count = histogram.counts().iter().sum::<u64>() as f64;
        Self { count, seconds: histogram.sum() }
    }

    fn since(self, earlier: Self) -> Self {
        Self { count: self.count - earlier.count, seconds: self.seconds - earlier.seconds }
    }
}

/// A moment of the running requests: seconds since their start, tokens so far; steps that only
/// decoded, and steps that read prompts.
#[derive(Clone, Copy)]
struct Moment {
    time: f64,
    tokens: f64,
    decode: Steps,
    prefill: Steps,
}

impl Moment {
    fn now(runners: &mut Runners, metrics: &Metrics) -> Self {
        let (decode, prefill) =
            (Steps::of(&metrics.decode_steps), Steps::of(&metrics.prefill_steps));
        let (time, tokens) = runners.now();
        Self { time, tokens, decode, prefill }
    }

    /// What part of their rate the running requests kept since `earlier`, if every step took as long
    /// as those that only decoded in the same time.
    fn share(&self, earlier: &Self) -> f64 {
        let decode = self.decode.since(earlier.decode);
        let steps = decode.count + self.prefill.since(earlier.prefill).count;
        steps * decode.seconds / decode.count / (self.time - earlier.time)
    }
}

impl Runners {
    /// Starts them and waits for their first tokens.
    fn start(engine: &Engine) -> Result<Self, Box<dyn std::error::Error>> {
        let handles = [engine.submit(request(50, 2, RUN))?, engine.submit(request(50, 3, RUN))?];
        let start = Instant::now();
        for handle in &handles {
            first_token(handle, start);
        }
        Ok(Self { handles, tokens: 2, start: Instant::now() })
    }

    /// Seconds since the start, and tokens so far.
    fn now(&mut self) -> (f64, f64) {
        self.tokens += self.handles.iter().map(count).sum::<usize>();
        (self.start.elapsed().as_secs_f64(), self.tokens as f64)
    }

    fn have_ended(&self) -> bool {
        self.handles.iter().any(RequestHandle::is_done)
    }
}

/// When undisturbed requests had produced so many tokens: contexts grow, and steps with them.
struct Undisturbed(Vec<(f64, f64)>);

impl Undisturbed {
    fn measure(engine: &Engine, seconds: f64) -> Result<Self, Box<dyn std::error::Error>> {
        let mut runners = Runners::start(engine)?;
        let mut times = vec![runners.now()];
        while times[times.len() - 1].0 < seconds {
            std::thread::sleep(Duration::from_millis(20));
            times.push(runners.now());
        }
        let rate = |part: &[(f64, f64)]| match part {
            [(t0, n0), .., (t1, n1)] => (n1 - n0) / (t1 - t0),
            _ => 0.0,
        };
        let part = times.len() / 10;
        let (first, last) = (rate(&times[..part]), rate(&times[times.len() - part..]));
        println!("decoding alone: {first:.0} tokens/s at first, {last:.0} after {seconds:.0} s");
        Ok(Self(times))
    }

    /// Seconds between two numbers of tokens.
    fn seconds(&self, from: f64, to: f64) -> Result<f64, &'static str> {
        let at = |tokens: f64| {
            let i = self.0.partition_point(|&(_, t)| t < tokens).max(1);
            let (before, after) = (self.0.get(i - 1)?, self.0.get(i)?);
            Some(before.0 + (after.0 - before.0) * (tokens - before.1) / (after.1 - before.1))
        };
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to - from),
            _ => Err("the running requests were faster beside the prompt than alone"),
        }
    }
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
    let read_alone = || -> Result<f64, Box<dyn std::error::Error>> {
        let start = Instant::now();
        Ok(first_token(&engine.submit(request(len, 1, 1))?, start))
    };
    let before = read_alone()?;

    // As many tokens as they will have produced when the prompt has been read beside them.
    let undisturbed = Undisturbed::measure(&engine, 1.5 * before)?;
    let mut runners = Runners::start(&engine)?;
    let metrics = engine.metrics();
    let first = Moment::now(&mut runners, metrics);
    let mut last = first;
    let start = Instant::now();
    let long = engine.submit(request(len, 4, 1))?;
    let reader = std::thread::spawn(move || first_token(&long, start));
    let (mut windows, mut newcomers) = (Vec::new(), Vec::new());
    loop {
        std::thread::sleep(Duration::from_secs_f64(WINDOW));
        let now = Moment::now(&mut runners, metrics);
        if reader.is_finished() {
            break;
        }
        windows.push((last, now));
        last = now;
        let arrival = Instant::now();
        let newcomer = engine.submit(request(100, 5 + newcomers.len() as u32, 4))?;
        newcomers.push(first_token(&newcomer, arrival));
    }
    let end = Moment::now(&mut runners, metrics);
    let beside = reader.join().map_err(|_| "the reader of the prompt's answer failed")?;
    if runners.have_ended() {
        return Err("the running requests ended before the prompt was read".into());
    }
    drop(runners);
    let after = read_alone()?;
    let undisturbed = [undisturbed, Undisturbed::measure(&engine, 1.5 * before)?];
    let alone = (before + after) / 2.0;
    println!("the prompt of {len} tokens alone: {before:.2} s before, {after:.2} s after");
    let worst = newcomers.iter().copied().fold(0.0, f64::max);
    println!(
        "newcomers of 100 tokens: {worst:.3} s at worst, {:.2}% of the prompt",
        100.0 * worst / alone
    );
    let (mut rates, mut steps, mut drift) = (Vec::new(), Vec::new(), 0.0f64);
    // A time without any step that only decodes has nothing to be compared with.
    windows.retain(|(from, to)| to.decode.count > from.decode.count);
    if windows.is_empty() {
        return Err("the prompt is too short to measure rates beside it".into());
    }
    for (from, to) in &windows {
        let [before, after] = &undisturbed;
        let before = before.seconds(from.tokens, to.tokens)?;
        let after = after.seconds(from.tokens, to.tokens)?;
        drift = drift.max((before / after - 1.0).abs());
        rates.push((before + after) / 2.0 / (to.time - from.time));
        steps.push(to.share(from));
    }
    // How fast the machine was beside the prompt, compared with before and after.
    let speed = rates.iter().sum::<f64>() / steps.iter().sum::<f64>();
    println!("running requests, over {} times of {WINDOW} s, keep of their rate", windows.len());
    for (name, mut shares) in [("alone", rates), ("in steps that only decode", steps)] {
        shares.sort_by(f64::total_cmp);
        let (worst, median) = (100.0 * shares[0], 100.0 * shares[shares.len() / 2]);
        println!("    {name}: {worst:.1}% at worst, {median:.1}% at the median");
    }
    println!("    alone, before and after: up to {:.0}% apart", 100.0 * drift);
    println!("beside the prompt, the machine was {speed:.2} times as fast as before and after");
    let (decode, prefill) = (end.decode.since(first.decode), end.prefill.since(first.prefill));
    let rows = prefill.seconds - prefill.count * decode.seconds / decode.count;
    println!(
        "the prompt beside them: {beside:.2} s, {:.2} times alone; {rows:.2} s for rows of prompts",
        beside / alone
    );
    for (name, steps) in [("only decoded", decode), ("read prompts", prefill)] {
        let Steps { count, seconds } = steps;
        println!("{count} steps that {name}: {seconds:.2} s, {:.2} ms each", 1e3 * seconds / count);
    }
    Ok(())
}
