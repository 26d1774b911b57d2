//! Random requests that come and go: every token must be the one that the request gives alone, and
//! nothing may be left at the end. Used with the modules `random` and `serve` beside it.
#![allow(dead_code)]

use super::random::Random;
use super::serve::{random_tokens, requests};
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::request::{Completion, Request, RequestHandle};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time without any event before an engine counts as stalled.
const STALLED: Duration = Duration::from_secs(120);

/// Random requests; prompt lengths from 1 to `longest`, short ones more often, and some outputs that
/// need pages of their own.
pub fn workload(seed: u64, count: usize, longest: usize) -> Vec<Request> {
    let mut random = Random(seed);
    let mut requests = requests(seed, count, 200);
    let shared = random_tokens(seed, longest);
    for (i, request) in requests.iter_mut().enumerate() {
        let part = random.below(1 << 16) as f64 / f64::from(1 << 16);
        let len = (longest as f64).powf(part).round() as usize;
        let common = if random.below(3) == 0 { 0 } else { random.below(len + 1) };
        let own = random_tokens(seed + 5000 + i as u64, len - common);
        let prompt = [&shared[..common], &own].concat();
        let mut params = request.params.clone();
        let most = match random.below(6) {
            0 => 150 + random.below(150),
            _ => 1 + random.below(40),
        };
        params.max_tokens = Some(most);
        params.min_tokens = params.min_tokens.min(most);
        *request = Request::tokens(prompt, params);
    }
    requests
}

/// What came of a number of requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Ended, with the right tokens.
    pub right: usize,
    /// Left early, with the right tokens so far.
    pub left: usize,
}

struct Running {
    pick: usize,
    handle: RequestHandle,
    completion: Completion,
    /// Tokens after which the caller leaves.
    patience: Option<usize>,
}

/// Sends what `next` names, while at most `at_once` requests run, until there is no more; callers
/// may leave. Compares with what the requests give alone.
pub fn serve(
    engine: &Engine,
    requests: &[Request],
    expected: &[Completion],
    at_once: usize,
    random: &mut Random,
    name: &str,
    mut next: impl FnMut(&mut Random) -> Option<usize>,
) -> Served {
    let mut served = Served::default();
    let mut running: Vec<Running> = Vec::new();
    let (mut more, mut last) = (true, Instant::now());
    while more || !running.is_empty() {
        // Sometimes a crowd, sometimes one after the other.
        while more && running.len() < 1 + random.below(at_once) {
            let Some(pick) = next(random) else {
                more = false;
                break;
            };
            let patience = (random.below(5) == 0).then(|| random.below(30));
            let handle = engine.submit(requests[pick].clone()).expect("the queue has room");
            running.push(Running { pick, handle, completion: Completion::default(), patience });
        }
        running.retain_mut(|r| {
            let whole = &expected[r.pick];
            while let Some(event) = r.handle.try_recv() {
                last = Instant::now();
                let (pick, found) = (r.pick, &mut r.completion);
                if found.push(event).expect("requests do not fail") {
                    assert_eq!(found.tokens, whole.tokens, "{name}: request {pick}");
                    assert_eq!(found.text, whole.text, "{name}: request {pick}");
                    assert_eq!(found.reason, whole.reason, "{name}: request {pick}");
                    served.right += 1;
                    return false;
                }
                if r.patience.is_some_and(|n| found.tokens.len() >= n) {
                    assert!(whole.tokens.starts_with(&found.tokens), "{name}: request {pick}");
                    served.left += 1;
                    return false;
                }
            }
            true
        });
        assert!(last.elapsed() < STALLED, "{name}: {} requests stand still", running.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    served
}

/// All of `requests` once, in random order.
pub fn serve_all(
    engine: &Engine,
    requests: &[Request],
    expected: &[Completion],
    at_once: usize,
    random: &mut Random,
    name: &str,
) -> Served {
    let mut left: Vec<usize> = (0..requests.len()).collect();
    let next = |random: &mut Random| match left.len() {
        0 => None,
        n => Some(left.swap_remove(random.below(n))),
    };
    serve(engine, requests, expected, at_once, random, name, next)
}

/// Waits until the engine has nothing to do, and checks that nothing is left.
pub fn check_empty(engine: &Engine, name: &str) {
    let mut held = engine.held().expect("the engine runs");
    let start = Instant::now();
    while held.sequences > 0 {
        assert!(start.elapsed() < STALLED, "{name}: {held:?} after all callers have gone");
        std::thread::sleep(Duration::from_millis(2));
        held = engine.held().expect("the engine runs");
    }
    engine.clear_prefix_cache();
    assert_eq!(engine.held(), Some(Default::default()), "{name}: nothing is left");
}

/// Engines whose pools are too small for what is asked of them.
pub fn soak_configs(small: &EngineConfig, folder: &Path) -> Vec<(EngineConfig, &'static str)> {
    let tight = EngineConfig { kv_tokens: 128 * 5, swap_bytes: 2 << 20, ..small.clone() };
    vec![
        (
            EngineConfig {
                draft: DraftMode::Fixed(3),
                prefix_cache: PrefixCache::Host,
                host_cache_bytes: 4 << 20,
                ..tight.clone()
            },
            "host tier, drafts, overlap",
        ),
        (
            EngineConfig {
                prefix_cache: PrefixCache::Disk(folder.to_owned()),
                host_cache_bytes: 200_000,
                disk_cache_bytes: 8 << 20,
                swap_bytes: 0,
                ..tight.clone()
            },
            "disk tier, recomputing",
        ),
        (
            EngineConfig {
                overlap: false,
                prefix_cache: PrefixCache::Device,
                device_snapshots: 2,
                draft: DraftMode::Off,
                ..tight
            },
            "few snapshots, no overlap",
        ),
    ]
}
