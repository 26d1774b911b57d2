//! Products in plain Rust: the reference for every instruction set.

use super::Rows;
use crate::cpu::{lanes, scratch};
use crate::formats::dequantize_matrix_row;
use crate::tensor::StoredMatrix;
use std::ops::Range;

/// `out[i, j]` = row `i` of `x` times row `n.start + j` of `w`.
pub(super) fn block(x: &Rows, w: &StoredMatrix, n: Range<usize>, out: &mut [f32]) {
    let width = n.len();
    let padded = lanes::padded(w.format, w.cols);
    let mut memory = scratch::take(w.cols + padded);
    let (row, arranged) = memory.split_at_mut(w.cols);
    for (j, n) in n.enumerate() {
        dequantize_matrix_row(w, n, row);
        lanes::arrange(w.format, row, arranged);
        for i in 0..x.len() {
            out[i * width + j] = lanes::dot(x.row(i), arranged);
        }
    }
}
