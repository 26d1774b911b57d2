//! Random requests in random order at several step sizes, with caches cold and warm and pools so
//! small that requests lose their place: each must give the tokens that it gives alone. Then prompts
//! of random lengths in random chunks, in every prefill mode.
//!
//! ```text
//! cargo bench -p deepinfer --bench workload -- [MODEL_DIR, default the demo model] [REQUESTS, 200]
//!     [LONGEST PROMPT, 8000] [PREFILL TRIPLES, 200] [ONE SETTING OF THE ENGINE, 1 to 4; all]
//! ```
//! A short form of it is a test (`tests/workload.rs`, `tests/model.rs`).

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/load/mod.rs"]
mod load;
#[path = "../tests/modes/mod.rs"]
mod modes;
#[path = "../tests/random/mod.rs"]
mod random;
#[path = "../tests/serve/mod.rs"]
mod serve;

use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::request::Completion;
use load::{check_empty, serve_all, workload};
use random::Random;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let model = arguments.next().map_or(demo, Into::into);
    let mut number = |default| arguments.next().map_or(Ok(default), |n| n.parse::<usize>());
    let (count, longest, triples) = (number(200)?, number(8000)?, number(200)?);
    let only = number(0)?;

    let open = |config: &EngineConfig| {
        Engine::open(Source::directory(model.clone()), config, &mut |_, _| {})
    };
    let requests = workload(31, count, longest);
    let tokens: usize = requests.iter().map(|r| prompt_len(&r.prompt)).sum();
    println!("{count} requests, {tokens} prompt tokens");
    let plain = EngineConfig {
        max_batch_tokens: 512,
        prefill_chunk: 512,
        max_seqs: 1,
        kv_tokens: longest + 1024,
        prefix_cache: PrefixCache::Off,
        draft: DraftMode::Off,
        overlap: false,
        ..EngineConfig::default()
    };
    let engine = open(&plain)?;
    let start = Instant::now();
    let mut expected: Vec<Completion> = Vec::new();
    for request in &requests {
        expected.push(engine.submit(request.clone())?.wait()?);
    }
    drop(engine);
    println!("each alone: {:.0} s", start.elapsed().as_secs_f64());

    // Just enough for the longest request, and enough for a few.
    let (least, some) = (longest + 512, 3 * longest);
    let settings = [
        (64, 33, least, DraftMode::Fixed(2), 0, PrefixCache::Device),
        (256, 256, some, DraftMode::Auto, 1 << 30, PrefixCache::Host),
        (1024, 512, least, DraftMode::Off, 1 << 30, PrefixCache::Device),
        (700, 129, least, DraftMode::Fixed(5), 64 << 20, PrefixCache::Host),
    ];
    for (i, setting) in settings.into_iter().enumerate() {
        if only > 0 && only != i + 1 {
            continue;
        }
        let (rows, chunk, kv_tokens, draft, swap_bytes, prefix_cache) = setting;
        let name = format!("{rows} rows, chunks of {chunk}, {kv_tokens} tokens, {draft:?}");
        let config = EngineConfig {
            max_batch_tokens: rows,
            prefill_chunk: chunk,
            max_seqs: 8,
            kv_tokens,
            draft,
            swap_bytes,
            prefix_cache,
            overlap: rows != 700,
            ..EngineConfig::default()
        };
        let engine = open(&config)?;
        let mut random = Random(rows as u64);
        for pass in ["cold", "warm"] {
            let metrics = engine.metrics();
            let before = (metrics.cached_tokens.get(), metrics.prompt_tokens.get());
            let start = Instant::now();
            let served = serve_all(&engine, &requests, &expected, 24, &mut random, &name);
            println!(
                "{name}, {pass}: {} right, {} left early, {:.0} s; {:.0}% of prompt tokens cached, \
                 {} swapped out and {} computed again so far",
                served.right,
                served.left,
                start.elapsed().as_secs_f64(),
                100.0 * (metrics.cached_tokens.get() - before.0) as f64
                    / (metrics.prompt_tokens.get() - before.1) as f64,
                metrics.swapped.get(),
                metrics.recomputed.get(),
            );
        }
        check_empty(&engine, &name);
    }

    for format in common::FORMATS {
        let start = Instant::now();
        let mut session = common::session(format, 1, 2);
        modes::check_random(&mut session, triples, 400, serve::VOCAB, "tiny-a");
        println!(
            "{triples} prompts in every prefill mode, {format:?}: equal, {:.0} s",
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn prompt_len(prompt: &deepinfer::request::Prompt) -> usize {
    match prompt {
        deepinfer::request::Prompt::Tokens(tokens) => tokens.len(),
        deepinfer::request::Prompt::Text(text) => text.len(),
    }
}
