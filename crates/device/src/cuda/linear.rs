//! Products with weights in stored form. `kernels/linear.cuh` says in which order they are added.

use super::Cuda;
use super::launch::{MAX_BLOCKS_YZ, args, u32_of};
use super::memory::{Buffer, Ptr};
use super::scratch::ScratchGuard;
use super::stored::{Matrix, SLAB};
use crate::ops::Result;
use crate::tensor::Format;
use half::bf16;

/// Most chunks of a row; the kernels hold as many partial sums.
const CHUNKS: usize = 8;
/// The same for f32 weights.
const F32_CHUNKS: usize = 32;
/// Least values in a chunk.
const LEAST_CHUNK: usize = 256;
/// Rows of x up to which a block holds them all, and each warp a chunk.
const FEW_ROWS: usize = 8;
/// Weight rows of such a block, and where more blocks are wanted.
const FEW_N: [usize; 2] = [16, 8];
/// Blocks of the larger kind a multiprocessor, below which more are wanted.
const FEW_TILES: usize = 2;
/// Rows of x up to which f32 weights get a block for each product.
const FEW_F32_ROWS: usize = 16;
/// Rows of x of a block for many rows: the smaller one lets more blocks share a multiprocessor.
const TILE_M: [usize; 2] = [32, 64];
/// Rows of x up to which the smaller one serves; for bf16 with a chunk a block.
const SMALL_TILE_ROWS: usize = 32;
const SMALL_BF16_ROWS: usize = 128;
/// Blocks a multiprocessor, with a chunk each, below which the smaller one serves, too.
const FEW_SPLIT_BLOCKS: usize = 2;
/// Weight rows, and threads, of a block for many rows.
const TILE_N: usize = 128;
/// Blocks for many rows below which chunks get blocks of their own.
const FEW_BLOCKS: usize = 256;
/// Most values of chunk sums at a time.
const MOST_SUMS: usize = 64 << 20;

/// Values in a chunk, a function of format and length of the row alone, and chunks.
fn chunks(format: Format, k: usize) -> (usize, usize) {
    let most = if format == Format::F32 { F32_CHUNKS } else { CHUNKS };
    let chunk = k.div_ceil(most).next_multiple_of(SLAB).max(LEAST_CHUNK);
    (chunk, k.div_ceil(chunk).max(1))
}

/// One product.
struct Product<'a> {
    operation: &'static str,
    w: &'a Matrix,
    groups: usize,
    factor: f32,
    to_f32: bool,
}

pub(super) fn linear(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    w: &Matrix,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let product = Product { operation: "linear", w, groups: 1, factor: 1.0, to_f32: false };
    let (x, out) = (x.head(rows * w.cols), out.head(rows * w.rows));
    product.run(cuda, x, rows, out, &mut cuda.scratch())
}

pub(super) fn linear_f32(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    w: &Matrix,
    factor: f32,
    rows: usize,
    out: &mut Buffer<f32>,
) -> Result<()> {
    let (x, out) = (x.head(rows * w.cols), out.head(rows * w.rows));
    to_f32(cuda, "linear_f32", x, w, factor, rows, out, &mut cuda.scratch())
}

pub(super) fn grouped_linear(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    w: &Matrix,
    groups: usize,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    assert!(w.rows.is_multiple_of(groups), "{groups} groups in {} rows", w.rows);
    let product = Product { operation: "grouped_linear", w, groups, factor: 1.0, to_f32: false };
    let (x, out) = (x.head(rows * groups * w.cols), out.head(rows * w.rows));
    product.run(cuda, x, rows, out, &mut cuda.scratch())
}

/// `linear_f32` inside another operation.
pub(super) fn to_f32(
    cuda: &Cuda,
    operation: &'static str,
    x: Ptr,
    w: &Matrix,
    factor: f32,
    rows: usize,
    out: Ptr,
    scratch: &mut ScratchGuard<'_>,
) -> Result<()> {
    Product { operation, w, groups: 1, factor, to_f32: true }.run(cuda, x, rows, out, scratch)
}

impl Product<'_> {
    /// Rows in pieces that a grid can have and whose chunk sums are not too many.
    fn run(
        &self,
        cuda: &Cuda,
        x: Ptr,
        rows: usize,
        out: Ptr,
        scratch: &mut ScratchGuard<'_>,
    ) -> Result<()> {
        if rows == 0 || self.w.rows == 0 {
            return Ok(());
        }
        cuda.trace_shape(self.operation, self.w.rows, self.w.cols);
        let out_bytes = if self.to_f32 { 4 } else { 2 };
        // A multiple of a tile keeps the pieces of `out` aligned.
        let step = MAX_BLOCKS_YZ / TILE_M[1] * TILE_M[1];
        for first in (0..rows).step_by(step) {
            let x = x.add(first * self.groups * self.w.cols * 2);
            let out = out.add(first * self.w.rows * out_bytes);
            self.piece(cuda, x, step.min(rows - first), out, scratch)?;
        }
        Ok(())
    }

    fn piece(
        &self,
        cuda: &Cuda,
        x: Ptr,
        rows: usize,
        out: Ptr,
        scratch: &mut ScratchGuard<'_>,
    ) -> Result<()> {
        let n = self.w.rows / self.groups;
        let (_, chunks) = chunks(self.w.format, self.w.cols);
        let name = match self.w.format {
            Format::F32 => {
                // Few rows of x get more blocks, with more warps.
                let (r, warps) = if rows <= FEW_F32_ROWS { (1, F32_CHUNKS) } else { (4, 8) };
                let blocks = [self.groups * n.div_ceil(r), rows.div_ceil(r), 1];
                let threads = chunks.min(warps) * 32;
                let kernel = format!("linear_f32_{r}");
                return self.launch(cuda, &kernel, blocks, threads, x, rows, out);
            }
            Format::Bf16 => "bf16",
            Format::Fp8Block32 | Format::Fp8Row32 => "fp8",
            Format::Fp4Row32 => "fp4",
        };
        // Rows of x that do not start at multiples of 16 bytes are read value by value.
        let odd = !self.w.cols.is_multiple_of(8);
        if rows <= FEW_ROWS || odd {
            let tiles = |rows: usize| self.groups * n.div_ceil(rows);
            let more = !odd && tiles(FEW_N[0]) < FEW_TILES * cuda.info().multiprocessors;
            let high = FEW_N[usize::from(more)];
            let kind = if odd { "odd".to_owned() } else { high.to_string() };
            let kernel = format!("linear_few_{name}_{kind}");
            let blocks = [tiles(high), rows.div_ceil(FEW_ROWS), 1];
            return self.launch(cuda, &kernel, blocks, chunks * 32, x, rows, out);
        }
        let tiles = self.groups * n.div_ceil(TILE_N);
        let high = TILE_M[usize::from(rows > SMALL_TILE_ROWS)];
        let sums = rows * self.w.rows;
        let many = tiles * rows.div_ceil(high) >= FEW_BLOCKS;
        if chunks == 1 || many || chunks * sums > MOST_SUMS {
            let kernel = format!("linear_tile_{name}_{high}");
            let blocks = [rows.div_ceil(high), tiles, 1];
            return self.launch(cuda, &kernel, blocks, TILE_N, x, rows, out);
        }
        let small = if name == "bf16" { SMALL_BF16_ROWS } else { SMALL_TILE_ROWS };
        let blocks = rows.div_ceil(TILE_M[1]) * tiles * chunks;
        let many = blocks >= FEW_SPLIT_BLOCKS * cuda.info().multiprocessors;
        let high = TILE_M[usize::from(rows > small && many)];
        let kernel = format!("linear_split_{name}_{high}");
        let blocks = [rows.div_ceil(high), tiles, chunks];
        let partial = scratch.take::<f32>(chunks * sums)?;
        self.launch(cuda, &kernel, blocks, TILE_N, x, rows, partial)?;
        let args =
            args![partial, u32_of(chunks), sums as u64, self.factor, u32::from(self.to_f32), out,];
        let width = if sums.is_multiple_of(4) { 4 } else { 1 };
        let blocks = [sums.div_ceil(256 * width), 1, 1];
        cuda.launch(self.operation, &format!("linear_sum_{width}"), blocks, 256, 0, args)
    }

    fn launch(
        &self,
        cuda: &Cuda,
        kernel: &str,
        blocks: [usize; 3],
        threads: usize,
        x: Ptr,
        rows: usize,
        out: Ptr,
    ) -> Result<()> {
        let w = self.w;
        let (chunk, chunks) = chunks(w.format, w.cols);
        let shift = if w.format == Format::Fp8Block32 { 5u32 } else { 0 };
        let args = args![
            x,
            w.data,
            w.row_stride as u64,
            w.scale,
            w.scale_stride as u64,
            u32_of(w.scale_row0),
            shift,
            u32_of(rows),
            u32_of(w.rows / self.groups),
            u32_of(w.cols),
            u32_of(self.groups),
            u32_of(chunk),
            u32_of(chunks),
            self.factor,
            u32::from(self.to_f32),
            out,
        ];
        cuda.launch(self.operation, kernel, blocks, threads, 0, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_row_and_are_few() {
        for (format, most) in [(Format::Bf16, CHUNKS), (Format::F32, F32_CHUNKS)] {
            for k in (1..5000).chain([5120, 8192, 15360, 20480, 129_280]) {
                let (chunk, count) = chunks(format, k);
                assert!(chunk.is_multiple_of(SLAB) && count <= most, "{k}");
                assert!(chunk * count >= k && chunk * (count - 1) < k, "{k}");
            }
        }
    }
}
