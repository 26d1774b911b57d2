//! Watching the engine: whether its loop still takes turns, and whether its answers are right.

use crate::app::{App, SelfTest};
use deepinfer::request::{Request, SamplingParams};
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

/// Runs the self-test, which makes the server ready or fails it. Blocks.
pub fn self_test(app: &App) {
    match tested(app) {
        Ok(()) => app.ready.store(true, Relaxed),
        Err(reason) => app.fail(format!("self-test: {reason}")),
    }
}

fn tested(app: &App) -> Result<(), String> {
    let short = SelfTest { prompt: vec![app.info().tokenizer.bos().unwrap_or(0)], tokens: vec![] };
    let known = app.config.self_test.as_ref();
    let test = known.unwrap_or(&short);
    let params = SamplingParams {
        max_tokens: Some(test.tokens.len().max(1)),
        ignore_eos: true,
        ..SamplingParams::greedy()
    };
    let request = Request::tokens(test.prompt.clone(), params);
    let handle = app.inference.submit(request).map_err(|error| error.to_string())?;
    let found = handle.wait().map_err(|error| error.to_string())?.ids();
    match known {
        Some(test) if found != test.tokens => {
            Err(format!("the tokens must be {:?} and are {found:?}", test.tokens))
        }
        _ => Ok(()),
    }
}
