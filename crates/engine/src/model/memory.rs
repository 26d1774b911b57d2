//! Engram: n-grams of the text look up rows of a large table, which are gated into the streams.

use super::Model;
use super::batch::Batch;
use super::scratch::Scratch;
use crate::engram::Engram;
use crate::plan::{IMAGE, PlanSequence};
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// Weights of one n-gram memory.
pub struct Memory<D: Device> {
    /// Which of the model's n-gram memories this is.
    pub ordinal: usize,
    /// `[rows, head_dim]`, read by row, never as a whole.
    pub table: D::Matrix,
    /// `[(S + 1) * H, hash columns * head_dim]`: S keys, then the value.
    pub wkv: D::Matrix,
    /// `[S, H]`: product of the query and key norm weights.
    pub weight: D::Buffer<f32>,
    /// Table rows a token looks up.
    pub columns: usize,
}

impl<D: Device> Memory<D> {
    /// Adds the gated values to the streams of the current rows.
    pub fn update(&self, device: &D, batch: &Batch<D>, s: &mut Scratch<D>) -> Result<()> {
        let set = batch.set();
        let rows = set.map.rows;
        let ids = &batch.memory_rows[self.ordinal];
        device.engram_gather(&self.table, ids, rows * self.columns, &mut s.memory)?;
        device.linear(&s.memory, &self.wkv, rows, &mut s.memory_kv)?;
        device.engram_update(&mut s.streams, &s.memory_kv, &self.weight, &set.image, &s.shape, rows)
    }
}

impl<D: Device> Model<D> {
    /// Tells the device early which table rows the step will read.
    pub(super) fn memory_prefetch(&self, device: &D, batch: &Batch<D>) {
        for memory in self.layers.iter().filter_map(|l| l.memory.as_ref()) {
            device.engram_prefetch(&memory.table, &batch.memory_row_ids[memory.ordinal]);
        }
    }
}

/// Appends the table rows that a sequence's rows look up, for every n-gram memory: `[rows, columns]`.
pub fn push_rows(engram: &Engram, q: &PlanSequence, out: &mut [Vec<u64>]) {
    let hasher = &engram.hasher;
    let text = |i: usize| q.context.get(i).unwrap_or_else(|| &q.tokens[i - q.context.len()]);
    let mut window = vec![hasher.pad(); hasher.window_len()];
    for row in 0..q.tokens.len() {
        let newest_first = (0..=q.context.len() + row).rev().map(|i| {
            let token = *text(i);
            (token != IMAGE).then(|| engram.compress(token))
        });
        hasher.fill_window(newest_first, &mut window);
        for (ordinal, rows) in out.iter_mut().enumerate() {
            let at = rows.len();
            rows.resize(at + hasher.columns(), 0);
            hasher.rows(ordinal, &window, &mut rows[at..]);
        }
    }
}
