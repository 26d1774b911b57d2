//! The golden checkpoint in the repository, loaded on the CPU.
#![allow(dead_code)]

use super::random::mix;
use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engram::Engram;
use deepinfer::model::{Model, NoProbe};
use deepinfer::plan::StepPlan;
use deepinfer::session::Session;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::cpu::Cpu;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Both stored forms of the caches.
pub const FORMATS: [CacheFormat; 2] = [CacheFormat::Released, CacheFormat::Exact];

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
            let state = (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mix(state) % u64::from(vocab)) as u32
        })
        .collect()
}

/// Logits of every position, as bits.
pub fn bits(logits: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    logits.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

/// Every row of a step of `n`.
pub fn all(n: usize) -> Vec<u32> {
    (0..n as u32).collect()
}

/// Runs `tokens` in `slot` by chunks of `chunk`; logits of every row.
pub fn run_chunks(
    s: &mut Session<Cpu>,
    slot: usize,
    tokens: &[u32],
    chunk: usize,
) -> Vec<Vec<u32>> {
    let mut out = Vec::new();
    for part in tokens.chunks(chunk) {
        let q = s.extend(slot, part, &all(part.len()));
        out.extend(bits(s.run(&StepPlan { sequences: vec![q] }, &mut NoProbe).unwrap()));
    }
    out
}
