//! What the prefix cache keeps and gives up when requests wait for room, over a simulated worker.

mod random;
mod simulation;

use deepinfer::cache::tiers::Tiers;
use deepinfer::engine::PrefillMode;
use deepinfer::metrics::Metrics;
use deepinfer::output::OutputText;
use deepinfer::request::{Completion, RequestHandle, RequestId, SamplingParams, event_queue};
use deepinfer::schedule::{Held, Scheduler};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use simulation::{Simulation, VOCAB, next, shape};
use std::sync::Arc;
use std::time::Instant;

struct Engine {
    steps: StepLoop<Inline<Simulation>>,
    requests: u64,
}

struct Running {
    prompt: Vec<u32>,
    handle: RequestHandle,
    completion: Completion,
    ended: bool,
}

impl Engine {
    fn new(pages: usize, snapshots: usize, tiers: Tiers) -> Self {
        let mut shape = shape(pages, 4, PrefillMode::Exact, 0);
        shape.device_snapshots = snapshots;
        let worker = Simulation::new(&shape);
        let scheduler = Scheduler::new(shape, tiers, Arc::new(Metrics::default()));
        Self { steps: StepLoop::new(scheduler, Inline::new(worker), true), requests: 0 }
    }

    fn submit(&mut self, prompt: &[u32], max_tokens: usize, salt: Option<String>) -> Running {
        let id = RequestId(self.requests);
        self.requests += 1;
        let (sink, handle) = event_queue(id);
        self.steps.scheduler.submit(Arrival {
            id,
            priority: 0,
            salt,
            params: SamplingParams {
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                ..SamplingParams::default()
            },
            prompt: prompt.to_vec(),
            seed: 0,
            max_len: prompt.len() + max_tokens,
            form: Form::Free,
            leader: None,
            text: OutputText::new(None, Vec::new()),
            sink,
            time: Instant::now(),
        });
        let (prompt, completion) = (prompt.to_vec(), Completion::default());
        Running { prompt, handle, completion, ended: false }
    }

    fn held(&self) -> Held {
        self.steps.scheduler.held()
    }

    /// Runs until a request has ended. Returns it.
    fn finish(&mut self, mut request: Running) -> Completion {
        for _ in 0..1000 {
            if request.poll() {
                return request.completion;
            }
            self.steps.step().expect("the simulation does not fail");
        }
        panic!("the request comes to an end");
    }

    fn run(&mut self, prompt: &[u32], max_tokens: usize, salt: Option<String>) -> Completion {
        let request = self.submit(prompt, max_tokens, salt);
        self.finish(request)
    }
}

impl Running {
    /// Takes in what has come. Returns whether it has ended; what it gave is right, then.
    fn poll(&mut self) -> bool {
        while let Some(event) = self.handle.try_recv() {
            self.ended = self.completion.push(event).expect("no failures");
        }
        if self.ended {
            let mut text = self.prompt.clone();
            for token in self.completion.ids() {
                assert_eq!(token, next(0, &text));
                text.push(token);
            }
        }
        self.ended
    }
}

/// A text that begins like no other one.
fn text(start: u32, len: usize) -> Vec<u32> {
    std::iter::once(start).chain((1..len as u32).map(|i| 1 + (i * i) % (VOCAB - 1))).collect()
}

#[test]
fn a_request_that_waits_for_room_leaves_the_cache_alone() {
    let mut engine = Engine::new(60, 40, Tiers::default());
    engine.run(&text(1, 41), 1, None);
    engine.run(&text(2, 21), 1, None);

    // Two requests hold 37 pages and more, so the next turn of the first text has to wait.
    let mut others = [engine.submit(&text(3, 80), 8, None), engine.submit(&text(4, 60), 8, None)];
    while engine.held().queued_tokens > 0 {
        engine.steps.step().expect("the simulation does not fail");
    }
    let turn = [text(1, 41), text(5, 74)].concat();
    let waiting = engine.submit(&turn, 1, None);
    let (mut before, mut waited) = (engine.held(), 0);
    loop {
        engine.steps.step().expect("the simulation does not fail");
        let held = engine.held();
        if others.iter_mut().any(Running::poll) {
            break;
        }
        assert_eq!(held.queued_tokens, turn.len(), "it waits");
        assert!(held.cached_pages >= before.cached_pages, "{held:?} after {before:?}");
        assert!(held.cached_states >= before.cached_states, "{held:?} after {before:?}");
        (before, waited) = (held, waited + 1);
    }
    assert!(waited >= 3, "it waited {waited} steps");
    assert_eq!(engine.finish(waiting).usage.cached_tokens, 41);
    engine.steps.scheduler.clear_prefix_cache();
}

/// A hit's open page is copied, so the request and the cache hold it twice for a moment: where that
/// is more than there is, the request goes on without the hit.
#[test]
fn a_request_as_large_as_the_pool_does_not_wait_for_its_own_prefix() {
    let mut engine = Engine::new(24, 4, Tiers::default());
    engine.run(&text(1, 41), 1, None);
    let turn = [text(1, 41), text(2, 52)].concat();
    let result = engine.run(&turn, 1, None);
    assert_eq!(result.usage.cached_tokens, 0);
    // With a page less it fits beside it.
    let mut engine = Engine::new(24, 4, Tiers::default());
    engine.run(&text(1, 41), 1, None);
    assert_eq!(engine.run(&turn[..90], 1, None).usage.cached_tokens, 41);
}

/// The index knows what is somewhere, and nothing else, whatever texts and salts there were.
#[test]
fn the_index_does_not_outgrow_what_it_names() {
    let folder = tempfile::tempdir().expect("a folder");
    // Pages and states of the device, entries of the lower tiers (a page has 16 bytes; a file has
    // more than 200), and at most as many roots.
    let disk = Tiers::disk(500, folder.path(), 20_000, b"simulation").expect("opens");
    for (tiers, most) in [
        (Tiers::default(), 2 * (40 + 4)),
        (Tiers::host(2000), 2 * (40 + 4 + 2000 / 16)),
        (disk, 2 * (40 + 4 + 500 / 16 + 20_000 / 200)),
    ] {
        let mut engine = Engine::new(40, 4, tiers);
        for i in 0..150 {
            let mut prompt = text(1 + i % 39, 30);
            prompt[1] = 1 + i / 39;
            let salt = (i % 3 > 0).then(|| i.to_string());
            engine.run(&prompt, 2, salt);
            let known = engine.steps.scheduler.known_prefixes();
            assert!(known <= most, "{known} of {most} after {i}");
        }
    }
    let mut engine = Engine::new(40, 4, Tiers::default());
    engine.run(&text(1, 30), 2, Some("salt".to_owned()));
    assert!(engine.steps.scheduler.known_prefixes() > 0);
    engine.steps.scheduler.clear_prefix_cache();
    assert_eq!(engine.steps.scheduler.known_prefixes(), 0);
}

/// Pipes stand for files of a directory that hangs: reading one waits for somebody to write.
#[cfg(unix)]
#[test]
fn requests_whose_prefix_does_not_come_hold_nobody_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let tiers = || Tiers::disk(0, folder.path(), 1 << 20, b"simulation").expect("opens");
    let mut engine = Engine::new(60, 4, tiers());
    for first in 1..=4 {
        engine.run(&text(first, 20), 2, None);
    }
    drop(engine);
    let mut engine = Engine::new(60, 4, tiers());
    let files = std::fs::read_dir(folder.path()).expect("is there").flatten();
    let files: Vec<_> = files.map(|file| file.path()).collect();
    for file in &files {
        std::fs::remove_file(file).expect("is there");
        let made = std::process::Command::new("mkfifo").arg(file).status().expect("mkfifo runs");
        assert!(made.success());
    }
    let mut waiting: Vec<_> = (1..=4).map(|i| engine.submit(&text(i, 20), 2, None)).collect();
    let other = engine.submit(&text(9, 20), 2, None);
    assert_eq!(engine.finish(other).tokens.len(), 2);
    assert!(waiting.iter_mut().all(|request| !request.poll()), "theirs are being read");
    for file in &files {
        let end = std::fs::File::options().read(true).write(true).open(file).expect("is there");
        std::fs::remove_file(file).expect("is there");
        drop(end);
    }
    while !waiting.iter_mut().all(Running::poll) {
        engine.steps.step().expect("the simulation does not fail");
        std::thread::yield_now();
    }
    assert!(waiting.iter().all(|request| request.completion.usage.cached_tokens == 0));
}
