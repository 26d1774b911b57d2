//! What lies beyond 2^31 and 2^32 bytes in one buffer: the same results as from its beginning.

use super::buffers::{HostMap, Random, act, input};
use super::{Runner, Trouble};
use crate::ops::{Attention, CandidateShape, Candidates, Device, PagedRows, Selected};
use crate::ops::{Selection, WindowRows};
use crate::random::{Content, Random as Numbers, RandomMatrix};
use crate::tensor::{Expert, Format, RowFormat, StoredMatrix};

const ROWS_PER_PAGE: usize = 64;

/// How far, and with which experts: an offset that 32 bits hold no longer.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    bytes: usize,
    hidden: usize,
    inner: usize,
}

impl Reach {
    /// On a device.
    pub(super) const DEVICE: Reach = Reach { bytes: 1 << 32, hidden: 5120, inner: 2304 };
    /// To test the test.
    #[cfg(test)]
    const SMALL: Reach = Reach { bytes: 1 << 20, hidden: 64, inner: 32 };
}

/// Rows in pages on both sides of the limit, of its half, and at the beginning.
struct Pages {
    format: RowFormat,
    width: usize,
    /// Where the pages are.
    far: Vec<u32>,
    rows: Vec<u8>,
}

impl Pages {
    fn new(random: &mut Random, format: RowFormat, width: usize, reach: Reach) -> Self {
        let page = ROWS_PER_PAGE * format.row_bytes(width);
        let around = |byte: usize| {
            let middle = (byte / page) as u32;
            middle.saturating_sub(4)..middle + 6
        };
        // Descending and ascending, so that no two runs of pages follow each other.
        let mut far: Vec<u32> = around(reach.bytes).rev().collect();
        far.extend(around(reach.bytes / 2));
        far.extend((0..7).rev());
        let rows = random.stored_rows(far.len() * ROWS_PER_PAGE, width, format);
        Self { format, width, far, rows }
    }

    fn page_bytes(&self) -> usize {
        ROWS_PER_PAGE * self.format.row_bytes(self.width)
    }

    fn count(&self) -> usize {
        self.far.len() * ROWS_PER_PAGE
    }

    /// A cache with the rows at `pages`.
    fn upload<D: Device>(&self, device: &D, pages: &[u32]) -> Result<D::Buffer<u8>, Trouble> {
        let bytes = self.page_bytes();
        let last = pages.iter().max().map_or(0, |page| *page as usize + 1);
        let mut cache = device.alloc(last * bytes)?;
        for (page, rows) in pages.iter().zip(self.rows.chunks_exact(bytes)) {
            device.upload(rows, &mut cache, *page as usize * bytes)?;
        }
        Ok(cache)
    }

    fn near(&self) -> Vec<u32> {
        (0..self.far.len() as u32).collect()
    }

    fn paged<'a, D: Device>(&self, cache: &'a D::Buffer<u8>) -> PagedRows<'a, D> {
        let (format, width) = (self.format, self.width);
        PagedRows { cache, format, width, rows_per_page: ROWS_PER_PAGE, ratio: 1 }
    }
}

/// Rows are taken from far places, and put there.
fn moved<D: Device>(device: &D, random: &mut Random, reach: Reach) -> Result<bool, Trouble> {
    let pages = Pages::new(random, RowFormat::Nvfp4x16, 512, reach);
    let width = pages.format.row_bytes(pages.width);
    let mut cache = pages.upload(device, &pages.far)?;
    let place = |i: usize| {
        u64::from(pages.far[i / ROWS_PER_PAGE]) * ROWS_PER_PAGE as u64 + (i % ROWS_PER_PAGE) as u64
    };
    let n = pages.count();
    let places: Vec<u64> = (0..n).map(place).collect();
    let indices: Vec<u32> = places.iter().map(|place| *place as u32).collect();
    let mut out = device.alloc(n * width)?;
    device.gather_rows(&cache, width, &input(device, &indices)?, n, &mut out)?;
    let mut got = vec![0u8; n * width];
    device.download(&out, 0, &mut got)?;
    let mut well = got == pages.rows;

    // Every row to the place of its mirror image.
    let turned: Vec<u64> = places.iter().rev().copied().collect();
    device.scatter_rows(&out, width, &input(device, &turned)?, n, &mut cache)?;
    for (i, row) in pages.rows.chunks_exact(width).enumerate() {
        let mut there = vec![0u8; width];
        device.download(&cache, turned[i] as usize * width, &mut there)?;
        well &= there == row;
    }
    Ok(well)
}

/// Index keys in far pages are chosen as from near ones.
fn selected<D: Device>(device: &D, random: &mut Random, reach: Reach) -> Result<bool, Trouble> {
    let pages = Pages::new(random, RowFormat::Mxfp4x32, 128, reach);
    let (heads, k, rows) = (32, 512, 5);
    let positions = pages.count() - rows..pages.count();
    let q = act(device, &random.values(rows * heads * pages.width))?;
    let weights = input(device, &random.values(rows * heads))?;
    let shape = CandidateShape { block_size: 8, blocks: 100 };
    let choose = |places: &[u32]| -> Result<Vec<u32>, Trouble> {
        let cache = pages.upload(device, places)?;
        let selection = Selection {
            q: &q,
            weights: &weights,
            heads,
            map: &HostMap::one(positions.clone(), 8, places).upload(device)?,
            keys: pages.paged(&cache),
            k,
        };
        let (mut out, mut within) = (device.alloc(rows * k)?, device.alloc(rows * k)?);
        let mut blocks = device.alloc(rows * shape.blocks)?;
        device.select(&selection, Candidates::Publish(shape, &mut blocks), &mut out)?;
        device.select(&selection, Candidates::Within(shape, &blocks), &mut within)?;
        let mut chosen = vec![0; 2 * rows * k];
        let (first, second) = chosen.split_at_mut(rows * k);
        device.download(&out, 0, first)?;
        device.download(&within, 0, second)?;
        Ok(chosen)
    };
    Ok(choose(&pages.far)? == choose(&pages.near())?)
}

/// Attention reads far rows as it reads near ones.
fn attended<D: Device>(device: &D, random: &mut Random, reach: Reach) -> Result<bool, Trouble> {
    let pages = Pages::new(random, RowFormat::Nvfp4x16, 512, reach);
    let (heads, dim, window, rows, k) = (64, pages.width, 8, 3, 512);
    let first = pages.count() - rows;
    let format = RowFormat::Fp8x32;
    let ring = input(device, &random.stored_rows(window, dim, format))?;
    let fresh = input(device, &random.stored_rows(rows, dim, format))?;
    let q = act(device, &random.values(rows * heads * dim))?;
    let sink = input(device, &random.values(heads))?;
    let step = first / k;
    let choice = |row: usize| (0..k).map(move |i| (i * step + (row + i) % step.max(1)) as u32);
    let indices: Vec<u32> = (0..rows).flat_map(choice).collect();
    let indices = input(device, &indices)?;
    let attend = |places: &[u32]| -> Result<Vec<f32>, Trouble> {
        let cache = pages.upload(device, places)?;
        let attention = Attention {
            q: &q,
            heads,
            head_dim: dim,
            map: &HostMap::one(first..first + rows, window, places).upload(device)?,
            window: WindowRows { ring: &ring, ring_len: window, fresh: &fresh, format },
            selected: Some(Selected { indices: &indices, k, keys: pages.paged(&cache) }),
            sink: &sink,
            scale: 1.0 / (dim as f32).sqrt(),
        };
        let mut out = device.alloc(rows * heads * dim)?;
        device.attend(&attention, &mut out)?;
        let mut host = vec![0.0; rows * heads * dim];
        device.download_act(&out, 0, &mut host)?;
        Ok(host)
    };
    let (far, near) = (attend(&pages.far)?, attend(&pages.near())?);
    Ok(far == near && far.iter().any(|x| *x != 0.0))
}

/// Rows of a table, at its beginning and its end.
fn looked_up<D: Device>(device: &D, random: &mut Random, reach: Reach) -> Result<bool, Trouble> {
    let cols = 256;
    let table = RandomMatrix {
        format: Format::Fp8Row32,
        rows: reach.bytes / cols + 1000,
        cols,
        values: Numbers { content: Content::Fp8, key: random.word() },
        scales: Numbers { content: Content::Scale(126), key: random.word() },
    };
    let on_device = device.random_matrix(&table)?;
    let some = [0, 1, table.rows / 2 - 1, table.rows / 2, table.rows - 999, table.rows - 1];
    let ids: Vec<u64> = some.iter().map(|id| *id as u64).collect();
    let mut out = device.alloc(ids.len() * cols)?;
    device.engram_gather(&on_device, &input(device, &ids)?, ids.len(), &mut out)?;
    let mut got = vec![0.0; ids.len() * cols];
    device.download_act(&out, 0, &mut got)?;
    let mut want = vec![0.0; cols];
    let mut well = true;
    for (id, got) in ids.iter().zip(got.chunks_exact(cols)) {
        let (mut data, mut scale) = (vec![0; cols], vec![0; cols / 32]);
        table.values.fill(id * data.len() as u64, &mut data);
        table.scales.fill(id * scale.len() as u64, &mut scale);
        let row = StoredMatrix::new(table.format, 1, cols, data.into(), scale.into());
        crate::formats::dequantize_matrix_row(&row, 0, &mut want);
        well &= got == want;
    }
    Ok(well)
}

/// The last of so many experts give what they give alone.
fn expert<D: Device>(device: &D, random: &mut Random, reach: Reach) -> Result<bool, Trouble> {
    let Reach { hidden, inner, .. } = reach;
    let key = random.word();
    let matrix = |expert: usize, which: u64, rows, cols| RandomMatrix {
        format: Format::Fp4Row32,
        rows,
        cols,
        values: Numbers { content: Content::Fp4, key: key ^ (8 * expert as u64 + which) },
        scales: Numbers {
            content: Content::Scale(119),
            key: key ^ (8 * expert as u64 + 4 + which),
        },
    };
    let make = |expert: usize| Expert {
        w1: matrix(expert, 0, inner, hidden),
        w3: matrix(expert, 1, inner, hidden),
        w2: matrix(expert, 2, hidden, inner),
    };
    let (few, k) = (12usize, 6usize);
    let count = reach.bytes / (hidden * inner / 2) + few;
    let shared = random.expert(Format::Fp8Block32, hidden, inner);
    let shared = Expert {
        w1: device.matrix(shared.w1)?,
        w3: device.matrix(shared.w3)?,
        w2: device.matrix(shared.w2)?,
    };
    let all = device.random_experts(&(0..count).map(make).collect::<Vec<_>>())?;
    let last = device.random_experts(&(count - few..count).map(make).collect::<Vec<_>>())?;
    let mut well = true;
    for rows in [1, 7, 129] {
        let x = act(device, &random.values(rows * hidden))?;
        let weights = input(device, &vec![0.25f32; rows * k])?;
        let ids: Vec<u32> =
            (0..rows).flat_map(|r| (0..k).map(move |i| ((r + 5 * i) % few) as u32)).collect();
        let run = |experts: &D::Experts, from: usize| -> Result<Vec<f32>, Trouble> {
            let ids: Vec<u32> = ids.iter().map(|id| id + from as u32).collect();
            let ids = input(device, &ids)?;
            let mut out = device.alloc(rows * hidden)?;
            let (x, w) = (&x, &weights);
            device.experts_forward(x, experts, &shared, &ids, w, k, 10.0, rows, &mut out)?;
            let mut host = vec![0.0; rows * hidden];
            device.download_act(&out, 0, &mut host)?;
            Ok(host)
        };
        let (far, near) = (run(&all, count - few)?, run(&last, 0)?);
        well &= far == near && far.iter().any(|x| *x != 0.0);
    }
    Ok(well)
}

type Test<D> = fn(&D, &mut Random, Reach) -> Result<bool, Trouble>;

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>, reach: Reach) {
    let tests: [(&str, Test<D>); 5] = [
        ("gather, scatter_rows", moved),
        ("select", selected),
        ("attend", attended),
        ("engram_gather", looked_up),
        ("experts_forward", expert),
    ];
    for (operation, test) in tests {
        let shape = format!("across {} MiB in one buffer", reach.bytes >> 20);
        runner.case(operation, shape, |device, random| test(device, random, reach));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Case, Options};
    use super::*;
    use crate::cpu::{Cpu, Isa};

    fn cases<D: Device>(device: &D, reach: Reach) -> Vec<Case> {
        let plain = Cpu::with_isa(Some(1), Isa::Scalar).expect("threads start");
        let options = Options { quick: false, seed: 3 };
        let random = Random::new(3);
        let observe = &mut |case: &Case| println!("{case:?}");
        let mut runner = Runner { device, plain, options, random, observe, cases: Vec::new() };
        run(&mut runner, reach);
        for case in &runner.cases {
            assert_eq!(case.failure, None, "{}", case.operation);
        }
        runner.cases
    }

    #[test]
    fn a_cpu_finds_what_lies_far() {
        let cases = cases(&Cpu::new(Some(2)).expect("threads start"), Reach::SMALL);
        assert_eq!(cases.len(), 5);
        assert!(cases.iter().all(|case| case.shape.ends_with("in one buffer")));
    }

    #[test]
    fn a_gpu_finds_what_lies_far() {
        if let Some(device) = crate::cuda::test_gpu() {
            cases(&device, Reach::DEVICE);
        }
    }
}
