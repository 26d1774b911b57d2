//! The demo model against the PyTorch code that trained it (`training/logits.py`): the same weights,
//! read and computed by two implementations.

mod common;
mod files;
mod random;

use common::{all, load};
use deepinfer::cache::CacheFormat;
use deepinfer::model::NoProbe;
use deepinfer::plan::StepPlan;
use deepinfer::session::Session;
use deepinfer_device::cpu::Cpu;
use files::{f32s, i64s, testdata};
use std::cmp::Ordering;

/// Largest difference of two logits: roundings of f32 sums in another order. Those seen are a tenth.
const TOLERANCE: f32 = 1e-3;

/// A session on the demo model with caches as computed.
fn session() -> Session<Cpu> {
    let demo = testdata("../models/demo");
    let (cpu, model) = load(&demo, 2);
    Session::new(cpu, model, CacheFormat::Exact, 1, 512, 128).expect("memory for a small model")
}

/// Logits after each of `tokens`, which go on in slot 0.
fn run(s: &mut Session<Cpu>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let sequence = s.extend(0, tokens, &all(tokens.len()));
    s.run(&StepPlan { sequences: vec![sequence] }, &mut NoProbe).expect("it runs")
}

/// Tokens by their logits, the best first, the lower id on ties.
fn ranked(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| {
        let by_logit = logits[b as usize].partial_cmp(&logits[a as usize]);
        by_logit.unwrap_or(Ordering::Equal)
    });
    ids
}

fn tokens(file: &[u8], name: &str) -> Vec<u32> {
    i64s(file, name).into_iter().map(|id| u32::try_from(id).expect("a token")).collect()
}

#[test]
fn pytorch_and_this_engine_agree() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/files/demo-logits.safetensors");
    let file = std::fs::read(path).expect("the file is there");
    let mut s = session();
    let vocab = s.model.config.text_config.vocab_size;
    for name in ["sum", "copy", "talk"] {
        let part = |what: &str| format!("{name}.{what}");
        let prompt = tokens(&file, &part("ids"));
        let expected = f32s(&file, &part("logits"));
        let tops = tokens(&file, &part("top"));
        s.truncate(0, 0);
        let mut logits = run(&mut s, &prompt);
        let positions = i64s(&file, &part("positions"));
        assert_eq!(positions.len(), 4, "{name}");
        for ((position, expected), top) in
            positions.into_iter().zip(expected.chunks(vocab)).zip(tops.chunks(10))
        {
            let found = &logits[position as usize];
            for (id, (found, expected)) in found.iter().zip(expected).enumerate() {
                let difference = (found - expected).abs();
                assert!(
                    difference <= TOLERANCE,
                    "{name}, position {position}, token {id}: {found}, not {expected}"
                );
            }
            // Two tokens may change places only where the reference itself hardly tells them apart.
            for (rank, (&found, &wanted)) in ranked(found).iter().zip(top).enumerate() {
                let gap = (expected[found as usize] - expected[wanted as usize]).abs();
                assert!(
                    found == wanted || gap <= 2.0 * TOLERANCE,
                    "{name}, position {position}, rank {rank}: {found}, not {wanted}"
                );
            }
        }
        // Decoding step by step; the reference computes the whole text each time.
        let (greedy, gaps) = (tokens(&file, &part("greedy")), f32s(&file, &part("gaps")));
        assert!(greedy.len() >= 8 && greedy.len() == gaps.len(), "{name}: {greedy:?}");
        for (step, (&wanted, &gap)) in greedy.iter().zip(&gaps).enumerate() {
            let found = ranked(logits.last().expect("a row"))[0];
            assert!(gap > 2.0 * TOLERANCE, "{name}: the reference is undecided at step {step}");
            assert_eq!(found, wanted, "{name}: greedy step {step}");
            logits = run(&mut s, &[wanted]);
        }
    }
}
