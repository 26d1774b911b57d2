//! Requests beside each other give what they give alone.

mod serve;

use deepinfer::engine::{DraftMode, EngineConfig, PrefixCache};
use deepinfer::metrics::Metrics;
use deepinfer::request::{Completion, FinishReason, Request, SamplingParams};
use serve::{alone, engine, requests, small};
use std::sync::Arc;

/// Runs all requests twice at once and compares; returns the engine's figures.
fn check(
    config: &EngineConfig,
    requests: &[Request],
    expected: &[Completion],
    name: &str,
) -> Arc<Metrics> {
    let engine = engine(config);
    for pass in 0..2 {
        let found = engine.generate(requests.to_vec(), |_| {});
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let found = found.as_ref().expect("served");
            assert_eq!(found.ids(), expected.ids(), "{name}: request {i}, pass {pass}");
            assert_eq!(found.tokens, expected.tokens, "{name}: request {i}, pass {pass}");
            assert_eq!(found.text, expected.text, "{name}: request {i}, pass {pass}");
            assert_eq!(found.reason, expected.reason, "{name}: request {i}, pass {pass}");
        }
    }
    engine.clear_prefix_cache();
    let held = engine.held().expect("runs");
    assert_eq!(held, Default::default(), "{name}: nothing is left");
    let metrics = engine.metrics().clone();
    if config.prefix_cache != PrefixCache::Off {
        let cached = metrics.cached_tokens.get() as f64 / metrics.prompt_tokens.get() as f64;
        assert!(cached > 0.3, "{name}: {cached} from the cache");
    }
    metrics
}

#[test]
fn a_request_runs() {
    let params = SamplingParams { max_tokens: Some(8), ..SamplingParams::greedy() };
    let found = alone(&[Request::tokens([1, 2, 3], params)], &small());
    assert_eq!(found[0].tokens.len(), 8);
    assert_eq!(found[0].reason, Some(FinishReason::Length));
}

#[test]
fn batches_give_what_single_requests_give() {
    let requests = requests(1, 20, 160);
    let expected = alone(&requests, &small());
    let ways = [
        (32, 7, DraftMode::Off, true, PrefixCache::Off),
        (64, 64, DraftMode::Fixed(3), true, PrefixCache::Device),
        (200, 129, DraftMode::Fixed(5), false, PrefixCache::Device),
        (64, 33, DraftMode::Auto, true, PrefixCache::Host),
    ];
    for (rows, chunk, draft, overlap, prefix_cache) in ways {
        let name = format!("{rows} rows, {chunk}, {draft:?}, {overlap}, {prefix_cache:?}");
        let config = EngineConfig {
            max_batch_tokens: rows,
            prefill_chunk: chunk,
            draft,
            overlap,
            prefix_cache,
            ..small()
        };
        check(&config, &requests, &expected, &name);
    }
}

#[test]
fn small_pools_push_requests_out_and_change_nothing() {
    let requests = requests(2, 24, 200);
    let expected = alone(&requests, &small());
    for swap_bytes in [0, 16 << 20] {
        for overlap in [false, true] {
            let config = EngineConfig {
                kv_tokens: 128 * 4,
                swap_bytes,
                overlap,
                draft: DraftMode::Fixed(2),
                ..small()
            };
            let name = format!("swap {swap_bytes}, overlap {overlap}");
            let metrics = check(&config, &requests, &expected, &name);
            let counts = [metrics.recomputed.get(), metrics.swapped.get()];
            assert!(counts[usize::from(swap_bytes > 0)] > 0, "{name}: {counts:?}");
        }
    }
}
