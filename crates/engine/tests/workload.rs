//! Random workloads and a short soak; `cargo bench -p deepinfer --bench workload` and `--bench soak`
//! are the long forms.

mod load;
mod random;
mod serve;

use deepinfer::engine::{DraftMode, EngineConfig, PrefixCache};
use load::{check_empty, serve_all, soak_configs, workload};
use random::Random;
use serve::{alone, engine, small};

#[test]
fn random_workloads_give_what_single_requests_give() {
    let requests = workload(21, 24, 500);
    let expected = alone(&requests, &small());
    let mut given_up = 0;
    for (rows, chunk, pages, draft, swap_bytes, prefix_cache) in [
        (40, 9, 64, DraftMode::Off, 0, PrefixCache::Device),
        (64, 64, 8, DraftMode::Fixed(3), 0, PrefixCache::Host),
        (128, 48, 7, DraftMode::Auto, 16 << 20, PrefixCache::Device),
        (256, 200, 8, DraftMode::Fixed(5), 1 << 20, PrefixCache::Off),
    ] {
        let name = format!("{rows} rows, chunks of {chunk}, {pages} pages, {draft:?}");
        let config = EngineConfig {
            max_batch_tokens: rows,
            prefill_chunk: chunk,
            kv_tokens: 128 * pages,
            draft,
            swap_bytes,
            prefix_cache,
            overlap: rows != 64,
            ..small()
        };
        let engine = engine(&config);
        let mut random = Random(rows as u64);
        // The second time the cache is warm.
        for _ in 0..2 {
            let served = serve_all(&engine, &requests, &expected, 16, &mut random, &name);
            assert_eq!(served.right + served.left, requests.len());
        }
        check_empty(&engine, &name);
        given_up += engine.metrics().recomputed.get() + engine.metrics().swapped.get();
    }
    assert!(given_up > 0, "pools are small enough");
}

#[test]
fn a_short_soak() {
    let requests = serve::requests(11, 30, 220);
    let expected = alone(&requests, &small());
    let folder = tempfile::tempdir().expect("a directory");
    for (config, name) in soak_configs(&small(), folder.path()) {
        let engine = engine(&config);
        let mut left = 60;
        let mut random = Random(left);
        let served = load::serve(&engine, &requests, &expected, 24, &mut random, name, |random| {
            left = u64::checked_sub(left, 1)?;
            Some(random.below(requests.len()))
        });
        assert!(served.left > 0 && served.right > 0, "{name}: {served:?}");
        check_empty(&engine, name);
    }
}
