//! Times on the device: marks in its stream, and one after every kernel while that is wanted.

use super::context::{Context, Event, elapsed};
use super::{Cuda, lock};
use crate::ops::Result;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// A point in the work of a device.
pub struct Mark {
    event: Event,
    /// Outlives the event.
    _context: Arc<Context>,
}

/// What is known of the kernels started while they were traced.
#[derive(Default)]
pub(super) struct Trace {
    on: AtomicBool,
    kernels: Mutex<Kernels>,
}

#[derive(Default)]
struct Kernels {
    /// A mark behind each kernel, and its name.
    marks: Vec<(String, Mark)>,
    /// The operation that multiplies with a matrix, and its shape.
    shape: Option<(&'static str, usize, usize)>,
}

impl Cuda {
    /// Marks this point: what was asked before it comes before.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn mark(&self) -> Result<Mark> {
        let event = Event::new(&self.context)?;
        event.record(&self.context)?;
        Ok(Mark { event, _context: self.context.clone() })
    }

    /// Seconds between two marks. Waits until the device has passed both.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn between(&self, from: &Mark, to: &Mark) -> Result<f64> {
        from.event.wait()?;
        to.event.wait()?;
        elapsed(&from.event, &to.event)
    }

    /// From now on a mark follows every kernel, which slows them down a little.
    pub fn trace(&self) {
        lock(&self.trace.kernels).marks.clear();
        self.trace.on.store(true, Relaxed);
    }

    /// Ends it. The kernels since [`Cuda::trace`], in order, each with the mark behind it: names of
    /// kernels, or operation and shape of products with a matrix.
    pub fn traced(&self) -> Vec<(String, Mark)> {
        self.trace.on.store(false, Relaxed);
        std::mem::take(&mut lock(&self.trace.kernels).marks)
    }

    /// `operation` multiplies with a matrix of this shape from now on.
    pub(super) fn trace_shape(&self, operation: &'static str, rows: usize, cols: usize) {
        if self.trace.on.load(Relaxed) {
            lock(&self.trace.kernels).shape = Some((operation, rows, cols));
        }
    }

    /// A kernel was started.
    pub(super) fn trace_launch(&self, operation: &'static str, kernel: &str) -> Result<()> {
        if !self.trace.on.load(Relaxed) {
            return Ok(());
        }
        let mark = self.mark()?;
        let mut kernels = lock(&self.trace.kernels);
        let name = match kernels.shape {
            Some((last, rows, cols)) if last == operation => format!("{last} {rows} x {cols}"),
            _ => kernel.to_owned(),
        };
        kernels.marks.push((name, mark));
        Ok(())
    }
}
