//! The scheduler over a simulated worker: random requests, arrivals, aborts and pool sizes. Every
//! request gives its own tokens, every row read has been written, and nothing is left at the end.

mod random;
mod simulation;

use deepinfer::cache::tiers::Tiers;
use deepinfer::drafting::CostCurve;
use deepinfer::engine::PrefillMode;
use deepinfer::metrics::Metrics;
use deepinfer::output::OutputText;
use deepinfer::request::{
    Completion, FinishReason, RequestHandle, RequestId, SamplingParams, event_queue,
};
use deepinfer::schedule::{Held, Scheduler};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use proptest::prelude::*;
use simulation::{END, Simulation, VOCAB, next, shape};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

#[derive(Clone, Debug)]
struct Case {
    prompt: Vec<u32>,
    seed: u64,
    max_tokens: usize,
    priority: i32,
    draft: bool,
    /// Turns before it arrives, after the one before.
    wait: usize,
    /// Turns until the caller gives up.
    patience: Option<usize>,
    /// Goes on from the text of the one before, once that has ended.
    turn: bool,
    /// Continuations of the prompt.
    samples: usize,
    /// Has the prompt of the one before, but for a token so far from its end (0: for none).
    twist: Option<usize>,
}

fn case() -> impl Strategy<Value = Case> {
    // Prompts from few pieces share prefixes often.
    let piece = prop_oneof![
        Just(vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        Just(vec![1, 2, 3, 4, 5, 6, 7]),
        proptest::collection::vec(1..VOCAB, 1..9),
    ];
    let prompt = proptest::collection::vec(piece, 1..5).prop_map(|p| p.concat());
    let patience = proptest::option::weighted(0.2, 0usize..30);
    let turn = proptest::bool::weighted(0.3);
    let samples = prop_oneof![3 => Just(1usize), 1 => 2usize..5];
    let twist = proptest::option::weighted(0.3, 0usize..6);
    let numbers = (0u64..3, 1usize..20, 0i32..2, samples);
    let kind = (turn, twist);
    (prompt, numbers, any::<bool>(), 0usize..6, patience, kind).prop_map(
        |(prompt, numbers, draft, wait, patience, (turn, twist))| {
            let (seed, max_tokens, priority, samples) = numbers;
            Case { prompt, seed, max_tokens, priority, draft, wait, patience, turn, samples, twist }
        },
    )
}

/// Makes turns go on from the texts before them, and twists repeat the prompts before them.
fn converse(cases: &mut [Case]) {
    for i in 1..cases.len() {
        if let Some(back) = cases[i].twist {
            let (mut prompt, seed) = (cases[i - 1].prompt.clone(), cases[i - 1].seed);
            let at = prompt.len().checked_sub(back).filter(|&at| at < prompt.len());
            if let Some(at) = at {
                prompt[at] = 1 + prompt[at] % (VOCAB - 1);
            }
            cases[i] = Case { prompt, seed, ..cases[i].clone() };
        } else if cases[i].turn {
            let before = &cases[i - 1];
            let mut prompt = [before.prompt.clone(), expected(before)].concat();
            prompt.extend(cases[i].prompt.iter().take(3));
            let seed = before.seed;
            cases[i] = Case { prompt, seed, wait: 25, ..cases[i].clone() };
        }
    }
}

fn expected(case: &Case) -> Vec<u32> {
    let mut text = case.prompt.clone();
    for _ in 0..case.max_tokens {
        let token = next(case.seed, &text);
        text.push(token);
        if token == END {
            break;
        }
    }
    text.split_off(case.prompt.len())
}

#[derive(Clone, Debug)]
struct Setting {
    pages: usize,
    seqs: usize,
    prefill: PrefillMode,
    drafts: usize,
    auto: bool,
    overlap: bool,
    prefix_cache: bool,
    host_bytes: usize,
    swap_bytes: usize,
    snapshots: usize,
}

fn setting() -> impl Strategy<Value = Setting> {
    let prefill = prop_oneof![
        Just(PrefillMode::Off),
        Just(PrefillMode::Exact),
        Just(PrefillMode::Compact),
        Just(PrefillMode::Mask)
    ];
    let host = prop_oneof![Just(0usize), Just(2000), Just(1 << 20)];
    let swap = prop_oneof![Just(0usize), Just(1000), Just(1 << 20)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (24usize..60, 1usize..6, prefill, 0usize..4, flags, host, swap).prop_map(
        |(pages, seqs, prefill, drafts, flags, host_bytes, swap_bytes)| Setting {
            pages,
            seqs,
            prefill,
            drafts,
            auto: flags.0,
            overlap: flags.1,
            prefix_cache: flags.2,
            host_bytes,
            swap_bytes,
            snapshots: 1 + pages % 5,
        },
    )
}

struct Running {
    case: Case,
    handle: RequestHandle,
    completion: Completion,
    ended: bool,
    age: usize,
}

fn run(setting: &Setting, cases: &[Case]) -> Arc<Metrics> {
    run_counting(setting, cases).0
}

/// Also returns how many slots were copied.
fn run_counting(setting: &Setting, cases: &[Case]) -> (Arc<Metrics>, usize) {
    let mut shape = shape(setting.pages, setting.seqs, setting.prefill, setting.drafts);
    shape.prefix_cache = setting.prefix_cache;
    shape.swap_bytes = setting.swap_bytes;
    shape.adapt_drafts = setting.auto;
    shape.costs = CostCurve::new(vec![(1, 1.0), (24, 3.0)], vec![(1, 0.1), (6, 0.2)]);
    shape.device_snapshots = if setting.prefix_cache { setting.snapshots } else { 0 };
    let tiers = match setting.host_bytes {
        0 => Tiers::default(),
        bytes => Tiers::host(bytes),
    };
    let metrics = Arc::new(Metrics::default());
    let worker = Simulation::new(&shape);
    let slot_copies = worker.slot_copies.clone();
    let bounds = shape.bounds(false);
    let scheduler = Scheduler::new(shape, tiers, metrics.clone());
    let mut steps = StepLoop::new(scheduler, Inline::new(worker), setting.overlap);

    let mut left = cases.iter().enumerate();
    let mut next_case = left.next();
    let mut since = 0;
    let mut running: Vec<Running> = Vec::new();
    for turn in 0.. {
        assert!(turn < 20_000, "the requests come to an end");
        while let Some((i, case)) = next_case {
            if since < case.wait {
                break;
            }
            since = 0;
            next_case = left.next();
            let params = SamplingParams {
                max_tokens: Some(case.max_tokens),
                draft: case.draft,
                ..SamplingParams::default()
            };
            if params.check(&case.prompt, &bounds).is_err() {
                continue;
            }
            let first = RequestId((i * 10) as u64);
            for sample in 0..case.samples {
                let id = RequestId(first.0 + sample as u64);
                let (sink, handle) = event_queue(id);
                steps.scheduler.submit(Arrival {
                    id,
                    priority: case.priority,
                    salt: (case.seed == 2).then(|| "salt".to_owned()),
                    max_len: case.prompt.len() + case.max_tokens,
                    prompt: case.prompt.clone(),
                    seed: case.seed,
                    form: Form::Free,
                    leader: (sample > 0).then_some(first),
                    text: OutputText::new(None, Vec::new()),
                    params: params.clone(),
                    sink,
                    time: Instant::now(),
                });
                // The one that reads the prompt may go before it has.
                let patience = case.patience.filter(|_| sample % 2 == 0);
                let (completion, case) = (Completion::default(), Case { patience, ..case.clone() });
                running.push(Running { case, handle, completion, ended: false, age: 0 });
            }
        }
        since += 1;
        for request in &mut running {
            request.age += 1;
            if request.case.patience == Some(request.age) {
                request.handle.abort();
            }
        }
        steps.step().expect("the simulation does not fail");
        for request in &mut running {
            while let Some(event) = request.handle.try_recv() {
                assert!(!request.ended, "nothing follows the end");
                request.ended = request.completion.push(event).expect("no failures");
            }
        }
        if next_case.is_none() && steps.scheduler.is_idle() {
            break;
        }
    }
    for request in running {
        let (expected, found) = (expected(&request.case), request.completion.ids());
        match request.completion.reason {
            Some(FinishReason::Aborted) => {
                assert!(request.case.patience.is_some());
                assert!(expected.starts_with(&found), "{found:?} begins {expected:?}");
            }
            reason => {
                assert_eq!(found, expected);
                let stop = expected.last() == Some(&END);
                let end = if stop { FinishReason::Stop } else { FinishReason::Length };
                assert_eq!(reason, Some(end));
                assert_eq!(request.completion.usage.output_tokens, expected.len());
            }
        }
    }
    steps.scheduler.clear_prefix_cache();
    assert_eq!(steps.scheduler.held(), Held::default(), "nothing is left");
    (metrics, slot_copies.load(Ordering::Relaxed))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn every_request_gives_its_own_tokens(
        setting in setting(),
        mut cases in proptest::collection::vec(case(), 1..30),
    ) {
        converse(&mut cases);
        run(&setting, &cases);
    }
}

fn many(prompt: usize, count: usize) -> Vec<Case> {
    (0..count)
        .map(|i| Case {
            prompt: (0..prompt).map(|j| 1 + ((i * 7 + j * j) % 39) as u32).collect(),
            seed: i as u64,
            max_tokens: 20,
            priority: 0,
            draft: true,
            wait: 0,
            patience: None,
            turn: false,
            samples: 1,
            twist: None,
        })
        .collect()
}

fn plain() -> Setting {
    Setting {
        pages: 40,
        seqs: 5,
        prefill: PrefillMode::Exact,
        drafts: 3,
        auto: false,
        overlap: true,
        prefix_cache: true,
        host_bytes: 0,
        swap_bytes: 0,
        snapshots: 40,
    }
}

#[test]
fn small_pools_preempt_both_ways() {
    for swap_bytes in [0, 1 << 20] {
        let setting = Setting { pages: 24, swap_bytes, prefix_cache: false, ..plain() };
        let metrics = run(&setting, &many(15, 20));
        let (swapped, recomputed) = (metrics.swapped.get(), metrics.recomputed.get());
        assert!(if swap_bytes > 0 { swapped > 0 } else { recomputed > 0 });
    }
}

#[test]
fn repeated_prompts_come_from_the_cache() {
    for (pages, host_bytes) in [(300, 0), (30, 1 << 20)] {
        let mut cases = many(40, 12);
        cases.iter_mut().for_each(|case| case.wait = 60);
        let again = cases.clone();
        cases.extend(again);
        let setting = Setting { pages, host_bytes, ..plain() };
        let metrics = run(&setting, &cases);
        // All but the last token of each prompt of the second half.
        let (cached, wanted) = (metrics.cached_tokens.get(), 12 * 39);
        assert!(cached >= wanted, "{cached} tokens of {wanted} from the cache");
    }
}

/// A repeated prompt leaves the state of the first one, which serves earlier cuts, in its place, and
/// offers it to the lower tier, which has no room for anything.
#[test]
fn a_repeated_prompt_does_not_narrow_what_is_kept() {
    let copies = [0, 1, 1 << 20].map(|host_bytes| {
        let first = Case { wait: 60, ..many(43, 1)[0].clone() };
        let mut third = first.clone();
        third.prompt[41] = 1 + third.prompt[41] % (VOCAB - 1);
        let (metrics, copies) = run_counting(
            &Setting { pages: 300, host_bytes, ..plain() },
            &[first.clone(), first.clone(), third],
        );
        assert_eq!(metrics.cached_tokens.get(), 42 + 41, "{host_bytes} bytes");
        copies
    });
    assert_eq!(copies, [copies[0]; 3], "nothing is copied over what is kept");
}

#[test]
fn other_samples_do_not_read_the_prompt_again() {
    for prefix_cache in [false, true] {
        let case = Case { samples: 4, ..many(60, 1)[0].clone() };
        let setting = Setting { pages: 100, prefix_cache, ..plain() };
        let metrics = run(&setting, &[case]);
        assert_eq!(metrics.prefill_rows.get(), 60 + 3);
        assert_eq!(metrics.cached_tokens.get(), 3 * 59);
    }
}
