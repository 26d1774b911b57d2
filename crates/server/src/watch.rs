//! Watching the engine: whether its loop still takes turns, and whether its answers are right.

use crate::app::App;
use deepinfer::request::{Request, RequestError, SamplingParams};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);

/// Starts the watch. It ends with the app.
pub fn start(app: &Arc<App>) {
    let (beat, beats) = channel();
    let asker = Arc::downgrade(app);
    // One thread asks, another one notices that it does not come back.
    std::thread::spawn(move || {
        while let Some(app) = asker.upgrade() {
            let answer = app.inference.check();
            drop(app);
            if beat.send(answer).is_err() {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    });
    let watcher: Weak<App> = Arc::downgrade(app);
    let limit = app.config.stall_limit;
    std::thread::spawn(move || {
        loop {
            let answer = match limit {
                Some(limit) => beats.recv_timeout(limit + PAUSE),
                None => beats.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let Some(app) = watcher.upgrade() else { return };
            match answer {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => return app.fail(reason),
                Err(RecvTimeoutError::Timeout) => {
                    let limit = limit.unwrap_or_default().as_secs();
                    return app.fail(format!("it has not taken a turn for {limit} s"));
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    });
}

/// Text whose continuation is tested if no other test is given, and tokens to produce.
const TEST: (&str, usize) = ("The capital of France is", 8);

/// Runs the self-test, which makes the server ready or fails it. Blocks.
pub fn self_test(app: &App) {
    match tested(app) {
        Ok(()) => app.ready.store(true, Relaxed),
        Err(reason) => app.fail(format!("self-test: {reason}")),
    }
}

/// The most probable continuation of a prompt must be the known one, if there is one, and the same
/// again when the prompt comes from the prefix cache.
fn tested(app: &App) -> Result<(), String> {
    let tokenizer = &app.info().tokenizer;
    let known = app.config.self_test.as_ref();
    let (prompt, count) = match known {
        Some(test) => (test.prompt.clone(), test.tokens.len()),
        None => {
            let ids = tokenizer.encode(TEST.0).map_err(|error| error.to_string())?;
            (tokenizer.bos().into_iter().chain(ids).collect(), TEST.1)
        }
    };
    let first = continuation(app, &prompt, count)?;
    if let Some(test) = known.filter(|test| test.tokens != first) {
        return Err(format!("the tokens must be {:?} and are {first:?}", test.tokens));
    }
    if first.is_empty() {
        return Err("no token was produced".into());
    }
    let second = continuation(app, &prompt, count)?;
    match first == second {
        true => Ok(()),
        false => Err(format!("the tokens were {first:?} at first, then {second:?}")),
    }
}

/// The most probable continuation of a prompt. A full queue is waited for.
fn continuation(app: &App, prompt: &[u32], count: usize) -> Result<Vec<u32>, String> {
    loop {
        let params = SamplingParams {
            max_tokens: Some(count.max(1)),
            ignore_eos: true,
            ..SamplingParams::greedy()
        };
        let mut request = Request::tokens(prompt, params);
        request.priority = i32::MAX;
        request.cache_salt = Some("self-test".into());
        let found = app.inference.submit(request).and_then(|handle| handle.wait());
        match found {
            Ok(found) => return Ok(found.ids()),
            Err(
                RequestError::QueueFull { .. }
                | RequestError::QueueTokensFull { .. }
                | RequestError::WaitedTooLong { .. },
            ) => std::thread::sleep(PAUSE),
            Err(error) => return Err(error.to_string()),
        }
    }
}
