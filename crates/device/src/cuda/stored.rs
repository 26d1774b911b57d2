//! Weight matrices on the device.

use super::Cuda;
use super::lock;
use super::memory::{Memory, Ptr};
use super::staging::{Pinned, pad_rows};
use crate::error::DeviceError;
use crate::ops::Result;
use crate::tensor::{Format, StoredMatrix};

/// Rows are padded with zeros to a multiple of this many values, so that kernels read whole slabs
/// at aligned addresses.
pub(super) const SLAB: usize = 64;
/// Columns that share a scale.
const GROUP: usize = 32;
/// Tables from this size on stay in host memory, where the device reads single rows.
const HOST_TABLE: usize = 1 << 30;

/// Where a matrix lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Device memory.
    Device,
    /// Page-locked host memory that the device reads row by row.
    Host,
}

/// Memory that a matrix owns.
enum Owner {
    Device { _values: Memory, _scales: Memory },
    Host { _values: Pinned, _scales: Pinned },
}

/// A weight matrix in its stored form: values with padded rows, and scales as they are stored.
pub struct Matrix {
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Values; row `r` starts at `r * row_stride`, a multiple of 16 bytes.
    pub(super) data: Ptr,
    pub(super) row_stride: usize,
    /// Scales, as in [`StoredMatrix`].
    pub(super) scale: Ptr,
    pub(super) scale_stride: usize,
    pub(super) scale_row0: usize,
    owner: Owner,
}

impl Matrix {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Where it lies.
    pub fn placement(&self) -> Placement {
        match self.owner {
            Owner::Device { .. } => Placement::Device,
            Owner::Host { .. } => Placement::Host,
        }
    }
}

/// Bytes from the first to the end of the last of `rows` rows.
fn extent(rows: usize, stride: usize, row: usize) -> Option<usize> {
    match rows.checked_sub(1) {
        None => Some(0),
        Some(before) => before.checked_mul(stride)?.checked_add(row),
    }
}

/// The largest scale byte with which every weight is a bf16 number on the way through registers.
fn largest_scale(format: Format) -> u8 {
    match format {
        Format::F32 | Format::Bf16 => 255,
        // Codes are read as 2^-120 and 2^-126 of their values, and put right by one product with a
        // power of two, the scale in it.
        Format::Fp8Block32 | Format::Fp8Row32 => 134,
        Format::Fp4Row32 => 128,
    }
}

/// Shape of a matrix's scales as it is stored.
fn scale_shape(m: &StoredMatrix) -> (usize, usize) {
    m.format.scale_shape(m.rows + m.scale_row0, m.cols).unwrap_or((0, 0))
}

fn unsupported(m: &StoredMatrix, reason: String) -> DeviceError {
    DeviceError::Unsupported {
        device: "cuda",
        format: format!("{:?}", m.format),
        rows: m.rows,
        cols: m.cols,
        reason,
    }
}

/// Refuses a matrix whose bytes do not cover its shape.
fn check_bytes(m: &StoredMatrix) -> Result<()> {
    let (scale_rows, groups) = scale_shape(m);
    let values = extent(m.rows, m.row_stride, m.format.row_bytes(m.cols));
    let scales = extent(scale_rows, m.scale_stride, groups);
    let short = |have: usize, want: Option<usize>| want.is_none_or(|want| have < want);
    if short(m.data.len(), values) || short(m.scale.len(), scales) {
        let reason = format!(
            "{} bytes of values (row stride {}) and {} of scales (row stride {}) do not cover it",
            m.data.len(),
            m.row_stride,
            m.scale.len(),
            m.scale_stride
        );
        return Err(unsupported(m, reason));
    }
    Ok(())
}

/// Refuses what the products cannot read: bytes that do not cover the shape, and scales that are
/// too large or not a number.
pub(super) fn check_stored(m: &StoredMatrix) -> Result<()> {
    check_bytes(m)?;
    let (scale_rows, groups) = scale_shape(m);
    let limit = largest_scale(m.format);
    for r in 0..scale_rows {
        let row = &m.scale[r * m.scale_stride..][..groups];
        if let Some(byte) = row.iter().find(|byte| **byte > limit) {
            let exponent = i32::from(*byte) - 127;
            let most = i32::from(limit) - 127;
            let reason = format!("a scale of 2^{exponent}; this device reads up to 2^{most}");
            return Err(unsupported(m, reason));
        }
    }
    Ok(())
}

impl Cuda {
    /// Copies a matrix to the device. Large tables of rows with scales of their own (n-gram memory)
    /// go to page-locked host memory; they serve lookups only.
    ///
    /// # Errors
    /// If memory runs out, if the bytes do not cover the shape, or if a scale is too large for the
    /// products in registers (2^7 for fp8, 2 for fp4) or not a number.
    pub(super) fn store(&self, m: &StoredMatrix) -> Result<Matrix> {
        check_bytes(m)?;
        let row_bytes = m.format.row_bytes(m.cols);
        let (scale_rows, groups) = scale_shape(m);
        let row_stride = m.format.row_bytes(m.cols.next_multiple_of(SLAB));
        let bytes = m.rows * row_stride;
        let place = |data, scale, owner| Matrix {
            format: m.format,
            rows: m.rows,
            cols: m.cols,
            data,
            row_stride,
            scale,
            scale_stride: groups,
            scale_row0: m.scale_row0,
            owner,
        };
        if m.format == Format::Fp8Row32 && bytes >= HOST_TABLE {
            let mut values = Pinned::new(&self.context, bytes, true)?;
            pad_rows(&m.data, row_bytes, m.row_stride, row_stride, values.bytes_mut());
            let mut scales = Pinned::new(&self.context, scale_rows * groups, true)?;
            pad_rows(&m.scale, groups, m.scale_stride, groups, scales.bytes_mut());
            let (data, scale) = (values.ptr()?, scales.ptr()?);
            return Ok(place(data, scale, Owner::Host { _values: values, _scales: scales }));
        }
        check_stored(m)?;
        let values = Memory::zeroed(&self.context, "a weight", bytes)?;
        // A slab of a row's padding may read one scale beyond the last, and must find a number.
        let scale_bytes = scale_rows * groups + SLAB / GROUP;
        let scales = Memory::zeroed(&self.context, "a weight's scales", scale_bytes)?;
        let (data, scale) = (values.ptr(), scales.ptr());
        let mut staging = lock(&self.staging);
        let context = &self.context;
        staging.upload_rows(context, &m.data, m.rows, row_bytes, m.row_stride, data, row_stride)?;
        staging.upload_rows(
            context,
            &m.scale,
            scale_rows,
            groups,
            m.scale_stride,
            scale,
            groups,
        )?;
        Ok(place(data, scale, Owner::Device { _values: values, _scales: scales }))
    }
}
