//! Weight matrices on the device.

use super::Cuda;
use super::lock;
use super::memory::{Memory, Ptr};
use super::staging::{Pinned, pad_rows};
use crate::formats::dequantize_matrix_row;
use crate::ops::Result;
use crate::tensor::{Expert, Format, StoredMatrix};
use bytes::Bytes;
use half::bf16;

/// Rows are padded with zeros to a multiple of this many values, so that kernels read whole slabs
/// at aligned addresses.
pub(super) const SLAB: usize = 64;
/// Columns that share a scale.
const GROUP: usize = 32;
/// Tables from this size on stay in host memory, where the device reads single rows.
pub const HOST_TABLE: usize = 1 << 30;

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
    Host { values: Pinned, scales: Pinned },
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

/// The largest scale byte that products in registers can apply.
pub(super) fn largest_scale(format: Format) -> u8 {
    match format {
        Format::F32 | Format::Bf16 => 255,
        // Codes are read as 2^-120 and 2^-126 of their values, and put right by one product with a
        // power of two, the scale in it.
        Format::Fp8Block32 | Format::Fp8Row32 => 134,
        Format::Fp4Row32 => 128,
    }
}

/// Whether a matrix is a table that stays in host memory.
fn is_host_table(format: Format, rows: usize, cols: usize) -> bool {
    let row_stride = format.row_bytes(cols.next_multiple_of(SLAB));
    format == Format::Fp8Row32 && rows * row_stride >= HOST_TABLE
}

/// Shape of a matrix's scales as it is stored.
fn scale_shape(m: &StoredMatrix) -> (usize, usize) {
    m.format.scale_shape(m.rows + m.scale_row0, m.cols).unwrap_or((0, 0))
}

/// Whether a scale is too large for products in registers, or not a number.
fn has_large_scale(m: &StoredMatrix) -> bool {
    let (scale_rows, groups) = scale_shape(m);
    let limit = largest_scale(m.format);
    let row = |r: usize| &m.scale[r * m.scale_stride..][..groups];
    (0..scale_rows).any(|r| row(r).iter().any(|byte| *byte > limit))
}

/// Whether products in registers would misread it: a scale that is too large or no number, or the
/// fp8 code of NaN.
fn needs_widening(m: &StoredMatrix) -> bool {
    let fp8 = matches!(m.format, Format::Fp8Block32 | Format::Fp8Row32);
    let is_nan = |row: &[u8]| row.iter().fold(false, |any, code| any | (code & 0x7F == 0x7F));
    has_large_scale(m) || fp8 && (0..m.rows).any(|r| is_nan(m.row(r)))
}

/// The same weights as bf16. Exact, as every product of a code and a scale is a bf16 number.
fn widened(m: &StoredMatrix) -> StoredMatrix {
    let mut row = vec![0.0; m.cols];
    let mut data = Vec::with_capacity(Format::Bf16.row_bytes(m.cols) * m.rows);
    for r in 0..m.rows {
        dequantize_matrix_row(m, r, &mut row);
        data.extend(row.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()));
    }
    StoredMatrix::new(Format::Bf16, m.rows, m.cols, data.into(), Bytes::new())
}

/// The experts of a layer in a form that the kernels read: as they are, or all as bf16 if the
/// scales of one are too large (above 2 for fp4: weights above 8) or one holds a NaN.
///
/// # Errors
/// If bytes do not cover a shape.
pub(super) fn readable(experts: Vec<Expert<StoredMatrix>>) -> Result<Vec<Expert<StoredMatrix>>> {
    let mut large = false;
    for m in experts.iter().flat_map(|e| [&e.w1, &e.w3, &e.w2]) {
        m.check("cuda")?;
        large |= needs_widening(m);
    }
    if !large {
        return Ok(experts);
    }
    let widen = |e: Expert<StoredMatrix>| Expert {
        w1: widened(&e.w1),
        w3: widened(&e.w3),
        w2: widened(&e.w2),
    };
    Ok(experts.into_iter().map(widen).collect())
}

impl Cuda {
    /// Copies a matrix to the device. Large tables of rows with scales of their own (n-gram memory)
    /// go to page-locked host memory; they serve lookups only.
    ///
    /// A matrix with a scale too large for products in registers (above 2^7 for fp8, 2 for fp4), or
    /// with a NaN, is kept as bf16.
    ///
    /// # Errors
    /// If memory runs out, or the bytes do not cover the shape.
    pub(super) fn store(&self, m: &StoredMatrix) -> Result<Matrix> {
        m.check("cuda")?;
        let (scale_rows, groups) = scale_shape(m);
        let row_bytes = m.format.row_bytes(m.cols);
        if !is_host_table(m.format, m.rows, m.cols) && needs_widening(m) {
            return self.store(&widened(m));
        }
        let mut matrix = self.blank(m.format, m.rows, m.cols, m.scale_row0)?;
        let (data, scale, row_stride) = (matrix.data, matrix.scale, matrix.row_stride);
        if let Owner::Host { values, scales } = &mut matrix.owner {
            pad_rows(&m.data, row_bytes, m.row_stride, row_stride, values.bytes_mut());
            pad_rows(&m.scale, groups, m.scale_stride, groups, scales.bytes_mut());
            return Ok(matrix);
        }
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
        Ok(matrix)
    }

    /// Memory for a matrix, where it belongs. On the device it holds zeros, in host memory anything.
    ///
    /// # Errors
    /// If memory runs out.
    pub(super) fn blank(
        &self,
        format: Format,
        rows: usize,
        cols: usize,
        scale_row0: usize,
    ) -> Result<Matrix> {
        let row_stride = format.row_bytes(cols.next_multiple_of(SLAB));
        let (scale_rows, groups) = format.scale_shape(rows + scale_row0, cols).unwrap_or((0, 0));
        let (bytes, scale_bytes) = (rows * row_stride, scale_rows * groups);
        let (data, scale, owner) = if is_host_table(format, rows, cols) {
            let values = Pinned::new(&self.context, bytes, true)?;
            let scales = Pinned::new(&self.context, scale_bytes, true)?;
            (values.ptr()?, scales.ptr()?, Owner::Host { values, scales })
        } else {
            let values = Memory::zeroed(&self.context, "a weight", bytes)?;
            // A slab of a row's padding may read one scale beyond the last, and must find a number.
            let scale_bytes = scale_bytes + SLAB / GROUP;
            let scales = Memory::zeroed(&self.context, "a weight's scales", scale_bytes)?;
            (values.ptr(), scales.ptr(), Owner::Device { _values: values, _scales: scales })
        };
        Ok(Matrix {
            format,
            rows,
            cols,
            data,
            row_stride,
            scale,
            scale_stride: groups,
            scale_row0,
            owner,
        })
    }
}
