//! Moving, rounding and reading rows.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use super::paged::alignment;
use super::stored::Matrix;
use crate::ops::Result;
use crate::tensor::{Element, Format, RowFormat};
use half::bf16;

/// Threads of a block.
const THREADS: usize = 256;
/// Rows of a block with a warp each.
const WARPS: usize = THREADS / 32;

/// Whole rows in a buffer.
fn rows_in<E: Element>(buffer: &Buffer<E>, width: usize) -> u64 {
    buffer.len().checked_div(width).unwrap_or(0) as u64
}

pub(super) fn gather<E: Element>(
    cuda: &Cuda,
    src: &Buffer<E>,
    width: usize,
    indices: &Buffer<u32>,
    rows: usize,
    out: &mut Buffer<E>,
) -> Result<()> {
    let args = args![
        src.head(0),
        rows_in(src, width),
        (width * size_of::<E>()) as u64,
        indices.head(rows),
        rows as u64,
        out.head(rows * width),
    ];
    cuda.launch("gather_rows", "gather_rows", [rows.div_ceil(WARPS), 1, 1], THREADS, 0, args)
}

pub(super) fn scatter<E: Element>(
    cuda: &Cuda,
    src: &Buffer<E>,
    width: usize,
    indices: &Buffer<u64>,
    rows: usize,
    out: &mut Buffer<E>,
) -> Result<()> {
    let args = args![
        src.head(rows * width),
        (width * size_of::<E>()) as u64,
        indices.head(rows),
        rows as u64,
        rows_in(out, width),
        out.head(0),
    ];
    cuda.launch("scatter_rows", "scatter_rows", [rows.div_ceil(WARPS), 1, 1], THREADS, 0, args)
}

/// The end of the names of a quantized format's kernels.
fn suffix(format: RowFormat) -> Option<&'static str> {
    match format {
        RowFormat::F32 | RowFormat::Bf16 => None,
        RowFormat::Fp8x32 => Some("fp8"),
        RowFormat::Nvfp4x16 => Some("nvfp4"),
        RowFormat::Mxfp4x32 => Some("mxfp4"),
    }
}

pub(super) fn encode(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    width: usize,
    format: RowFormat,
    rows: usize,
    out: &mut Buffer<u8>,
) -> Result<()> {
    let (x, out) = (x.head(rows * width), out.head(rows * format.row_bytes(width)));
    let operation = "encode_rows";
    let Some(suffix) = suffix(format) else {
        if format == RowFormat::Bf16 {
            return cuda.copy_bytes(x, out, rows * width * 2);
        }
        let blocks = [(rows * width).div_ceil(THREADS), 1, 1];
        let args = args![x, (rows * width) as u64, out];
        return cuda.launch(operation, "encode_rows_f32", blocks, THREADS, 0, args);
    };
    let groups = rows * width.div_ceil(32);
    let args = args![x, u32_of(width), rows as u64, out];
    let kernel = format!("encode_rows_{suffix}");
    cuda.launch(operation, &kernel, [groups.div_ceil(WARPS), 1, 1], THREADS, 0, args)
}

pub(super) fn round(
    cuda: &Cuda,
    x: &mut Buffer<bf16>,
    width: usize,
    format: RowFormat,
    rows: usize,
) -> Result<()> {
    let x = x.head(rows * width);
    // What an exact format keeps is what the activations are.
    let Some(suffix) = suffix(format) else { return Ok(()) };
    let groups = rows * width.div_ceil(32);
    let args = args![x, u32_of(width), rows as u64];
    let kernel = format!("round_rows_{suffix}");
    cuda.launch("round_rows", &kernel, [groups.div_ceil(WARPS), 1, 1], THREADS, 0, args)
}

pub(super) fn decode(
    cuda: &Cuda,
    src: &Buffer<u8>,
    width: usize,
    format: RowFormat,
    indices: &Buffer<u32>,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let row_bytes = format.row_bytes(width);
    let args = args![
        src.head(0),
        rows_in(src, row_bytes),
        row_bytes as u64,
        u32_of(width),
        indices.head(rows),
        rows as u64,
        out.head(rows * width),
    ];
    // Bytes of eight values, which a lane reads at a time where rows allow it.
    let (name, eight) = match format {
        RowFormat::F32 => ("f32", 16),
        RowFormat::Bf16 => ("bf16", 16),
        RowFormat::Fp8x32 => ("fp8", 8),
        RowFormat::Nvfp4x16 => ("nvfp4", 4),
        RowFormat::Mxfp4x32 => ("mxfp4", 4),
    };
    let odd = !width.is_multiple_of(8) || alignment(row_bytes) < eight;
    let kernel = format!("decode_rows_{name}{}", if odd { "_odd" } else { "" });
    cuda.launch("decode_rows", &kernel, [rows.div_ceil(WARPS), 1, 1], THREADS, 0, args)
}

/// The number by which kernels know a format.
pub(super) fn format_number(format: Format) -> u32 {
    match format {
        Format::F32 => 0,
        Format::Bf16 => 1,
        Format::Fp8Block32 => 2,
        Format::Fp8Row32 => 3,
        Format::Fp4Row32 => 4,
    }
}

/// `out[i] = table[ids[i]]`, rounded to bf16. Ids beyond the table leave their row alone.
fn read<E: Element>(
    cuda: &Cuda,
    operation: &'static str,
    kernel: &'static str,
    table: &Matrix,
    ids: &Buffer<E>,
    count: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let args = args![
        table.data,
        table.row_stride as u64,
        table.scale,
        table.scale_stride as u64,
        table.scale_row0 as u64,
        table.rows as u64,
        u32_of(table.cols),
        format_number(table.format),
        ids.head(count),
        count as u64,
        out.head(count * table.cols),
    ];
    // A thread reads eight columns.
    let blocks = [(count * table.cols.div_ceil(8)).div_ceil(THREADS), 1, 1];
    cuda.launch(operation, kernel, blocks, THREADS, 0, args)
}

pub(super) fn embed(
    cuda: &Cuda,
    table: &Matrix,
    tokens: &Buffer<u32>,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    read(cuda, "embed", "read_table_u32", table, tokens, rows, out)
}

pub(super) fn engram_gather(
    cuda: &Cuda,
    table: &Matrix,
    row_ids: &Buffer<u64>,
    count: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    read(cuda, "engram_gather", "read_table_u64", table, row_ids, count, out)
}
