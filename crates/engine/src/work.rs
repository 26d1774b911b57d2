//! What the scheduler tells a worker to do in one step, and what comes back. Plain data: it can
//! cross threads, and a worker that only pretends can take the place of one with a device.

use crate::cache::Snapshot;
use crate::cache::prefix::Key;
use crate::grammar::{Grammar, MatchError};
use crate::plan::StepPlan;
use crate::pulse::Pulse;
use crate::request::{RequestId, SamplingParams, Token, TokenLogprobs};
use deepinfer_device::DeviceError;
use std::sync::Arc;

/// One step.
#[derive(Debug, Default)]
pub struct Work {
    /// Done in order, before the model runs.
    pub before: Vec<Op>,
    /// Rows to run. The rows of sequences that [`SequenceWork::follow`] are filled in by the worker.
    pub plan: StepPlan,
    /// One for each sequence of the plan.
    pub sequences: Vec<SequenceWork>,
    /// How many drafts are verified in all; `None`: as many as the sequences' own limits allow.
    pub verify: Option<Verify>,
}

/// How many drafts a step verifies in all: those of the highest chances
/// ([`drafting::share`](crate::drafting::share)).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verify {
    /// At most so many.
    pub count: usize,
    /// What confidences are multiplied by, by position.
    pub correction: Vec<f32>,
}

/// Something to do about slots and pages.
#[derive(Debug)]
pub enum Op {
    /// A sequence moves into a slot.
    Open(Box<Opening>),
    /// It leaves.
    Close {
        /// The slot.
        slot: u32,
    },
    /// Copies rings and pending rows.
    CopySlot {
        /// Source.
        from: u32,
        /// Destination.
        to: u32,
    },
    /// Copies a page.
    CopyPage {
        /// Source.
        from: u32,
        /// Destination.
        to: u32,
    },
    /// Copies a slot and pages to the host; they come back in the saved parts of [`Done`].
    SaveState {
        /// What for.
        name: SaveName,
        /// The slot.
        slot: u32,
        /// The pages.
        pages: Vec<u32>,
    },
    /// Copies a page to the host.
    SavePage {
        /// Its key.
        key: Key,
        /// The page.
        page: u32,
    },
    /// Puts a saved state into a slot and pages.
    LoadState {
        /// What was saved.
        state: Arc<Snapshot>,
        /// The slot.
        slot: u32,
        /// The pages, as many as were saved.
        pages: Vec<u32>,
    },
    /// Puts a saved page into a page.
    LoadPage {
        /// What was saved.
        bytes: Arc<Vec<u8>>,
        /// The page.
        page: u32,
    },
}

/// What a saved state is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SaveName {
    /// The prefix cache.
    Prefix(Key),
    /// A request that lost its place.
    Swap(RequestId),
}

/// What a worker must know of a sequence to choose its tokens.
#[derive(Clone, Debug)]
pub struct Opening {
    /// Its slot.
    pub slot: u32,
    /// How tokens are chosen.
    pub params: Arc<SamplingParams>,
    /// Key of the random choices.
    pub seed: u64,
    /// Which of the seed's continuations it is.
    pub sample: u32,
    /// The form of its output.
    pub grammar: Option<Grammar>,
    /// All tokens known so far.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

/// What a step does for one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceWork {
    /// The request.
    pub id: RequestId,
    /// The worker fills in the rows: the newest token of the slot, and at most so many of the
    /// tokens drafted after it. The plan's pages reach as far as the worst case needs.
    pub follow: Option<u32>,
    /// A token is chosen after the last row (and after each accepted draft).
    pub sample: bool,
    /// Tokens to draft afterwards.
    pub draft: u32,
    /// Log-probabilities of the given rows' next tokens are wanted, with so many alternatives.
    pub prompt_logprobs: Option<usize>,
}

/// What a step gave.
#[derive(Debug, Default)]
pub struct Done {
    /// One for each sequence of the plan.
    pub sequences: Vec<SequenceDone>,
    /// Saved pages.
    pub pages: Vec<(Key, Vec<u8>)>,
    /// Saved states.
    pub states: Vec<(SaveName, Snapshot)>,
    /// Seconds from start to end.
    pub seconds: f64,
    /// Of these, seconds for drafting.
    pub draft_seconds: f64,
}

/// What a step gave for one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceDone {
    /// Accepted drafts, then the token chosen after them. Empty if nothing was sampled.
    pub tokens: Vec<Token>,
    /// Drafts that were verified.
    pub verified: u32,
    /// Confidences of the tokens drafted for the next step; empty if none were.
    pub confidences: Vec<f32>,
    /// Log-probabilities of the tokens after the given rows, as far as they are prompt.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// The form of its output cannot be enforced any further.
    pub fault: Option<MatchError>,
}

/// Runs steps, in order.
pub trait Worker: Send + 'static {
    /// Runs one step. An error is a fault of the device; no request can cause one.
    fn run(&mut self, work: Work) -> Result<Done, DeviceError>;

    /// Beats while a step runs; one that never does if the worker has none.
    fn pulse(&self) -> Arc<Pulse> {
        Arc::default()
    }

    /// Runs `f`, which runs steps that follow each other at once, where they start soonest. `f` must
    /// not wait for anything but the device.
    fn run_series<R: Send>(&mut self, f: impl FnOnce(&mut Self) -> R + Send) -> R
    where
        Self: Sized,
    {
        f(self)
    }
}
