//! Branches of a recorded step: operations that run beside others.
//!
//! Outside of recorded steps everything runs in one stream, branches too. While a step is recorded, a
//! branch goes to a stream of its own, so that its kernels depend on those before it alone.

use super::Cuda;
use super::context::{Context, check, new_stream};
use crate::ops::{Branch, Result};
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

/// Branches at a time.
pub(super) const LANES: usize = 4;
/// Rows up to which branches are worth while; more rows fill the GPU by themselves.
const FEW_ROWS: usize = 8;

/// A stream for branches, and the points where they begin and end.
struct Lane {
    stream: sys::CUstream,
    begin: sys::CUevent,
    end: sys::CUevent,
}

/// The streams for branches.
#[derive(Default)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    /// The lane of the branch that is being recorded, counted from 1; 0 for none.
    current: AtomicUsize,
    /// A bit for each lane with a branch that has not been joined.
    taken: AtomicU32,
}

impl Lanes {
    /// Makes the streams. The context must be current.
    pub(super) fn open(&mut self) -> Result<()> {
        for _ in 0..LANES {
            let stream = new_stream()?;
            self.lanes.push(Lane { stream, begin: null_mut(), end: null_mut() });
            let Some(lane) = self.lanes.last_mut() else { continue };
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            for event in [&mut lane.begin, &mut lane.end] {
                // SAFETY: the caller has made a context current.
                check("creating an event", unsafe { sys::cuEventCreate(event, flags) })?;
            }
        }
        Ok(())
    }

    /// Frees the streams. The context must be current.
    pub(super) fn close(&mut self) {
        for lane in self.lanes.drain(..) {
            // SAFETY: nobody else has the stream or the events. What the driver says at the end
            // cannot be helped.
            unsafe {
                for event in [lane.begin, lane.end] {
                    if !event.is_null() {
                        let _ = sys::cuEventDestroy_v2(event);
                    }
                }
                let _ = sys::cuStreamDestroy_v2(lane.stream);
            }
        }
    }

    /// The stream of the branch that is being recorded.
    pub(super) fn current(&self) -> Option<sys::CUstream> {
        let lane = self.lanes.get(self.number().checked_sub(1)?)?;
        Some(lane.stream)
    }

    /// 0, or the number of the branch that is being recorded.
    pub(super) fn number(&self) -> usize {
        self.current.load(Relaxed)
    }

    /// Forgets branches of a step that could not be recorded.
    pub(super) fn reset(&self) {
        self.current.store(0, Relaxed);
        self.taken.store(0, Relaxed);
    }

    /// A free lane, taken.
    fn take(&self) -> Option<usize> {
        let taken = self.taken.load(Relaxed);
        let free = (0..self.lanes.len()).find(|i| taken >> i & 1 == 0)?;
        self.taken.store(taken | 1 << free, Relaxed);
        Some(free)
    }
}

/// `to` goes on when `from` has come to this point.
fn wait(
    context: &Context,
    event: sys::CUevent,
    from: sys::CUstream,
    to: sys::CUstream,
) -> Result<()> {
    context.bind()?;
    // SAFETY: event and streams are of the same context.
    check("recording an event", unsafe { sys::cuEventRecord(event, from) })?;
    // SAFETY: as above.
    check("waiting for an event", unsafe { sys::cuStreamWaitEvent(to, event, 0) })
}

pub(super) fn beside(cuda: &Cuda, rows: usize, f: impl FnOnce() -> Result<()>) -> Result<Branch> {
    let context = &cuda.context;
    let lanes = &context.lanes;
    let alone = !context.inside_step() || rows > FEW_ROWS || lanes.number() > 0;
    let Some(i) = (if alone { None } else { lanes.take() }) else {
        f()?;
        return Ok(Branch::default());
    };
    let lane = &lanes.lanes[i];
    wait(context, lane.begin, context.stream(), lane.stream)?;
    lanes.current.store(i + 1, Relaxed);
    let result = f();
    lanes.current.store(0, Relaxed);
    result.map(|()| Branch(i + 1))
}

pub(super) fn join(cuda: &Cuda, branch: Branch) -> Result<()> {
    let lanes = &cuda.context.lanes;
    let Some(i) = branch.0.checked_sub(1) else { return Ok(()) };
    let lane = &lanes.lanes[i];
    lanes.taken.fetch_and(!(1 << i), Relaxed);
    wait(&cuda.context, lane.end, lane.stream, cuda.context.stream())
}
