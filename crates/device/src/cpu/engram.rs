//! The n-gram memory: rows of a very large table, and the gated update of the streams.

use crate::cpu::Cpu;
use crate::cpu::dispatch::{by_isa, dot};
use crate::cpu::math::sigmoid;
use crate::cpu::norm::inverse_rms;
use crate::cpu::read_ahead::ReadAhead;
use crate::formats::dequantize_matrix_row;
use crate::ops::StreamShape;
use crate::tensor::StoredMatrix;
use rayon::prelude::*;
use std::sync::OnceLock;

/// Starts reading the pages of table rows. Without threads the hint is dropped.
pub(crate) fn prefetch(table: &StoredMatrix, row_ids: &[u64]) {
    static AHEAD: OnceLock<Option<ReadAhead>> = OnceLock::new();
    if let Some(ahead) = AHEAD.get_or_init(ReadAhead::start) {
        ahead.begin(table, row_ids);
    }
}

/// Reads each row that occurs once, in the order of the table, and copies it to where it is wanted.
pub(crate) fn gather(
    cpu: &Cpu,
    table: &StoredMatrix,
    row_ids: &[u64],
    count: usize,
    out: &mut [f32],
) {
    let width = table.cols;
    if count == 0 || width == 0 {
        return;
    }
    let mut wanted: Vec<(u64, &mut [f32])> =
        row_ids[..count].iter().copied().zip(out.chunks_exact_mut(width)).collect();
    wanted.sort_unstable_by_key(|(id, _)| *id);
    let read = |wanted: &mut [(u64, &mut [f32])]| {
        for same in wanted.chunk_by_mut(|a, b| a.0 == b.0) {
            if let Some(((id, first), rest)) = same.split_first_mut() {
                dequantize_matrix_row(table, *id as usize, first);
                rest.iter_mut().for_each(|(_, out)| out.copy_from_slice(first));
            }
        }
    };
    let block = cpu.rows_per_task(count, 8 * width);
    if block >= count {
        return read(&mut wanted);
    }
    cpu.pool().install(|| wanted.par_chunks_mut(block).for_each(read));
}

pub(crate) fn update(
    cpu: &Cpu,
    streams: &mut [f32],
    kv: &[f32],
    weight: &[f32],
    image: &[u8],
    shape: &StreamShape,
    rows: usize,
) {
    let StreamShape { streams: s, hidden, norm_eps, .. } = *shape;
    let weight = &weight[..s * hidden];
    cpu.for_rows(streams, s * hidden, rows, 10 * s * hidden, |first, streams| {
        let mut weighted = vec![0.0; hidden];
        for (i, streams) in streams.chunks_exact_mut(s * hidden).enumerate() {
            let row = first + i;
            if image[row] == 0 {
                let kv = &kv[row * (s + 1) * hidden..][..(s + 1) * hidden];
                update_row(cpu.isa(), streams, kv, weight, norm_eps, &mut weighted);
            }
        }
    });
}

by_isa! {
    fn update_row(
        streams: &mut [f32],
        kv: &[f32],
        weight: &[f32],
        eps: f32,
        weighted: &mut [f32],
    ) {
        let hidden = weighted.len();
        let (keys, value) = kv.split_at(streams.len());
        let scale = 1.0 / (hidden as f32).sqrt();
        let rows = streams.chunks_exact_mut(hidden).zip(keys.chunks_exact(hidden));
        for ((stream, key), weight) in rows.zip(weight.chunks_exact(hidden)) {
            for c in 0..hidden {
                weighted[c] = stream[c] * weight[c];
            }
            let product = dot(weighted, key);
            let dot = product * inverse_rms(stream, eps) * inverse_rms(key, eps) * scale;
            let size = dot.abs();
            let root = if size < 1e-6 { 1e-6f32 } else { size }.sqrt();
            // The sign of 0 is 0.
            let gate = sigmoid(if dot == 0.0 { 0.0 } else { root.copysign(dot) });
            for c in 0..hidden {
                stream[c] = gate.mul_add(value[c], stream[c]);
            }
        }
    }
}
