//! Drafting changes speed, never tokens; the rejection scheme changes tokens, never their
//! distribution.

mod random;
mod serve;

use deepinfer::drafting::{CostCurve, KnownDrafts};
use deepinfer::engine::{DraftMode, DraftScheme, EngineConfig, PrefixCache};
use deepinfer::metrics::{Counter, Metrics};
use deepinfer::request::{Completion, Request, SamplingParams};
use serve::{alone, engine, random_tokens, requests, small};
use std::collections::HashMap;
use std::sync::Arc;

const BLOCK: usize = 5;

/// Drafts that follow what the requests give, with these chances.
fn known(
    requests: &[Request],
    expected: &[Completion],
    profiles: Vec<Vec<f32>>,
) -> Option<Arc<KnownDrafts>> {
    let text = |(request, completion): (&Request, &Completion)| {
        let deepinfer::request::Prompt::Tokens(prompt) = &request.prompt else {
            panic!("requests have token ids")
        };
        (prompt.clone(), completion.ids())
    };
    let texts = requests.iter().zip(expected).map(text).collect();
    Some(Arc::new(KnownDrafts { texts, profiles, seed: 3, vocab: 500 }))
}

fn counts(counters: &[Counter]) -> Vec<u64> {
    counters[..BLOCK].iter().map(Counter::get).collect()
}

/// Runs the requests together and compares each with what it gives alone.
fn check(
    config: &EngineConfig,
    requests: &[Request],
    expected: &[Completion],
    name: &str,
) -> Arc<Metrics> {
    let engine = engine(config);
    let found = engine.generate(requests.to_vec(), |_| {});
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = found.as_ref().expect("served");
        assert_eq!(found.tokens, expected.tokens, "{name}: request {i}");
        assert_eq!(found.text, expected.text, "{name}: request {i}");
        assert_eq!(found.reason, expected.reason, "{name}: request {i}");
        let usage = &found.usage;
        assert!(usage.accepted <= usage.verified && usage.verified <= usage.drafted, "{usage:?}");
    }
    engine.metrics().clone()
}

#[test]
fn every_acceptance_count_gives_the_same_tokens() {
    // Long enough to cross a page, and to meet every residue of groups and rings.
    let mut requests = requests(31, 16, 140);
    requests.iter_mut().for_each(|r| r.params.min_tokens = 10);
    requests.iter_mut().for_each(|r| r.params.max_tokens = Some(24));
    requests.iter_mut().for_each(|r| r.params.stop_tokens.clear());
    let expected = alone(&requests, &small());
    for accepted in 0..=BLOCK {
        let profile = (0..BLOCK).map(|i| if i < accepted { 1.0 } else { 0.0 }).collect();
        let known_drafts = known(&requests, &expected, vec![profile]);
        let overlap = accepted % 2 == 0;
        let draft = DraftMode::Fixed(BLOCK);
        let config = EngineConfig { draft, known_drafts, overlap, ..small() };
        let metrics = check(&config, &requests, &expected, &format!("{accepted} accepted"));
        let [drafted, verified, taken] =
            [&metrics.drafted, &metrics.verified, &metrics.accepted].map(|c| counts(c));
        for i in 0..BLOCK {
            assert!(verified[i] > 0 && verified[i] <= drafted[i], "{verified:?} of {drafted:?}");
            // At the end of a text, the rest of a block is not verified.
            let all = if i < accepted { verified[i] } else { 0 };
            assert_eq!(taken[i], all, "{accepted} of each block: position {i}: {taken:?}");
        }
    }
}

#[test]
fn scheduled_verification_gives_the_same_tokens() {
    let requests = requests(32, 16, 100);
    let expected = alone(&requests, &small());
    let profiles = vec![vec![0.9, 0.9, 0.8, 0.7, 0.6], vec![0.5, 0.3, 0.2, 0.1, 0.1], vec![0.1]];
    for (overlap, own) in [(false, true), (true, true), (false, false), (true, false)] {
        let known_drafts = own.then(|| known(&requests, &expected, profiles.clone())).flatten();
        let config = EngineConfig { draft: DraftMode::Auto, known_drafts, overlap, ..small() };
        let name = format!("overlap {overlap}, known {own}");
        let metrics = check(&config, &requests, &expected, &name);
        assert!(counts(&metrics.drafted)[0] > 0, "{name}: nothing was drafted");
    }
}

/// Which drafts are verified follows from what a row costs and from how likely the draft is: where
/// rows are free all are, and where a row costs half a step only the likely ones.
#[test]
fn dear_rows_are_for_likely_drafts() {
    let mut requests = requests(34, 16, 100);
    requests.iter_mut().for_each(|r| r.params.max_tokens = Some(24));
    requests.iter_mut().for_each(|r| r.params.min_tokens = 20);
    requests.iter_mut().for_each(|r| r.params.stop_tokens.clear());
    let expected = alone(&requests, &small());
    let known_drafts = known(&requests, &expected, vec![vec![1.0, 1.0, 0.05, 0.05, 0.05]]);
    let run = |draft, row: Option<f64>, overlap| {
        let step = |row: f64| (1..=36).map(|rows| (rows, 1.0 + row * (rows - 1) as f64)).collect();
        let known_costs = row.map(|row| CostCurve::new(step(row), vec![(1, 1e-3)]));
        let known_drafts = known_drafts.clone();
        let config = EngineConfig { draft, known_drafts, known_costs, overlap, ..small() };
        let name = format!("{draft:?}, a row costs {row:?}, overlap {overlap}");
        let metrics = check(&config, &requests, &expected, &name);
        [&metrics.drafted, &metrics.verified, &metrics.accepted].map(|c| counts(c))
    };
    for overlap in [false, true] {
        let everything = run(DraftMode::Fixed(BLOCK), None, overlap);
        let [drafted, verified, _] = &everything;
        assert!(verified[BLOCK - 1] > 40, "{verified:?} of {drafted:?}");
        assert_eq!(run(DraftMode::Auto, Some(0.0), overlap), everything, "rows are free");

        let [drafted, verified, accepted] = run(DraftMode::Auto, Some(0.5), overlap);
        // All are verified in the first two steps, of six sequences each.
        let few = 2 * small().max_seqs as u64;
        for i in 0..BLOCK {
            let told = format!("position {i}: {verified:?} of {drafted:?}");
            match i < 2 {
                true => assert!(verified[i] * 10 > drafted[i] * 7, "{told}: likely ones are not"),
                false => assert!(verified[i] <= few && few < drafted[i], "{told}: unlikely ones"),
            }
        }
        assert_eq!(accepted[..2], verified[..2], "they are what the text goes on with");
    }
}

#[test]
fn costs_are_measured_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = EngineConfig { costs_dir: Some(dir.path().to_owned()), ..small() };
    engine(&config);
    let files: Vec<_> = std::fs::read_dir(dir.path()).expect("is there").flatten().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let bytes = std::fs::read(files[0].path()).expect("is there");
    let file: serde_json::Value = serde_json::from_slice(&bytes).expect("is JSON");
    let curve: CostCurve = serde_json::from_value(file["curve"].clone()).expect("is a curve");
    let sizes = |points: &[(usize, f64)]| -> Vec<usize> { points.iter().map(|p| p.0).collect() };
    assert_eq!(sizes(&curve.steps), [1, 2, 3, 4, 5, 6, 9, 14, 21, 32, 36]);
    assert_eq!(sizes(&curve.drafts), [1, 2, 3, 5, 6]);
    assert!(curve.steps.iter().chain(&curve.drafts).all(|&(_, seconds)| seconds > 0.0));
    // A fixed length needs none.
    let dir = tempfile::tempdir().expect("a directory");
    let costs_dir = Some(dir.path().to_owned());
    engine(&EngineConfig { costs_dir, draft: DraftMode::Fixed(2), ..small() });
    assert_eq!(std::fs::read_dir(dir.path()).expect("is there").count(), 0);
}

#[test]
fn rejection_changes_nothing_at_temperature_0() {
    let mut requests = requests(33, 12, 60);
    requests.iter_mut().for_each(|r| r.params.temperature = 0.0);
    let expected = alone(&requests, &small());
    let draft_scheme = DraftScheme::Rejection;
    let config = EngineConfig { draft_scheme, draft: DraftMode::Fixed(3), ..small() };
    check(&config, &requests, &expected, "rejection");
}

/// Tokens that the texts of [`texts`] are made of.
const ALLOWED: [u32; 4] = [17, 40, 99, 300];

/// How often each text of three tokens comes out over many seeds.
fn texts(config: &EngineConfig) -> (HashMap<Vec<u32>, f64>, Arc<Metrics>) {
    let engine = engine(config);
    let prompt = random_tokens(8, 12);
    let request = |seed: u64| {
        let params = SamplingParams {
            seed: Some(seed * 0x9e37_79b9),
            allowed_tokens: ALLOWED.to_vec(),
            temperature: 1.0,
            max_tokens: Some(3),
            ignore_eos: true,
            ..SamplingParams::default()
        };
        Request::tokens(prompt.clone(), params)
    };
    let mut counts = HashMap::new();
    for found in engine.generate((0..2000).map(request).collect(), |_| {}) {
        *counts.entry(found.expect("served").ids()).or_default() += 1.0;
    }
    (counts, engine.metrics().clone())
}

/// Distance of two samples of the same size, in standard deviations: the sum of
/// (a - b)^2 / (a + b) over kinds is chi-square.
fn distance(a: &HashMap<Vec<u32>, f64>, b: &HashMap<Vec<u32>, f64>) -> f64 {
    let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let get = |counts: &HashMap<Vec<u32>, f64>, key| counts.get(key).copied().unwrap_or(0.0);
    let mut chi = 0.0;
    let mut freedom = -1.0;
    let (mut rest_a, mut rest_b) = (0.0, 0.0);
    for key in keys {
        let (a, b) = (get(a, key), get(b, key));
        if a + b < 10.0 {
            (rest_a, rest_b) = (rest_a + a, rest_b + b);
            continue;
        }
        chi += (a - b).powi(2) / (a + b);
        freedom += 1.0;
    }
    if rest_a + rest_b > 0.0 {
        chi += f64::powi(rest_a - rest_b, 2) / (rest_a + rest_b);
        freedom += 1.0;
    }
    assert!(freedom > 10.0, "{freedom} kinds of text");
    (chi - freedom) / f64::sqrt(2.0 * freedom)
}

/// Drafts of the checkpoint's stages, which are drawn, and imposed ones, which are always the same.
#[test]
fn rejection_keeps_the_distribution() {
    let config = EngineConfig { prefix_cache: PrefixCache::Device, ..small() };
    let (plain, _) = texts(&EngineConfig { draft: DraftMode::Off, ..config.clone() });
    let text = |first: u32| (random_tokens(8, 12), vec![first, 17, 40]);
    let imposed = KnownDrafts {
        texts: ALLOWED.map(text).to_vec(),
        profiles: vec![vec![1.0, 1.0]],
        ..KnownDrafts::default()
    };
    for known_drafts in [None, Some(Arc::new(imposed))] {
        let name = if known_drafts.is_some() { "imposed drafts" } else { "own drafts" };
        let draft_scheme = DraftScheme::Rejection;
        let draft = DraftMode::Fixed(2);
        let drafted = EngineConfig { draft_scheme, draft, known_drafts, ..config.clone() };
        let (drafted, metrics) = texts(&drafted);
        let (verified, accepted) = (counts(&metrics.verified)[0], counts(&metrics.accepted)[0]);
        assert!(0 < accepted && accepted < verified, "{name}: {accepted} of {verified}");
        let distance = distance(&plain, &drafted);
        assert!(distance < 4.0, "{name}: {distance} standard deviations");
    }
}

/// Timing steps at the start keeps to what a step has room for.
#[test]
fn small_steps_are_timed() {
    for rows in [2, 3, 6, 7] {
        let config = EngineConfig {
            max_seqs: 1,
            max_batch_tokens: rows,
            prefill_chunk: rows,
            draft: DraftMode::Auto,
            ..small()
        };
        let params = SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() };
        let request = Request::tokens(random_tokens(1, 9), params);
        let completion = engine(&config).submit(request).expect("valid").wait().expect("served");
        assert!(!completion.tokens.is_empty(), "{rows} rows");
    }
}
