//! Launching kernels.

use super::Cuda;
use super::context::check;
use super::memory::Ptr;
use crate::ops::Result;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Most bytes of dynamic shared memory of a block that need no leave; a few static ones stand beside
/// it. Kernels that have leave take up to 99 KiB, which every supported card has.
pub(super) const MAX_SHARED: usize = (48 << 10) - 512;

/// Most blocks along the second and third axis of a grid.
pub(super) const MAX_BLOCKS_YZ: usize = 65535;

/// An argument of a kernel: in the low bytes of a slot, where the driver reads as many as the
/// kernel's parameter has.
pub(super) trait Arg {
    fn slot(self) -> u64;
}

impl Arg for Ptr {
    fn slot(self) -> u64 {
        self.0
    }
}

impl Arg for u64 {
    fn slot(self) -> u64 {
        self
    }
}

impl Arg for u32 {
    fn slot(self) -> u64 {
        self.into()
    }
}

impl Arg for f32 {
    fn slot(self) -> u64 {
        self.to_bits().into()
    }
}

/// The arguments of a kernel, each with exactly the type of its parameter: `Ptr` for pointers, u64,
/// u32 (also for `int`) or f32.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::launch::Arg::slot($arg)),*] };
}
pub(super) use args;

/// A size as a kernel takes it.
///
/// # Panics
/// If it does not fit.
pub(super) fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of single rows and steps are below 2^32")
}

impl Cuda {
    /// Starts `kernel` on a grid of `blocks` with `threads` threads each and `shared` bytes of
    /// dynamic shared memory: beyond `MAX_SHARED`, always the same of a kernel. Nothing happens if
    /// there are no blocks. `operation` is named in errors.
    ///
    /// The caller answers for the arguments: their number and types are those of the kernel, and
    /// pointers cover what it reads and writes.
    pub(super) fn launch(
        &self,
        operation: &'static str,
        kernel: &str,
        blocks: [usize; 3],
        threads: usize,
        shared: usize,
        args: &[u64],
    ) -> Result<()> {
        if blocks.contains(&0) {
            return Ok(());
        }
        let function = self.kernels.get(operation, kernel, shared)?;
        self.context.bind()?;
        let mut slots: [*mut c_void; 40] = [null_mut(); 40];
        // Pointers into the whole array: a kernel whose parameter is a struct reads on from the
        // first.
        for (i, slot) in slots.iter_mut().enumerate().take(args.len()) {
            *slot = args.as_ptr().wrapping_add(i).cast_mut().cast();
        }
        let [x, y, z] = blocks.map(u32_of);
        // SAFETY: the callers pass what the kernel's parameters are; the driver reads them now.
        let result = unsafe {
            sys::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                u32_of(threads),
                1,
                1,
                u32_of(shared),
                self.context.stream(),
                slots.as_mut_ptr(),
                null_mut(),
            )
        };
        check(operation, result)?;
        self.trace_launch(operation, kernel)
    }
}
