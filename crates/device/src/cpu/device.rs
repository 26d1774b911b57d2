//! The list of operations, each in a module of its own.

use super::{
    Buffer, Cpu, attend, compress, engram, experts, linear, norm, rope, route, rows, sample,
    select, streams,
};
use crate::ops::{
    Attention, BiasEntry, Candidates, Device, Mix, MixWeights, PenaltyRow, Result, Routing,
    SampleRow, Selection, StreamShape, TokenCount,
};
use crate::tensor::{Element, Expert, RowFormat, StoredMatrix};

impl Device for Cpu {
    type Act = f32;
    type Buffer<E: Element> = Buffer<E>;
    type Matrix = linear::Weight;
    type Experts = experts::Experts;
    type Graphs = ();

    fn alloc<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        Buffer::zeroed(len)
    }

    fn len<E: Element>(&self, buffer: &Buffer<E>) -> usize {
        buffer.len()
    }

    fn upload<E: Element>(&self, src: &[E], dst: &mut Buffer<E>, offset: usize) -> Result<()> {
        dst[offset..][..src.len()].copy_from_slice(src);
        Ok(())
    }

    fn download<E: Element>(&self, src: &Buffer<E>, offset: usize, dst: &mut [E]) -> Result<()> {
        dst.copy_from_slice(&src[offset..][..dst.len()]);
        Ok(())
    }

    fn copy<E: Element>(
        &self,
        src: &Buffer<E>,
        src_offset: usize,
        dst: &mut Buffer<E>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        dst[dst_offset..][..len].copy_from_slice(&src[src_offset..][..len]);
        Ok(())
    }

    fn copy_within<E: Element>(
        &self,
        buffer: &mut Buffer<E>,
        src_offset: usize,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        buffer[..].copy_within(src_offset..src_offset + len, dst_offset);
        Ok(())
    }

    fn upload_act(&self, src: &[f32], dst: &mut Buffer<f32>, offset: usize) -> Result<()> {
        self.upload(src, dst, offset)
    }

    fn download_act(&self, src: &Buffer<f32>, offset: usize, dst: &mut [f32]) -> Result<()> {
        self.download(src, offset, dst)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }

    fn exact_rows(&self) -> RowFormat {
        RowFormat::F32
    }

    fn matrix(&self, stored: StoredMatrix) -> Result<linear::Weight> {
        linear::Weight::new(stored)
    }

    fn experts(&self, stored: Vec<Expert<StoredMatrix>>) -> Result<experts::Experts> {
        experts::Experts::new(stored)
    }

    fn gather_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        rows::gather(self, src, width, indices, rows, out);
        Ok(())
    }

    fn scatter_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u64>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        rows::scatter(src, width, indices, rows, out);
        Ok(())
    }

    fn encode_rows(
        &self,
        x: &Buffer<f32>,
        width: usize,
        format: RowFormat,
        rows: usize,
        out: &mut Buffer<u8>,
    ) -> Result<()> {
        rows::encode(self, x, width, format, rows, out);
        Ok(())
    }

    fn round_rows(
        &self,
        x: &mut Buffer<f32>,
        width: usize,
        format: RowFormat,
        rows: usize,
    ) -> Result<()> {
        rows::round(self, x, width, format, rows);
        Ok(())
    }

    fn decode_rows(
        &self,
        src: &Buffer<u8>,
        width: usize,
        format: RowFormat,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        rows::decode(self, src, width, format, indices, rows, out);
        Ok(())
    }

    fn embed(
        &self,
        table: &linear::Weight,
        tokens: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        rows::embed(self, table.stored(), tokens, rows, out);
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &Buffer<f32>,
        weight: &Buffer<f32>,
        eps: f32,
        width: usize,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        norm::rms_norm(self, x, weight, eps, width, rows, out);
        Ok(())
    }

    fn linear(
        &self,
        x: &Buffer<f32>,
        w: &linear::Weight,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        linear::linear(self, x, w, rows, out);
        Ok(())
    }

    fn linear_f32(
        &self,
        x: &Buffer<f32>,
        w: &linear::Weight,
        factor: f32,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        linear::linear_f32(self, x, w, factor, rows, out);
        Ok(())
    }

    fn grouped_linear(
        &self,
        x: &Buffer<f32>,
        w: &linear::Weight,
        groups: usize,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        linear::grouped_linear(self, x, w, groups, rows, out);
        Ok(())
    }

    fn rope(
        &self,
        x: &mut Buffer<f32>,
        angles: &Buffer<f32>,
        heads: usize,
        head_dim: usize,
        rope_dims: usize,
        inverse: bool,
        rows: usize,
    ) -> Result<()> {
        rope::rope(self, x, angles, heads, head_dim, rope_dims, inverse, rows);
        Ok(())
    }

    fn streams_start(
        &self,
        x: &Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        streams: &mut Buffer<f32>,
    ) -> Result<()> {
        streams::start(self, x, shape, rows, streams);
        Ok(())
    }

    fn streams_collapse(
        &self,
        streams: &Buffer<f32>,
        pre: &Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        streams::collapse(self, streams, pre, shape, rows, out);
        Ok(())
    }

    fn streams_mix(
        &self,
        streams: &Buffer<f32>,
        weights: &MixWeights<Self>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Mix<Self>,
    ) -> Result<()> {
        let mut products = vec![0.0; rows * (2 + shape.streams) * shape.streams];
        linear::linear_f32(self, streams, &weights.function, 1.0, rows, &mut products);
        let MixWeights { base, scale, .. } = weights;
        let Mix { pre, post, comb } = out;
        streams::mix(self, streams, &products, base, scale, shape, rows, pre, post, comb);
        Ok(())
    }

    fn streams_update(
        &self,
        streams: &mut Buffer<f32>,
        y: &Buffer<f32>,
        mix: &Mix<Self>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        streams::update(self, streams, y, &mix.post, &mix.comb, shape, rows);
        Ok(())
    }

    fn streams_mean(
        &self,
        streams: &Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Buffer<f32>,
        out_width: usize,
        column: usize,
    ) -> Result<()> {
        streams::mean(self, streams, shape, rows, out, out_width, column);
        Ok(())
    }

    fn pool_groups(
        &self,
        values: &Buffer<f32>,
        scores: &Buffer<f32>,
        pending: &Buffer<f32>,
        members: &Buffer<u32>,
        ratio: usize,
        width: usize,
        groups: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        compress::pool_groups(self, values, scores, pending, members, ratio, width, groups, out);
        Ok(())
    }

    fn store_pending(
        &self,
        values: &Buffer<f32>,
        scores: &Buffer<f32>,
        indices: &Buffer<u64>,
        width: usize,
        rows: usize,
        pending: &mut Buffer<f32>,
    ) -> Result<()> {
        compress::store_pending(values, scores, indices, width, rows, pending);
        Ok(())
    }

    fn select(
        &self,
        args: &Selection<'_, Self>,
        candidates: Candidates<'_, Self>,
        out: &mut Buffer<u32>,
    ) -> Result<()> {
        select::select(self, args, candidates, out);
        Ok(())
    }

    fn attend(&self, args: &Attention<'_, Self>, out: &mut Buffer<f32>) -> Result<()> {
        attend::attend(self, args, out);
        Ok(())
    }

    fn route(
        &self,
        args: &Routing<'_, Self>,
        rows: usize,
        ids: &mut Buffer<u32>,
        weights: &mut Buffer<f32>,
    ) -> Result<()> {
        route::route(self, args, rows, ids, weights);
        Ok(())
    }

    fn experts_forward(
        &self,
        x: &Buffer<f32>,
        experts: &experts::Experts,
        shared: &Expert<linear::Weight>,
        ids: &Buffer<u32>,
        weights: &Buffer<f32>,
        k: usize,
        limit: f32,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        experts::experts_forward(self, x, experts, shared, ids, weights, k, limit, rows, out);
        Ok(())
    }

    fn engram_prefetch(&self, table: &linear::Weight, row_ids: &[u64]) {
        engram::prefetch(table.stored(), row_ids);
    }

    fn engram_gather(
        &self,
        table: &linear::Weight,
        row_ids: &Buffer<u64>,
        count: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        engram::gather(self, table.stored(), row_ids, count, out);
        Ok(())
    }

    fn engram_update(
        &self,
        streams: &mut Buffer<f32>,
        kv: &Buffer<f32>,
        weight: &Buffer<f32>,
        image: &Buffer<u8>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        engram::update(self, streams, kv, weight, image, shape, rows);
        Ok(())
    }

    fn concat(
        &self,
        a: &Buffer<f32>,
        a_width: usize,
        b: &Buffer<f32>,
        b_width: usize,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        rows::concat(self, a, a_width, b, b_width, rows, out);
        Ok(())
    }

    fn add_rows_f32(
        &self,
        x: &Buffer<f32>,
        width: usize,
        rows: usize,
        out: &mut Buffer<f32>,
        out_rows: &Buffer<u32>,
    ) -> Result<()> {
        rows::add(x, width, rows, out, out_rows);
        Ok(())
    }

    fn penalize(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        penalties: &[PenaltyRow],
        counts: &[TokenCount],
    ) -> Result<()> {
        sample::penalize(logits, vocab, penalties, counts);
        Ok(())
    }

    fn add_bias(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        entries: &[BiasEntry],
    ) -> Result<()> {
        sample::add_bias(logits, vocab, entries);
        Ok(())
    }

    fn mask_logits(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        mask_rows: &[u32],
        mask: &[u32],
    ) -> Result<()> {
        sample::mask_logits(logits, vocab, mask_rows, mask);
        Ok(())
    }

    fn sample(
        &self,
        logits: &Buffer<f32>,
        vocab: usize,
        rows: &[SampleRow],
        tokens: &mut Buffer<u32>,
    ) -> Result<()> {
        sample::sample(self, logits, vocab, rows, tokens);
        Ok(())
    }
}
