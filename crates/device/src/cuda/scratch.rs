//! Memory for intermediate results of an operation.
//!
//! One block, reserved when the device is opened, and a small one for each branch of a recorded step. An operation on shapes larger than the released
//! model's makes it grow, which waits for the GPU: not inside a recorded step, where it is refused.
//! An operation holds the scratch until it has launched its last kernel; the stream's order keeps
//! operations apart.

use super::branches::LANES;
use super::context::Context;
use super::memory::{Memory, Plain, Ptr, bytes_of};
use super::{Cuda, lock};
use crate::ops::Result;
use std::array::from_fn;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes reserved at the start: more than any operation takes at the released sizes with chunks of
/// 512 rows (split sums of a linear layer: 256 MiB).
const FIRST: usize = 320 << 20;
/// The same for a branch, which has few rows.
const FIRST_OF_BRANCH: usize = 1 << 20;
/// Alignment of every piece.
const ALIGN: usize = 256;

/// The scratch memory of a device.
pub(super) struct Scratch {
    /// The last one is in use; those before it are too small, and hold pieces of this operation.
    blocks: Vec<Memory>,
    used: usize,
    /// How often it has grown.
    grown: u64,
}

impl Scratch {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        Ok(Self { blocks: vec![Memory::new(context, "scratch", bytes)?], used: 0, grown: 0 })
    }

    fn take(&mut self, context: &Arc<Context>, bytes: usize) -> Result<Ptr> {
        let have = self.blocks.last().map_or(0, Memory::bytes);
        if self.used + bytes > have {
            let wanted = (2 * have).max(bytes.next_multiple_of(ALIGN));
            self.blocks.push(Memory::new(context, "scratch", wanted)?);
            (self.used, self.grown) = (0, self.grown + 1);
        }
        let ptr = self.blocks.last().map_or(Ptr::NULL, Memory::ptr).add(self.used);
        self.used = (self.used + bytes).next_multiple_of(ALIGN);
        Ok(ptr)
    }
}

/// The scratch memory of the stream, then that of branches.
pub(super) fn all(context: &Arc<Context>) -> Result<[Mutex<Scratch>; 1 + LANES]> {
    let mut all = Vec::new();
    for bytes in [FIRST].into_iter().chain([FIRST_OF_BRANCH; LANES]) {
        all.push(Scratch::new(context, bytes)?);
    }
    let mut all = all.into_iter();
    Ok(from_fn(|_| Mutex::new(all.next().expect("as many as were pushed"))))
}

/// The scratch while an operation uses it.
pub(super) struct ScratchGuard<'a> {
    cuda: &'a Cuda,
    scratch: MutexGuard<'a, Scratch>,
}

impl Cuda {
    /// Changes when scratch memory that was handed out before is gone.
    pub(super) fn scratch_generation(&self) -> u64 {
        self.scratch.iter().map(|scratch| lock(scratch).grown).sum()
    }

    /// The whole scratch memory, for one operation.
    pub(super) fn scratch(&self) -> ScratchGuard<'_> {
        let mut scratch = lock(&self.scratch[self.context.lanes.number()]);
        scratch.used = 0;
        // Freeing waits for the kernels that use what is freed.
        let small = scratch.blocks.len().saturating_sub(1);
        scratch.blocks.drain(..small);
        ScratchGuard { cuda: self, scratch }
    }
}

impl ScratchGuard<'_> {
    /// Memory for `len` values with undefined contents, aligned to 256 bytes, until the guard goes.
    pub(super) fn take<T: Plain>(&mut self, len: usize) -> Result<Ptr> {
        self.scratch.take(&self.cuda.context, len * size_of::<T>())
    }

    /// The same with these values.
    pub(super) fn put<T: Plain>(&mut self, values: &[T]) -> Result<Ptr> {
        let ptr = self.take::<T>(values.len())?;
        self.cuda.upload_bytes(bytes_of(values), ptr)?;
        Ok(ptr)
    }
}
