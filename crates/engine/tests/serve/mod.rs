//! Engines on the golden checkpoint in the repository.
#![allow(dead_code)]

use super::random::Random;
use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::request::{Completion, Request, SamplingParams};
use std::path::{Path, PathBuf};

/// Ids that random prompts are made of: below the special tokens.
pub const VOCAB: u32 = 512;

/// Small settings.
pub fn small() -> EngineConfig {
    EngineConfig {
        max_batch_tokens: 128,
        max_seqs: 6,
        prefill_chunk: 48,
        kv_tokens: 8192,
        device_snapshots: 64,
        host_cache_bytes: 64 << 20,
        swap_bytes: 16 << 20,
        keep_tokens: 24,
        ..EngineConfig::default()
    }
}

/// An engine with these settings.
pub fn engine(config: &EngineConfig) -> Engine {
    let source = Source::directory(testdata("tiny-a"));
    let config = EngineConfig { threads: Some(1), ..config.clone() };
    Engine::open(source, &config, &mut |_, _| {}).expect("starts")
}

/// Each request by itself, without caches, drafts or overlap.
pub fn alone(requests: &[Request], config: &EngineConfig) -> Vec<Completion> {
    let config = EngineConfig {
        max_seqs: 1,
        max_batch_tokens: 256,
        prefill_chunk: 256,
        kv_tokens: 8192,
        prefix_cache: PrefixCache::Off,
        draft: DraftMode::Off,
        overlap: false,
        ..config.clone()
    };
    let engine = engine(&config);
    let each =
        |request: &Request| engine.submit(request.clone()).expect("valid").wait().expect("served");
    requests.iter().map(each).collect()
}

/// The folder of a test checkpoint.
pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name)
}

/// `n` token ids.
pub fn random_tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut random = Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
    (0..n).map(|_| random.below(VOCAB as usize) as u32).collect()
}

/// Random requests: some share prefixes, and every parameter occurs.
pub fn requests(seed: u64, count: usize, longest: usize) -> Vec<Request> {
    let mut random = Random(seed);
    let shared = random_tokens(seed, longest);
    (0..count)
        .map(|i| {
            let len = 1 + random.below(longest);
            let common = if random.below(3) == 0 { 0 } else { random.below(len + 1) };
            let mut prompt = shared[..common].to_vec();
            prompt.extend(random_tokens(seed + 1000 + i as u64, len - common));
            let mut params = SamplingParams {
                temperature: [0.0, 0.7, 1.0, 1.5][random.below(4)],
                seed: Some(random.below(1 << 30) as u64),
                max_tokens: Some(1 + random.below(24)),
                ignore_eos: random.below(2) == 0,
                ..SamplingParams::default()
            };
            match random.below(8) {
                0 => params.top_p = 0.8,
                1 => params.top_k = 5,
                2 => params.min_p = 0.05,
                3 => {
                    params.repetition_penalty = 1.3;
                    params.presence_penalty = 0.4;
                    params.frequency_penalty = 0.2;
                }
                4 => {
                    params.logit_bias = vec![(7, 3.0), (9, f32::NEG_INFINITY)];
                    params.min_tokens = params.max_tokens.map_or(4, |most| most.min(4));
                }
                5 => params.bad_words = vec![vec![3], vec![5, 6]],
                6 => params.allowed_tokens = (20..60).collect(),
                _ => params.logprobs = Some(2),
            }
            if random.below(4) == 0 {
                params.stop_tokens = (0..40).map(|_| random.below(VOCAB as usize) as u32).collect();
            }
            Request::tokens(prompt, params)
        })
        .collect()
}
