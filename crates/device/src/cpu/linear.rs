//! Linear layers over weights in stored form, read in place.
//!
//! Every product follows the order of `lanes`, whatever the number of rows, the
//! threads and the instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod few;
#[cfg(target_arch = "x86_64")]
mod many;
mod plain;
#[cfg(target_arch = "x86_64")]
mod scales;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::dispatch::{LANES, by_isa};
use super::{Cpu, Isa, lanes, scratch};
use crate::error::DeviceError;
use crate::tensor::{Format, StoredMatrix};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows that share one pass over the weights.
const ROW_BLOCK: usize = 256;
/// Weight rows in a unit of work. Tiles have as many.
const PIECE: usize = 32;
/// Stored bytes in a unit of work for few activation rows: handing over a unit takes as long as
/// reading some kilobytes.
const UNIT_BYTES: usize = 128 << 10;
/// Units that a matrix is cut into at least, if it has as many tiles, so that threads end together.
const LEAST_UNITS: usize = 16;
/// Activation rows up to which units of work are long: for so few, reading weights takes the time.
const FEW_ROWS: usize = 8;
/// Least activation rows in a unit of work, where there are as many.
const LEAST_ROWS: usize = 24;
/// Multiply-adds below which a second thread does not pay.
const SMALL: usize = 1 << 17;

/// A weight matrix that this CPU reads where it lies.
#[derive(Clone, Debug)]
pub struct Weight(StoredMatrix);

impl Weight {
    /// Accepts a matrix whose bytes cover its shape.
    pub fn new(m: StoredMatrix) -> Result<Self, DeviceError> {
        m.check("cpu")?;
        Ok(Self(m))
    }

    /// The matrix as it is stored.
    pub fn stored(&self) -> &StoredMatrix {
        &self.0
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.0.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.0.cols
    }
}

/// `out = x @ w^T`: `[rows, in] -> [rows, out features]`.
///
/// # Panics
/// If `x` or `out` is shorter than that.
pub fn linear(cpu: &Cpu, x: &[f32], w: &Weight, rows: usize, out: &mut [f32]) {
    product(cpu, x, w, 1, 1.0, rows, out);
}

/// The same times `factor`.
pub fn linear_f32(cpu: &Cpu, x: &[f32], w: &Weight, factor: f32, rows: usize, out: &mut [f32]) {
    product(cpu, x, w, 1, factor, rows, out);
}

/// Block-diagonal product: `w` is `[groups * o, i]`, `x` is `[rows, groups * i]`; group `g` of the
/// output `[rows, groups * o]` is rows `g*o..` of `w` times group `g` of `x`.
///
/// # Panics
/// If `x` or `out` is shorter than that, or `groups` does not divide the rows of `w`.
pub fn grouped_linear(
    cpu: &Cpu,
    x: &[f32],
    w: &Weight,
    groups: usize,
    rows: usize,
    out: &mut [f32],
) {
    product(cpu, x, w, groups, 1.0, rows, out);
}

fn product(
    cpu: &Cpu,
    x: &[f32],
    w: &Weight,
    groups: usize,
    factor: f32,
    rows: usize,
    out: &mut [f32],
) {
    let (w, isa) = (&w.0, cpu.isa());
    assert!(w.rows.is_multiple_of(groups), "{groups} groups in {w:?}");
    let (o, x_width) = (w.rows / groups, groups * w.cols);
    let (x, out) = (&x[..rows * x_width], &mut out[..rows * w.rows]);
    if rows == 0 || w.rows == 0 {
        return;
    }
    let views: Vec<_> = (0..groups).map(|g| w.row_range(g * o..(g + 1) * o)).collect();
    let few = rows <= FEW_ROWS;
    let parts: Vec<_> = views
        .iter()
        .enumerate()
        .flat_map(|(g, w)| pieces(w, few).map(move |n| (g, w, n)))
        .collect();
    let padded = lanes::padded(w.format, w.cols);

    let blocks = x.chunks((ROW_BLOCK * x_width).max(1)).zip(out.chunks_mut(ROW_BLOCK * w.rows));
    for (x, out) in blocks {
        let rows = out.len() / w.rows;
        let columns = Columns::new(out, w.rows);
        let stride = apart(groups * padded);
        let mut arranged = scratch::take(rows * stride);
        for (x, to) in x.chunks(x_width.max(1)).zip(arranged.chunks_mut(stride)) {
            for (x, to) in x.chunks(w.cols.max(1)).zip(to.chunks_mut(padded.max(1))) {
                lanes::arrange(w.format, x, to);
            }
        }
        let arranged = &*arranged;
        let magnitudes = Magnitudes::wanted(isa, w.format, arranged, stride, groups * padded);
        // Few weight rows for all threads: cut the activation rows too.
        let cuts = (4 * cpu.threads()).div_ceil(parts.len());
        let step = rows.div_ceil(cuts).max(LEAST_ROWS);
        let tasks: Vec<_> = (0..rows)
            .step_by(step)
            .flat_map(|from| parts.iter().map(move |part| (from..rows.min(from + step), part)))
            .collect();
        cpu.for_each(rows * w.rows * w.cols, &tasks, |(rows, (g, w, n))| {
            let start = &arranged[rows.start * stride + g * padded..];
            let x = Rows::strided(start, rows.len(), stride, padded, magnitudes);
            let mut values = scratch::take(rows.len() * n.len());
            block(isa, &x, w, n.clone(), &mut values);
            if factor != 1.0 {
                values.iter_mut().for_each(|v| *v *= factor);
            }
            for (i, values) in values.chunks(n.len()).enumerate() {
                // SAFETY: each task has rows or columns of its own.
                unsafe { columns.write(rows.start + i, g * o + n.start, values) };
            }
        });
    }
}

/// The rows of a matrix in units of work, cut where tiles are. `few` asks for units that suit few
/// activation rows: smaller ones where the format has no tiles, else several short tiles.
pub(crate) fn pieces(w: &StoredMatrix, few: bool) -> impl Iterator<Item = Range<usize>> + use<> {
    let (rows, before) = (w.rows, w.scale_row0);
    let piece = match (few, w.format) {
        (false, _) => PIECE,
        (true, Format::F32 | Format::Bf16) => PIECE / 4,
        (true, format) => {
            let tile_bytes = PIECE * format.row_bytes(w.cols);
            let most = (rows / (PIECE * LEAST_UNITS)).max(1);
            PIECE * (UNIT_BYTES / tile_bytes.max(1)).clamp(1, most)
        }
    };
    (0..(rows + before).div_ceil(piece))
        .map(move |t| (t * piece).saturating_sub(before)..((t + 1) * piece - before).min(rows))
        .filter(|piece| !piece.is_empty())
}

impl Cpu {
    /// Calls `f` for each task, on all threads if `work` multiply-adds are worth it.
    pub(crate) fn for_each<T: Sync>(&self, work: usize, tasks: &[T], f: impl Fn(&T) + Send + Sync) {
        if work < SMALL || self.threads() == 1 || tasks.len() < 2 {
            tasks.iter().for_each(f);
        } else {
            self.pool().install(|| tasks.par_iter().with_max_len(1).for_each(f));
        }
    }
}

/// Magnitudes among values, as bits of f32: the least but 0, and the largest. Both are 0 if all are.
#[derive(Clone, Copy)]
pub(crate) struct Magnitudes {
    pub(crate) least: u32,
    pub(crate) largest: u32,
}

impl Magnitudes {
    /// Those of rows of `width`, `stride` apart, if products with matrices of a format ask for them.
    pub(crate) fn wanted(
        isa: Isa,
        format: Format,
        rows: &[f32],
        stride: usize,
        width: usize,
    ) -> Self {
        let mut all = Self { least: 0, largest: 0 };
        if format == Format::Fp8Block32 {
            magnitudes(isa, rows, stride, width, &mut all);
        }
        all
    }
}

by_isa! {
    fn magnitudes(rows: &[f32], stride: usize, width: usize, all: &mut Magnitudes) {
        // Less one, zeros come last.
        let (mut least, mut largest) = (u32::MAX, 0);
        for row in rows.chunks_exact(stride) {
            for x in &row[..width] {
                let bits = x.to_bits() & 0x7FFF_FFFF;
                least = least.min(bits.wrapping_sub(1));
                largest = largest.max(bits);
            }
        }
        *all = Magnitudes { least: least.wrapping_add(1), largest };
    }
}

/// Values from one row of `width` to the next: lines that are read together do not meet in one set of
/// a cache.
pub(crate) fn apart(width: usize) -> usize {
    width + LANES
}

/// Rows in lane order.
pub(crate) struct Rows<'a> {
    data: &'a [f32],
    len: usize,
    stride: usize,
    width: usize,
    index: Option<&'a [u32]>,
    magnitudes: Magnitudes,
}

impl<'a> Rows<'a> {
    /// `len` rows of `width`, `stride` apart. `magnitudes` covers all of them.
    pub(crate) fn strided(
        data: &'a [f32],
        len: usize,
        stride: usize,
        width: usize,
        magnitudes: Magnitudes,
    ) -> Self {
        Self { data, len, stride, width, index: None, magnitudes }
    }

    /// Those rows of `width`, `stride` apart in `data`, that `index` names.
    pub(crate) fn gathered(
        data: &'a [f32],
        index: &'a [u32],
        stride: usize,
        width: usize,
        magnitudes: Magnitudes,
    ) -> Self {
        Self { data, len: index.len(), stride, width, index: Some(index), magnitudes }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        let i = self.index.map_or(i, |index| index[i] as usize);
        &self.data[i * self.stride..][..self.width]
    }
}

/// A row-major matrix whose columns several threads write.
pub(crate) struct Columns<'a> {
    start: *mut f32,
    len: usize,
    width: usize,
    of: PhantomData<&'a mut [f32]>,
}

// SAFETY: the memory is borrowed exclusively; `write` makes its caller keep threads apart.
unsafe impl Send for Columns<'_> {}
// SAFETY: as above.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    pub(crate) fn new(data: &'a mut [f32], width: usize) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), width, of: PhantomData }
    }

    /// Writes `values` from column `column` of row `row` on.
    ///
    /// # Safety
    /// No other thread writes these columns.
    pub(crate) unsafe fn write(&self, row: usize, column: usize, values: &[f32]) {
        let at = row * self.width + column;
        assert!(column + values.len() <= self.width && at + values.len() <= self.len);
        // SAFETY: in bounds by the assertion; nobody else touches it by the caller's promise.
        unsafe { self.start.add(at).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
}

/// `out[i, j]` = row `i` of `x` times row `n.start + j` of `w`. `x` is in the lane order of the
/// format of `w`.
pub(crate) fn block(isa: Isa, x: &Rows, w: &StoredMatrix, n: Range<usize>, out: &mut [f32]) {
    match isa {
        Isa::Scalar => plain::block(x, w, n, out),
        // SAFETY: a device holds an `Isa` only if the processor has it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::block_avx2(x, w, n, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { x86::block_avx512(x, w, n, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vbmi => unsafe { x86::block_vbmi(x, w, n, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => plain::block(x, w, n, out),
    }
}
