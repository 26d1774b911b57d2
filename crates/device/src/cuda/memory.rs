//! Device memory.

use super::Cuda;
use super::context::{Context, check};
use crate::error::DeviceError;
use crate::ops::{BiasEntry, PenaltyRow, Result, SampleRow, TokenCount};
use crate::tensor::Element;
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::sync::Arc;

/// An address in device memory, or of host memory that the device can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ptr(pub(super) u64);

impl Ptr {
    /// No memory.
    pub(super) const NULL: Ptr = Ptr(0);

    /// The address `bytes` further on.
    pub(super) fn add(self, bytes: usize) -> Ptr {
        Ptr(self.0 + bytes as u64)
    }
}

/// Plain data that host arrays and kernels share.
///
/// # Safety
/// The type has no padding, and no pointers.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: elements are plain numbers (the trait is sealed).
unsafe impl<E: Element> Plain for E {}
// SAFETY: `repr(C)` with 8 + 6 * 4 bytes.
unsafe impl Plain for SampleRow {}
// SAFETY: `repr(C)` with 4 words.
unsafe impl Plain for TokenCount {}
// SAFETY: `repr(C)` with 3 words.
unsafe impl Plain for PenaltyRow {}
// SAFETY: `repr(C)` with 3 words.
unsafe impl Plain for BiasEntry {}

/// The bytes of plain data.
pub(super) fn bytes_of<T: Plain>(x: &[T]) -> &[u8] {
    // SAFETY: the memory of `x`, all of it initialized, since `T` has no padding.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// Device memory of some bytes, freed on drop.
pub(super) struct Memory {
    context: Arc<Context>,
    start: u64,
    bytes: usize,
}

impl Memory {
    /// Memory with undefined contents, aligned to 256 bytes.
    pub(super) fn new(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self> {
        let mut start = 0;
        if bytes > 0 {
            context.outside_step("allocating memory")?;
            context.bind()?;
            // SAFETY: a context is current.
            let result = unsafe { sys::cuMemAlloc_v2(&mut start, bytes) };
            if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(DeviceError::OutOfMemory { what, wanted: bytes });
            }
            check("allocating memory", result)?;
        }
        Ok(Self { context: context.clone(), start, bytes })
    }

    pub(super) fn zeroed(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self> {
        let this = Self::new(context, what, bytes)?;
        if bytes > 0 {
            // SAFETY: the memory is `bytes` long.
            let result = unsafe { sys::cuMemsetD8Async(this.start, 0, bytes, context.stream()) };
            check("clearing memory", result)?;
        }
        Ok(this)
    }

    pub(super) fn ptr(&self) -> Ptr {
        Ptr(self.start)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 && self.context.bind().is_ok() {
            // SAFETY: nobody else has the memory, and the stream is waited for, so that no kernel
            // uses it any more. What the driver says cannot be helped.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.context.stream());
                let _ = sys::cuMemFree_v2(self.start);
            }
        }
    }
}

/// A fixed number of elements in device memory. Dropping it waits for the GPU.
pub struct Buffer<E: Element> {
    memory: Memory,
    len: usize,
    of: PhantomData<E>,
}

impl<E: Element> Buffer<E> {
    pub(super) fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self> {
        let what = "a buffer";
        let bytes = len.checked_mul(size_of::<E>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or(DeviceError::OutOfMemory { what, wanted: usize::MAX })?;
        Ok(Self { memory: Memory::zeroed(context, what, bytes)?, len, of: PhantomData })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where elements `offset..offset + len` lie.
    ///
    /// # Panics
    /// If the buffer does not hold them.
    pub(super) fn range(&self, offset: usize, len: usize) -> Ptr {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "elements {offset}.. ({len} of them) of a buffer of {}", self.len);
        self.memory.ptr().add(offset * size_of::<E>())
    }

    /// Where the first `len` elements lie.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub(super) fn head(&self, len: usize) -> Ptr {
        self.range(0, len)
    }
}

impl Cuda {
    pub(super) fn copy_bytes(&self, from: Ptr, to: Ptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the callers have checked both ranges.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, self.context.stream()) };
        check("copying on the device", result)
    }

    pub(super) fn download_elements<E: Element>(&self, from: Ptr, to: &mut [E]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the callers have checked the device's range; every byte pattern is an element;
        // `to` is borrowed until the stream has been waited for.
        let result = unsafe {
            let stream = self.context.stream();
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, size_of_val(to), stream)
        };
        // Also after an error, nothing may write to `to` later.
        let waited = self.context.sync();
        check("copying to the host", result)?;
        waited
    }
}
