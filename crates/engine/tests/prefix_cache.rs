//! How much of repeated prompts comes from the prefix cache, and that it never changes a token.

mod random;
mod serve;

use deepinfer::engine::{EngineConfig, PrefillMode, PrefixCache};
use deepinfer::request::{Completion, Request, SamplingParams};
use random::Random;
use serve::{engine, random_tokens, small};
use std::path::Path;

/// Prompts of at least 256 tokens that together fit.
const LENGTHS: [usize; 6] = [256, 257, 300, 384, 511, 640];

fn requests() -> Vec<Request> {
    let request = |(i, &len): (usize, &usize)| {
        let params = SamplingParams {
            seed: Some(i as u64),
            max_tokens: Some(6),
            ignore_eos: true,
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        Request::tokens(random_tokens(40 + i as u64, len), params)
    };
    LENGTHS.iter().enumerate().map(request).collect()
}

/// Runs all requests on a new engine, `passes` times. Returns the results and the share of the last
/// pass's prompt tokens that came from the cache.
fn run(config: &EngineConfig, passes: usize) -> (Vec<Completion>, f64) {
    let engine = engine(config);
    let mut last = (Vec::new(), 0.0);
    for _ in 0..passes {
        let metrics = engine.metrics();
        let before = (metrics.cached_tokens.get(), metrics.prompt_tokens.get());
        let results = engine.generate(requests(), |_| {});
        let results: Vec<Completion> = results.into_iter().map(|r| r.expect("served")).collect();
        let cached = metrics.cached_tokens.get() - before.0;
        let prompts = metrics.prompt_tokens.get() - before.1;
        let sum: usize = results.iter().map(|r| r.usage.cached_tokens).sum();
        assert_eq!(sum as u64, cached, "requests are told what was cached");
        last = (results, cached as f64 / prompts as f64);
    }
    last
}

fn tokens(results: &[Completion]) -> Vec<&[deepinfer::request::Token]> {
    results.iter().map(|r| r.tokens.as_slice()).collect()
}

#[test]
fn a_second_pass_comes_from_the_cache() {
    let (cold, none) = run(&EngineConfig { prefix_cache: PrefixCache::Off, ..small() }, 1);
    assert_eq!(none, 0.0);
    for (prefix_cache, kv_tokens) in [
        (PrefixCache::Device, 8192),
        // The device holds one or two of them at a time.
        (PrefixCache::Host, 1280),
    ] {
        let name = format!("{prefix_cache:?}");
        let (warm, cached) = run(&EngineConfig { prefix_cache, kv_tokens, ..small() }, 2);
        assert!(cached >= 0.95, "{name}: {cached} of the second pass");
        assert_eq!(tokens(&warm), tokens(&cold), "{name}");
    }
}

#[test]
fn every_prefill_mode_finds_its_own_entries() {
    for (prefill, least) in [(PrefillMode::Off, 0.95), (PrefillMode::Compact, 0.9)] {
        let cold = EngineConfig { prefill, prefix_cache: PrefixCache::Off, ..small() };
        let (cold, _) = run(&cold, 1);
        let (warm, cached) = run(&EngineConfig { prefill, ..small() }, 2);
        assert!(cached >= least, "{prefill:?}: {cached} of the second pass");
        assert_eq!(tokens(&warm), tokens(&cold), "{prefill:?}");
    }
}

#[test]
fn the_third_visitor_of_a_shared_beginning_finds_it() {
    let config = EngineConfig { max_batch_tokens: 512, prefill_chunk: 512, ..small() };
    let (cached_engine, plain) = (
        engine(&config),
        engine(&EngineConfig { prefix_cache: PrefixCache::Off, ..config.clone() }),
    );
    let shared = random_tokens(1, 1500);
    let params = SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() };
    let mut cached = Vec::new();
    for visitor in 0..3 {
        let prompt = [shared.clone(), random_tokens(10 + visitor, 500)].concat();
        let request = Request::tokens(prompt, params.clone());
        let done = cached_engine.submit(request.clone()).expect("valid").wait().expect("served");
        let alone = plain.submit(request).expect("valid").wait().expect("served");
        assert_eq!(done.tokens, alone.tokens);
        cached.push(done.usage.cached_tokens);
    }
    assert_eq!(cached[0], 0);
    assert!((1408..=1500 + 6).contains(&cached[2]), "{cached:?}");
}

fn disk(folder: &Path) -> EngineConfig {
    EngineConfig {
        prefix_cache: PrefixCache::Disk(folder.to_owned()),
        // Host memory holds a few entries only.
        host_cache_bytes: 200_000,
        kv_tokens: 1280,
        ..small()
    }
}

#[test]
fn the_disk_tier_survives_a_restart() {
    let folder = tempfile::tempdir().expect("a directory");
    let (cold, _) = run(&disk(folder.path()), 1);
    let (warm, cached) = run(&disk(folder.path()), 1);
    assert_eq!(tokens(&warm), tokens(&cold));
    assert!(cached >= 0.9, "{cached} after a restart");
    // Entries of other settings are not even looked at.
    let other = EngineConfig { prefill: PrefillMode::Off, ..disk(folder.path()) };
    assert_eq!(run(&other, 1).1, 0.0);
}

#[test]
fn lost_and_damaged_entries_are_misses() {
    let folder = tempfile::tempdir().expect("a directory");
    let (cold, _) = run(&disk(folder.path()), 1);
    let mut random = Random(8);
    for round in 0..4 {
        let mut damaged = 0;
        for file in std::fs::read_dir(folder.path()).expect("is there").flatten() {
            let path = file.path();
            let bytes = std::fs::read(&path).expect("is there");
            match random.below(6) {
                0 => std::fs::remove_file(&path).expect("is there"),
                1 => std::fs::write(&path, &bytes[..random.below(bytes.len())]).expect("writes"),
                2 => {
                    let mut bytes = bytes;
                    let at = random.below(bytes.len());
                    bytes[at] ^= 1 << random.below(8);
                    std::fs::write(&path, bytes).expect("can be written");
                }
                _ => continue,
            }
            damaged += 1;
        }
        assert!(damaged > 0);
        let (again, cached) = run(&disk(folder.path()), 1);
        assert_eq!(tokens(&again), tokens(&cold), "round {round}");
        assert!(cached < 1.0);
    }
    // What is lost is written again once it has been missed.
    run(&disk(folder.path()), 1);
    let (_, cached) = run(&disk(folder.path()), 1);
    assert!(cached >= 0.9, "{cached} after all was mended");
}

/// While the engine runs, too: files vanish between the lookup and the reading.
#[test]
fn files_may_vanish_at_any_time() {
    let folder = tempfile::tempdir().expect("a directory");
    let (cold, _) = run(&disk(folder.path()), 1);
    let engine = engine(&disk(folder.path()));
    for file in std::fs::read_dir(folder.path()).expect("is there").flatten() {
        std::fs::remove_file(file.path()).expect("is there");
    }
    for pass in 0..2 {
        let results = engine.generate(requests(), |_| {});
        let results: Vec<Completion> = results.into_iter().map(|r| r.expect("served")).collect();
        assert_eq!(tokens(&results), tokens(&cold), "pass {pass}");
    }
    engine.clear_prefix_cache();
    assert_eq!(engine.held(), Some(Default::default()));
}

/// Many texts with one beginning go through a directory that holds a few of them: those are found
/// after a restart, as their beginning is still there.
#[test]
fn a_shared_beginning_outlives_its_tails_on_disk() {
    let request = |tail: u64| {
        let tokens = [random_tokens(1, 257), random_tokens(100 + tail, 12)].concat();
        let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
        Request::tokens(tokens, params)
    };
    let size = |folder: &Path| -> u64 {
        let files = std::fs::read_dir(folder).expect("is there").flatten();
        files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
    };
    let serve = |config: &EngineConfig, tails: std::ops::Range<u64>| -> Vec<usize> {
        let engine = engine(config);
        let cached = |tail| {
            let done = engine.generate(vec![request(tail)], |_| {}).remove(0);
            done.expect("served").usage.cached_tokens
        };
        tails.map(cached).collect()
    };
    let once = tempfile::tempdir().expect("a directory");
    serve(&disk(once.path()), 0..1);
    let folder = tempfile::tempdir().expect("a directory");
    let config = EngineConfig { disk_cache_bytes: 8 * size(once.path()), ..disk(folder.path()) };
    serve(&config, 0..50);
    assert!(size(folder.path()) <= config.disk_cache_bytes);
    assert!(size(folder.path()) > config.disk_cache_bytes / 2, "it was full");
    let cached = serve(&config, 45..50);
    assert!(cached.iter().all(|&cached| cached >= 256), "{cached:?}");
}
