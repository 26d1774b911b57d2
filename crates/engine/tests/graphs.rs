//! Steps that are launched as a whole give the tokens of steps launched operation by operation.
//! Needs a GPU; without one it says so.

mod common;
mod random;

use common::{random_tokens, testdata};
use deepinfer::checkpoint::Source;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::request::{Request, SamplingParams};
use deepinfer_device::{Cuda, DeviceChoice, DeviceError};

/// Texts of requests that run together, with groups of tokens that end at different steps.
fn texts(graphs: bool, draft: DraftMode) -> Vec<Vec<u32>> {
    let config = EngineConfig {
        device: DeviceChoice::Cuda(0),
        prefix_cache: PrefixCache::Off,
        kv_tokens: 1 << 14,
        graphs,
        draft,
        ..EngineConfig::default()
    };
    let source = Source::directory(testdata("tiny-a"));
    let engine = Engine::open(source, &config, &mut |_, _| {}).expect("opens");
    let handles: Vec<_> = (0..7)
        .map(|i| {
            let params = SamplingParams {
                temperature: if i % 2 == 0 { 0.0 } else { 0.9 },
                seed: Some(i),
                max_tokens: Some(60 + i as usize),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            let prompt = random_tokens(i, 20 + 31 * i as usize, 512);
            engine.submit(Request::tokens(prompt, params)).expect("is valid")
        })
        .collect();
    let ids = |handle: deepinfer::request::RequestHandle| {
        handle.wait().expect("is served").tokens.iter().map(|token| token.id).collect()
    };
    handles.into_iter().map(ids).collect()
}

#[test]
fn recorded_steps_give_the_same_tokens() {
    match Cuda::open(0) {
        Ok(_) => {}
        Err(error @ (DeviceError::NoDriver | DeviceError::NoDevice { .. })) => {
            println!("not run: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    let plain = texts(false, DraftMode::Off);
    for draft in [DraftMode::Off, DraftMode::Fixed(3), DraftMode::Auto] {
        assert_eq!(texts(true, draft), plain, "{draft:?}");
    }
}
