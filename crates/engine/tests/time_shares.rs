//! How a long prompt, running requests and newcomers share a device, in the time of a simulated
//! one: nothing here depends on how fast the test runs.

use deepinfer::cache::tiers::Tiers;
use deepinfer::engine::PrefillMode;
use deepinfer::metrics::Metrics;
use deepinfer::output::OutputText;
use deepinfer::request::{Event, RequestHandle, RequestId, SamplingParams, Token, event_queue};
use deepinfer::schedule::{Scheduler, Shape};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use deepinfer::work::{Done, SequenceDone, SequenceWork, Work, Worker};
use deepinfer_device::DeviceError;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A device whose steps take time by its own clock.
#[derive(Clone)]
struct Clocked {
    clock: Arc<Mutex<f64>>,
    /// Seconds of a step, of a decoding row, of a step's having prompt rows at all, and of a prompt
    /// row at position 0; the last doubles every `double` positions.
    step: f64,
    decode_row: f64,
    prompts: f64,
    prompt_row: f64,
    double: f64,
    /// Steps take so much more or less, at most, as part of their time.
    noise: f64,
    random: u64,
}

impl Clocked {
    fn now(&self) -> f64 {
        *self.clock.lock().expect("no panics")
    }
}

impl Worker for Clocked {
    fn run(&mut self, work: Work) -> Result<Done, DeviceError> {
        let mut seconds = if work.sequences.is_empty() { 0.0 } else { self.step };
        let (mut sequences, mut prompts) = (Vec::new(), false);
        for (plan, sequence) in work.plan.sequences.iter().zip(&work.sequences) {
            let SequenceWork { sample, follow, .. } = sequence;
            if follow.is_some() {
                seconds += self.decode_row;
            }
            if sequence.follow.is_none() && !prompts {
                prompts = true;
                seconds += self.prompts;
            }
            let depth = 1.0 + f64::from(plan.start) / self.double;
            seconds += plan.tokens.len() as f64 * self.prompt_row * depth;
            let tokens = vec![Token { id: 7, logprobs: None }; usize::from(*sample)];
            sequences.push(SequenceDone { tokens, ..SequenceDone::default() });
        }
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        seconds *= 1.0 + self.noise * ((self.random >> 33) as f64 / f64::from(1 << 30) - 1.0);
        *self.clock.lock().expect("no panics") += seconds;
        Ok(Done { sequences, seconds, ..Done::default() })
    }
}

fn shape() -> Shape {
    Shape {
        page_tokens: 128,
        pages: 4096,
        sequence_pages: 1024,
        max_seqs: 16,
        rows: 1024,
        outputs: 16,
        chunk: 512,
        backtracking: 6,
        context: 3,
        span: 2541,
        prefill: PrefillMode::Exact,
        keep: 140,
        max_tokens: 131_000,
        drafts: 0,
        adapt_drafts: false,
        costs: Default::default(),
        prefix_cache: false,
        device_snapshots: 0,
        identity: Vec::new(),
        swap_bytes: 0,
        slot_bytes: 0,
        page_bytes: 0,
        ends: vec![1],
        vocab: 1000,
        image_token: None,
        max_queued_requests: 1000,
        max_queued_tokens: 1 << 30,
        max_wait: None,
    }
}

struct Machine {
    steps: StepLoop<Inline<Clocked>>,
    submitted: u64,
}

impl Machine {
    fn new(device: Clocked, overlap: bool) -> Self {
        *device.clock.lock().expect("no panics") = 0.0;
        let scheduler = Scheduler::new(shape(), Tiers::default(), Arc::new(Metrics::default()));
        let steps = StepLoop::new(scheduler, Inline::new(device), overlap);
        Self { steps, submitted: 0 }
    }

    fn submit(&mut self, prompt: usize, output: usize) -> RequestHandle {
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let (sink, handle) = event_queue(id);
        self.steps.scheduler.submit(Arrival {
            id,
            priority: 0,
            salt: None,
            params: SamplingParams::greedy(),
            prompt: vec![2; prompt],
            seed: 0,
            max_len: prompt + output,
            form: Form::Free,
            leader: None,
            text: OutputText::new(None, Vec::new()),
            sink,
            time: Instant::now(),
        });
        handle
    }

    fn turn(&mut self) {
        self.steps.step().expect("the simulation does not fail");
    }
}

fn tokens(handle: &RequestHandle) -> usize {
    let mut count = 0;
    while let Some(event) = handle.try_recv() {
        if let Event::Tokens { tokens, .. } = event {
            count += tokens.len();
        }
    }
    count
}

fn check(device: &Clocked, overlap: bool) {
    const LONG: usize = 100_000;
    let mut machine = Machine::new(device.clone(), overlap);
    let long = machine.submit(LONG, 1);
    while tokens(&long) == 0 {
        machine.turn();
    }
    let alone = device.now();

    let mut machine = Machine::new(device.clone(), overlap);
    let running: Vec<RequestHandle> = (0..4).map(|_| machine.submit(50, 30_000)).collect();
    let count = || running.iter().map(tokens).sum::<usize>() as f64;
    while device.now() < 5.0 {
        machine.turn();
    }
    count();
    let start = device.now();
    while device.now() < start + 5.0 {
        machine.turn();
    }
    let quiet = count() / (device.now() - start);

    let start = device.now();
    let long = machine.submit(LONG, 1);
    let (mut window, mut newcomer) = (device.now(), None);
    let (mut slowest, mut latest, mut arrived) = (f64::INFINITY, 0.0f64, 0);
    while tokens(&long) == 0 {
        machine.turn();
        if device.now() - window >= 2.0 {
            slowest = slowest.min(count() / (device.now() - window));
            window = device.now();
        }
        match &newcomer {
            None if device.now() - start > arrived as f64 * alone / 10.0 => {
                arrived += 1;
                newcomer = Some((machine.submit(100, 5), device.now()));
            }
            Some((handle, time)) if tokens(handle) > 0 => {
                latest = latest.max(device.now() - time);
                newcomer = None;
            }
            _ => {}
        }
    }
    let beside = device.now() - start;
    println!(
        "newcomers {:.2}%, running {:.0}%, prompt {:.2} times",
        100.0 * latest / alone,
        100.0 * slowest / quiet,
        beside / alone
    );
    assert!(arrived > 5, "newcomers came");
    assert!(
        latest < 0.02 * alone,
        "a newcomer waited {latest:.3} s, the prompt alone takes {alone:.1} s"
    );
    assert!(slowest >= 0.5 * quiet, "{slowest:.1} of {quiet:.1} tokens/s are left");
    assert!(beside <= 2.2 * alone, "the prompt took {beside:.1} s, alone {alone:.1} s");
}

/// Short requests that never stop coming do not keep a long prompt from its end.
#[test]
fn newcomers_do_not_stop_a_long_prompt() {
    let device = Clocked {
        clock: Arc::new(Mutex::new(0.0)),
        step: 0.3,
        decode_row: 0.001,
        prompts: 0.0,
        prompt_row: 0.001,
        double: 400_000.0,
        noise: 0.0,
        random: 1,
    };
    for overlap in [false, true] {
        let mut machine = Machine::new(device.clone(), overlap);
        let running: Vec<RequestHandle> = (0..4).map(|_| machine.submit(50, 30_000)).collect();
        let long = machine.submit(60_000, 1);
        let mut turns = 0;
        while tokens(&long) == 0 {
            // It ends with its first token.
            drop(machine.submit(16, 1));
            machine.turn();
            turns += 1;
            assert!(turns < 3_000, "overlap {overlap}: the long prompt does not end");
        }
        assert!(running.iter().map(tokens).sum::<usize>() > turns, "decoding goes on");
    }
}

#[test]
fn nobody_starves() {
    let clock = Arc::new(Mutex::new(0.0));
    for overlap in [false, true] {
        for (step, decode_row, prompts, prompt_row, double, noise) in [
            // A small model on a CPU, a large one, a GPU; steps that cost more for having prompts;
            // steps of uneven length.
            (0.003, 0.001, 0.0, 0.0004, 100_000.0, 0.0),
            (0.3, 0.05, 0.0, 0.02, 400_000.0, 0.0),
            (0.01, 0.0002, 0.0, 0.00005, 50_000.0, 0.0),
            (0.02, 0.001, 0.008, 0.0002, 100_000.0, 0.0),
            (0.1, 0.004, 0.01, 0.001, 100_000.0, 0.0),
            (0.003, 0.001, 0.0, 0.0004, 100_000.0, 0.2),
        ] {
            let clock = clock.clone();
            let random = 1;
            let device =
                Clocked { clock, step, decode_row, prompts, prompt_row, double, noise, random };
            check(&device, overlap);
        }
    }
}
