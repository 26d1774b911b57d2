//! What a long prompt does to others, and they to it:
//!
//! ```text
//! cargo bench -p deepinfer --bench fairness -- MODEL_DIR [PROMPT_TOKENS, default 100000]
//! ```
//! Prints, for a prompt that is read beside two running requests: the time to the first token of
//! newcomers of 100 tokens; how much of their rate the running requests keep, compared with the
//! same tokens of the same requests alone; and the prompt's time. What it is compared with is the
//! mean of a measurement before and one after, since the speed of a machine drifts.

use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::metrics::Histogram;
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
    let steps = |histogram: &Histogram| (histogram.counts().iter().sum::<u64>(), histogram.sum());
    let counts = [steps(&metrics.decode_steps), steps(&metrics.prefill_steps)];
    let mut last = runners.now();
    let start = Instant::now();
    let long = engine.submit(request(len, 4, 1))?;
    let reader = std::thread::spawn(move || first_token(&long, start));
    let (mut windows, mut newcomers) = (Vec::new(), Vec::new());
    loop {
        std::thread::sleep(Duration::from_secs_f64(WINDOW));
        let now = runners.now();
        if reader.is_finished() {
            break;
        }
        windows.push((last, now));
        last = now;
        let arrival = Instant::now();
        let newcomer = engine.submit(request(100, 5 + newcomers.len() as u32, 4))?;
        newcomers.push(first_token(&newcomer, arrival));
    }
    let now = [steps(&metrics.decode_steps), steps(&metrics.prefill_steps)];
    let beside = reader.join().map_err(|_| "the reader of the prompt's answer failed")?;
    if windows.is_empty() {
        return Err("the prompt is too short to measure rates beside it".into());
    }
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
    let mut shares = Vec::new();
    for (from, to) in windows {
        let alone = undisturbed.iter().map(|u| u.seconds(from.1, to.1));
        let alone = alone.sum::<Result<f64, _>>()? / undisturbed.len() as f64;
        shares.push(100.0 * alone / (to.0 - from.0));
    }
    shares.sort_by(f64::total_cmp);
    println!(
        "running requests keep {:.1}% of their rate at worst, {:.1}% at the median, over {} times \
         of {WINDOW} s",
        shares[0],
        shares[shares.len() / 2],
        shares.len()
    );
    println!("the prompt beside them: {beside:.2} s, {:.2} times alone", beside / alone);
    for (name, before, after) in
        [("only decoded", counts[0], now[0]), ("read prompts", counts[1], now[1])]
    {
        let (count, seconds) = (after.0 - before.0, after.1 - before.1);
        println!(
            "{count} steps that {name}: {seconds:.2} s, {:.2} ms each",
            1e3 * seconds / count as f64
        );
    }
    Ok(())
}
