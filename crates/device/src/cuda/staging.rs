//! Host memory that the GPU copies from: uploads are written here and copied in the background.

use super::context::{Context, Event, check};
use super::memory::Ptr;
use crate::error::DeviceError;
use crate::ops::Result;
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// Bytes of a segment.
const SEGMENT: usize = 4 << 20;
/// Segments in the ring.
const SEGMENTS: usize = 4;
/// Alignment of what is put into a segment.
const ALIGN: usize = 64;

/// Page-locked host memory.
pub(super) struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Page-locked memory with undefined contents. `mapped`: the device can read it.
    pub(super) fn new(context: &Arc<Context>, bytes: usize, mapped: bool) -> Result<Self> {
        context.bind()?;
        let mut start = null_mut();
        let flags = if mapped { sys::CU_MEMHOSTALLOC_DEVICEMAP } else { 0 };
        // SAFETY: a context is current.
        let result = unsafe { sys::cuMemHostAlloc(&mut start, bytes, flags) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(DeviceError::OutOfMemory { what: "page-locked memory", wanted: bytes });
        }
        check("allocating page-locked memory", result)?;
        Ok(Self { context: context.clone(), start: start.cast(), bytes })
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is `bytes` long, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Where the device reads it; it must be mapped.
    pub(super) fn ptr(&self) -> Result<Ptr> {
        self.context.bind()?;
        let mut ptr = 0;
        // SAFETY: the memory comes from `cuMemHostAlloc`.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut ptr, self.start.cast(), 0) };
        check("mapping host memory", result)?;
        Ok(Ptr(ptr))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.sync().is_ok() {
            // SAFETY: nobody else has the memory, and the GPU has finished with it.
            let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

/// A ring of page-locked segments. Writing waits only for the copies of a segment used
/// `SEGMENTS` segments ago.
pub(super) struct Staging {
    segments: Vec<(Pinned, Event, bool)>,
    current: usize,
    used: usize,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let segment = || Ok((Pinned::new(context, SEGMENT, false)?, Event::new(context)?, false));
        let segments = (0..SEGMENTS).map(|_| segment()).collect::<Result<_>>()?;
        Ok(Self { segments, current: 0, used: 0 })
    }

    /// Copies `bytes` to the device, after all that was asked before.
    pub(super) fn upload(&mut self, context: &Context, bytes: &[u8], to: Ptr) -> Result<()> {
        for (i, piece) in bytes.chunks(SEGMENT).enumerate() {
            let room = self.room(context, piece.len())?;
            room.copy_from_slice(piece);
            self.send(context, piece.len(), to.add(i * SEGMENT))?;
        }
        Ok(())
    }

    /// Copies `rows` rows of `row_bytes` bytes, `from_stride` apart on the host, `to_stride` on the
    /// device; what lies between them there becomes 0, unless rows are longer than a segment: then it is
    /// left alone.
    pub(super) fn upload_rows(
        &mut self,
        context: &Context,
        bytes: &[u8],
        rows: usize,
        row_bytes: usize,
        from_stride: usize,
        to: Ptr,
        to_stride: usize,
    ) -> Result<()> {
        if from_stride == row_bytes && to_stride == row_bytes {
            return self.upload(context, &bytes[..rows * row_bytes], to);
        }
        if to_stride > SEGMENT {
            for r in 0..rows {
                let row = &bytes[r * from_stride..][..row_bytes];
                self.upload(context, row, to.add(r * to_stride))?;
            }
            return Ok(());
        }
        let at_once = SEGMENT / to_stride.max(1);
        for first in (0..rows).step_by(at_once.max(1)) {
            let count = at_once.min(rows - first);
            let room = self.room(context, count * to_stride)?;
            pad_rows(&bytes[first * from_stride..], row_bytes, from_stride, to_stride, room);
            self.send(context, count * to_stride, to.add(first * to_stride))?;
        }
        Ok(())
    }

    /// A place for `len` bytes, at most a segment.
    fn room(&mut self, context: &Context, len: usize) -> Result<&mut [u8]> {
        if self.used + len > SEGMENT {
            let (_, event, busy) = &mut self.segments[self.current];
            event.record(context)?;
            *busy = true;
            self.current = (self.current + 1) % self.segments.len();
            self.used = 0;
            let (_, event, busy) = &mut self.segments[self.current];
            if std::mem::take(busy) {
                event.wait()?;
            }
        }
        Ok(&mut self.segments[self.current].0.bytes_mut()[self.used..][..len])
    }

    /// Starts the copy of what was written to the place that `room` gave.
    fn send(&mut self, context: &Context, len: usize, to: Ptr) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        context.bind()?;
        let from = self.segments[self.current].0.bytes_mut()[self.used..].as_ptr();
        self.used = (self.used + len).next_multiple_of(ALIGN).min(SEGMENT);
        // SAFETY: the source stays as it is until the segment's event has passed; the callers have
        // checked the target.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.cast(), len, context.stream()) };
        check("copying to the device", result)
    }
}

/// Writes rows with zeros between them.
pub(super) fn pad_rows(
    bytes: &[u8],
    row_bytes: usize,
    from_stride: usize,
    to_stride: usize,
    to: &mut [u8],
) {
    for (r, to) in to.chunks_exact_mut(to_stride).enumerate() {
        let (row, rest) = to.split_at_mut(row_bytes);
        row.copy_from_slice(&bytes[r * from_stride..][..row_bytes]);
        rest.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_with_zeros() {
        let mut to = [9; 12];
        pad_rows(&[1, 2, 0, 3, 4], 2, 3, 6, &mut to);
        assert_eq!(to, [1, 2, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0]);
    }
}
