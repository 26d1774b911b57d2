//! Choice of compressed rows. Inputs are small integers, so that scores are exact and full of ties.

use super::buffers::{HostMap, Random, act, encoded, input, output, part, read};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{CandidateShape, Candidates, Device, PagedRows, Selection};
use crate::tensor::RowFormat;
use std::ops::Range;

const ROWS_PER_PAGE: usize = 64;

struct Select {
    heads: usize,
    width: usize,
    ratio: usize,
    k: usize,
    shape: Option<CandidateShape>,
    /// Position of the first row.
    first: usize,
    pages: Vec<u32>,
    q: Vec<f32>,
    weights: Vec<f32>,
    cache: Vec<u8>,
}

impl Select {
    fn new(
        random: &mut Random,
        (heads, width): (usize, usize),
        (ratio, k): (usize, usize),
        shape: Option<CandidateShape>,
        first: usize,
        rows: usize,
    ) -> Self {
        let count = ((first + rows) / ratio).div_ceil(ROWS_PER_PAGE).max(1);
        let keys = random.integers(count * ROWS_PER_PAGE * width, 1);
        Self {
            heads,
            width,
            ratio,
            k,
            shape,
            first,
            pages: (0..count as u32).rev().collect(),
            q: random.integers(rows * heads * width, 3),
            weights: random.integers(rows * heads, 8),
            cache: encoded(&keys, width, RowFormat::Mxfp4x32),
        }
    }
}

impl Operation for Select {
    type Ready<D: Device> = D::Buffer<u8>;

    fn name(&self) -> &'static str {
        "select"
    }

    fn shape(&self) -> String {
        let Self { heads, width, ratio, k, first, .. } = self;
        let blocks = self
            .shape
            .map_or(String::new(), |s| format!(", {} blocks of {}", s.blocks, s.block_size));
        format!("{heads} x {width}, {k} of {}{blocks}", first / ratio)
    }

    fn bound(&self) -> f64 {
        0.0
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<D::Buffer<u8>, Trouble> {
        Ok(input(device, &self.cache)?)
    }

    fn run<D: Device>(
        &self,
        device: &D,
        cache: &D::Buffer<u8>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let (heads, width, k, n) = (self.heads, self.width, self.k, rows.len());
        let map = HostMap::one(self.first + rows.start..self.first + rows.end, 8, &self.pages);
        let selection = Selection {
            q: &act(device, part(&self.q, heads * width, &rows))?,
            weights: &input(device, part(&self.weights, heads, &rows))?,
            heads,
            map: &map.upload(device)?,
            keys: PagedRows {
                cache,
                format: RowFormat::Mxfp4x32,
                width,
                rows_per_page: ROWS_PER_PAGE,
                ratio: self.ratio,
            },
            k,
        };
        let mut out = output(device, n * k)?;
        let Some(shape) = self.shape else {
            device.select(&selection, Candidates::All, &mut out)?;
            return Ok(Output::Exact(read(device, &out)?));
        };
        // Publish blocks, then choose within them.
        let mut blocks = output(device, n * shape.blocks)?;
        device.select(&selection, Candidates::Publish(shape, &mut blocks), &mut out)?;
        let (chosen, published) = (read(device, &out)?, read(device, &blocks)?);
        let mut out = output(device, n * k)?;
        device.select(&selection, Candidates::Within(shape, &blocks), &mut out)?;
        let within = read(device, &out)?;
        let each = chosen.chunks_exact(k).zip(within.chunks_exact(k));
        let each = each.zip(published.chunks_exact(shape.blocks));
        let all = each.flat_map(|((a, b), c)| [a, b, c].concat());
        Ok(Output::Exact(all.collect()))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    let blocks = |block_size, blocks| Some(CandidateShape { block_size, blocks });
    let quick = [
        ((3, 24), (2, 11), blocks(3, 6), 0, 1536),
        ((32, 128), (1, 512), None, 2000, 7),
        ((5, 40), (1, 64), blocks(8, 20), 18_000, 7),
    ];
    let real = [
        ((32, 128), (2, 512), None, 16_384, 1536),
        ((32, 128), (1, 512), blocks(8, 2048), 65_536, 129),
        ((32, 128), (1, 512), blocks(8, 2048), 524_288, 7),
    ];
    let cases = quick.iter().chain(if runner.options.quick { &real[..0] } else { &real[..] });
    for (shape, choice, blocks, first, most) in cases {
        let most = runner.most(*most);
        let select = Select::new(&mut runner.random, *shape, *choice, *blocks, *first, most);
        runner.check(&select, most);
    }
}
