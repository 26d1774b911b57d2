//! Attention.

use super::buffers::{HostMap, Random, act, input, output_act, part, read_act};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{ABSENT, Attention, Device, PagedRows, Selected, WindowRows};
use crate::tensor::RowFormat;
use std::ops::Range;

const ROWS_PER_PAGE: usize = 64;

/// A sequence of `first` positions that were there before, and the rows of the step behind them.
struct Attend {
    heads: usize,
    dim: usize,
    window: usize,
    k: usize,
    formats: (RowFormat, RowFormat),
    first: usize,
    pages: Vec<u32>,
    q: Vec<f32>,
    /// By position.
    window_rows: Vec<u8>,
    cache: Vec<u8>,
    indices: Vec<u32>,
    sink: Vec<f32>,
}

impl Attend {
    fn new(
        random: &mut Random,
        (heads, dim): (usize, usize),
        (window, k): (usize, usize),
        formats: (RowFormat, RowFormat),
        rows: usize,
    ) -> Self {
        // Rows from here on see all of their window, and enough compressed rows to choose from.
        let first = window + 2 * k;
        let length = first + rows;
        let count = length.div_ceil(ROWS_PER_PAGE);
        // Pages in no particular order.
        let pages = (0..count).map(|p| (p * 7 % count) as u32);
        let pages = if count.is_multiple_of(7) {
            (0..count as u32).rev().collect()
        } else {
            pages.collect()
        };
        let mut indices = Vec::with_capacity(rows * k);
        for p in first..length {
            // Ascending, some absent at the end.
            let step = (p + 1) / k.max(1);
            let absent = if p % 5 == 4 { k / 3 } else { 0 };
            let chosen = (0..k - absent).map(|i| (i * step + random.below(step.max(1))) as u32);
            indices.extend(chosen.chain(std::iter::repeat_n(ABSENT, absent)));
        }
        Self {
            heads,
            dim,
            window,
            k,
            formats,
            first,
            pages,
            q: random.values(rows * heads * dim),
            window_rows: random.stored_rows(length, dim, formats.0),
            cache: random.stored_rows(count * ROWS_PER_PAGE, dim, formats.1),
            indices,
            sink: random.values(heads),
        }
    }
}

impl Operation for Attend {
    type Ready<D: Device> = D::Buffer<u8>;

    fn name(&self) -> &'static str {
        "attend"
    }

    fn shape(&self) -> String {
        let Self { heads, dim, window, k, formats, .. } = self;
        format!("{heads} x {dim}, {k} of {:?}, {window} of {:?}", formats.1, formats.0)
    }

    fn bound(&self) -> f64 {
        4e-3
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
        let (heads, dim) = (self.heads, self.dim);
        let bytes = self.formats.0.row_bytes(dim);
        let positions = self.first + rows.start..self.first + rows.end;
        let map = HostMap::one(positions.clone(), self.window, &self.pages);
        let ring_len = self.window + 5;
        let mut ring = vec![0x55; ring_len * bytes];
        for p in positions.start - self.window..positions.start {
            ring[p % ring_len * bytes..][..bytes]
                .copy_from_slice(&self.window_rows[p * bytes..][..bytes]);
        }
        let (ring, fresh) =
            (input(device, &ring)?, input(device, part(&self.window_rows, bytes, &positions))?);
        let indices = input(device, part(&self.indices, self.k, &rows))?;
        let selected = (self.k > 0).then_some(Selected {
            indices: &indices,
            k: self.k,
            keys: PagedRows {
                cache,
                format: self.formats.1,
                width: dim,
                rows_per_page: ROWS_PER_PAGE,
                ratio: 1,
            },
        });
        let attention = Attention {
            q: &act(device, part(&self.q, heads * dim, &rows))?,
            heads,
            head_dim: dim,
            map: &map.upload(device)?,
            window: WindowRows { ring: &ring, ring_len, fresh: &fresh, format: self.formats.0 },
            selected,
            sink: &input(device, &self.sink)?,
            scale: 1.0 / (dim as f32).sqrt(),
        };
        let mut out = output_act(device, rows.len() * heads * dim)?;
        device.attend(&attention, &mut out)?;
        Ok(Output::Rounded(read_act(device, &out)?))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    let released = (RowFormat::Fp8x32, RowFormat::Nvfp4x16);
    let exact = runner.device.exact_rows();
    let quick = [
        ((1, 32), (5, 0), released, 1536),
        ((5, 48), (16, 40), released, 1536),
        ((12, 192), (70, 33), (exact, exact), 129),
        ((64, 512), (128, 512), released, 7),
    ];
    let real = [
        ((64, 512), (128, 512), released, 1536),
        ((64, 512), (128, 0), released, 129),
        ((64, 512), (128, 512), (exact, exact), 129),
    ];
    let cases = quick.iter().chain(if runner.options.quick { &real[..0] } else { &real[..] });
    for (shape, keys, formats, most) in cases {
        let most = runner.most(*most);
        let attend = Attend::new(&mut runner.random, *shape, *keys, *formats, most);
        runner.check(&attend, most);
    }
}
