//! Moving, rounding and joining rows.

use crate::cpu::Cpu;
use crate::formats::{decode_row, dequantize_matrix_row, encode_row, round_row};
use crate::ops::ABSENT;
use crate::tensor::{Element, RowFormat, StoredMatrix};

pub(crate) fn gather<E: Element>(
    cpu: &Cpu,
    src: &[E],
    width: usize,
    indices: &[u32],
    rows: usize,
    out: &mut [E],
) {
    cpu.for_rows(out, width, rows, width, |first, out| {
        for (out, index) in out.chunks_exact_mut(width).zip(&indices[first..rows]) {
            if *index != ABSENT {
                out.copy_from_slice(&src[*index as usize * width..][..width]);
            }
        }
    });
}

pub(crate) fn scatter<E: Element>(
    src: &[E],
    width: usize,
    indices: &[u64],
    rows: usize,
    out: &mut [E],
) {
    for (row, index) in indices[..rows].iter().enumerate() {
        if *index != u64::MAX {
            out[*index as usize * width..][..width].copy_from_slice(&src[row * width..][..width]);
        }
    }
}

pub(crate) fn concat(
    cpu: &Cpu,
    a: &[f32],
    a_width: usize,
    b: &[f32],
    b_width: usize,
    rows: usize,
    out: &mut [f32],
) {
    let width = a_width + b_width;
    cpu.for_rows(out, width, rows, width, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let row = first + i;
            out[..a_width].copy_from_slice(&a[row * a_width..][..a_width]);
            out[a_width..].copy_from_slice(&b[row * b_width..][..b_width]);
        }
    });
}

pub(crate) fn add(x: &[f32], width: usize, rows: usize, out: &mut [f32], out_rows: &[u32]) {
    for (row, out_row) in out_rows[..rows].iter().enumerate() {
        if *out_row != ABSENT {
            let out = &mut out[*out_row as usize * width..][..width];
            out.iter_mut().zip(&x[row * width..][..width]).for_each(|(out, x)| *out += x);
        }
    }
}

pub(crate) fn encode(
    cpu: &Cpu,
    x: &[f32],
    width: usize,
    format: RowFormat,
    rows: usize,
    out: &mut [u8],
) {
    let bytes = format.row_bytes(width);
    cpu.for_rows(out, bytes, rows, 16 * width, |first, out| {
        for (i, out) in out.chunks_exact_mut(bytes).enumerate() {
            encode_row(format, &x[(first + i) * width..][..width], out);
        }
    });
}

pub(crate) fn round(cpu: &Cpu, x: &mut [f32], width: usize, format: RowFormat, rows: usize) {
    // What an exact format keeps is what the activations are.
    if matches!(format, RowFormat::F32 | RowFormat::Bf16) {
        return;
    }
    cpu.for_rows(x, width, rows, 24 * width, |_, x| {
        x.chunks_exact_mut(width).for_each(|row| round_row(format, row));
    });
}

pub(crate) fn decode(
    cpu: &Cpu,
    src: &[u8],
    width: usize,
    format: RowFormat,
    indices: &[u32],
    rows: usize,
    out: &mut [f32],
) {
    let bytes = format.row_bytes(width);
    cpu.for_rows(out, width, rows, 4 * width, |first, out| {
        for (out, index) in out.chunks_exact_mut(width).zip(&indices[first..rows]) {
            if *index != ABSENT {
                decode_row(format, &src[*index as usize * bytes..][..bytes], out);
            }
        }
    });
}

pub(crate) fn embed(cpu: &Cpu, table: &StoredMatrix, tokens: &[u32], rows: usize, out: &mut [f32]) {
    let width = table.cols;
    cpu.for_rows(out, width, rows, 2 * width, |first, out| {
        for (out, token) in out.chunks_exact_mut(width).zip(&tokens[first..rows]) {
            if *token != ABSENT {
                dequantize_matrix_row(table, *token as usize, out);
            }
        }
    });
}
