//! The list of operations, each in a module of its own.

use super::memory::{Buffer, bytes_of};
use super::stored::Matrix;
use super::{
    Cuda, attend, branches, compress, engram, experts, graphs, join, linear, norm, random, rope,
    route, rows, sample, select, streams,
};
use crate::ops::{
    Attention, BiasEntry, Branch, Candidates, Device, GraphKey, Mix, MixWeights, PenaltyRow,
    Result, Routing, SampleRow, Selection, StreamShape, TokenCount,
};
use crate::random::{Random, RandomMatrix};
use crate::tensor::{Element, Expert, RowFormat, StoredMatrix};
use half::bf16;

impl Device for Cuda {
    type Act = bf16;
    type Buffer<E: Element> = Buffer<E>;
    type Matrix = Matrix;
    type Experts = experts::Experts;
    type Graphs = graphs::Graphs;

    fn alloc<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        Buffer::zeroed(&self.context, len)
    }

    fn len<E: Element>(&self, buffer: &Buffer<E>) -> usize {
        buffer.len()
    }

    fn upload<E: Element>(&self, src: &[E], dst: &mut Buffer<E>, offset: usize) -> Result<()> {
        self.upload_bytes(bytes_of(src), dst.range(offset, src.len()))
    }

    fn download<E: Element>(&self, src: &Buffer<E>, offset: usize, dst: &mut [E]) -> Result<()> {
        self.download_elements(src.range(offset, dst.len()), dst)
    }

    fn copy<E: Element>(
        &self,
        src: &Buffer<E>,
        src_offset: usize,
        dst: &mut Buffer<E>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        let (from, to) = (src.range(src_offset, len), dst.range(dst_offset, len));
        self.copy_bytes(from, to, len * size_of::<E>())
    }

    fn copy_within<E: Element>(
        &self,
        buffer: &mut Buffer<E>,
        src_offset: usize,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        let (from, to) = (buffer.range(src_offset, len), buffer.range(dst_offset, len));
        self.copy_bytes(from, to, len * size_of::<E>())
    }

    fn upload_act(&self, src: &[f32], dst: &mut Buffer<bf16>, offset: usize) -> Result<()> {
        let rounded: Vec<bf16> = src.iter().map(|x| bf16::from_f32(*x)).collect();
        self.upload(&rounded, dst, offset)
    }

    fn download_act(&self, src: &Buffer<bf16>, offset: usize, dst: &mut [f32]) -> Result<()> {
        let mut narrow = vec![bf16::ZERO; dst.len()];
        self.download(src, offset, &mut narrow)?;
        dst.iter_mut().zip(narrow).for_each(|(to, from)| *to = from.to_f32());
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.context.sync()
    }

    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(Some(self.memory()?.0 as u64))
    }

    fn exact_rows(&self) -> RowFormat {
        RowFormat::Bf16
    }

    fn graphs(&self) -> Option<graphs::Graphs> {
        Some(graphs::Graphs::default())
    }

    fn replay(
        &self,
        graphs: &mut graphs::Graphs,
        key: GraphKey,
        f: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        graphs::replay(self, graphs, key, f)
    }

    fn beside(&self, rows: usize, f: impl FnOnce() -> Result<()>) -> Result<Branch> {
        branches::beside(self, rows, f)
    }

    fn join(&self, branch: Branch) -> Result<()> {
        branches::join(self, branch)
    }

    fn matrix(&self, stored: StoredMatrix) -> Result<Matrix> {
        self.store(&stored)
    }

    fn experts(&self, stored: Vec<Expert<StoredMatrix>>) -> Result<experts::Experts> {
        experts::Experts::new(self, stored)
    }

    fn random_matrix(&self, m: &RandomMatrix) -> Result<Matrix> {
        random::matrix(self, m)
    }

    fn random_experts(&self, all: &[Expert<RandomMatrix>]) -> Result<experts::Experts> {
        random::experts(self, all)
    }

    fn random_bytes(&self, random: &Random, bytes: usize, out: &mut Buffer<u8>) -> Result<()> {
        random::bytes(self, random, bytes, out)
    }

    fn gather_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        rows::gather(self, src, width, indices, rows, out)
    }

    fn scatter_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u64>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        rows::scatter(self, src, width, indices, rows, out)
    }

    fn encode_rows(
        &self,
        x: &Buffer<bf16>,
        width: usize,
        format: RowFormat,
        rows: usize,
        out: &mut Buffer<u8>,
    ) -> Result<()> {
        rows::encode(self, x, width, format, rows, out)
    }

    fn round_rows(
        &self,
        x: &mut Buffer<bf16>,
        width: usize,
        format: RowFormat,
        rows: usize,
    ) -> Result<()> {
        rows::round(self, x, width, format, rows)
    }

    fn decode_rows(
        &self,
        src: &Buffer<u8>,
        width: usize,
        format: RowFormat,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        rows::decode(self, src, width, format, indices, rows, out)
    }

    fn embed(
        &self,
        table: &Matrix,
        tokens: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        rows::embed(self, table, tokens, rows, out)
    }

    fn rms_norm(
        &self,
        x: &Buffer<bf16>,
        weight: &Buffer<f32>,
        eps: f32,
        width: usize,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        norm::rms_norm(self, x, weight, eps, width, rows, out)
    }

    fn linear(
        &self,
        x: &Buffer<bf16>,
        w: &Matrix,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        linear::linear(self, x, w, rows, out)
    }

    fn linear_f32(
        &self,
        x: &Buffer<bf16>,
        w: &Matrix,
        factor: f32,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        linear::linear_f32(self, x, w, factor, rows, out)
    }

    fn grouped_linear(
        &self,
        x: &Buffer<bf16>,
        w: &Matrix,
        groups: usize,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        linear::grouped_linear(self, x, w, groups, rows, out)
    }

    fn rope(
        &self,
        x: &mut Buffer<bf16>,
        angles: &Buffer<f32>,
        heads: usize,
        head_dim: usize,
        rope_dims: usize,
        inverse: bool,
        rows: usize,
    ) -> Result<()> {
        rope::rope(self, x, angles, heads, head_dim, rope_dims, inverse, rows)
    }

    fn streams_start(
        &self,
        x: &Buffer<bf16>,
        shape: &StreamShape,
        rows: usize,
        streams: &mut Buffer<bf16>,
    ) -> Result<()> {
        streams::start(self, x, shape, rows, streams)
    }

    fn streams_collapse(
        &self,
        streams: &Buffer<bf16>,
        pre: &Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        streams::collapse(self, streams, pre, shape, rows, out)
    }

    fn streams_collapse_norm(
        &self,
        streams: &Buffer<bf16>,
        pre: &Buffer<f32>,
        weight: &Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        collapsed: &mut Buffer<bf16>,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        streams::collapse_norm(self, streams, pre, weight, shape, rows, collapsed, out)
    }

    fn streams_mix(
        &self,
        streams: &Buffer<bf16>,
        weights: &MixWeights<Self>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Mix<Self>,
    ) -> Result<()> {
        streams::mix(self, streams, weights, shape, rows, out)
    }

    fn streams_update(
        &self,
        streams: &mut Buffer<bf16>,
        y: &Buffer<bf16>,
        mix: &Mix<Self>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        streams::update(self, streams, y, &mix.post, &mix.comb, shape, rows)
    }

    fn streams_mean(
        &self,
        streams: &Buffer<bf16>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Buffer<bf16>,
        out_width: usize,
        column: usize,
    ) -> Result<()> {
        streams::mean(self, streams, shape, rows, out, out_width, column)
    }

    fn pool_groups(
        &self,
        values: &Buffer<bf16>,
        scores: &Buffer<bf16>,
        pending: &Buffer<f32>,
        members: &Buffer<u32>,
        ratio: usize,
        width: usize,
        groups: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        compress::pool_groups(self, values, scores, pending, members, ratio, width, groups, out)
    }

    fn store_pending(
        &self,
        values: &Buffer<bf16>,
        scores: &Buffer<bf16>,
        indices: &Buffer<u64>,
        width: usize,
        rows: usize,
        pending: &mut Buffer<f32>,
    ) -> Result<()> {
        compress::store_pending(self, values, scores, indices, width, rows, pending)
    }

    fn select(
        &self,
        args: &Selection<'_, Self>,
        candidates: Candidates<'_, Self>,
        out: &mut Buffer<u32>,
    ) -> Result<()> {
        select::select(self, args, candidates, out)
    }

    fn attend(&self, args: &Attention<'_, Self>, out: &mut Buffer<bf16>) -> Result<()> {
        attend::attend(self, args, out)
    }

    fn route(
        &self,
        args: &Routing<'_, Self>,
        rows: usize,
        ids: &mut Buffer<u32>,
        weights: &mut Buffer<f32>,
    ) -> Result<()> {
        route::route(self, args, rows, ids, weights)
    }

    fn experts_forward(
        &self,
        x: &Buffer<bf16>,
        experts: &experts::Experts,
        shared: &Expert<Matrix>,
        ids: &Buffer<u32>,
        weights: &Buffer<f32>,
        k: usize,
        limit: f32,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        experts::experts_forward(self, x, experts, shared, ids, weights, k, limit, rows, out)
    }

    fn engram_gather(
        &self,
        table: &Matrix,
        row_ids: &Buffer<u64>,
        count: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        rows::engram_gather(self, table, row_ids, count, out)
    }

    fn engram_update(
        &self,
        streams: &mut Buffer<bf16>,
        kv: &Buffer<bf16>,
        weight: &Buffer<f32>,
        image: &Buffer<u8>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        engram::update(self, streams, kv, weight, image, shape, rows)
    }

    fn concat(
        &self,
        a: &Buffer<bf16>,
        a_width: usize,
        b: &Buffer<bf16>,
        b_width: usize,
        rows: usize,
        out: &mut Buffer<bf16>,
    ) -> Result<()> {
        join::concat(self, a, a_width, b, b_width, rows, out)
    }

    fn add_rows_f32(
        &self,
        x: &Buffer<f32>,
        width: usize,
        rows: usize,
        out: &mut Buffer<f32>,
        out_rows: &Buffer<u32>,
    ) -> Result<()> {
        join::add(self, x, width, rows, out, out_rows)
    }

    fn penalize(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        penalties: &[PenaltyRow],
        counts: &[TokenCount],
    ) -> Result<()> {
        sample::penalize(self, logits, vocab, penalties, counts)
    }

    fn add_bias(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        entries: &[BiasEntry],
    ) -> Result<()> {
        sample::add_bias(self, logits, vocab, entries)
    }

    fn mask_logits(
        &self,
        logits: &mut Buffer<f32>,
        vocab: usize,
        mask_rows: &[u32],
        mask: &[u32],
    ) -> Result<()> {
        sample::mask_logits(self, logits, vocab, mask_rows, mask)
    }

    fn sample(
        &self,
        logits: &Buffer<f32>,
        vocab: usize,
        rows: &[SampleRow],
        tokens: &mut Buffer<u32>,
    ) -> Result<()> {
        sample::sample(self, logits, vocab, rows, tokens)
    }
}
