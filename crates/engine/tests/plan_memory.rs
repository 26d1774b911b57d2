//! What an engine will need, and what it refuses.

use deepinfer::cache::{CacheFormat, Caches};
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::config::ModelConfig;
use deepinfer::engine::{DraftMode, EngineConfig, EngineError, PrefixCache};
use deepinfer::plan_memory::{DoesNotFit, MemoryPlan};
use deepinfer::schedule::{Shape, geometry};
use deepinfer_device::cpu::Cpu;
use std::path::Path;

fn checkpoint() -> Checkpoint {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny-a");
    Checkpoint::open(Source::directory(folder)).expect("opens")
}

#[test]
fn the_plan_counts_what_caches_take() {
    let checkpoint = checkpoint();
    let cpu = Cpu::new(Some(1)).expect("starts");
    for cache_format in [CacheFormat::Released, CacheFormat::Exact] {
        let config = EngineConfig { cache_format, ..EngineConfig::default() };
        let plan = MemoryPlan::new(&checkpoint, &config).expect("fits together");
        let model = checkpoint.config();
        let caches = Caches::new(&cpu, &model.text_config, cache_format, geometry(model), 2, 2);
        let caches = caches.expect("memory for a tiny model");
        assert_eq!(plan.sequence_bytes, caches.slot_bytes() as u64);
        assert_eq!(plan.token_bytes * 128.0, caches.page_bytes() as f64);
        let parts = plan.slot_pool_bytes + plan.page_pool_bytes + plan.scratch_bytes;
        assert_eq!(plan.allocated_bytes, parts);
        let stored: u64 = checkpoint.tensors().map(|t| t.bytes).sum();
        assert_eq!(plan.mapped_weights.values().sum::<u64>(), stored);
        assert_eq!(plan.sequences_of(1 << 14), 4);
    }
}

/// Preempted requests, host memory, and what waits to be written.
#[test]
fn the_plan_counts_what_the_prefix_cache_takes_of_the_host() {
    let checkpoint = checkpoint();
    let plan = |prefix_cache, host_cache_bytes| {
        let d = EngineConfig::default();
        let config = EngineConfig { prefix_cache, host_cache_bytes, swap_bytes: 5, ..d };
        MemoryPlan::new(&checkpoint, &config).expect("fits together").host_cache_bytes
    };
    let disk = || PrefixCache::Disk("prefixes".into());
    assert_eq!(plan(PrefixCache::Device, 1 << 30), 5);
    assert_eq!(plan(PrefixCache::Host, 1 << 30), (1 << 30) + 5);
    assert_eq!(plan(disk(), 1 << 30), (1 << 30) + (1 << 28) + 5);
    assert_eq!(plan(disk(), 1000), 1000 + (64 << 20) + 5);
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let plan = MemoryPlan::new(&checkpoint(), &EngineConfig::default()).expect("fits together");
    assert_eq!(plan.check(plan.allocated_bytes), Ok(()));
    let refused = plan.check(plan.allocated_bytes - 1).expect_err("does not fit");
    assert_eq!(refused.needed, plan.allocated_bytes);
    assert!(refused.to_string().contains("lower kv_tokens"), "{refused}");
    let mut error = DoesNotFit {
        needed: 42_500_000,
        weights: 0,
        tables: 0,
        slots: 2_500_000,
        pages: 30_000_000,
        tokens: 65536,
        scratch: 10_000_000,
        available: 20_000_000,
    };
    assert_eq!(
        error.told("take less"),
        "42.5 MB needed (2.50 MB for slots of sequences and snapshots, 30.0 MB for pages for 65536 \
         tokens, 10.0 MB for work space), 20.0 MB available; take less"
    );
    error.weights = 21_000_000;
    let told = error.told("take less");
    assert!(
        told.ends_with("beside 1 GiB that is left alone; the weights alone do not fit"),
        "{told}"
    );
}

#[test]
fn a_gpu_holds_weights_too_and_the_pool_takes_the_rest() {
    let plan = MemoryPlan::new(&checkpoint(), &EngineConfig::default()).expect("fits together");
    let least = plan.allocated_bytes + plan.device_weights;
    assert!(plan.device_weights > 0 && plan.device_weights < plan.mapped_weights.values().sum());
    let refused = plan.check_gpu(least).expect_err("something is left alone");
    assert_eq!((refused.needed, refused.weights), (least, plan.device_weights));
    assert!(refused.to_string().contains("for weights"), "{refused}");
    assert_eq!(plan.check_gpu(least + (1 << 30)), Ok(()));

    let positions = 1 << 30;
    let free = (1 << 30) + plan.allocated_bytes;
    assert_eq!(plan.tokens_that_fill(0, positions), plan.pool_tokens);
    assert_eq!(plan.tokens_that_fill(free, positions), plan.pool_tokens);
    let more = plan.tokens_that_fill(free + (plan.token_bytes * 12_800.0) as u64, positions);
    assert_eq!(more, plan.pool_tokens + 12_800);
    assert_eq!(plan.tokens_that_fill(1 << 60, 10_000), 16 * 10_112);
}

/// A checkpoint with one n-gram table of `rows` rows of `cols` values, which takes no room on the
/// disk.
fn with_table(
    (rows, cols): (u64, u64),
    dtype: &str,
    groups: u64,
) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().expect("a folder");
    let config = checkpoint().config().to_json();
    std::fs::write(folder.path().join("config.json"), config).expect("can be written");
    let (values, scales) = (rows * cols, rows * groups);
    let header = serde_json::json!({
        "layers.1.engram.embed.weight":
            {"dtype": dtype, "shape": [rows, cols], "data_offsets": [0, values]},
        "layers.1.engram.embed.scale":
            {"dtype": "F8_E8M0", "shape": [rows, groups], "data_offsets": [values, values + scales]},
    });
    let header = header.to_string();
    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.extend(header.bytes());
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, &head).expect("can be written");
    let file = std::fs::File::options().write(true).open(&path).expect("is there");
    file.set_len(head.len() as u64 + values + scales).expect("can be made longer");
    let checkpoint = Checkpoint::open(Source::directory(folder.path())).expect("opens");
    (folder, checkpoint)
}

#[test]
fn tables_that_a_gpu_reads_from_host_memory_must_fit_there() {
    let plan = |rows, dtype, groups| {
        let (_folder, checkpoint) = with_table((rows, 100), dtype, groups);
        MemoryPlan::new(&checkpoint, &EngineConfig::default()).expect("fits together")
    };
    // Rows are padded to 128 values; they have four scales each.
    let rows = (1 << 30) / 128;
    let large = plan(rows, "F8_E4M3", 4);
    assert_eq!((large.host_tables, large.device_weights), (rows * 132, 0));
    assert_eq!(large.check_tables(rows * 132), Ok(()));
    let refused = large.check_tables(rows * 132 - 1).expect_err("does not fit");
    assert_eq!((refused.needed, refused.tables), (rows * 132, rows * 132));
    let told = refused.told("take less");
    assert!(told.starts_with("1.11 GB needed (1.11 GB for n-gram tables"), "{told}");
    assert!(
        told.ends_with("1.11 GB available; a GPU reads them from there, whatever its own memory")
    );
    // Others go to the GPU's own memory.
    for (rows, dtype, groups) in [(rows - 1, "F8_E4M3", 4), (rows, "I8", 4), (rows, "F8_E4M3", 3)] {
        let plan = plan(rows, dtype, groups);
        assert_eq!((plan.host_tables, plan.device_weights), (0, rows * (100 + groups)));
        assert_eq!(plan.check_tables(0), Ok(()));
    }
}

/// A header may say anything that comes to no bytes.
#[test]
fn a_table_without_rows_may_be_of_any_width() {
    for cols in [u64::MAX, u64::MAX - 63, u64::MAX - 64] {
        let (_folder, checkpoint) = with_table((0, cols), "F8_E4M3", cols.div_ceil(32));
        let plan = MemoryPlan::new(&checkpoint, &EngineConfig::default()).expect("fits together");
        assert_eq!((plan.host_tables, plan.device_weights), (0, 0));
    }
}

#[test]
fn scratch_does_not_grow_with_context() {
    let scratch = |kv_tokens| {
        let config = EngineConfig { kv_tokens, ..EngineConfig::default() };
        MemoryPlan::new(&checkpoint(), &config).expect("fits together").scratch_bytes
    };
    // The page table of each sequence is the only part that does: 2 x 4 bytes a page.
    assert!(scratch(1 << 22) - scratch(1 << 13) <= 2 * 4 * 16 * (1 << 22) / 128);
}

#[test]
fn settings_that_cannot_work_together_are_refused() {
    let refused = |change: fn(&mut EngineConfig)| {
        let mut config = EngineConfig::default();
        change(&mut config);
        MemoryPlan::new(&checkpoint(), &config).expect_err("is refused")
    };
    assert!(matches!(
        refused(|c| c.draft = DraftMode::Fixed(6)),
        EngineError::DraftLength { wanted: 6, block: 5 }
    ));
    for change in [
        (|c| c.max_seqs = usize::MAX) as fn(&mut EngineConfig),
        |c| c.max_batch_tokens = usize::MAX,
        |c| c.kv_tokens = usize::MAX,
        |c| c.device_snapshots = usize::MAX,
    ] {
        let error = refused(change);
        assert!(matches!(error, EngineError::TooLarge { value: usize::MAX, .. }), "{error}");
    }
    let too_small = |error| match error {
        EngineError::TooSmall { name, .. } => name,
        other => panic!("{other}"),
    };
    assert_eq!(too_small(refused(|c| c.max_batch_tokens = 16)), "max_batch_tokens");
    assert_eq!(too_small(refused(|c| c.max_seqs = 0)), "max_seqs");
    assert_eq!(too_small(refused(|c| c.prefill_chunk = 0)), "prefill_chunk");
    assert_eq!(too_small(refused(|c| c.max_queued_requests = 0)), "max_queued_requests");
    assert!(matches!(
        refused(|c| c.kv_tokens = 100),
        EngineError::PoolTooSmall { value: 100, least: 128, page_tokens: 128, .. }
    ));
    assert_eq!(
        too_small(refused(|c| {
            c.prefill = deepinfer::engine::PrefillMode::Compact;
            c.keep_tokens = 13;
        })),
        "keep_tokens"
    );
}

/// What is odd about a checkpoint is named, not what follows from it.
#[test]
fn odd_checkpoints_are_refused_with_the_reason() {
    let refused = |kv_tokens, change: fn(&mut serde_json::Value)| {
        let mut config: serde_json::Value =
            serde_json::from_str(&checkpoint().config().to_json()).expect("it is JSON");
        change(&mut config["text_config"]);
        let model = ModelConfig::from_json(config.to_string().as_bytes()).expect("it is valid");
        let settings = EngineConfig { kv_tokens, ..EngineConfig::default() };
        Shape::new(&model, &settings, &[]).expect_err("is refused").to_string()
    };
    let ratio = refused(4000, |text| {
        for ratio in text["compress_ratios"].as_array_mut().expect("ratios") {
            if *ratio == 2 {
                *ratio = 4093.into();
            }
        }
    });
    for part in ["kv_tokens is 4000", "at least 4093", "compression ratio"] {
        assert!(ratio.contains(part), "{ratio}");
    }
    let block = refused(65_536, |text| {
        text["dspark_block_size"] = 60.into();
        text["max_position_embeddings"] = 100.into();
    });
    for part in ["100 positions", "122", "draft"] {
        assert!(block.contains(part), "{block}");
    }
}
