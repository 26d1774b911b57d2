//! Cases, and the making of their inputs.

use super::{COPIES, Extent, Measure, Work};
use crate::inputs::Random;
use crate::ops::Result;
use crate::random::{self, Content};
use crate::tensor::{Expert, Format, RowFormat, StoredMatrix};
use bytes::Bytes;
use std::sync::{Arc, Mutex, PoisonError};

/// A call of an operation with the inputs of this number.
type Call<D> = Box<dyn FnMut(&D, usize) -> Result<()> + Send>;
/// Makes inputs on the device.
type Prepare<D> = Box<dyn FnOnce(&mut Maker<'_, D>) -> Result<Ready<D>>>;

/// An operation at one shape.
pub(super) struct Case<D> {
    pub(super) operation: &'static str,
    pub(super) shape: String,
    pub(super) prepare: Prepare<D>,
}

/// A case whose inputs are there.
pub(super) struct Ready<D> {
    pub(super) work: Work,
    /// Copies of its inputs, at least 1.
    pub(super) copies: usize,
    pub(super) call: Call<D>,
}

impl<D> Ready<D> {
    pub(super) fn new(
        work: Work,
        copies: usize,
        call: impl FnMut(&D, usize) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        Ok(Self { work, copies, call: Box::new(call) })
    }
}

/// The list of cases.
pub(super) struct Cases<D> {
    pub(super) extent: Extent,
    pub(super) list: Vec<Case<D>>,
}

impl<D: Measure> Cases<D> {
    pub(super) fn new(extent: Extent) -> Self {
        Self { extent, list: Vec::new() }
    }

    pub(super) fn add(
        &mut self,
        operation: &'static str,
        shape: String,
        prepare: impl FnOnce(&mut Maker<'_, D>) -> Result<Ready<D>> + 'static,
    ) {
        self.list.push(Case { operation, shape, prepare: Box::new(prepare) });
    }
}

/// Weights of several cases, made for the first that is measured and freed with the last.
pub(super) struct Shared<T>(Arc<Mutex<Option<Arc<T>>>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Shared<T> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    pub(super) fn get(&self, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = &*held {
            return Ok(made.clone());
        }
        let made = Arc::new(make()?);
        *held = Some(made.clone());
        Ok(made)
    }
}

/// Bytes of random numbers that larger arrays repeat.
const BLOCK: usize = 16 << 20;
/// The exponent byte of scales: products get about the size of their inputs.
const SCALE: u8 = 120;

/// Makes inputs.
pub(super) struct Maker<'a, D> {
    pub(super) device: &'a D,
    pub(super) random: Random,
    block: Vec<u8>,
    /// Codes of weights. Matrices are parts of it.
    codes: Bytes,
    given: usize,
}

impl<'a, D: Measure> Maker<'a, D> {
    pub(super) fn new(device: &'a D, mut random: Random) -> Self {
        let block = random.bytes(BLOCK);
        Self { device, random, block, codes: Bytes::new(), given: 0 }
    }

    /// Copies of inputs of `bytes` bytes that caches do not hold.
    pub(super) fn copies(&self, bytes: f64) -> usize {
        ((D::ROTATED as f64 / bytes.max(1.0)).ceil() as usize).clamp(1, COPIES)
    }

    /// `len` random bytes, each changed by `change`, which gets its place.
    fn bytes(&self, len: usize, change: impl Fn(usize, u8) -> u8) -> Bytes {
        let some = &self.block[..BLOCK.min(len)];
        let some: Vec<u8> = some.iter().enumerate().map(|(i, b)| change(i, *b)).collect();
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            bytes.extend_from_slice(&some[..some.len().min(len - bytes.len())]);
        }
        bytes.into()
    }

    /// A matrix of small random numbers. Matrices follow each other in a stretch of memory that is
    /// longer than caches, so that a CPU, which reads weights in place, reads each from memory.
    pub(super) fn stored(&mut self, format: Format, rows: usize, cols: usize) -> StoredMatrix {
        let len = rows * format.row_bytes(cols);
        let (scale_rows, groups) = format.scale_shape(rows, cols).unwrap_or((0, 0));
        let scale = vec![SCALE; scale_rows * groups].into();
        let width = match format {
            Format::F32 => 4,
            Format::Bf16 => 2,
            Format::Fp8Block32 | Format::Fp8Row32 | Format::Fp4Row32 => {
                if self.codes.len() < len {
                    // No NaN among the codes of fp8.
                    self.codes = self.bytes((D::ROTATED + BLOCK).max(len), |_, b| b & 0xbf);
                }
                if self.given + len > self.codes.len() {
                    self.given = 0;
                }
                let data = self.codes.slice(self.given..self.given + len);
                self.given += len;
                return StoredMatrix::new(format, rows, cols, data, scale);
            }
        };
        // Signs and fractions stay; exponents become those of 2^-15 to 2^-11.
        let small = |i: usize, b: u8| if i % width == width - 1 { b & 0x81 | 0x38 } else { b };
        StoredMatrix::new(format, rows, cols, self.bytes(len, small), scale)
    }

    pub(super) fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> Result<D::Matrix> {
        let stored = self.stored(format, rows, cols);
        self.device.matrix(stored)
    }

    pub(super) fn expert(
        &mut self,
        format: Format,
        hidden: usize,
        inner: usize,
    ) -> Expert<StoredMatrix> {
        Expert {
            w1: self.stored(format, inner, hidden),
            w3: self.stored(format, inner, hidden),
            w2: self.stored(format, hidden, inner),
        }
    }

    /// Random activations between -2 and 2.
    pub(super) fn acts(&mut self, len: usize) -> Result<D::Buffer<D::Act>> {
        let mut buffer = self.device.alloc(len)?;
        let some = self.random.values(len.min(1 << 20));
        for from in (0..len).step_by(some.len().max(1)) {
            let part = &some[..some.len().min(len - from)];
            self.device.upload_act(part, &mut buffer, from)?;
        }
        Ok(buffer)
    }

    /// Random numbers between -2 and 2, times `factor`.
    pub(super) fn values(&mut self, len: usize, factor: f32) -> Result<D::Buffer<f32>> {
        let mut buffer = self.device.alloc(len)?;
        let some: Vec<f32> =
            self.random.values(len.min(1 << 20)).iter().map(|x| x * factor).collect();
        for from in (0..len).step_by(some.len().max(1)) {
            let part = &some[..some.len().min(len - from)];
            self.device.upload(part, &mut buffer, from)?;
        }
        Ok(buffer)
    }

    /// Rows of a cache.
    pub(super) fn rows(
        &mut self,
        rows: usize,
        width: usize,
        format: RowFormat,
    ) -> Result<D::Buffer<u8>> {
        let bytes = rows * format.row_bytes(width);
        let mut buffer = self.device.alloc(bytes)?;
        let content = Content::Rows { format, width };
        let random = random::Random { content, key: self.random.word() };
        self.device.random_bytes(&random, bytes, &mut buffer)?;
        Ok(buffer)
    }

    /// Random numbers below `most`.
    pub(super) fn numbers(&mut self, count: usize, most: usize) -> Vec<u32> {
        (0..count).map(|_| self.random.below(most) as u32).collect()
    }
}

/// Bytes of an activation.
pub(super) const fn act<D: Measure>() -> usize {
    size_of::<D::Act>()
}
