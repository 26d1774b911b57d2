//! Random requests, aborts and a pool that is too small, for a while: every token must be the one
//! that the request gives alone, and nothing may be left at the end.
//!
//! ```text
//! cargo bench -p deepinfer --bench soak -- [SECONDS, default 600]
//! ```
//! A short form of it is a test (`tests/engine.rs`).

#[path = "../tests/serve/mod.rs"]
mod serve;

use deepinfer::engine::{DraftMode, EngineConfig, PrefixCache};
use serve::{Random, alone, engine, requests, small};
use std::time::{Duration, Instant};

fn main() {
    let argument = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let seconds: u64 = argument.unwrap_or(600);
    let requests = requests(11, 60, 220);
    let expected = alone(&requests, &small());
    let config = EngineConfig {
        kv_tokens: 128 * 5,
        draft: DraftMode::Fixed(3),
        prefix_cache: PrefixCache::Host,
        host_cache_bytes: 4 << 20,
        swap_bytes: 2 << 20,
        ..small()
    };
    let engine = engine(&config);
    let mut random = Random(seconds);
    let start = Instant::now();
    let (mut running, mut checked, mut left) = (Vec::new(), 0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        while running.len() < 24 {
            let pick = random.below(requests.len());
            let patience = (random.below(3) == 0).then(|| random.below(20));
            let handle = engine.submit(requests[pick].clone()).expect("the queue has room");
            running.push((pick, handle, deepinfer::request::Completion::default(), patience));
        }
        running.retain_mut(|(pick, handle, completion, patience)| {
            while let Some(event) = handle.try_recv() {
                if completion.push(event).expect("requests do not fail") {
                    assert_eq!(completion.tokens, expected[*pick].tokens, "request {pick}");
                    checked += 1;
                    return false;
                }
                if patience.is_some_and(|n| completion.tokens.len() >= n) {
                    let whole = &expected[*pick].tokens;
                    assert!(whole.starts_with(&completion.tokens), "request {pick}");
                    left += 1;
                    return false;
                }
            }
            true
        });
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(running);
    let mut held = engine.held().expect("the engine runs");
    while held.sequences > 0 {
        std::thread::sleep(Duration::from_millis(5));
        held = engine.held().expect("the engine runs");
    }
    engine.clear_prefix_cache();
    assert_eq!(engine.held(), Some(Default::default()), "nothing is left");
    let metrics = engine.metrics();
    println!(
        "{seconds} s: {checked} requests right, {left} left early, {} swapped out, {} computed \
         again, {} of {} prompt tokens cached",
        metrics.swapped.get(),
        metrics.recomputed.get(),
        metrics.cached_tokens.get(),
        metrics.prompt_tokens.get(),
    );
}
