//! Prompts read in every prefill mode, step by step: what must be equal, bit for bit, and how many
//! rows go through each layer.
#![allow(dead_code)]

use super::random::Random;
use deepinfer::model::{NoProbe, Probe, Scratch};
use deepinfer::plan::{PlanSequence, StepPlan};
use deepinfer::session::{GreedyDrafts, Session};
use deepinfer_device::cpu::Cpu;
use deepinfer_device::ops::Result;

/// How the decoder reads a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    Off,
    Exact,
    Compact(usize),
    Mask(usize),
}

/// Counts rows by layer.
#[derive(Default)]
pub struct RowCount {
    pub attention: Vec<usize>,
    pub experts: Vec<usize>,
}

impl RowCount {
    fn add(counts: &mut Vec<usize>, layer: usize, rows: usize) -> Result<()> {
        counts.resize(counts.len().max(layer + 1), 0);
        counts[layer] += rows;
        Ok(())
    }
}

impl Probe<Cpu> for RowCount {
    fn attention_out(
        &mut self,
        _: &Cpu,
        layer: usize,
        rows: usize,
        _: &mut Scratch<Cpu>,
    ) -> Result<()> {
        Self::add(&mut self.attention, layer, rows)
    }

    fn experts_out(
        &mut self,
        _: &Cpu,
        layer: usize,
        rows: usize,
        _: &mut Scratch<Cpu>,
    ) -> Result<()> {
        Self::add(&mut self.experts, layer, rows)
    }
}

/// Layers of the decoder, and the window.
pub fn decoder(s: &Session<Cpu>) -> (usize, usize) {
    let text = &s.model.config.text_config;
    let layers = text.decoder_start().map_or(0, |start| text.num_hidden_layers - start);
    (layers, text.sliding_window)
}

/// Rows that the decoder runs for the last one to come out complete.
pub fn span(s: &Session<Cpu>) -> usize {
    let (layers, window) = decoder(s);
    layers * (window - 1) + 1
}

/// What a mode gives: the logits of the prompt's kept rows, of the rows after it, and the drafts.
#[derive(Debug, PartialEq)]
pub struct Read {
    pub kept: Vec<Vec<u32>>,
    pub after: Vec<Vec<u32>>,
    pub drafts: Vec<(Vec<u32>, Vec<u32>)>,
}

/// Reads `prompt` in chunks of the given lengths (the last one again and again), then `after` in
/// steps of one and two tokens with a draft block after each. Logits are wanted from `kept` on.
pub fn read(
    s: &mut Session<Cpu>,
    prompt: &[u32],
    after: &[u32],
    chunks: &[usize],
    mode: Mode,
    kept: usize,
    probe: &mut impl Probe<Cpu>,
) -> Read {
    let len = prompt.len();
    let (from, window_from, complete_from) = match mode {
        Mode::Off => (0, 0, 0),
        Mode::Exact => (len.saturating_sub(span(s)), len.saturating_sub(span(s)), len - 1),
        Mode::Compact(keep) => (len.saturating_sub(keep), len.saturating_sub(keep), 0),
        Mode::Mask(keep) => (0, len.saturating_sub(keep), 0),
    };
    s.truncate(0, 0);
    let (mut found, mut at, mut next) =
        (Read { kept: vec![], after: vec![], drafts: vec![] }, 0, 0);
    while at < len {
        let size = chunks[next.min(chunks.len() - 1)].min(len - at);
        next += 1;
        let outputs: Vec<u32> = (0..size as u32).filter(|&row| at + row as usize >= kept).collect();
        let plan = PlanSequence {
            decoder_from: from as u32,
            decoder_window_from: window_from as u32,
            complete_from: complete_from as u32,
            ..s.extend(0, &prompt[at..at + size], &outputs)
        };
        let plan = StepPlan { sequences: vec![plan] };
        found.kept.extend(bits(s.run(&plan, probe).expect("it runs")));
        at += size;
    }
    let window_from = if mode == Mode::Exact { 0 } else { window_from };
    let mut done = 0;
    while done < after.len() {
        if s.drafts.is_some() {
            let (tokens, confidences) =
                s.draft(&[(0, after[done])], block(s), &mut GreedyDrafts).expect("it drafts");
            let confidences = confidences[0].iter().map(|x| x.to_bits()).collect();
            found.drafts.push((tokens[0].clone(), confidences));
        }
        let size = (1 + done % 2).min(after.len() - done);
        let outputs: Vec<u32> = (0..size as u32).collect();
        let plan = PlanSequence {
            decoder_window_from: window_from as u32,
            ..s.extend(0, &after[done..done + size], &outputs)
        };
        let plan = StepPlan { sequences: vec![plan] };
        found.after.extend(bits(s.run(&plan, &mut NoProbe).expect("it runs")));
        done += size;
    }
    found
}

/// One prompt in all modes: `exact` as `off`, `compact` as `mask`, whatever the chunks.
pub fn check(
    s: &mut Session<Cpu>,
    prompt: &[u32],
    after: &[u32],
    chunks: &[usize],
    keep: usize,
    name: &str,
) {
    let len = prompt.len();
    let off = read(s, prompt, after, &[len], Mode::Off, len - 1, &mut NoProbe);
    let mut counts = RowCount::default();
    let exact = read(s, prompt, after, chunks, Mode::Exact, len - 1, &mut counts);
    assert_eq!(exact, off, "{name}: exact, {len} tokens in chunks of {chunks:?}");
    check_counts(s, &counts, len, name);
    let kept = len.saturating_sub(keep);
    let mask = read(s, prompt, after, &[len], Mode::Mask(keep), kept, &mut NoProbe);
    let compact = read(s, prompt, after, chunks, Mode::Compact(keep), kept, &mut NoProbe);
    assert_eq!(compact, mask, "{name}: compact of {keep}, {len} tokens in chunks of {chunks:?}");
}

/// Layers before the decoder run every row; the decoder's layers run those that matter: the last
/// one a window, each one before it a window less one more.
fn check_counts(s: &Session<Cpu>, counts: &RowCount, len: usize, name: &str) {
    let (layers, window) = decoder(s);
    let before = s.model.layers().len() - layers;
    let matter = (0..layers).map(|depth| len.min((layers - depth) * (window - 1) + 1));
    let expected: Vec<usize> = std::iter::repeat_n(len, before).chain(matter).collect();
    assert_eq!(counts.attention, expected, "{name}: rows through attention");
    assert_eq!(counts.experts, expected, "{name}: rows through experts");
}

fn block(s: &Session<Cpu>) -> usize {
    s.model.config.text_config.dspark_block_size
}

fn bits(logits: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    logits.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

/// Checks `count` random (length, chunks, keep) triples of at most `longest` tokens.
pub fn check_random(s: &mut Session<Cpu>, count: usize, longest: usize, vocab: u32, name: &str) {
    let mut random = Random(count as u64 + longest as u64);
    let (_, window) = decoder(s);
    let least = window + s.caches.geometry.backtracking;
    for _ in 0..count {
        let len = 1 + random.below(longest);
        let mut text = |n: usize| -> Vec<u32> {
            (0..n).map(|_| random.below(vocab as usize) as u32).collect()
        };
        let (prompt, after) = (text(len), text(window + 3));
        let chunks: Vec<usize> =
            (0..1 + random.below(4)).map(|_| 1 + random.below(len.div_ceil(2))).collect();
        let keep = least + random.below(len + 1);
        check(s, &prompt, &after, &chunks, keep, name);
    }
}
