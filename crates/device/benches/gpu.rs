//! Times of attention, selection and experts on the first GPU, at the released model's shapes, by
//! events of the stream: microseconds, medians over inputs in rotation.

use deepinfer_device::formats::encode_row;
use deepinfer_device::ops::{
    Attention, Candidates, PagedRows, Routing, RowMap, SampleRow, Selected, Selection, WindowRows,
};
use deepinfer_device::{
    Cuda, Device, DeviceError, Element, Expert, Format, RowFormat, StoredMatrix,
};
use half::bf16;

type Buffer<E> = <Cuda as Device>::Buffer<E>;
type Result<T> = std::result::Result<T, DeviceError>;

/// Inputs that are used in turn.
const ROTATION: usize = 8;
const ROWS_PER_PAGE: usize = 64;

struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    fn acts(&mut self, len: usize) -> Vec<bf16> {
        let value = |word: u64| bf16::from_f32((word % 511) as f32 / 128.0 - 2.0);
        (0..len).map(|_| value(self.word())).collect()
    }

    /// One encoded row of random values, repeated with its codes changed.
    fn rows(&mut self, rows: usize, width: usize, format: RowFormat) -> Vec<u8> {
        let values: Vec<f32> = self.acts(64 * width).iter().map(|x| x.to_f32()).collect();
        let bytes = format.row_bytes(width);
        let mut some = vec![0; 64 * bytes];
        for (x, out) in values.chunks(width).zip(some.chunks_mut(bytes)) {
            encode_row(format, x, out);
        }
        (0..rows).flat_map(|_| some[self.below(64) * bytes..][..bytes].to_vec()).collect()
    }
}

fn put<E: Element>(cuda: &Cuda, values: &[E]) -> Result<Buffer<E>> {
    let mut buffer = cuda.alloc(values.len())?;
    cuda.upload(values, &mut buffer, 0)?;
    Ok(buffer)
}

/// Median microseconds of one call; several follow each other in a measurement.
fn time(cuda: &Cuda, mut call: impl FnMut(usize) -> Result<()>) -> Result<f32> {
    const CALLS: usize = 8;
    for i in 0..ROTATION {
        call(i)?;
    }
    cuda.sync()?;
    let mut times = Vec::new();
    for _ in 0..7 {
        let all = cuda.time(|| (0..CALLS).try_for_each(|i| call(i % ROTATION)))?;
        times.push(all * 1000.0 / CALLS as f32);
    }
    times.sort_by(f32::total_cmp);
    Ok(times[times.len() / 2])
}

/// Every row is a sequence of its own, or all are one: positions end at `last`.
fn map(cuda: &Cuda, rows: usize, last: usize, alone: bool, pages: usize) -> Result<RowMap<Cuda>> {
    let position: Vec<u32> =
        (0..rows).map(|i| if alone { last } else { last + 1 - rows + i } as u32).collect();
    let sequences = if alone { rows } else { 1 };
    let ids: Vec<u32> = (0..rows).map(|i| if alone { i as u32 } else { 0 }).collect();
    let first = position[0];
    Ok(RowMap {
        rows,
        sequences,
        sequence: put(cuda, &ids)?,
        window_from: put(
            cuda,
            &position.iter().map(|p| (p + 1).saturating_sub(128)).collect::<Vec<_>>(),
        )?,
        window_to: put(cuda, &position.iter().map(|p| p + 1).collect::<Vec<_>>())?,
        position: put(cuda, &position)?,
        fresh_from: put(cuda, &vec![first; sequences])?,
        first_row: put(cuda, &(0..sequences as u32).collect::<Vec<_>>())?,
        slot: put(cuda, &(0..sequences as u32).collect::<Vec<_>>())?,
        pages: put(cuda, &(0..sequences * pages).map(|i| (i % pages) as u32).collect::<Vec<_>>())?,
        max_pages: pages,
    })
}

fn attend(cuda: &Cuda, random: &mut Random) -> Result<()> {
    const ROWS: usize = 1 << 18;
    let (heads, dim, k, ring_len) = (64, 512, 512, 134);
    let cache = put(cuda, &random.rows(ROWS, dim, RowFormat::Nvfp4x16))?;
    let sink = put(cuda, &vec![0.5f32; heads])?;
    for (rows, alone) in
        [(1, true), (8, true), (32, true), (128, true), (1536, false), (4096, false)]
    {
        let map = map(cuda, rows, ROWS - 1, alone, ROWS / ROWS_PER_PAGE)?;
        let q = put(cuda, &random.acts(rows * heads * dim))?;
        let slots = if alone { rows } else { 1 };
        let ring = put(cuda, &random.rows(slots * ring_len, dim, RowFormat::Fp8x32))?;
        let fresh = put(cuda, &random.rows(rows, dim, RowFormat::Fp8x32))?;
        let mut choices = Vec::new();
        for _ in 0..ROTATION {
            let step = (ROWS - rows) / k;
            let row =
                |_| (0..k).map(|i| (i * step + random.below(step)) as u32).collect::<Vec<_>>();
            choices.push(put(cuda, &(0..rows).flat_map(row).collect::<Vec<u32>>())?);
        }
        let mut out = cuda.alloc::<bf16>(rows * heads * dim)?;
        let us = time(cuda, |i| {
            let keys = PagedRows {
                cache: &cache,
                format: RowFormat::Nvfp4x16,
                width: dim,
                rows_per_page: ROWS_PER_PAGE,
                ratio: 1,
            };
            let window =
                WindowRows { ring: &ring, ring_len, fresh: &fresh, format: RowFormat::Fp8x32 };
            let args = Attention {
                q: &q,
                heads,
                head_dim: dim,
                map: &map,
                window,
                selected: Some(Selected { indices: &choices[i], k, keys }),
                sink: &sink,
                scale: 0.044,
            };
            cuda.attend(&args, &mut out)
        })?;
        println!("attend, 64 heads, 512 + 128 rows, {rows} queries: {us:.1} us");
    }
    Ok(())
}

fn select(cuda: &Cuda, random: &mut Random) -> Result<()> {
    let (heads, width, k) = (32, 128, 512);
    for (count, rows) in [(8192, 1), (65536, 1), (524_288, 1), (8192, 1536), (65536, 1536)] {
        let cache = put(cuda, &random.rows(count, width, RowFormat::Mxfp4x32))?;
        let map = map(cuda, rows, count - 1, false, count / ROWS_PER_PAGE)?;
        let q = put(cuda, &random.acts(rows * heads * width))?;
        let weights: Vec<f32> = random.acts(rows * heads).iter().map(|x| x.to_f32()).collect();
        let weights = put(cuda, &weights)?;
        let mut out = cuda.alloc::<u32>(rows * k)?;
        let us = time(cuda, |_| {
            let keys = PagedRows {
                cache: &cache,
                format: RowFormat::Mxfp4x32,
                width,
                rows_per_page: ROWS_PER_PAGE,
                ratio: 1,
            };
            let args = Selection { q: &q, weights: &weights, heads, map: &map, keys, k };
            cuda.select(&args, Candidates::All, &mut out)
        })?;
        println!("select, 32 x 128, 512 of {count}, {rows} queries: {us:.1} us");
    }
    Ok(())
}

fn experts(cuda: &Cuda, random: &mut Random) -> Result<()> {
    let (hidden, inner, count, k) = (5120, 2304, 384, 6);
    // All experts have the same bytes here, but places of their own there.
    let mut matrix = |format: Format, rows: usize, cols: usize| {
        let (scale_rows, groups) = format.scale_shape(rows, cols).unwrap_or((0, 0));
        let mask = if format == Format::Fp4Row32 { 0xff } else { 0xbf };
        let data: Vec<u8> =
            (0..rows * format.row_bytes(cols)).map(|_| random.word() as u8 & mask).collect();
        let scale = vec![120; scale_rows * groups];
        StoredMatrix::new(format, rows, cols, data.into(), scale.into())
    };
    let mut expert = |format| Expert {
        w1: matrix(format, inner, hidden),
        w3: matrix(format, inner, hidden),
        w2: matrix(format, hidden, inner),
    };
    let (routed, shared) = (expert(Format::Fp4Row32), expert(Format::Fp8Block32));
    let routed = cuda.experts(vec![routed; count])?;
    let shared = Expert {
        w1: cuda.matrix(shared.w1)?,
        w3: cuda.matrix(shared.w3)?,
        w2: cuda.matrix(shared.w2)?,
    };
    for rows in [1, 8, 32, 128, 1024, 4096] {
        let x = put(cuda, &random.acts(rows * hidden))?;
        let weights = put(cuda, &vec![0.25f32; rows * k])?;
        let mut choices = Vec::new();
        for _ in 0..ROTATION {
            let mut ids: Vec<u32> = Vec::new();
            for _ in 0..rows {
                let from = ids.len();
                while ids.len() < from + k {
                    let id = random.below(count) as u32;
                    if !ids[from..].contains(&id) {
                        ids.push(id);
                    }
                }
            }
            choices.push(put(cuda, &ids)?);
        }
        let mut out = cuda.alloc::<bf16>(rows * hidden)?;
        let us = time(cuda, |i| {
            let ids = &choices[i];
            cuda.experts_forward(&x, &routed, &shared, ids, &weights, k, 10.0, rows, &mut out)
        })?;
        println!("experts_forward, 6 of 384 and shared, {rows} rows: {us:.1} us");
    }
    Ok(())
}

fn route_and_sample(cuda: &Cuda, random: &mut Random) -> Result<()> {
    for rows in [1, 128] {
        let scores: Vec<f32> = random.acts(rows * 384).iter().map(|x| x.to_f32()).collect();
        let (scores, bias) = (put(cuda, &scores)?, put(cuda, &[0.1f32; 384])?);
        let image = put(cuda, &vec![0u8; rows])?;
        let (mut ids, mut weights) = (cuda.alloc(rows * 6)?, cuda.alloc(rows * 6)?);
        let us = time(cuda, |_| {
            let routing = Routing {
                scores: &scores,
                experts: 384,
                k: 6,
                bias: &bias,
                bias_image: None,
                image: &image,
                scale: 1.5,
            };
            cuda.route(&routing, rows, &mut ids, &mut weights)
        })?;
        println!("route, 6 of 384, {rows} rows: {us:.1} us");
        let vocab = 129_280;
        let logits: Vec<f32> = random.acts(rows * vocab).iter().map(|x| 4.0 * x.to_f32()).collect();
        let logits = put(cuda, &logits)?;
        let mut tokens = cuda.alloc(rows)?;
        let plain = SampleRow { temperature: 1.0, ..SampleRow::greedy() };
        let kinds = [
            ("greedy", SampleRow::greedy()),
            ("temperature", plain),
            ("top-p", SampleRow { top_p: 0.95, ..plain }),
        ];
        for (name, row) in kinds {
            let params = vec![row; rows];
            let us = time(cuda, |_| cuda.sample(&logits, vocab, &params, &mut tokens))?;
            println!("sample, {name}, {rows} rows: {us:.1} us");
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let cuda = match Cuda::open(0) {
        Ok(cuda) => cuda,
        Err(error @ (DeviceError::NoDriver | DeviceError::NoDevice { .. })) => {
            println!("nothing measured: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let mut random = Random(1);
    attend(&cuda, &mut random)?;
    select(&cuda, &mut random)?;
    route_and_sample(&cuda, &mut random)?;
    experts(&cuda, &mut random)
}
