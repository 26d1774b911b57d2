//! Random requests, aborts and pools that are too small, for a while: every token must be the one
//! that the request gives alone, and nothing may be left at the end.
//!
//! ```text
//! cargo bench -p deepinfer --bench soak -- [SECONDS, default 600]
//! ```
//! A short form of it is a test (`tests/workload.rs`).

#[path = "../tests/load/mod.rs"]
mod load;
#[path = "../tests/random/mod.rs"]
mod random;
#[path = "../tests/serve/mod.rs"]
mod serve;

use load::{Served, check_empty, soak_configs};
use random::Random;
use serve::{alone, engine, requests, small};
use std::time::{Duration, Instant};

/// Rounds, each with an engine of its own.
const ROUNDS: usize = 12;

fn main() {
    let argument = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let seconds: u64 = argument.unwrap_or(600);
    let requests = requests(11, 60, 220);
    let expected = alone(&requests, &small());
    let folder = tempfile::tempdir().expect("a directory");
    let configs = soak_configs(&small(), folder.path());
    let mut random = Random(seconds);
    let (mut all, mut first_memory) = (Served::default(), None);
    for round in 0..ROUNDS {
        let (config, name) = &configs[round % configs.len()];
        let engine = engine(config);
        let end = Instant::now() + Duration::from_secs_f64(seconds as f64 / ROUNDS as f64);
        let served = load::serve(&engine, &requests, &expected, 24, &mut random, name, |random| {
            (Instant::now() < end).then(|| random.below(requests.len()))
        });
        check_empty(&engine, name);
        let metrics = engine.metrics();
        println!(
            "{name}: {} requests right, {} left early, {} swapped out, {} computed again, {} of {} \
             prompt tokens cached",
            served.right,
            served.left,
            metrics.swapped.get(),
            metrics.recomputed.get(),
            metrics.cached_tokens.get(),
            metrics.prompt_tokens.get(),
        );
        (all.right, all.left) = (all.right + served.right, all.left + served.left);
        drop(engine);
        // After each kind of engine has been there once.
        if round + 1 == configs.len() {
            first_memory = resident_kb();
        }
    }
    let memory = first_memory.zip(resident_kb());
    println!("{seconds} s: {} requests right, {} left early", all.right, all.left);
    if let Some((before, after)) = memory {
        println!("resident memory: {before} kB after three rounds, {after} kB at the end");
        assert!(after < before + before / 4 + (32 << 10), "memory grows");
    }
}

/// Memory of this process, where the system says.
fn resident_kb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
