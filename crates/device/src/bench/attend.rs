//! Attention over selected rows and a window, both in their stored form.

use super::cases::{Cases, Maker, Ready, Shared, act};
use super::{Measure, Work};
use crate::inputs::{HostMap, input};
use crate::ops::{Attention, PagedRows, Result, RowMap, Selected, WindowRows};
use crate::tensor::RowFormat;

const HEADS: usize = 64;
const DIM: usize = 512;
const WINDOW: usize = 128;
const K: usize = 512;
const SELECTED: RowFormat = RowFormat::Nvfp4x16;
const WINDOWED: RowFormat = RowFormat::Fp8x32;
const ROWS_PER_PAGE: usize = 64;
/// Rows in the cache: more than caches hold.
const CACHE: usize = 1 << 20;
/// Rings of windows, and positions in each.
const SLOTS: usize = 512;
const RING: usize = WINDOW + 6;

/// What lies in memory before a step.
struct Rows<D: Measure> {
    selected: D::Buffer<u8>,
    rings: D::Buffer<u8>,
    sink: D::Buffer<f32>,
}

struct Queries<D: Measure> {
    q: D::Buffer<D::Act>,
    indices: D::Buffer<u32>,
    fresh: D::Buffer<u8>,
    map: RowMap<D>,
}

/// `K` rows of the first `visible` for each of `rows` queries, ascending, and how many different
/// ones there are.
fn choose<D: Measure>(maker: &mut Maker<'_, D>, rows: usize, visible: usize) -> (Vec<u32>, usize) {
    let step = visible / K;
    let mut seen = vec![false; visible];
    let mut indices = Vec::with_capacity(rows * K);
    for _ in 0..rows {
        for i in 0..K {
            let row = i * step + maker.random.below(step);
            seen[row] = true;
            indices.push(row as u32);
        }
    }
    (indices, seen.iter().filter(|seen| **seen).count())
}

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    // Sequences of one query each (decode), or queries of one sequence (prefill).
    let quick = [(1, true), (32, true)];
    let moderate = [(1, true), (8, true), (32, true), (128, true), (256, false)];
    let full = [(1, true), (8, true), (32, true), (128, true), (1536, false), (4096, false)];
    let rows: Shared<Rows<D>> = Shared::new();
    for &(count, decode) in cases.extent.of(&quick, &moderate, &full) {
        let rows = rows.clone();
        let kind = if decode { "decode, batch" } else { "prefill, queries" };
        let shape = format!("{HEADS} x {DIM}, {K} fp4 and {WINDOW} fp8 rows, {kind} {count}");
        cases.add("attend", shape, move |maker| {
            let rows = rows.get(|| {
                Ok(Rows {
                    selected: maker.rows(CACHE, DIM, SELECTED)?,
                    rings: maker.rows(SLOTS * RING, DIM, WINDOWED)?,
                    sink: maker.values(HEADS, 0.5)?,
                })
            })?;
            let windows = if decode { count * WINDOW } else { count + WINDOW - 1 };
            let bytes = |selected: usize| {
                selected * SELECTED.row_bytes(DIM)
                    + windows * WINDOWED.row_bytes(DIM)
                    + count * (HEADS * DIM * 2 * act::<D>() + 4 * K)
            };
            let copies = maker.copies(bytes((count * K).min(CACHE)) as f64);
            let (mut all, mut different) = (Vec::new(), 0);
            for copy in 0..copies {
                let (queries, selected) = queries(maker, count, decode, copy)?;
                all.push(queries);
                different += selected;
            }
            let keys = (K + WINDOW) as f64;
            let work = Work {
                bytes: bytes(different / copies) as f64,
                // Two products, with keys and with values.
                operations: 4.0 * (count * HEADS * DIM) as f64 * keys,
                ..Work::default()
            };
            let mut out = maker.device.alloc(count * HEADS * DIM)?;
            Ready::new(work, copies, move |device: &D, i| {
                let Queries { q, indices, fresh, map } = &all[i];
                let keys = PagedRows {
                    cache: &rows.selected,
                    format: SELECTED,
                    width: DIM,
                    rows_per_page: ROWS_PER_PAGE,
                    ratio: 1,
                };
                let args = Attention {
                    q,
                    heads: HEADS,
                    head_dim: DIM,
                    map,
                    window: WindowRows {
                        ring: &rows.rings,
                        ring_len: RING,
                        fresh,
                        format: WINDOWED,
                    },
                    selected: Some(Selected { indices, k: K, keys }),
                    sink: &rows.sink,
                    scale: (DIM as f32).sqrt().recip(),
                };
                device.attend(&args, &mut out)
            })
        });
    }
}

/// Queries at the end of the cache, and how many different rows they select.
fn queries<D: Measure>(
    maker: &mut Maker<'_, D>,
    count: usize,
    decode: bool,
    copy: usize,
) -> Result<(Queries<D>, usize)> {
    let pages: Vec<u32> = (0..(CACHE / ROWS_PER_PAGE) as u32).collect();
    let map = if decode {
        let first = (copy * count % SLOTS) as u32;
        HostMap::alone(CACHE - 1, WINDOW, first..first + count as u32, &pages)
    } else {
        HostMap::one(CACHE - count..CACHE, WINDOW, &pages)
    };
    let (indices, different) = choose(maker, count, CACHE - count);
    let queries = Queries {
        q: maker.acts(count * HEADS * DIM)?,
        indices: input(maker.device, &indices)?,
        fresh: maker.rows(count, DIM, WINDOWED)?,
        map: map.upload(maker.device)?,
    };
    Ok((queries, different))
}
