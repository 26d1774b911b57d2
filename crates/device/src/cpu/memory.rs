//! Memory of the CPU device.

use crate::error::DeviceError;
use crate::tensor::Element;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A cache line, and the widest vector.
const ALIGN: usize = 64;

/// A fixed number of elements, zeroed, aligned to 64 bytes. Memory that was never written costs
/// nothing but address space.
pub struct Buffer<E: Element> {
    start: NonNull<E>,
    len: usize,
    owned: PhantomData<E>,
}

// SAFETY: a buffer owns its memory, as a boxed slice does.
unsafe impl<E: Element> Send for Buffer<E> {}
// SAFETY: shared access only reads.
unsafe impl<E: Element> Sync for Buffer<E> {}

impl<E: Element> Buffer<E> {
    /// A zeroed buffer of `len` elements.
    pub(crate) fn zeroed(len: usize) -> Result<Self, DeviceError> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len, owned: PhantomData });
        }
        let too_large = || DeviceError::OutOfMemory {
            what: "a buffer",
            wanted: len.saturating_mul(size_of::<E>()),
        };
        let layout = Self::layout(len).ok_or_else(too_large)?;
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(memory.cast::<E>()).ok_or_else(too_large)?;
        Ok(Self { start, len, owned: PhantomData })
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::array::<E>(len).ok()?.align_to(ALIGN).ok()
    }
}

impl<E: Element> Drop for Buffer<E> {
    fn drop(&mut self) {
        if self.len > 0
            && let Some(layout) = Self::layout(self.len)
        {
            // SAFETY: `start` came from `alloc_zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<E: Element> Deref for Buffer<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        // SAFETY: `start` is aligned, and valid for `len` elements; all-zero bytes are a value of
        // every element type (the trait is sealed).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<E: Element> DerefMut for Buffer<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_may_be_empty() {
        let mut buffer = Buffer::<u32>::zeroed(1001).expect("fits");
        assert_eq!(buffer.as_ptr().align_offset(ALIGN), 0);
        assert!(buffer.len() == 1001 && buffer.iter().all(|x| *x == 0));
        buffer[1000] = 7;
        assert_eq!(buffer[1000], 7);
        assert!(Buffer::<u64>::zeroed(0).expect("fits").is_empty());
    }

    #[test]
    fn too_much_is_an_error_with_the_size() {
        let error = Buffer::<u64>::zeroed(usize::MAX / 4).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains(&usize::MAX.to_string())));
        // Memory that nobody looks at need not be asked for.
        assert!(std::hint::black_box(Buffer::<u8>::zeroed(1 << 62)).is_err());
    }
}
