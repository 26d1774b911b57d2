//! Tokens a second of the scheduler with a device that does nothing: what the loop itself costs.
//!
//! ```text
//! cargo bench -p deepinfer --bench scheduler
//! ```

use deepinfer::cache::tiers::Tiers;
use deepinfer::engine::PrefillMode;
use deepinfer::metrics::Metrics;
use deepinfer::output::OutputText;
use deepinfer::request::{RequestId, SamplingParams, Token, event_queue};
use deepinfer::schedule::{Scheduler, Shape};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use deepinfer::work::{Done, SequenceDone, Work, Worker};
use deepinfer_device::DeviceError;
use std::sync::Arc;
use std::time::Instant;

/// Accepts every draft and chooses token 7.
struct Nothing;

impl Worker for Nothing {
    fn run(&mut self, work: Work) -> Result<Done, DeviceError> {
        let each = |sequence: &deepinfer::work::SequenceWork| {
            let verified = sequence.follow.unwrap_or(0);
            let count = if sequence.sample { 1 + verified as usize } else { 0 };
            let tokens = vec![Token { id: 7, logprobs: None }; count];
            SequenceDone { tokens, verified, ..SequenceDone::default() }
        };
        let sequences = work.sequences.iter().map(each).collect();
        Ok(Done { sequences, ..Done::default() })
    }
}

fn shape(drafts: usize) -> Shape {
    Shape {
        page_tokens: 128,
        pages: 8192,
        sequence_pages: 64,
        max_seqs: 256,
        rows: 4096,
        outputs: 4096,
        chunk: 512,
        backtracking: 6,
        context: 3,
        span: 2541,
        prefill: PrefillMode::Exact,
        keep: 140,
        max_tokens: 8000,
        drafts,
        adapt_drafts: false,
        costs: Default::default(),
        prefix_cache: true,
        device_snapshots: 64,
        identity: Vec::new(),
        swap_bytes: 0,
        slot_bytes: 3 << 20,
        page_bytes: 114 << 10,
        ends: vec![1],
        vocab: 129_280,
        image_token: None,
        max_queued_requests: 10_000,
        max_queued_tokens: 1 << 30,
        max_wait: None,
    }
}

/// Runs `count` requests of `prompt` and `output` tokens; returns tokens a second.
fn run(drafts: usize, count: u64, prompt: usize, output: usize) -> f64 {
    let scheduler = Scheduler::new(shape(drafts), Tiers::default(), Arc::new(Metrics::default()));
    let mut steps = StepLoop::new(scheduler, Inline::new(Nothing), true);
    let mut handles = Vec::new();
    for i in 0..count {
        let (sink, handle) = event_queue(RequestId(i));
        handles.push(handle);
        steps.scheduler.submit(Arrival {
            id: RequestId(i),
            priority: 0,
            salt: None,
            params: SamplingParams::greedy(),
            prompt: (0..prompt as u32).map(|j| 100 + j * 7 + i as u32).collect(),
            seed: 0,
            max_len: prompt + output,
            form: Form::Free,
            leader: None,
            text: OutputText::new(None, Vec::new()),
            sink,
            time: Instant::now(),
        });
    }
    let start = Instant::now();
    let mut tokens = 0;
    while !steps.scheduler.is_idle() {
        if steps.step().is_err() {
            return 0.0;
        }
        // A caller reads along.
        for handle in &handles {
            while let Some(event) = handle.try_recv() {
                if let deepinfer::request::Event::Tokens { tokens: new, .. } = event {
                    tokens += new.len();
                }
            }
        }
    }
    tokens as f64 / start.elapsed().as_secs_f64()
}

fn main() {
    for (drafts, prompt) in [(0, 100), (3, 100), (0, 2000)] {
        let mut rates: Vec<f64> = (0..5).map(|_| run(drafts, 256, prompt, 1000)).collect();
        rates.sort_by(f64::total_cmp);
        println!("256 sequences, prompts of {prompt}, {drafts} drafts: {:.0} tokens/s", rates[2]);
    }
}
