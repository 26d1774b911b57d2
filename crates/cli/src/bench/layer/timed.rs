//! Devices whose work can be timed piece by piece.

use deepinfer_device::bench::Measure;
use deepinfer_device::cuda::Mark;
use deepinfer_device::ops::Result;
use deepinfer_device::{Cpu, Cuda};
use std::time::Instant;

/// A device with a clock.
pub trait Timed: Measure {
    /// A point in its work.
    type Mark;
    /// Marks the point behind all that was asked so far.
    fn mark(&self) -> Result<Self::Mark>;
    /// Seconds between two marks.
    fn between(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64>;
    /// From now on a mark follows every kernel, on devices that have kernels.
    fn trace(&self) {}
    /// Ends it: the kernels so far, each with its mark.
    fn traced(&self) -> Vec<(String, Self::Mark)> {
        Vec::new()
    }
    /// What it is.
    fn describe(&self) -> String;
    /// Bytes of its memory: free, and all. None where weights lie in host memory.
    fn memory(&self) -> Result<Option<(usize, usize)>>;
}

impl Timed for Cpu {
    type Mark = Instant;

    fn mark(&self) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn between(&self, from: &Instant, to: &Instant) -> Result<f64> {
        Ok(to.duration_since(*from).as_secs_f64())
    }

    fn describe(&self) -> String {
        format!("cpu, {:?}, {} threads", self.isa(), self.threads()).to_lowercase()
    }

    fn memory(&self) -> Result<Option<(usize, usize)>> {
        Ok(None)
    }
}

impl Timed for Cuda {
    type Mark = Mark;

    fn mark(&self) -> Result<Mark> {
        Cuda::mark(self)
    }

    fn between(&self, from: &Mark, to: &Mark) -> Result<f64> {
        Cuda::between(self, from, to)
    }

    fn trace(&self) {
        Cuda::trace(self);
    }

    fn traced(&self) -> Vec<(String, Mark)> {
        Cuda::traced(self)
    }

    fn describe(&self) -> String {
        let info = self.info();
        format!("cuda:{}, {}", info.ordinal, info.name)
    }

    fn memory(&self) -> Result<Option<(usize, usize)>> {
        Ok(Some(Cuda::memory(self)?))
    }
}
