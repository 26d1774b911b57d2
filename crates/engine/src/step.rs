//! The loop, on one screen: admit, plan, run, commit, emit.

use crate::schedule::Scheduler;
use crate::work::{Done, Work, Worker};
use deepinfer_device::DeviceError;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// The scheduler and what it drives.
pub struct StepLoop<E: Executor> {
    /// Decides.
    pub scheduler: Scheduler,
    executor: E,
    overlap: bool,
    in_flight: usize,
}

impl<E: Executor> StepLoop<E> {
    /// A loop; with `overlap`, a step is planned while the one before it runs.
    pub fn new(scheduler: Scheduler, executor: E, overlap: bool) -> Self {
        Self { scheduler, executor, overlap, in_flight: 0 }
    }

    /// One turn. The plain loop waits for the step that it has planned; the overlapped one for the
    /// step before, whose results it did not know when it planned. Both give the same tokens.
    /// Returns whether there was anything to do.
    pub fn step(&mut self) -> Result<bool, DeviceError> {
        self.scheduler.sweep(Instant::now());
        self.scheduler.admit();
        let mut ahead = 0;
        if let Some(work) = self.scheduler.plan() {
            self.executor.start(work)?;
            self.in_flight += 1;
            ahead = usize::from(self.overlap);
        }
        let active = self.in_flight > 0;
        while self.in_flight > ahead {
            let done = self.executor.wait()?;
            self.in_flight -= 1;
            self.scheduler.commit(done);
        }
        self.scheduler.emit();
        Ok(active)
    }
}

/// Carries steps to a worker and results back, in order.
pub trait Executor {
    /// Hands a step over.
    fn start(&mut self, work: Work) -> Result<(), DeviceError>;
    /// Waits for the oldest result that has not been taken.
    fn wait(&mut self) -> Result<Done, DeviceError>;
}

/// A worker on the caller's own thread.
pub struct Inline<W: Worker> {
    worker: W,
    done: VecDeque<Done>,
}

impl<W: Worker> Inline<W> {
    /// Runs steps as they are handed over.
    pub fn new(worker: W) -> Self {
        Self { worker, done: VecDeque::new() }
    }
}

impl<W: Worker> Executor for Inline<W> {
    fn start(&mut self, work: Work) -> Result<(), DeviceError> {
        self.done.push_back(self.worker.run(work)?);
        Ok(())
    }

    fn wait(&mut self) -> Result<Done, DeviceError> {
        self.done.pop_front().ok_or(DeviceError::Stopped)
    }
}

/// A worker on a thread of its own.
pub struct Threaded {
    work: Option<Sender<Work>>,
    done: Receiver<Result<Done, DeviceError>>,
    thread: Option<JoinHandle<()>>,
}

impl Threaded {
    /// Starts the thread.
    pub fn new(mut worker: impl Worker) -> std::io::Result<Self> {
        let (work, mut inbox) = channel::<Work>();
        let (outbox, done) = channel();
        let thread = std::thread::Builder::new().name("worker".into()).spawn(move || {
            while let Ok(first) = inbox.recv() {
                if !worker.run_series(|worker| series(worker, first, &mut inbox, &outbox)) {
                    return;
                }
            }
        })?;
        Ok(Self { work: Some(work), done, thread: Some(thread) })
    }
}

/// Runs `first`, and what has arrived meanwhile. Returns whether there may be more to run.
fn series(
    worker: &mut impl Worker,
    first: Work,
    inbox: &mut Receiver<Work>,
    outbox: &Sender<Result<Done, DeviceError>>,
) -> bool {
    let mut next = Some(first);
    while let Some(work) = next {
        let result = worker.run(work);
        let failed = result.is_err();
        if outbox.send(result).is_err() || failed {
            return false;
        }
        next = inbox.try_recv().ok();
    }
    true
}

impl Executor for Threaded {
    fn start(&mut self, work: Work) -> Result<(), DeviceError> {
        // If the worker has stopped, its error comes with the next result.
        let _ = self.work.as_ref().map(|sender| sender.send(work));
        Ok(())
    }

    fn wait(&mut self) -> Result<Done, DeviceError> {
        self.done.recv().unwrap_or(Err(DeviceError::Stopped))
    }
}

impl Drop for Threaded {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
