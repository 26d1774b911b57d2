//! Requests beside each other give what they give alone.

mod random;
mod serve;

use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engine::{DraftMode, EngineConfig, PrefillMode, PrefixCache};
use deepinfer::metrics::Metrics;
use deepinfer::request::{Completion, FinishReason, Request, RequestError, SamplingParams};
use random::Random;
use serve::{alone, engine, random_tokens, requests, small, testdata};
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
    // In a small pool they push each other out.
    if config.prefix_cache != PrefixCache::Off && config.kv_tokens == small().kv_tokens {
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
fn a_step_beats_several_times_a_layer() {
    let engine = engine(&EngineConfig { draft: DraftMode::Off, ..small() });
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    let before = engine.pulse().beats();
    let found = engine.generate(vec![Request::tokens([1, 2, 3], params)], |_| {});
    assert_eq!(found[0].as_ref().expect("served").tokens.len(), 1);
    let checkpoint = Checkpoint::open(Source::directory(testdata("tiny-a"))).expect("it opens");
    let layers = checkpoint.config().text_config.num_hidden_layers as u64;
    let beats = engine.pulse().beats() - before;
    assert!(beats >= 4 * layers, "{beats} beats in {layers} layers");
}

#[test]
fn rules_that_allow_nothing_end_their_request_alone() {
    let fine = SamplingParams { max_tokens: Some(40), ..SamplingParams::greedy() };
    let fine = Request::tokens([1, 2, 3], fine);
    let expected = alone(std::slice::from_ref(&fine), &small());
    let nothing = SamplingParams {
        max_tokens: Some(9),
        allowed_tokens: vec![16],
        bad_words: vec![vec![16]],
        presence_penalty: 0.5,
        ..SamplingParams::greedy()
    };
    // Allowed once: the text is dead only after a token.
    let once = SamplingParams { bad_words: vec![vec![16, 16]], ..nothing.clone() };
    for (overlap, draft) in
        [(true, DraftMode::Off), (true, DraftMode::Fixed(5)), (false, DraftMode::Off)]
    {
        let engine = engine(&EngineConfig { overlap, draft, ..small() });
        let requests = [&nothing, &once].map(|p| Request::tokens([4, 5, 6], p.clone()));
        let [nothing, once] = requests;
        let found = engine.generate(vec![fine.clone(), nothing, once, fine.clone()], |_| {});
        for (request, position) in [(1, 0), (2, 1)] {
            let error = found[request].as_ref().expect_err("nothing is allowed");
            assert_eq!(*error, RequestError::NothingAllowed { position }, "{overlap} {draft:?}");
        }
        for request in [0, 3] {
            let found = found[request].as_ref().expect("served");
            assert_eq!(found.ids(), expected[0].ids(), "{overlap} {draft:?}");
        }
        engine.clear_prefix_cache();
        assert_eq!(engine.held().expect("still runs"), Default::default());
    }
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
    // Each grows from one page to three, and eight are there.
    let mut requests = watched(2, &[120; 6]);
    for request in &mut requests {
        request.params.max_tokens = Some(150);
        request.params.logprobs = None;
        request.params.frequency_penalty = 0.1;
    }
    let expected = alone(&requests, &small());
    for swap_bytes in [0, 16 << 20] {
        for overlap in [false, true] {
            let config = EngineConfig {
                kv_tokens: 128 * 8,
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

/// Random prompts whose every token's log-probabilities are reported.
fn watched(seed: u64, lengths: &[usize]) -> Vec<Request> {
    let params = |i: usize| SamplingParams {
        seed: Some(i as u64),
        max_tokens: Some(6),
        ignore_eos: true,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    let prompt = |i: usize, len: usize| random_tokens(seed + i as u64, len);
    lengths.iter().enumerate().map(|(i, &len)| Request::tokens(prompt(i, len), params(i))).collect()
}

#[test]
fn prefill_modes_agree_in_pairs() {
    let mut random = Random(5);
    let lengths: Vec<usize> = (0..30).map(|_| 1 + random.below(120)).collect();
    let requests = watched(70, &lengths);
    let with = |prefill, prefill_chunk, prefix_cache, keep_tokens| {
        let max_batch_tokens = 120;
        let config = EngineConfig {
            prefill,
            prefill_chunk,
            prefix_cache,
            keep_tokens,
            max_batch_tokens,
            ..small()
        };
        let engine = engine(&config);
        let run = || -> Vec<_> {
            let results = engine.generate(requests.clone(), |_| {});
            results.into_iter().map(|r| r.expect("served").tokens).collect()
        };
        let first = run();
        assert_eq!(first, run(), "{prefill:?}: the second pass");
        (first, engine.metrics().clone())
    };
    let (off, _) = with(PrefillMode::Off, 120, PrefixCache::Off, 24);
    for (chunk, cache) in [(1, PrefixCache::Off), (17, PrefixCache::Device)] {
        let (exact, metrics) = with(PrefillMode::Exact, chunk, cache, 24);
        assert_eq!(exact, off, "exact in chunks of {chunk}");
        assert!(
            metrics.decoder_rows.get() < metrics.prefill_rows.get() + metrics.decode_rows.get()
        );
    }
    let (mut same, mut all) = (0, 0);
    for (keep, chunk, cache) in [(14, 9, PrefixCache::Device), (40, 64, PrefixCache::Off)] {
        let (mask, _) = with(PrefillMode::Mask, 120, PrefixCache::Off, keep);
        let (compact, _) = with(PrefillMode::Compact, chunk, cache, keep);
        assert_eq!(compact, mask, "compact keeps {keep} in chunks of {chunk}");
        all += mask.len();
        same += mask.iter().zip(&off).filter(|(a, b)| a == b).count();
    }
    assert!(same < all, "compact is another function of long prompts");
}

#[test]
fn exact_prefill_spares_the_decoder() {
    // 3 decoder layers with windows of 8: 22 rows make the last one complete. A snapshot can be cut
    // up to 6 tokens before the end, so 5 rows more are wanted complete where prefixes are kept.
    for (prefix_cache, rows) in [(PrefixCache::Off, 22), (PrefixCache::Device, 27)] {
        let overlap = false;
        let config = EngineConfig { draft: DraftMode::Off, overlap, prefix_cache, ..small() };
        let engine = engine(&config);
        let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
        engine.generate(vec![Request::tokens(random_tokens(3, 300), params)], |_| {});
        assert_eq!(engine.metrics().prefill_rows.get(), 300);
        assert_eq!(engine.metrics().decoder_rows.get(), rows);
    }
}

#[test]
fn prompt_logprobs_do_not_depend_on_the_way() {
    let mut requests = watched(90, &[1, 2, 40, 90]);
    requests.iter_mut().for_each(|r| r.params.prompt_logprobs = Some(2));
    let expected = alone(&requests, &EngineConfig { prefill: PrefillMode::Off, ..small() });
    let engine = engine(&EngineConfig { max_batch_tokens: 40, prefill_chunk: 13, ..small() });
    for _ in 0..2 {
        for (found, expected) in engine.generate(requests.clone(), |_| {}).iter().zip(&expected) {
            let found = found.as_ref().expect("served");
            assert_eq!(found.prompt_logprobs, expected.prompt_logprobs);
            assert_eq!(found.prompt_logprobs.len(), found.usage.prompt_tokens - 1);
            assert_eq!(found.tokens, expected.tokens);
        }
    }
    // A greedy token of the same model has the best log-probability.
    let compact = serve::engine(&EngineConfig { prefill: PrefillMode::Compact, ..small() });
    let refused = compact.submit(requests[0].clone()).err().expect("refused").to_string();
    assert!(refused.contains("prompt_logprobs"), "{refused}");
}

#[test]
fn a_second_turn_goes_on_from_the_first() {
    let engine = engine(&small());
    let params = SamplingParams { max_tokens: Some(20), ..SamplingParams::greedy() };
    let prompt = random_tokens(4, 60);
    let request = Request::tokens(prompt.clone(), params.clone());
    let first = engine.submit(request).expect("valid").wait().expect("served");
    let next = [prompt, first.ids(), random_tokens(5, 30)].concat();
    let request = Request::tokens(next, params);
    let second = engine.submit(request.clone()).expect("valid").wait().expect("served");
    let turn = 60 + first.tokens.len();
    assert!(second.usage.cached_tokens + 6 >= turn, "{:?} of {turn}", second.usage);
    assert_eq!(second.tokens, alone(&[request], &small())[0].tokens);
}

#[test]
fn callers_may_leave_at_any_time() {
    let requests = requests(6, 30, 120);
    let expected = alone(&requests, &small());
    for overlap in [false, true] {
        let engine = engine(&EngineConfig { kv_tokens: 128 * 5, overlap, ..small() });
        let mut random = Random(9);
        let mut kept = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let handle = engine.submit(request.clone()).expect("valid");
            match random.below(3) {
                0 => drop(handle),
                1 => {
                    handle.recv();
                    engine.abort(handle.id());
                }
                _ => kept.push((i, handle)),
            }
        }
        for (i, handle) in kept {
            assert_eq!(handle.wait().expect("served").tokens, expected[i].tokens);
        }
        engine.clear_prefix_cache();
        let mut held = engine.held().expect("runs");
        for _ in 0..1000 {
            if held.sequences == 0 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            held = engine.held().expect("runs");
        }
        engine.clear_prefix_cache();
        assert_eq!(engine.held(), Some(Default::default()));
    }
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let params =
        SamplingParams { max_tokens: Some(30), ignore_eos: true, ..SamplingParams::greedy() };
    let whole = alone(&[Request::tokens(random_tokens(2, 20), params.clone())], &small());
    let text = &whole[0].text;
    let from = text.char_indices().nth(text.chars().count() / 2).expect("long enough").0;
    let stop: String = text[from..].chars().take(3).collect();
    let at = text.find(&stop).expect("is in the text");
    let params = SamplingParams { stop: vec![stop], ..params };
    let found = alone(&[Request::tokens(random_tokens(2, 20), params)], &small());
    assert_eq!(found[0].text, text[..at]);
    assert_eq!(found[0].reason, Some(FinishReason::Stop));
}

#[test]
fn refusals_come_back_in_order() {
    let engine = engine(&small());
    let params = SamplingParams { max_tokens: Some(2), ..SamplingParams::greedy() };
    let requests = vec![
        Request::tokens([1, 2], params.clone()),
        Request::tokens([], params.clone()),
        Request::tokens([3], SamplingParams { n: 0, ..params.clone() }),
        Request::text("hello", params),
    ];
    let mut told = Vec::new();
    let results = engine.generate(requests, |progress| told.push(progress));
    let ok: Vec<bool> = results.iter().map(Result::is_ok).collect();
    assert_eq!(ok, [true, false, false, true]);
    let last = told.last().expect("is told");
    assert_eq!((last.done, last.total, last.tokens), (4, 4, 4));
}

#[test]
fn refused_requests_are_counted() {
    let engine = engine(&EngineConfig { max_queued_requests: 1, ..small() });
    let mut request = requests(1, 1, 8).remove(0);
    request.params.n = 2;
    let refused = engine.submit_all(request).map(|handles| handles.len());
    assert_eq!(refused, Err(RequestError::QueueFull { waiting: 0, limit: 1 }));
    assert_eq!(engine.metrics().failed.get(), 2);
}
