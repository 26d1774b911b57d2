//! Every feature at once: whatever a request asks for, it gives the same tokens and
//! log-probabilities alone and beside others, with any drafting, on warm and on cold caches.
//!
//! `DEEPINFER_MIXED=200` runs so many requests instead of a few.

mod random;
mod serve;

use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefillMode, PrefixCache};
use deepinfer::grammar::{CompileError, GrammarSpec, Tool, ToolCalls, ToolChoice, Trigger};
use deepinfer::request::{
    Completion, Constraint, FinishReason, Request, RequestError, SamplingParams, ThinkingBudget,
};
use random::Random;
use serde_json::json;
use serve::{engine, random_tokens, small};
use std::sync::{Arc, OnceLock};

/// The token that ends thinking in the test checkpoint.
fn think_end() -> u32 {
    static TOKEN: OnceLock<u32> = OnceLock::new();
    *TOKEN.get_or_init(|| {
        let engine = engine(&small());
        let tokenizer = engine.tokenizer().expect("there is one");
        tokenizer.special_id("</think>").expect("the chat format's tokens are there")
    })
}

fn schema() -> GrammarSpec {
    GrammarSpec::JsonSchema(json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "bc", "def"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "on": {"type": "boolean"},
        },
        "required": ["kind", "n", "on"],
        "additionalProperties": false,
    }))
}

fn form(random: &mut Random) -> GrammarSpec {
    match random.below(6) {
        0 => schema(),
        1 => GrammarSpec::JsonObject,
        2 => GrammarSpec::Regex("[a-f]{3,9}( x[0-9]{2})?".into()),
        3 => GrammarSpec::Choice(vec!["yes".into(), "no".into(), "no more".into()]),
        4 => GrammarSpec::Lark("start: \"<\" INNER \">\"\nINNER: /[a-z ]{2,12}/".into()),
        _ => GrammarSpec::ToolCalls(ToolCalls {
            tools: vec![Tool {
                name: "run".into(),
                parameters: json!({
                    "type": "object",
                    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                    "required": ["n"],
                }),
                strict: true,
            }],
            choice: ToolChoice::Required,
            parallel: false,
            opened: false,
        }),
    }
}

fn constrained(grammar: GrammarSpec, trigger: Option<Trigger>) -> Option<Arc<Constraint>> {
    Some(Arc::new(Constraint { grammar, trigger }))
}

fn after_thinking() -> Option<Trigger> {
    Some(Trigger::new(vec![think_end()], None).expect("not empty"))
}

/// Random requests with every parameter.
fn requests(seed: u64, count: usize) -> Vec<Request> {
    let mut random = Random(seed);
    let shared = random_tokens(seed, 150);
    let end = think_end();
    (0..count)
        .map(|i| {
            let len = 1 + random.below(150);
            let common = if random.below(3) == 0 { 0 } else { random.below(len + 1) };
            let mut prompt = shared[..common].to_vec();
            prompt.extend(random_tokens(seed + 1000 + i as u64, len - common));
            let mut params = SamplingParams {
                temperature: [0.0, 0.7, 1.0, 1.5][random.below(4)],
                seed: Some(random.below(1 << 30) as u64),
                max_tokens: Some(1 + random.below(32)),
                ignore_eos: random.below(4) == 0,
                n: [1, 1, 2, 3][random.below(4)],
                sample: random.below(2) as u32,
                ..SamplingParams::default()
            };
            match random.below(7) {
                0 => params.top_p = 0.8,
                1 => params.top_k = 5,
                2 => params.min_p = 0.05,
                3 => {
                    params.repetition_penalty = 1.3;
                    params.presence_penalty = 0.4;
                    params.frequency_penalty = 0.2;
                }
                4 => params.logit_bias = vec![(7, 3.0), (9, f32::NEG_INFINITY)],
                5 => params.bad_words = vec![vec![3], vec![5, 6]],
                _ => params.min_tokens = params.max_tokens.map_or(6, |most| most.min(6)),
            }
            params.logprobs = [None, None, Some(0), Some(3)][random.below(4)];
            params.prompt_logprobs = [None, None, None, Some(1)][random.below(4)];
            if random.below(4) == 0 {
                params.stop = vec!["e".into(), "no".into()];
            }
            if random.below(4) == 0 {
                params.stop_tokens = (0..20).map(|_| random.below(500) as u32).collect();
            }
            if random.below(3) == 0 {
                let tokens = random.below(10);
                params.thinking_budget = Some(ThinkingBudget { tokens, end });
            }
            match random.below(10) {
                0..5 => {
                    let grammar = form(&mut random);
                    let trigger = match random.below(4) {
                        0 | 1 => None,
                        2 => after_thinking(),
                        _ => {
                            // Whatever token 300 to 400 comes first ends the thinking.
                            let bound = Some(300 + random.below(100) as u32);
                            Some(Trigger::new(vec![end, 11, end], bound).expect("not empty"))
                        }
                    };
                    if trigger.is_none() {
                        params.thinking_budget = None;
                    }
                    params.constraint = constrained(grammar, trigger);
                }
                5 => params.forced = random_tokens(seed + 5000 + i as u64, random.below(12)),
                6 => params.allowed_tokens = (20..60).collect(),
                _ => {}
            }
            Request::tokens(prompt, params)
        })
        .collect()
}

type Outcome = Result<Completion, RequestError>;

/// The request for its continuation `i` alone.
fn one(request: &Request, i: usize) -> Request {
    let mut request = request.clone();
    request.params.n = 1;
    request.params.sample += i as u32;
    request
}

/// Each continuation by itself, without caches, drafts or overlap.
fn alone(requests: &[Request]) -> Vec<Vec<Outcome>> {
    let config = EngineConfig {
        max_seqs: 1,
        max_batch_tokens: 256,
        prefill_chunk: 256,
        prefix_cache: PrefixCache::Off,
        draft: DraftMode::Off,
        overlap: false,
        ..small()
    };
    let engine = engine(&config);
    let run = |request: Request| engine.submit(request).expect("valid").wait();
    requests.iter().map(|r| (0..r.params.n).map(|i| run(one(r, i))).collect()).collect()
}

/// What must be the same every time.
fn same(found: &Outcome, expected: &Outcome, name: &str) {
    match (found, expected) {
        (Ok(found), Ok(expected)) => {
            assert_eq!(found.ids(), expected.ids(), "{name}");
            assert_eq!(found.tokens, expected.tokens, "{name}");
            assert_eq!(found.text, expected.text, "{name}");
            assert_eq!(found.reason, expected.reason, "{name}");
            assert_eq!(found.prompt_logprobs, expected.prompt_logprobs, "{name}");
        }
        (found, expected) => assert_eq!(found.as_ref().err(), expected.as_ref().err(), "{name}"),
    }
}

/// Runs all requests at once, in random order; some are given up after some tokens.
fn check(engine: &Engine, requests: &[Request], expected: &[Vec<Outcome>], name: &str, seed: u64) {
    let mut random = Random(seed);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut running = Vec::new();
    for i in order {
        let handles = engine.submit_all(requests[i].clone()).expect("valid");
        assert_eq!(handles.len(), requests[i].params.n);
        for (sample, handle) in handles.into_iter().enumerate() {
            let patience = if random.below(8) == 0 { random.below(6) } else { usize::MAX };
            running.push((i, sample, patience, handle));
        }
    }
    for (i, sample, patience, handle) in running {
        let name = format!("{name}: request {i}, sample {sample}");
        let mut completion = Completion::default();
        let mut outcome = None;
        while let Some(event) = handle.recv() {
            if completion.tokens.len() >= patience {
                handle.abort();
            }
            if let Err(error) = completion.push(event) {
                outcome = Some(Err(error));
            }
        }
        let outcome = outcome.unwrap_or(Ok(completion));
        let expected = &expected[i][sample];
        match (&outcome, expected) {
            (Ok(found), Ok(expected)) if found.reason == Some(FinishReason::Aborted) => {
                assert!(patience < usize::MAX, "{name}: nobody gave up");
                let tokens = &expected.tokens[..found.tokens.len()];
                assert_eq!(found.tokens, tokens, "{name}");
            }
            (Ok(found), Err(_)) if found.reason == Some(FinishReason::Aborted) => {}
            _ => same(&outcome, expected, &name),
        }
    }
}

fn count() -> usize {
    let count = std::env::var("DEEPINFER_MIXED").ok().and_then(|n| n.parse().ok());
    count.unwrap_or(20)
}

#[test]
fn mixed_requests_give_the_same_every_time() {
    let requests = requests(3, count());
    let expected = alone(&requests);
    let all = || expected.iter().flatten();
    let ended = |reason| all().filter(move |o| o.as_ref().is_ok_and(|c| c.reason == Some(reason)));
    assert!(ended(FinishReason::Stop).count() > count() / 5, "forms and stop rules end some");
    assert!(ended(FinishReason::Length).count() > count() / 5, "others go on");
    assert!(all().filter(|o| o.is_err()).count() <= count() / 5, "few have contradictory rules");

    let drafting = [
        DraftMode::Off,
        DraftMode::Fixed(1),
        DraftMode::Fixed(2),
        DraftMode::Fixed(3),
        DraftMode::Fixed(4),
        DraftMode::Fixed(5),
        DraftMode::Auto,
    ];
    for (i, draft) in drafting.into_iter().enumerate() {
        // Pools so small that requests push each other out, and large ones.
        let config = EngineConfig {
            draft,
            overlap: i % 2 == 0,
            kv_tokens: [8192, 128 * 8][i % 2],
            swap_bytes: [16 << 20, 0, 16 << 20][i % 3],
            prefix_cache: if i % 4 == 1 { PrefixCache::Off } else { PrefixCache::Device },
            ..small()
        };
        let engine = engine(&config);
        for pass in 0..2 {
            let name = format!("{draft:?}, pass {pass}");
            check(&engine, &requests, &expected, &name, 100 * i as u64 + pass);
        }
        engine.clear_prefix_cache();
        assert_eq!(engine.held(), Some(Default::default()), "{draft:?}: nothing is left");
    }
}

/// Whether the tokens after the end of thinking are a document of [`schema`].
fn is_document(engine: &Engine, ids: &[u32]) -> bool {
    let at = ids.iter().position(|&id| id == think_end()).expect("the thinking ends");
    let text = engine.tokenizer().expect("there is one").decode(&ids[at + 1..ids.len() - 1]);
    let value: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
    ["a", "bc", "def"].contains(&value["kind"].as_str().unwrap_or_default())
        && value["n"].as_u64().is_some_and(|n| n < 100)
        && value["on"].is_boolean()
}

/// The same documents without white space, so that they are short.
fn compact() -> GrammarSpec {
    let document = r#"\{"kind":"(a|bc|def)","n":[1-9][0-9]?,"on":(true|false)\}"#;
    GrammarSpec::Regex(document.into())
}

#[test]
fn thinking_ends_at_every_offset_of_a_block_and_the_form_begins() {
    let end = think_end();
    let mut requests = Vec::new();
    for offset in 0..12 {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams {
                temperature,
                seed: Some(offset as u64),
                max_tokens: Some(70),
                constraint: constrained(compact(), after_thinking()),
                ..SamplingParams::default()
            };
            // By a budget, and by a given continuation that drafts propose in full.
            let budget = Some(ThinkingBudget { tokens: offset, end });
            let by_budget = SamplingParams { thinking_budget: budget, ..params.clone() };
            requests.push(Request::tokens(random_tokens(7, 20), by_budget));
            let mut forced = random_tokens(40 + offset as u64, offset);
            forced.push(end);
            let by_text = SamplingParams { forced, ..params };
            requests.push(Request::tokens(random_tokens(8, 20), by_text));
        }
    }
    let expected = alone(&requests);
    for draft in [1, 2, 3, 4, 5] {
        let config = EngineConfig { draft: DraftMode::Fixed(draft), ..small() };
        let engine = engine(&config);
        for (i, found) in engine.generate(requests.clone(), |_| {}).iter().enumerate() {
            same(found, &expected[i][0], &format!("{draft} drafts, request {i}"));
            let completion = found.as_ref().expect("served");
            let ids = completion.ids();
            assert_eq!(ids.iter().position(|&id| id == end), Some(i / 4), "request {i}");
            assert_eq!(completion.reason, Some(FinishReason::Stop), "request {i}");
            assert!(is_document(&engine, &ids), "request {i}");
        }
        let metrics = engine.metrics();
        assert!(metrics.accepted[0].get() > 0, "drafts are accepted");
    }
}

#[test]
fn continuations_share_their_prompt() {
    let prompt = random_tokens(21, 300);
    let params = SamplingParams {
        n: 4,
        seed: Some(9),
        max_tokens: Some(20),
        ignore_eos: true,
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    let requests = [Request::tokens(prompt, params)];
    let modes = [PrefillMode::Off, PrefillMode::Exact, PrefillMode::Compact, PrefillMode::Mask];
    for prefill in modes {
        let config = EngineConfig { prefill, prefix_cache: PrefixCache::Off, ..small() };
        let alone = engine(&EngineConfig { max_seqs: 1, draft: DraftMode::Off, ..config.clone() });
        let run = |i| alone.submit(one(&requests[0], i)).expect("valid").wait();
        let expected: Vec<Outcome> = (0..4).map(run).collect();
        let ids = |i: usize| expected[i].as_ref().expect("served").ids();
        assert!(ids(0) != ids(1) && ids(1) != ids(2), "samples differ");

        let engine = engine(&EngineConfig { draft: DraftMode::Fixed(3), ..config });
        for (i, found) in engine.generate(requests.to_vec(), |_| {}).iter().enumerate() {
            same(found, &expected[i], &format!("{prefill:?}, sample {i}"));
            let cached = found.as_ref().expect("served").usage.cached_tokens;
            assert_eq!(cached, if i == 0 { 0 } else { 299 });
        }
        assert_eq!(engine.metrics().prefill_rows.get(), 303, "the prompt is read once");
        assert_eq!(engine.held(), Some(Default::default()));
    }
}

#[test]
fn a_given_continuation_is_scored() {
    let text = random_tokens(31, 60);
    let (prompt, rest) = text.split_at(40);
    let params = SamplingParams {
        forced: rest.to_vec(),
        logprobs: Some(0),
        max_tokens: Some(rest.len()),
        ignore_eos: true,
        ..SamplingParams::greedy()
    };
    let whole = SamplingParams {
        prompt_logprobs: Some(0),
        max_tokens: Some(1),
        ..SamplingParams::greedy()
    };
    for draft in [DraftMode::Off, DraftMode::Fixed(5)] {
        let engine = engine(&EngineConfig { draft, ..small() });
        let requests = vec![
            Request::tokens(prompt, params.clone()),
            Request::tokens(text.clone(), whole.clone()),
        ];
        let found = engine.generate(requests, |_| {});
        let (scored, read) =
            (found[0].as_ref().expect("served"), found[1].as_ref().expect("served"));
        assert_eq!(scored.ids(), rest);
        let scores: Vec<f32> =
            scored.tokens.iter().filter_map(|t| Some(t.logprobs.as_ref()?.logprob)).collect();
        let expected: Vec<f32> = read.prompt_logprobs[39..].iter().map(|l| l.logprob).collect();
        assert_eq!(scores, expected);
        if draft != DraftMode::Off {
            assert!(scored.usage.accepted >= 12, "the continuation is its own draft");
        }
    }
}

#[test]
fn forms_that_cannot_be_enforced_are_refused_and_faults_end_one_request() {
    let engine = engine(&small());
    let with = |grammar, forced: Vec<u32>| {
        let params = SamplingParams {
            constraint: constrained(grammar, None),
            forced,
            max_tokens: Some(8),
            ..SamplingParams::greedy()
        };
        Request::tokens([1, 2, 3], params)
    };
    let bad =
        GrammarSpec::JsonSchema(json!({"type": "object", "properties": {"a": {"type": "x"}}}));
    match engine.submit(with(bad.clone(), vec![])).expect("is compiled first").wait() {
        Err(RequestError::Grammar(CompileError::Malformed { path, .. })) => {
            assert_eq!(path, "/properties/a");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(engine.check_grammar(&bad), Err(RequestError::Grammar(_))));
    engine.check_grammar(&schema()).expect("can be enforced");

    // A forced token that the form refuses ends that request, and no other one.
    let fault = engine.submit(with(schema(), vec![40, 41])).expect("valid");
    let other =
        engine.submit(with(GrammarSpec::Choice(vec!["yes".into()]), vec![])).expect("valid");
    assert!(matches!(fault.wait(), Err(RequestError::GrammarFault(_))));
    assert_eq!(other.wait().expect("served").text, "yes");
    engine.clear_prefix_cache();
    assert_eq!(engine.held(), Some(Default::default()));
}
