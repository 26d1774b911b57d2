//! The line of those that wait: who is refused, who has waited too long, who goes first.

mod grammar_util;
mod random;
mod simulation;

use deepinfer::cache::tiers::Tiers;
use deepinfer::engine::PrefillMode;
use deepinfer::grammar::GrammarSpec;
use deepinfer::metrics::Metrics;
use deepinfer::output::OutputText;
use deepinfer::request::{
    Event, RequestError, RequestHandle, RequestId, SamplingParams, event_queue,
};
use deepinfer::schedule::{Scheduler, Shape};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use grammar_util::SMALL;
use simulation::{Simulation, shape};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A request for four tokens at most, of a prompt of so many.
fn arrival(id: u64, prompt: usize, leader: Option<u64>) -> (Arrival, RequestHandle) {
    let (sink, handle) = event_queue(RequestId(id));
    let arrival = Arrival {
        id: RequestId(id),
        priority: 0,
        salt: None,
        params: SamplingParams::default(),
        prompt: vec![1; prompt],
        seed: 0,
        max_len: prompt + 4,
        form: Form::Free,
        leader: leader.map(RequestId),
        text: OutputText::new(None, Vec::new()),
        sink,
        time: Instant::now(),
    };
    (arrival, handle)
}

fn arrive(scheduler: &mut Scheduler, id: u64, prompt: usize, leader: Option<u64>) -> RequestHandle {
    let (arrival, handle) = arrival(id, prompt, leader);
    scheduler.submit(arrival);
    handle
}

fn scheduler(shape: &Shape) -> Scheduler {
    Scheduler::new(shape.clone(), Tiers::default(), Arc::new(Metrics::default()))
}

fn steps(shape: &Shape) -> StepLoop<Inline<Simulation>> {
    StepLoop::new(scheduler(shape), Inline::new(Simulation::new(shape)), false)
}

#[test]
fn a_full_queue_is_told() {
    let mut shape = shape(4, 1, PrefillMode::Exact, 0);
    shape.max_queued_requests = 3;
    let mut scheduler = scheduler(&shape);
    let handles: Vec<_> = (0..4).map(|id| arrive(&mut scheduler, id, 2, None)).collect();
    let refused = handles[3].wait();
    assert_eq!(refused, Err(RequestError::QueueFull { waiting: 3, limit: 3 }));
    assert!(handles[0].try_recv().is_none());
}

#[test]
fn samples_of_a_prompt_count_once_against_the_queued_tokens() {
    let mut shape = shape(4, 1, PrefillMode::Exact, 0);
    shape.max_queued_tokens = 3;
    let mut scheduler = scheduler(&shape);
    let first = arrive(&mut scheduler, 0, 2, None);
    let sample = arrive(&mut scheduler, 1, 2, Some(0));
    let other = arrive(&mut scheduler, 2, 2, None);
    assert!(first.try_recv().is_none() && sample.try_recv().is_none());
    assert_eq!(other.wait(), Err(RequestError::QueueTokensFull { waiting: 2, limit: 3 }));
}

#[test]
fn samples_do_not_wait_too_long_while_their_prompt_is_read() {
    let mut shape = shape(40, 2, PrefillMode::Exact, 0);
    shape.max_wait = Some(Duration::from_secs(5));
    let mut steps = steps(&shape);
    let read = arrive(&mut steps.scheduler, 0, 40, None);
    let sample = arrive(&mut steps.scheduler, 1, 40, Some(0));
    steps.step().expect("a part of the prompt is read");
    let waits = arrive(&mut steps.scheduler, 2, 40, None);
    steps.scheduler.sweep(Instant::now() + Duration::from_secs(6));
    assert!(matches!(waits.wait(), Err(RequestError::WaitedTooLong { .. })));
    for _ in 0..50 {
        steps.step().expect("runs");
    }
    assert_eq!(read.wait().expect("served").tokens.len(), 4);
    assert_eq!(sample.wait().expect("served").tokens.len(), 4);
}

/// A wait in line begins when others no longer read the prompt: neither a leader that leaves nor
/// a full house makes a continuation late at once.
#[test]
fn a_wait_in_line_begins_when_nobody_leads() {
    for leaves in [true, false] {
        let mut shape = shape(40, 1, PrefillMode::Exact, 0);
        shape.max_wait = Some(Duration::from_secs(5));
        let mut steps = steps(&shape);
        let leader = arrive(&mut steps.scheduler, 0, 40, None);
        steps.step().expect("a part of the prompt is read");
        let (sample, follower) = arrival(1, 40, Some(0));
        let long_ago = Instant::now() - Duration::from_secs(60);
        steps.scheduler.submit(Arrival { time: long_ago, ..sample });
        if leaves {
            steps.scheduler.abort(RequestId(0));
        } else {
            while leader.usage().output_tokens == 0 {
                steps.step().expect("runs");
            }
        }
        steps.scheduler.sweep(Instant::now());
        for _ in 0..50 {
            steps.step().expect("runs");
        }
        assert_eq!(follower.wait().expect("served").tokens.len(), 4);
    }
}

/// Prompts count while their grammars are compiled, and no longer once their callers have gone.
#[test]
fn prompts_count_while_their_grammars_are_compiled() {
    let mut shape = shape(4, 1, PrefillMode::Exact, 0);
    shape.max_queued_tokens = 3;
    let mut scheduler = scheduler(&shape);
    let (first, waits) = arrival(0, 2, None);
    scheduler.submit(Arrival {
        form: Form::Pending(SMALL.compiler.submit(GrammarSpec::JsonObject)),
        ..first
    });
    assert_eq!(scheduler.held().queued_tokens, 2);
    let refused = arrive(&mut scheduler, 1, 2, None);
    assert_eq!(refused.wait(), Err(RequestError::QueueTokensFull { waiting: 2, limit: 3 }));
    drop(waits);
    scheduler.sweep(Instant::now());
    assert_eq!(scheduler.held(), Default::default());
}

/// One long prompt whose log-probabilities are wanted leaves others an output in each step.
#[test]
fn log_probabilities_of_a_long_prompt_keep_nobody_waiting() {
    let shape = shape(60, 4, PrefillMode::Exact, 0);
    let mut steps = steps(&shape);
    let (mut long, reader) = arrival(0, 100, None);
    long.params.prompt_logprobs = Some(0);
    steps.scheduler.submit(long);
    let short = arrive(&mut steps.scheduler, 1, 4, None);
    for _ in 0..6 {
        steps.step().expect("runs");
    }
    assert_eq!(short.usage().output_tokens, 4, "the short one has been served");
    assert_eq!(reader.usage().output_tokens, 0, "the long prompt is still being read");
    while reader.usage().output_tokens == 0 {
        steps.step().expect("runs");
    }
    let read = std::iter::from_fn(|| reader.try_recv()).find_map(|event| match event {
        Event::PromptRead { logprobs, .. } => Some(logprobs.len()),
        _ => None,
    });
    assert_eq!(read, Some(99));
}

/// Nor do several keep a long prompt from the rows that they cannot use.
#[test]
fn rows_that_log_probabilities_cannot_use_are_for_others() {
    let shape = shape(100, 4, PrefillMode::Exact, 0);
    let mut steps = steps(&shape);
    let readers: Vec<RequestHandle> = (0..2)
        .map(|id| {
            let (mut long, reader) = arrival(id, 100, None);
            long.params.prompt_logprobs = Some(0);
            steps.scheduler.submit(long);
            reader
        })
        .collect();
    let plain = arrive(&mut steps.scheduler, 2, 100, None);
    for _ in 0..100usize.div_ceil(shape.chunk) + 1 {
        steps.step().expect("runs");
    }
    assert!(plain.usage().output_tokens > 0, "the prompt has been read");
    assert!(readers.iter().all(|reader| reader.usage().output_tokens == 0));
}

/// What has been told of a prompt is not computed again for a request that lost its place.
#[test]
fn log_probabilities_are_computed_once() {
    let mut shape = shape(14, 2, PrefillMode::Exact, 0);
    shape.swap_bytes = 0;
    shape.prefix_cache = false;
    let worker = Simulation::new(&shape);
    let (rows, metrics) = (worker.logprob_rows.clone(), Arc::new(Metrics::default()));
    let scheduler = Scheduler::new(shape, Tiers::default(), metrics.clone());
    let mut steps = StepLoop::new(scheduler, Inline::new(worker), false);
    let handles: Vec<RequestHandle> = (0..2)
        .map(|id| {
            let (mut arrival, handle) = arrival(id, 20, None);
            arrival.params.prompt_logprobs = Some(0);
            arrival.params.ignore_eos = true;
            arrival.max_len = 40;
            arrival.seed = id;
            steps.scheduler.submit(arrival);
            handle
        })
        .collect();
    while handles.iter().any(|handle| handle.usage().output_tokens < 20) {
        steps.step().expect("runs");
    }
    assert!(metrics.recomputed.get() > 0, "the pool is small enough");
    // The last row of a prompt has no token after it, and may or may not run with others.
    assert!((38..=40).contains(&rows.load(Ordering::Relaxed)));
}

/// Every request ends up in one of the counters, and its tokens in another.
#[test]
fn every_end_is_counted() {
    let mut shape = shape(40, 1, PrefillMode::Exact, 0);
    shape.max_queued_requests = 2;
    let metrics = Arc::new(Metrics::default());
    let scheduler = Scheduler::new(shape.clone(), Tiers::default(), metrics.clone());
    let mut steps = StepLoop::new(scheduler, Inline::new(Simulation::new(&shape)), false);
    let served = arrive(&mut steps.scheduler, 0, 4, None);
    steps.step().expect("runs");
    let leaves = arrive(&mut steps.scheduler, 1, 4, None);
    let fails = arrive(&mut steps.scheduler, 2, 4, None);
    let refused = arrive(&mut steps.scheduler, 3, 4, None);
    assert!(refused.wait().is_err());
    drop(leaves);
    steps.scheduler.sweep(Instant::now());
    while served.usage().output_tokens < 4 {
        steps.step().expect("runs");
    }
    steps.step().expect("runs");
    steps.scheduler.fail_all(&RequestError::Stopped { reason: "of a test".into() });
    assert!(fails.wait().is_err());
    let ends = [&metrics.finished, &metrics.aborted, &metrics.failed].map(|c| c.get());
    assert_eq!(ends, [1, 1, 2]);
    let produced = served.usage().output_tokens + fails.usage().output_tokens;
    assert_eq!(metrics.output_tokens.get(), produced as u64);
}
