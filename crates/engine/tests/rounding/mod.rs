//! A device whose activations are bf16, made of the CPU: every result that a GPU stores in bf16 is
//! rounded to it. It can be made to compute something wrong.

use deepinfer_device::cpu::{Buffer, Cpu, experts::Experts, linear::Weight};
use deepinfer_device::ops::{
    Attention, BiasEntry, Candidates, Mix, MixWeights, PagedRows, PenaltyRow, Result, Routing,
    RowMap, SampleRow, Selected, Selection, StreamShape, TokenCount, WindowRows,
};
use deepinfer_device::{Device, Element, Expert, RowFormat, StoredMatrix};

/// What a wrong kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Rounds towards zero.
    Truncates,
    /// Multiplies dot products of attention by 1.1 times the scale.
    Scale,
    /// Adds to one number of one row of a sublayer's output.
    OneNumber,
    /// Stores one code that is not the nearest.
    NextCode,
    /// Leaves out the last expert of every token.
    FewerExperts,
    /// Chooses the first rows instead of the best.
    FirstRows,
    /// Leaves the streams unmixed by a thirtieth.
    Mixing,
}

/// The device.
pub struct Rounding {
    cpu: Cpu,
    fault: Option<Fault>,
}

impl Rounding {
    pub fn new(fault: Option<Fault>) -> Self {
        Self { cpu: Cpu::new(Some(2)).expect("threads start"), fault }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// What a buffer of bf16 would hold.
    fn round(&self, x: &mut [f32]) {
        for x in x {
            *x = match self.is(Fault::Truncates) {
                true => f32::from_bits(x.to_bits() & 0xffff_0000),
                false => half::bf16::from_f32(*x).to_f32(),
            };
        }
    }

    fn same<E: Element>(&self, from: &Buffer<E>) -> Buffer<E> {
        let mut to = self.cpu.alloc(from.len()).expect("memory");
        to.copy_from_slice(from);
        to
    }

    fn map(&self, m: &RowMap<Self>) -> RowMap<Cpu> {
        RowMap {
            rows: m.rows,
            sequences: m.sequences,
            sequence: self.same(&m.sequence),
            position: self.same(&m.position),
            window_from: self.same(&m.window_from),
            window_to: self.same(&m.window_to),
            fresh_from: self.same(&m.fresh_from),
            first_row: self.same(&m.first_row),
            slot: self.same(&m.slot),
            pages: self.same(&m.pages),
            max_pages: m.max_pages,
        }
    }
}

fn paged<'a>(p: &PagedRows<'a, Rounding>) -> PagedRows<'a, Cpu> {
    let &PagedRows { cache, format, width, rows_per_page, ratio } = p;
    PagedRows { cache, format, width, rows_per_page, ratio }
}

type Acts = Buffer<f32>;

impl Device for Rounding {
    type Act = f32;
    type Buffer<E: Element> = Buffer<E>;
    type Matrix = Weight;
    type Experts = Experts;
    type Graphs = ();

    fn alloc<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        self.cpu.alloc(len)
    }
    fn len<E: Element>(&self, buffer: &Buffer<E>) -> usize {
        buffer.len()
    }
    fn upload<E: Element>(&self, src: &[E], dst: &mut Buffer<E>, offset: usize) -> Result<()> {
        self.cpu.upload(src, dst, offset)
    }
    fn download<E: Element>(&self, src: &Buffer<E>, offset: usize, dst: &mut [E]) -> Result<()> {
        self.cpu.download(src, offset, dst)
    }
    fn copy<E: Element>(
        &self,
        src: &Buffer<E>,
        src_offset: usize,
        dst: &mut Buffer<E>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        self.cpu.copy(src, src_offset, dst, dst_offset, len)
    }
    fn copy_within<E: Element>(
        &self,
        buffer: &mut Buffer<E>,
        src_offset: usize,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        self.cpu.copy_within(buffer, src_offset, dst_offset, len)
    }
    fn upload_act(&self, src: &[f32], dst: &mut Acts, offset: usize) -> Result<()> {
        let dst = &mut dst[offset..][..src.len()];
        dst.copy_from_slice(src);
        dst.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
        Ok(())
    }
    fn download_act(&self, src: &Acts, offset: usize, dst: &mut [f32]) -> Result<()> {
        self.cpu.download(src, offset, dst)
    }
    fn sync(&self) -> Result<()> {
        Ok(())
    }
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.cpu.run(f)
    }
    fn exact_rows(&self) -> RowFormat {
        RowFormat::Bf16
    }

    fn matrix(&self, stored: StoredMatrix) -> Result<Weight> {
        self.cpu.matrix(stored)
    }
    fn experts(&self, stored: Vec<Expert<StoredMatrix>>) -> Result<Experts> {
        self.cpu.experts(stored)
    }

    fn gather_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        self.cpu.gather_rows(src, width, indices, rows, out)
    }
    fn scatter_rows<E: Element>(
        &self,
        src: &Buffer<E>,
        width: usize,
        indices: &Buffer<u64>,
        rows: usize,
        out: &mut Buffer<E>,
    ) -> Result<()> {
        self.cpu.scatter_rows(src, width, indices, rows, out)
    }
    fn encode_rows(
        &self,
        x: &Acts,
        width: usize,
        format: RowFormat,
        rows: usize,
        out: &mut Buffer<u8>,
    ) -> Result<()> {
        self.cpu.encode_rows(x, width, format, rows, out)?;
        if self.is(Fault::NextCode) && rows > 1 {
            out[format.row_bytes(width) + 1] ^= 1;
        }
        Ok(())
    }
    fn round_rows(&self, x: &mut Acts, width: usize, format: RowFormat, rows: usize) -> Result<()> {
        self.cpu.round_rows(x, width, format, rows)
    }
    fn decode_rows(
        &self,
        src: &Buffer<u8>,
        width: usize,
        format: RowFormat,
        indices: &Buffer<u32>,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.decode_rows(src, width, format, indices, rows, out)
    }

    fn embed(
        &self,
        table: &Weight,
        tokens: &Buffer<u32>,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.embed(table, tokens, rows, out)?;
        self.round(out);
        Ok(())
    }
    fn rms_norm(
        &self,
        x: &Acts,
        weight: &Acts,
        eps: f32,
        width: usize,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.rms_norm(x, weight, eps, width, rows, out)?;
        self.round(&mut out[..rows * width]);
        Ok(())
    }
    fn linear(&self, x: &Acts, w: &Weight, rows: usize, out: &mut Acts) -> Result<()> {
        self.cpu.linear(x, w, rows, out)?;
        let out = &mut out[..rows * w.rows()];
        self.round(out);
        if self.is(Fault::OneNumber) && rows > 4 {
            let size = out.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            out[4 * w.rows() + 3] += size / 2.0;
        }
        Ok(())
    }
    fn linear_f32(
        &self,
        x: &Acts,
        w: &Weight,
        factor: f32,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.linear_f32(x, w, factor, rows, out)
    }
    fn grouped_linear(
        &self,
        x: &Acts,
        w: &Weight,
        groups: usize,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.grouped_linear(x, w, groups, rows, out)?;
        self.round(&mut out[..rows * w.rows()]);
        Ok(())
    }
    fn rope(
        &self,
        x: &mut Acts,
        angles: &Acts,
        heads: usize,
        head_dim: usize,
        rope_dims: usize,
        inverse: bool,
        rows: usize,
    ) -> Result<()> {
        self.cpu.rope(x, angles, heads, head_dim, rope_dims, inverse, rows)?;
        self.round(&mut x[..rows * heads * head_dim]);
        Ok(())
    }

    fn streams_start(
        &self,
        x: &Acts,
        shape: &StreamShape,
        rows: usize,
        streams: &mut Acts,
    ) -> Result<()> {
        self.cpu.streams_start(x, shape, rows, streams)
    }
    fn streams_collapse(
        &self,
        streams: &Acts,
        pre: &Acts,
        shape: &StreamShape,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.streams_collapse(streams, pre, shape, rows, out)?;
        self.round(&mut out[..rows * shape.hidden]);
        Ok(())
    }
    fn streams_mix(
        &self,
        streams: &Acts,
        weights: &MixWeights<Self>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Mix<Self>,
    ) -> Result<()> {
        let weights = MixWeights {
            function: weights.function.clone(),
            base: self.same(&weights.base),
            scale: self.same(&weights.scale),
        };
        let mut mix = Mix {
            pre: self.same(&out.pre),
            post: self.same(&out.post),
            comb: self.same(&out.comb),
        };
        self.cpu.streams_mix(streams, &weights, shape, rows, &mut mix)?;
        if self.is(Fault::Mixing) {
            mix.comb.iter_mut().for_each(|x| *x *= 1.0 - 1.0 / 30.0);
        }
        (out.pre, out.post, out.comb) = (mix.pre, mix.post, mix.comb);
        Ok(())
    }
    fn streams_update(
        &self,
        streams: &mut Acts,
        y: &Acts,
        mix: &Mix<Self>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        let mix = Mix {
            pre: self.same(&mix.pre),
            post: self.same(&mix.post),
            comb: self.same(&mix.comb),
        };
        self.cpu.streams_update(streams, y, &mix, shape, rows)?;
        self.round(&mut streams[..rows * shape.streams * shape.hidden]);
        Ok(())
    }
    fn streams_mean(
        &self,
        streams: &Acts,
        shape: &StreamShape,
        rows: usize,
        out: &mut Acts,
        out_width: usize,
        column: usize,
    ) -> Result<()> {
        self.cpu.streams_mean(streams, shape, rows, out, out_width, column)?;
        self.round(&mut out[..rows * out_width]);
        Ok(())
    }

    fn pool_groups(
        &self,
        values: &Acts,
        scores: &Acts,
        pending: &Acts,
        members: &Buffer<u32>,
        ratio: usize,
        width: usize,
        groups: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.pool_groups(values, scores, pending, members, ratio, width, groups, out)?;
        self.round(&mut out[..groups * width]);
        Ok(())
    }
    fn store_pending(
        &self,
        values: &Acts,
        scores: &Acts,
        indices: &Buffer<u64>,
        width: usize,
        rows: usize,
        pending: &mut Acts,
    ) -> Result<()> {
        self.cpu.store_pending(values, scores, indices, width, rows, pending)
    }
    fn select(
        &self,
        args: &Selection<'_, Self>,
        candidates: Candidates<'_, Self>,
        out: &mut Buffer<u32>,
    ) -> Result<()> {
        let map = self.map(args.map);
        let &Selection { q, weights, heads, k, .. } = args;
        let keys = paged(&args.keys);
        let candidates = match candidates {
            Candidates::All => Candidates::All,
            Candidates::Publish(shape, blocks) => Candidates::Publish(shape, blocks),
            Candidates::Within(shape, blocks) => Candidates::Within(shape, blocks),
        };
        let plain = Selection { q, weights, heads, map: &map, keys, k };
        self.cpu.select(&plain, candidates, out)?;
        if self.is(Fault::FirstRows) {
            for row in out[..map.rows * k].chunks_exact_mut(k) {
                let chosen = row.iter().filter(|&&i| i != u32::MAX).count();
                (0..chosen).for_each(|i| row[i] = i as u32);
            }
        }
        Ok(())
    }
    fn attend(&self, args: &Attention<'_, Self>, out: &mut Acts) -> Result<()> {
        let map = self.map(args.map);
        let &WindowRows { ring, ring_len, fresh, format } = &args.window;
        let selected = args.selected.as_ref().map(|s| Selected {
            indices: s.indices,
            k: s.k,
            keys: paged(&s.keys),
        });
        let &Attention { q, heads, head_dim, sink, scale, .. } = args;
        let window = WindowRows { ring, ring_len, fresh, format };
        let scale = if self.is(Fault::Scale) { scale * 1.1 } else { scale };
        let plain = Attention { q, heads, head_dim, map: &map, window, selected, sink, scale };
        self.cpu.attend(&plain, out)?;
        self.round(&mut out[..map.rows * heads * head_dim]);
        Ok(())
    }

    fn route(
        &self,
        args: &Routing<'_, Self>,
        rows: usize,
        ids: &mut Buffer<u32>,
        weights: &mut Acts,
    ) -> Result<()> {
        let &Routing { scores, experts, k, bias, bias_image, image, scale } = args;
        let plain = Routing { scores, experts, k, bias, bias_image, image, scale };
        self.cpu.route(&plain, rows, ids, weights)
    }
    fn experts_forward(
        &self,
        x: &Acts,
        experts: &Experts,
        shared: &Expert<Weight>,
        ids: &Buffer<u32>,
        weights: &Acts,
        k: usize,
        limit: f32,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        let mut used = self.same(weights);
        if self.is(Fault::FewerExperts) {
            used.iter_mut().skip(k - 1).step_by(k).for_each(|w| *w = 0.0);
        }
        self.cpu.experts_forward(x, experts, shared, ids, &used, k, limit, rows, out)?;
        self.round(&mut out[..rows * shared.w2.rows()]);
        Ok(())
    }

    fn engram_gather(
        &self,
        table: &Weight,
        row_ids: &Buffer<u64>,
        count: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.engram_gather(table, row_ids, count, out)
    }
    fn engram_update(
        &self,
        streams: &mut Acts,
        kv: &Acts,
        weight: &Acts,
        image: &Buffer<u8>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()> {
        self.cpu.engram_update(streams, kv, weight, image, shape, rows)?;
        self.round(&mut streams[..rows * shape.streams * shape.hidden]);
        Ok(())
    }

    fn concat(
        &self,
        a: &Acts,
        a_width: usize,
        b: &Acts,
        b_width: usize,
        rows: usize,
        out: &mut Acts,
    ) -> Result<()> {
        self.cpu.concat(a, a_width, b, b_width, rows, out)
    }
    fn add_rows_f32(
        &self,
        x: &Acts,
        width: usize,
        rows: usize,
        out: &mut Acts,
        out_rows: &Buffer<u32>,
    ) -> Result<()> {
        self.cpu.add_rows_f32(x, width, rows, out, out_rows)
    }
    fn penalize(
        &self,
        logits: &mut Acts,
        vocab: usize,
        penalties: &[PenaltyRow],
        counts: &[TokenCount],
    ) -> Result<()> {
        self.cpu.penalize(logits, vocab, penalties, counts)
    }
    fn add_bias(&self, logits: &mut Acts, vocab: usize, entries: &[BiasEntry]) -> Result<()> {
        self.cpu.add_bias(logits, vocab, entries)
    }
    fn mask_logits(
        &self,
        logits: &mut Acts,
        vocab: usize,
        mask_rows: &[u32],
        mask: &[u32],
    ) -> Result<()> {
        self.cpu.mask_logits(logits, vocab, mask_rows, mask)
    }
    fn sample(
        &self,
        logits: &Acts,
        vocab: usize,
        rows: &[SampleRow],
        tokens: &mut Buffer<u32>,
    ) -> Result<()> {
        self.cpu.sample(logits, vocab, rows, tokens)
    }
}
