//! Ctrl-C: stops an answer, and the program where there is none.

use crate::failure::Outcome;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use tokio::signal::unix::{SignalKind, signal};

const IDLE: u8 = 0;
const ANSWERING: u8 = 1;
const STOPPED: u8 = 2;

/// Exit code of a program that was ended by Ctrl-C.
const ENDED: i32 = 130;

/// Listens for Ctrl-C.
pub struct Interrupt {
    state: Arc<AtomicU8>,
}

impl Interrupt {
    /// Starts a thread that listens.
    pub fn new() -> Outcome<Self> {
        let state = Arc::new(AtomicU8::new(IDLE));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = {
            let _context = runtime.enter();
            signal(SignalKind::interrupt())?
        };
        let shared = state.clone();
        std::thread::Builder::new().name("interrupt".into()).spawn(move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    // Nothing to stop, or it does not stop.
                    if shared.swap(STOPPED, Ordering::Relaxed) != ANSWERING {
                        std::process::exit(ENDED);
                    }
                }
            });
        })?;
        Ok(Self { state })
    }

    /// An answer begins.
    pub fn answering(&self) -> Answering<'_> {
        self.state.store(ANSWERING, Ordering::Relaxed);
        Answering { state: &self.state }
    }
}

/// Lasts as long as an answer.
pub struct Answering<'a> {
    state: &'a AtomicU8,
}

impl Answering<'_> {
    /// Whether it is to be stopped.
    pub fn stopped(&self) -> bool {
        self.state.load(Ordering::Relaxed) == STOPPED
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.state.store(IDLE, Ordering::Relaxed);
    }
}
