//! Watching the engine: whether its loop still takes turns, and whether its answers are right.

use crate::app::App;
use deepinfer::request::{Request, RequestError, SamplingParams};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);

/// Starts the watch. It ends with the app.
pub fn start(app: &Arc<App>) {
    let (turn, turns) = channel();
    let asker = Arc::downgrade(app);
    // One thread asks, another one notices that it does not come back.
    std::thread::spawn(move || {
        while let Some(app) = asker.upgrade() {
            let answer = app.inference.check();
            drop(app);
            if turn.send(answer).is_err() {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    });
    let watcher: Weak<App> = Arc::downgrade(app);
    let limit = app.config.stall_limit;
    std::thread::spawn(move || {
        let mut patience = Patience::new(limit, Instant::now());
        loop {
            let answer = turns.recv_timeout(PAUSE);
            let Some(app) = watcher.upgrade() else { return };
            match answer {
                Ok(Ok(())) => patience.turn(Instant::now()),
                Ok(Err(reason)) => return app.fail(reason),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if patience.has_ended(app.inference.beats(), Instant::now()) {
                let limit = limit.unwrap_or_default().as_secs();
                let reason = "it has not taken a turn, and its step has not got on, for";
                return app.fail(format!("{reason} {limit} s"));
            }
        }
    });
}

/// How long an engine may stand still. It stands still while it takes no turn and its step does not
/// beat: the step of a large prompt, from weights that are still on the disk, takes its time.
struct Patience {
    limit: Option<Duration>,
    beats: u64,
    /// When it last was seen not to stand still.
    last: Instant,
}

impl Patience {
    fn new(limit: Option<Duration>, now: Instant) -> Self {
        // The engine is asked again only after a pause.
        Self { limit: limit.map(|limit| limit + PAUSE), beats: 0, last: now }
    }

    /// A turn was taken.
    fn turn(&mut self, now: Instant) {
        self.last = now;
    }

    /// Whether the engine stands still for too long, having beaten so often.
    fn has_ended(&mut self, beats: u64, now: Instant) -> bool {
        if beats != self.beats {
            (self.beats, self.last) = (beats, now);
        }
        self.limit.is_some_and(|limit| now.duration_since(self.last) > limit)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_lasts_while_something_gets_on() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut patience = Patience::new(Some(Duration::from_secs(25)), start);
        assert!(!patience.has_ended(0, at(25)));
        assert!(patience.has_ended(0, at(26)));
        // A step of a minute that gets on, and then no more.
        patience.turn(at(26));
        for (beats, seconds) in [(1, 40), (7, 60), (8, 85)] {
            assert!(!patience.has_ended(beats, at(seconds)), "{seconds}");
        }
        assert!(!patience.has_ended(8, at(110)));
        assert!(patience.has_ended(8, at(111)));
        // Without a limit it never ends.
        let mut endless = Patience::new(None, start);
        assert!(!endless.has_ended(0, at(1_000_000)));
    }
}
