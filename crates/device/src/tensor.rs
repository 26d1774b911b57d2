//! Weights as they lie in a checkpoint, and the element types of device buffers.

use crate::error::DeviceError;
use bytes::Bytes;
use std::ops::Range;

/// A type that device buffers hold: plain data, of which all-zero bytes are the default. Sealed.
pub trait Element:
    Copy + Default + Send + Sync + PartialEq + std::fmt::Debug + sealed::Plain + 'static
{
}

mod sealed {
    /// Types whose every byte pattern is a value.
    pub trait Plain {}
}

macro_rules! elements {
    ($($ty:ty),*) => {$(
        impl sealed::Plain for $ty {}
        impl Element for $ty {}
    )*};
}
elements!(f32, half::bf16, u8, u32, u64);

/// How the numbers of a weight matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Little-endian f32.
    F32,
    /// Little-endian bf16.
    Bf16,
    /// One E4M3FN byte a value; one UE8M0 scale for each 32 x 32 tile, `[ceil(rows/32), ceil(cols/32)]`.
    Fp8Block32,
    /// Two E2M1 codes a byte, the even column in the low nibble; one UE8M0 scale for each row and
    /// 32 columns, `[rows, ceil(cols/32)]`.
    Fp4Row32,
    /// One E4M3FN byte a value; one UE8M0 scale for each row and 32 columns, `[rows, ceil(cols/32)]`.
    Fp8Row32,
}

impl Format {
    /// Bytes of one row of `cols` values, scales not counted.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::Bf16 => cols * 2,
            Format::Fp8Block32 | Format::Fp8Row32 => cols,
            Format::Fp4Row32 => cols.div_ceil(2),
        }
    }

    /// Shape of the scale array of a `rows x cols` matrix; `None` for plain formats.
    pub const fn scale_shape(self, rows: usize, cols: usize) -> Option<(usize, usize)> {
        match self {
            Format::F32 | Format::Bf16 => None,
            Format::Fp8Block32 => Some((rows.div_ceil(32), cols.div_ceil(32))),
            Format::Fp4Row32 | Format::Fp8Row32 => Some((rows, cols.div_ceil(32))),
        }
    }
}

/// A view of a row-major matrix `[rows, cols]` in stored form. Cheap to clone: the bytes belong to
/// a mapped file or to the binary, and are never copied. Not necessarily aligned.
#[derive(Clone)]
pub struct StoredMatrix {
    /// Number format.
    pub format: Format,
    /// Output features of a linear layer.
    pub rows: usize,
    /// Input features of a linear layer.
    pub cols: usize,
    /// Values; row `r` starts at `r * row_stride`.
    pub data: Bytes,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    /// Scales; empty for plain formats. The scale row of row `r` is `(r + scale_row0) / 32` for
    /// tiles and `r` for row scales; it starts at that number times `scale_stride`.
    pub scale: Bytes,
    /// Bytes from one scale row to the next.
    pub scale_stride: usize,
    /// Rows of a tile that lie before row 0 of this view (tiles only).
    pub scale_row0: usize,
}

impl StoredMatrix {
    /// A whole matrix. The caller has checked that `data` and `scale` have the lengths that
    /// `format`, `rows` and `cols` ask for.
    pub fn new(format: Format, rows: usize, cols: usize, data: Bytes, scale: Bytes) -> Self {
        let row_stride = format.row_bytes(cols);
        let scale_stride = format.scale_shape(rows, cols).map_or(0, |(_, c)| c);
        debug_assert_eq!(data.len(), rows * row_stride);
        Self { format, rows, cols, data, row_stride, scale, scale_stride, scale_row0: 0 }
    }

    /// The rows of `range`, in place.
    ///
    /// # Panics
    /// If the range does not lie in the matrix.
    pub fn row_range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "row range {range:?}");
        let mut view = self.clone();
        view.rows = range.len();
        view.data = self.data.slice(range.start * self.row_stride..range.end * self.row_stride);
        match self.format {
            Format::F32 | Format::Bf16 => {}
            Format::Fp8Block32 => {
                let first = range.start + self.scale_row0;
                view.scale = self.scale.slice(first / 32 * self.scale_stride..);
                view.scale_row0 = first % 32;
            }
            Format::Fp4Row32 | Format::Fp8Row32 => {
                view.scale = self.scale.slice(range.start * self.scale_stride..);
            }
        }
        view
    }

    /// The columns of `range`, in place.
    ///
    /// # Panics
    /// If the range does not lie in the matrix, or starts off a scale group (32 columns).
    pub fn col_range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "column range {range:?}");
        assert!(range.start.is_multiple_of(32), "columns are cut at multiples of 32");
        let mut view = self.clone();
        view.cols = range.len();
        view.data = self.data.slice(self.format.row_bytes(range.start)..);
        if self.scale_stride > 0 {
            view.scale = self.scale.slice(range.start / 32..);
        }
        view
    }

    /// The bytes of row `r`.
    pub fn row(&self, r: usize) -> &[u8] {
        let at = r * self.row_stride;
        &self.data[at..at + self.format.row_bytes(self.cols)]
    }

    /// The scale bytes of row `r` (one a group of 32 columns); empty for plain formats.
    pub fn row_scales(&self, r: usize) -> &[u8] {
        let groups = self.cols.div_ceil(32);
        let at = match self.format {
            Format::F32 | Format::Bf16 => return &[],
            Format::Fp8Block32 => (r + self.scale_row0) / 32 * self.scale_stride,
            Format::Fp4Row32 | Format::Fp8Row32 => r * self.scale_stride,
        };
        &self.scale[at..at + groups]
    }

    /// An error about this matrix on `device`.
    pub(crate) fn unsupported(&self, device: &'static str, reason: String) -> DeviceError {
        let (format, rows, cols) = (format!("{:?}", self.format), self.rows, self.cols);
        DeviceError::Unsupported { device, format, rows, cols, reason }
    }

    /// Refuses a matrix whose bytes do not cover its shape, in the name of `device`.
    pub(crate) fn check(&self, device: &'static str) -> Result<(), DeviceError> {
        let values = extent(self.rows, self.row_stride, self.format.row_bytes(self.cols));
        let shape = self.format.scale_shape(self.rows + self.scale_row0, self.cols);
        let (scale_rows, groups) = shape.unwrap_or((0, 0));
        let scales = extent(scale_rows, self.scale_stride, groups);
        let short = |have: usize, want: Option<usize>| want.is_none_or(|want| have < want);
        if !short(self.data.len(), values) && !short(self.scale.len(), scales) {
            return Ok(());
        }
        let reason = format!(
            "{} bytes of values (row stride {}) and {} of scales (row stride {}) do not cover it",
            self.data.len(),
            self.row_stride,
            self.scale.len(),
            self.scale_stride
        );
        Err(self.unsupported(device, reason))
    }

    /// Bytes that a product with this matrix reads, scales included.
    pub fn stored_bytes(&self) -> usize {
        let scales = self.format.scale_shape(self.rows, self.cols).map_or(0, |(r, c)| r * c);
        self.rows * self.format.row_bytes(self.cols) + scales
    }
}

/// Bytes from the first to the end of the last of `rows` rows.
fn extent(rows: usize, stride: usize, row: usize) -> Option<usize> {
    match rows.checked_sub(1) {
        None => Some(0),
        Some(before) => before.checked_mul(stride)?.checked_add(row),
    }
}

impl std::fmt::Debug for StoredMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} [{}, {}]", self.format, self.rows, self.cols)
    }
}

/// The three projections of one expert (or of a shared expert).
#[derive(Clone, Debug)]
pub struct Expert<M> {
    /// Gate projection `[intermediate, hidden]`.
    pub w1: M,
    /// Up projection `[intermediate, hidden]`.
    pub w3: M,
    /// Down projection `[hidden, intermediate]`.
    pub w2: M,
}

/// How the rows of a cache are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// f32 as computed (the `exact` format of a CPU).
    F32,
    /// bf16 as computed (the `exact` format of a GPU).
    Bf16,
    /// E4M3 bytes, then one UE8M0 scale for each 32 values (window rows).
    Fp8x32,
    /// E2M1 pairs, then one E4M3 scale for each 16 values (compressed rows).
    Nvfp4x16,
    /// E2M1 pairs, then one UE8M0 scale for each 32 values (index keys).
    Mxfp4x32,
}

impl RowFormat {
    /// Bytes of one row of `width` values, scales included (the released widths: window 528,
    /// compressed 288, index 68).
    pub const fn row_bytes(self, width: usize) -> usize {
        match self {
            RowFormat::F32 => width * 4,
            RowFormat::Bf16 => width * 2,
            RowFormat::Fp8x32 => width + width.div_ceil(32),
            RowFormat::Nvfp4x16 => width.div_ceil(2) + width.div_ceil(16),
            RowFormat::Mxfp4x32 => width.div_ceil(2) + width.div_ceil(32),
        }
    }
}
