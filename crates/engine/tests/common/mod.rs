//! The golden checkpoint in the repository, loaded on the CPU.
#![allow(dead_code)]

use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engram::Engram;
use deepinfer::model::Model;
use deepinfer::session::Session;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::cpu::Cpu;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder of a test checkpoint.
pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name)
}

/// The model in `folder` on `threads` threads.
pub fn load(folder: &Path, threads: usize) -> (Arc<Cpu>, Arc<Model<Cpu>>) {
    let cpu = Cpu::new(Some(threads)).expect("threads start");
    let mut checkpoint = Checkpoint::open(Source::directory(folder)).expect("the checkpoint opens");
    let tokenizer = Tokenizer::from_bytes(checkpoint.tokenizer_json().expect("tokenizer"))
        .expect("the tokenizer loads");
    let engram = Engram::new(&checkpoint.config().text_config, &tokenizer).expect("token map");
    let model = Model::load(&cpu, &mut checkpoint, engram, &mut |_, _| {}).expect("it loads");
    (Arc::new(cpu), Arc::new(model))
}

/// A session on tiny-a with `slots` slots of 512 tokens.
pub fn session(format: CacheFormat, slots: usize, threads: usize) -> Session<Cpu> {
    let (cpu, model) = load(&testdata("tiny-a"), threads);
    Session::new(cpu, model, format, slots, 512, 512).expect("memory for a tiny model")
}

/// `n` token ids below `vocab`, from a counter-based generator.
pub fn random_tokens(seed: u64, n: usize, vocab: u32) -> Vec<u32> {
    (0..n as u64)
        .map(|i| {
            let mut z = (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % u64::from(vocab)) as u32
        })
        .collect()
}
