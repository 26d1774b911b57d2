//! Joining rows and adding them.

use super::Cuda;
use super::launch::{args, u32_of};
use super::memory::Buffer;
use crate::ops::Result;
use half::bf16;

pub(super) fn concat(
    cuda: &Cuda,
    a: &Buffer<bf16>,
    a_width: usize,
    b: &Buffer<bf16>,
    b_width: usize,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let args = args![
        a.head(rows * a_width),
        u32_of(a_width),
        b.head(rows * b_width),
        u32_of(b_width),
        out.head(rows * (a_width + b_width)),
    ];
    cuda.launch("concat", "concat", [rows, 1, 1], 256, 0, args)
}

pub(super) fn add(
    cuda: &Cuda,
    x: &Buffer<f32>,
    width: usize,
    rows: usize,
    out: &mut Buffer<f32>,
    out_rows: &Buffer<u32>,
) -> Result<()> {
    let args =
        args![x.head(rows * width), u32_of(width), u32_of(rows), out.head(0), out_rows.head(rows),];
    cuda.launch("add_rows_f32", "add_rows_f32", [width.div_ceil(256), 1, 1], 256, 0, args)
}
