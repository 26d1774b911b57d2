//! A worker without a model that checks what the scheduler tells it: every row that would be read
//! must have been written, by the right text, and decoder rows must be as complete as the prefill
//! mode promises. The next token is a hash of the text and the seed.
#![allow(dead_code)]

use super::random::mix;
use deepinfer::cache::Snapshot;
use deepinfer::drafting::{rates, share};
use deepinfer::engine::PrefillMode;
use deepinfer::request::{Token, TokenLogprobs};
use deepinfer::schedule::Shape;
use deepinfer::work::{Done, Op, SequenceDone, Work, Worker};
use deepinfer_device::DeviceError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const PAGE: usize = 4;
pub const WINDOW: usize = 3;
pub const LAYERS: usize = 2;
pub const BACK: usize = 4;
pub const RING: usize = WINDOW + BACK;
pub const VOCAB: u32 = 40;
pub const END: u32 = 0;

/// Numbers of a small engine.
pub fn shape(pages: usize, max_seqs: usize, prefill: PrefillMode, drafts: usize) -> Shape {
    let slack = 2 * (drafts + 1);
    let max_tokens = (pages * PAGE - slack).min(120);
    Shape {
        page_tokens: PAGE,
        pages,
        sequence_pages: (max_tokens + slack).div_ceil(PAGE),
        max_seqs,
        rows: 24.max(max_seqs + 1),
        outputs: (max_seqs * (drafts + 1)).min(24.max(max_seqs + 1)),
        chunk: 11,
        backtracking: BACK,
        context: 2,
        span: LAYERS * (WINDOW - 1) + 1,
        prefill,
        keep: WINDOW + BACK,
        max_tokens,
        drafts,
        adapt_drafts: false,
        costs: Default::default(),
        prefix_cache: true,
        device_snapshots: 4,
        identity: b"simulation".to_vec(),
        swap_bytes: 1 << 20,
        slot_bytes: RING * 7 * 4,
        page_bytes: PAGE * 4,
        ends: vec![END],
        vocab: VOCAB as usize,
        image_token: None,
        max_queued_requests: 1000,
        max_queued_tokens: 1 << 20,
        max_wait: None,
    }
}

/// The token after `text`.
pub fn next(seed: u64, text: &[u32]) -> u32 {
    let hash = text.iter().fold(mix(seed + 1), |h, &t| mix(h ^ u64::from(t) ^ 0x9e37_79b9));
    (hash % u64::from(VOCAB)) as u32
}

const NOTHING: u32 = u32::MAX;

/// A row of a decoder window.
#[derive(Clone, Copy, PartialEq)]
struct Decoded {
    position: u32,
    token: u32,
    /// How many decoder layers have the input that a full pass would give them (plus one for the
    /// output).
    level: u32,
    /// How many decoder layers it went through.
    layers: u32,
    /// Where windows began.
    from: u32,
}

#[derive(Clone)]
struct Rings {
    encoder: Vec<(u32, u32)>,
    decoder: Vec<Decoded>,
}

impl Rings {
    fn new() -> Self {
        let none = Decoded { position: NOTHING, token: NOTHING, level: 0, layers: 0, from: 0 };
        Self { encoder: vec![(NOTHING, NOTHING); RING], decoder: vec![none; RING] }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut words = Vec::new();
        self.encoder.iter().for_each(|&(p, t)| words.extend([p, t]));
        self.decoder.iter().for_each(|d| {
            words.extend([d.position, d.token, d.level, d.layers, d.from]);
        });
        words.resize(RING * 7, 0);
        bytes(&words)
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let words = words(bytes);
        let (encoder, decoder) = words.split_at(RING * 2);
        Self {
            encoder: encoder.chunks(2).map(|w| (w[0], w[1])).collect(),
            decoder: decoder
                .chunks(5)
                .map(|w| Decoded {
                    position: w[0],
                    token: w[1],
                    level: w[2],
                    layers: w[3],
                    from: w[4],
                })
                .collect(),
        }
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

struct Text {
    seed: u64,
    prompt_len: usize,
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    confidences: Vec<f32>,
}

/// The worker.
pub struct Simulation {
    shape: Shape,
    pages: Vec<Vec<u32>>,
    rings: Vec<Rings>,
    texts: Vec<Option<Text>>,
    /// Rows of prompts whose log-probabilities were computed.
    pub logprob_rows: Arc<AtomicUsize>,
    /// Slots that were copied.
    pub slot_copies: Arc<AtomicUsize>,
    /// Rows run by the decoder, for comparison of prefill modes.
    pub decoder_rows: usize,
}

impl Simulation {
    pub fn new(shape: &Shape) -> Self {
        let slots = shape.max_seqs + shape.device_snapshots;
        Self {
            pages: vec![vec![NOTHING; PAGE]; shape.pages],
            rings: vec![Rings::new(); slots],
            texts: (0..slots).map(|_| None).collect(),
            shape: shape.clone(),
            logprob_rows: Arc::default(),
            slot_copies: Arc::default(),
            decoder_rows: 0,
        }
    }

    fn apply(&mut self, op: Op, done: &mut Done) {
        match op {
            Op::Open(opening) => {
                let slot = opening.slot as usize;
                assert!(self.texts[slot].is_none(), "slot {slot} is taken");
                self.texts[slot] = Some(Text {
                    seed: opening.seed,
                    prompt_len: opening.prompt_len,
                    tokens: opening.tokens,
                    drafts: Vec::new(),
                    confidences: Vec::new(),
                });
            }
            Op::Close { slot } => {
                assert!(self.texts[slot as usize].take().is_some(), "slot {slot} is empty");
            }
            Op::CopySlot { from, to } => {
                self.slot_copies.fetch_add(1, Ordering::Relaxed);
                self.rings[to as usize] = self.rings[from as usize].clone();
            }
            Op::CopyPage { from, to } => {
                self.pages[to as usize] = self.pages[from as usize].clone();
            }
            Op::SaveState { name, slot, pages } => {
                let pages = pages.iter().map(|&p| bytes(&self.pages[p as usize])).collect();
                let slot = self.rings[slot as usize].to_bytes();
                done.states.push((name, Snapshot { slot, pages, ..Snapshot::default() }));
            }
            Op::SavePage { key, page } => {
                done.pages.push((key, bytes(&self.pages[page as usize])));
            }
            Op::LoadState { state, slot, pages } => {
                self.rings[slot as usize] = Rings::from_bytes(&state.slot);
                assert_eq!(state.pages.len(), pages.len(), "pages of a state");
                for (&page, bytes) in pages.iter().zip(&state.pages) {
                    self.pages[page as usize] = words(bytes);
                }
            }
            Op::LoadPage { bytes, page } => self.pages[page as usize] = words(&bytes),
        }
    }

    /// How many drafts each sequence verifies.
    fn shares(&self, work: &Work) -> Vec<usize> {
        let mut most = Vec::new();
        let mut chances = Vec::new();
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let text = self.texts[plan.slot as usize].as_ref().expect("the sequence is open");
            let verify = sequence.follow.unwrap_or(0) as usize;
            most.push(text.drafts.len().min(verify));
            let told = &text.confidences[..text.drafts.len().min(verify)];
            chances.push(rates(told, work.verify.as_ref().map_or(&[], |v| &v.correction)));
        }
        work.verify.as_ref().map_or(most, |verify| share(&chances, verify.count))
    }

    fn check_row(&self, text: &[u32], p: usize, start: usize, pages: &[u32], slot: usize) {
        for q in 0..start {
            let found = self.pages[pages[q / PAGE] as usize][q % PAGE];
            assert_eq!(found, text[q], "page row of position {q} read at {p}");
        }
        for q in (p + 1).saturating_sub(WINDOW)..start {
            let found = self.rings[slot].encoder[q % RING];
            assert_eq!(found, (q as u32, text[q]), "ring row of position {q} read at {p}");
        }
    }
}

impl Worker for Simulation {
    fn run(&mut self, mut work: Work) -> Result<Done, DeviceError> {
        let mut done = Done::default();
        for op in std::mem::take(&mut work.before) {
            self.apply(op, &mut done);
        }
        let mut rows = 0;
        let mut outputs = 0;
        let shares = self.shares(&work);
        let mut seen = std::collections::HashSet::new();
        let sequences = work.plan.sequences.iter().zip(&work.sequences);
        for ((plan, sequence), share) in sequences.zip(shares) {
            assert!(seen.insert(plan.slot), "a sequence runs once in a step");
            let slot = plan.slot as usize;
            let mut text = self.texts[slot].take().expect("the sequence is open");
            let mut result = SequenceDone::default();
            let (start, tokens) = match sequence.follow {
                Some(_) => {
                    let start = text.tokens.len() - 1;
                    let drafts = text.drafts.iter().take(share);
                    let tokens: Vec<u32> =
                        std::iter::once(text.tokens[start]).chain(drafts.copied()).collect();
                    (start, tokens)
                }
                None => (plan.start as usize, plan.tokens.clone()),
            };
            let end = start + tokens.len();
            rows += tokens.len();
            assert!(end <= plan.pages.len() * PAGE, "pages cover the rows");
            assert!(plan.pages.len() <= self.shape.sequence_pages);
            let mut full = text.tokens[..start].to_vec();
            full.extend(&tokens);
            if sequence.follow.is_none() {
                assert_eq!(full, text.tokens[..end], "given rows are the text");
                let from = start.saturating_sub(self.shape.context);
                assert_eq!(plan.context, text.tokens[from..start], "context");
            }
            for p in start..end {
                self.check_row(&full, p, start, &plan.pages, slot);
            }
            // The decoder.
            let depths: Vec<(usize, usize)> = (0..LAYERS as u32)
                .map(|depth| plan.rows_from(LAYERS as u32 - depth, WINDOW as u32))
                .map(|(from, window_from)| (from as usize, window_from as usize))
                .collect();
            let from = depths[0].0.clamp(start, end);
            let window_from = plan.decoder_window_from as usize;
            let mut fresh: Vec<Decoded> = Vec::new();
            for p in from..end {
                let mut level = 1;
                let layers = depths.iter().take_while(|&&(from, _)| p >= from).count();
                self.decoder_rows += layers;
                for (depth, &(_, reach)) in depths[..layers].iter().enumerate() {
                    let mut right = level == depth as u32 + 1;
                    for q in (p + 1).saturating_sub(WINDOW)..p {
                        if q < reach {
                            right = false;
                            continue;
                        }
                        let row = match q {
                            q if q >= from => Some(fresh[q - from]),
                            q if q >= start => None,
                            q => Some(self.rings[slot].decoder[q % RING])
                                .filter(|d| (d.position, d.token) == (q as u32, full[q])),
                        };
                        let row = row.filter(|row| row.layers as usize > depth);
                        let row = row.unwrap_or_else(|| panic!("decoder row of {q} read at {p}"));
                        right &= row.level as usize > depth;
                        let own = window_from as u32;
                        let compact = self.shape.prefill == PrefillMode::Compact;
                        assert!(!compact || row.from == own, "windows from {own}");
                    }
                    level += u32::from(right);
                }
                let (position, token, layers) = (p as u32, full[p], layers as u32);
                fresh.push(Decoded { position, token, level, layers, from: window_from as u32 });
            }
            let exact = matches!(self.shape.prefill, PrefillMode::Off | PrefillMode::Exact);
            if !exact {
                let keep = text.prompt_len.saturating_sub(self.shape.keep);
                assert_eq!(window_from, keep, "compact windows");
            }
            for p in start..end {
                self.pages[plan.pages[p / PAGE] as usize][p % PAGE] = full[p];
                self.rings[slot].encoder[p % RING] = (p as u32, full[p]);
                if p >= from {
                    self.rings[slot].decoder[p % RING] = fresh[p - from];
                }
            }
            if sequence.prompt_logprobs.is_some() {
                assert_eq!(plan.outputs, (0..tokens.len() as u32).collect::<Vec<_>>());
                outputs += tokens.len() - usize::from(sequence.sample);
                let known = (start + 1..(end + 1).min(text.prompt_len)).map(|p| TokenLogprobs {
                    token: text.tokens[p],
                    logprob: -1.0,
                    top: Vec::new(),
                });
                result.prompt_logprobs = known.collect();
                self.logprob_rows.fetch_add(tokens.len(), Ordering::Relaxed);
            }
            if sequence.sample {
                let choices = match sequence.follow {
                    Some(_) => start..end,
                    None => end - 1..end,
                };
                outputs += choices.len();
                result.verified = choices.len() as u32 - 1;
                for p in choices {
                    assert!(p >= from, "output row {p} runs the decoder");
                    let level = fresh[p - from].level;
                    assert!(!exact || level == LAYERS as u32 + 1, "output at {p}: level {level}");
                    let id = next(text.seed, &full[..=p]);
                    result.tokens.push(Token { id, logprobs: None });
                    text.tokens.push(id);
                    if full.get(p + 1) != Some(&id) {
                        break;
                    }
                }
                text.drafts.clear();
                text.confidences.clear();
                let a = text.tokens.len() - 1;
                if sequence.draft > 0 {
                    for q in a.saturating_sub(WINDOW)..a {
                        let row = self.rings[slot].decoder[q % RING];
                        if q >= window_from {
                            let found = (row.position, row.token);
                            assert_eq!(found, (q as u32, text.tokens[q]), "draft row at {a}");
                            assert!(!exact || row.level as usize >= LAYERS, "draft row at {a}");
                            assert_eq!(row.layers as usize, LAYERS, "draft row at {a}");
                        }
                    }
                    let mut ahead = text.tokens.clone();
                    for i in 0..sequence.draft {
                        let right = next(text.seed, &ahead);
                        let wrong =
                            mix(u64::from(right) + a as u64 + u64::from(i)).is_multiple_of(3);
                        let token = if wrong { (right + 1) % VOCAB } else { right };
                        ahead.push(token);
                        text.drafts.push(token);
                        text.confidences.push((mix(u64::from(token)) % 100) as f32 / 100.0);
                    }
                    result.confidences.clone_from(&text.confidences);
                }
            }
            self.texts[slot] = Some(text);
            done.sequences.push(result);
        }
        assert!(rows <= self.shape.rows, "{rows} rows");
        assert!(outputs <= self.shape.outputs, "{outputs} outputs");
        Ok(done)
    }
}
