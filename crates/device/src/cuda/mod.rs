//! NVIDIA GPUs from Ampere (compute capability 8.0) on, through the driver alone.
//!
//! The driver's library is opened at run time, and the kernels are embedded in the binary, so one
//! binary starts with and without a GPU. Activations are bf16; sums, norms and mixing are f32.
//!
//! All operations of a device run in one stream, in the order of the calls, so memory that one
//! operation leaves behind may be used by the next; branches of a recorded step run beside it. Only `download` and `sync` wait for the GPU;
//! an upload waits if more than a few megabytes of earlier uploads are still under way.

mod attend;
mod branches;
mod compress;
mod context;
mod device;
mod engram;
pub mod experts;
pub mod graphs;
mod join;
mod kernels;
mod launch;
mod limits;
mod linear;
mod memory;
mod norm;
mod paged;
mod random;
mod rope;
mod route;
mod rows;
mod sample;
mod scratch;
mod select;
mod staging;
mod stored;
mod streams;
mod trace;

pub use context::CudaDevice;
pub use limits::Yardstick;
pub use memory::Buffer;
pub use stored::{HOST_TABLE, Matrix, Placement};
pub use trace::Mark;

use crate::ops::Result;
use branches::LANES;
use context::Context;
use kernels::Kernels;
use scratch::Scratch;
use staging::Staging;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use trace::Trace;

/// One GPU.
pub struct Cuda {
    context: Arc<Context>,
    kernels: Kernels,
    staging: Mutex<Staging>,
    /// That of the stream, and those of branches.
    scratch: [Mutex<Scratch>; 1 + LANES],
    trace: Trace,
    load_seconds: f64,
}

impl Cuda {
    /// The GPU with this number (from 0, as the driver counts). Creates a context and loads the
    /// kernels.
    ///
    /// # Errors
    /// Without a driver or such a GPU, if the GPU is older than Ampere, or if the driver refuses.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_with(ordinal, &mut |_, _| {})
    }

    /// The same. `progress` is told how many of how many files of kernels are loaded: on a GPU
    /// without machine code of its own the driver compiles them first, which takes a while, once.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn open_with(ordinal: usize, progress: &mut dyn FnMut(usize, usize)) -> Result<Self> {
        let context = Arc::new(Context::open(ordinal)?);
        let start = Instant::now();
        let kernels = Kernels::load(&context, progress)?;
        let load_seconds = start.elapsed().as_secs_f64();
        let staging = Mutex::new(Staging::new(&context)?);
        let scratch = scratch::all(&context)?;
        let trace = Trace::default();
        Ok(Self { context, kernels, staging, scratch, trace, load_seconds })
    }

    /// Seconds that loading the kernels took, compiling included.
    pub fn load_seconds(&self) -> f64 {
        self.load_seconds
    }

    /// The GPUs that the driver knows, usable or not.
    ///
    /// # Errors
    /// Without a driver.
    pub fn devices() -> Result<Vec<CudaDevice>> {
        context::devices()
    }

    /// What this GPU is.
    pub fn info(&self) -> &CudaDevice {
        &self.context.info
    }

    /// Bytes of device memory: free now, and all.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.context.memory()
    }

    /// The time that `f`'s operations take on the GPU, in milliseconds. Waits for them.
    pub fn time(&self, f: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.context.time(f)
    }

    /// Copies host bytes to device memory without waiting for it.
    fn upload_bytes(&self, bytes: &[u8], to: memory::Ptr) -> Result<()> {
        self.context.outside_step("uploading")?;
        lock(&self.staging).upload(&self.context, bytes, to)
    }
}

/// What a thread that panicked left behind is as good as ever: it is written anew before use.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The first GPU for tests; none on a machine without one.
#[cfg(test)]
pub(crate) fn test_gpu() -> Option<Cuda> {
    use crate::error::DeviceError as E;
    match Cuda::open(0) {
        Ok(cuda) => Some(cuda),
        Err(E::NoDriver | E::NoDevice { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}
