//! Scores of index keys and the choice of the best rows, which is one operation here.

use super::cases::{Cases, Maker, Ready, Shared, act};
use super::{Measure, Work};
use crate::inputs::HostMap;
use crate::ops::{CandidateShape, Candidates, PagedRows, Result, RowMap, Selection};
use crate::tensor::RowFormat;

const HEADS: usize = 32;
const WIDTH: usize = 128;
const K: usize = 512;
const FORMAT: RowFormat = RowFormat::Mxfp4x32;
const ROWS_PER_PAGE: usize = 64;
/// Rows in the cache: more than caches hold.
const CACHE: usize = 1 << 22;

struct Queries<D: Measure> {
    q: D::Buffer<D::Act>,
    weights: D::Buffer<f32>,
    map: RowMap<D>,
}

/// The last `rows` positions of a sequence of `count` rows, whose pages are the cache's from `page`
/// on.
fn queries<D: Measure>(
    maker: &mut Maker<'_, D>,
    rows: usize,
    count: usize,
    page: usize,
) -> Result<Queries<D>> {
    let pages = count / ROWS_PER_PAGE;
    let pages: Vec<u32> =
        (page..page + pages).map(|p| (p % (CACHE / ROWS_PER_PAGE)) as u32).collect();
    Ok(Queries {
        q: maker.acts(rows * HEADS * WIDTH)?,
        weights: maker.values(rows * HEADS, 0.1)?,
        map: HostMap::one(count - rows..count, 128, &pages).upload(maker.device)?,
    })
}

/// The row cache, as keys.
fn keys<D: Measure>(cache: &D::Buffer<u8>) -> PagedRows<'_, D> {
    let (format, width, rows_per_page) = (FORMAT, WIDTH, ROWS_PER_PAGE);
    PagedRows { cache, format, width, rows_per_page, ratio: 1 }
}

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    let cache: Shared<D::Buffer<u8>> = Shared::new();
    all(cases, &cache);
    within(cases, &cache);
}

/// Among all rows.
fn all<D: Measure>(cases: &mut Cases<D>, cache: &Shared<D::Buffer<u8>>) {
    let quick = [(1, 8192), (1, 65_536)];
    let moderate = [(1, 8192), (1, 65_536), (1, 524_288), (128, 8192), (128, 65_536)];
    let full = [(1, 8192), (1, 65_536), (1, 524_288), (1536, 8192), (1536, 65_536)];
    for &(rows, count) in cases.extent.of(&quick, &moderate, &full) {
        let cache = cache.clone();
        let shape = format!("{HEADS} x {WIDTH} fp4, {K} of {count}, {rows} queries");
        cases.add("select", shape, move |maker| {
            let cache = cache.get(|| maker.rows(CACHE, WIDTH, FORMAT))?;
            let queries_bytes = rows * HEADS * (WIDTH * act::<D>() + 4);
            let read = (count * FORMAT.row_bytes(WIDTH) + queries_bytes) as f64;
            let copies = maker.copies(read);
            let mut all = Vec::new();
            for copy in 0..copies {
                all.push(queries(maker, rows, count, copy * count / ROWS_PER_PAGE)?);
            }
            // Query `i` sees all rows but those of the queries after it.
            let visible = rows * count - rows * (rows - 1) / 2;
            let work = Work {
                bytes: read + (4 * rows * K) as f64,
                operations: (2 * HEADS * WIDTH) as f64 * visible as f64,
                ..Work::default()
            };
            let mut out = maker.device.alloc(rows * K)?;
            Ready::new(work, copies, move |device: &D, i| {
                let Queries { q, weights, map } = &all[i];
                let keys = keys::<D>(&cache);
                let args = Selection { q, weights, heads: HEADS, map, keys, k: K };
                device.select(&args, Candidates::All, &mut out)
            })
        });
    }
}

/// Among the rows of blocks that an earlier layer published.
fn within<D: Measure>(cases: &mut Cases<D>, cache: &Shared<D::Buffer<u8>>) {
    const SHAPE: CandidateShape = CandidateShape { block_size: 8, blocks: 2048 };
    const CANDIDATES: usize = SHAPE.block_size * SHAPE.blocks;
    let full = [(1, 524_288), (1536, 65_536)];
    for &(rows, count) in cases.extent.of(&[], &full[..1], &full) {
        let cache = cache.clone();
        let shape = format!("{HEADS} x {WIDTH} fp4, {K} in 2048 x 8 of {count}, {rows} queries");
        cases.add("select_within", shape, move |maker| {
            let cache = cache.get(|| maker.rows(CACHE, WIDTH, FORMAT))?;
            let given = rows * (HEADS * (WIDTH * act::<D>() + 4) + 4 * SHAPE.blocks);
            let read = (rows * CANDIDATES).min(count) * FORMAT.row_bytes(WIDTH) + given;
            let copies = maker.copies(read as f64).min(64);
            let mut out = maker.device.alloc(rows * K)?;
            let mut all = Vec::new();
            for copy in 0..copies {
                let queries = queries(maker, rows, count, copy * count / ROWS_PER_PAGE)?;
                let mut blocks = maker.device.alloc(rows * SHAPE.blocks)?;
                let Queries { q, weights, map } = &queries;
                let args =
                    Selection { q, weights, heads: HEADS, map, keys: keys::<D>(&cache), k: K };
                let publish = Candidates::Publish(SHAPE, &mut blocks);
                maker.device.select(&args, publish, &mut out)?;
                all.push((queries, blocks));
            }
            let work = Work {
                bytes: (read + 4 * rows * K) as f64,
                operations: (2 * HEADS * WIDTH * rows * CANDIDATES) as f64,
                ..Work::default()
            };
            Ready::new(work, copies, move |device: &D, i| {
                let (Queries { q, weights, map }, blocks) = &all[i];
                let args =
                    Selection { q, weights, heads: HEADS, map, keys: keys::<D>(&cache), k: K };
                device.select(&args, Candidates::Within(SHAPE, blocks), &mut out)
            })
        });
    }
}
