//! Rows of caches and tables: reading them by number, dequantized.

use super::cases::{Cases, Ready, Shared, act};
use super::{Extent, Measure, Work};
use crate::inputs::input;
use crate::tensor::{Format, RowFormat};

const WIDTH: usize = 512;
/// Rows in a cache: more than caches hold.
const CACHE: usize = 1 << 20;
/// Rows that a token looks up in an n-gram table, and their width.
const COLUMNS: usize = 24;
const MEMORY: usize = 256;

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    gather(cases);
    engram(cases);
}

/// Stored rows, read by number and dequantized.
fn gather<D: Measure>(cases: &mut Cases<D>) {
    for (name, format) in [("fp8", RowFormat::Fp8x32), ("fp4", RowFormat::Nvfp4x16)] {
        let cache: Shared<D::Buffer<u8>> = Shared::new();
        for &rows in cases.extent.of(&[16_384], &[16_384, 49_152], &[16_384, 49_152]) {
            let cache = cache.clone();
            let row_bytes = format.row_bytes(WIDTH);
            let shape = format!("{name}, {row_bytes} B, {rows} rows");
            cases.add("decode_rows", shape, move |maker| {
                let cache = cache.get(|| maker.rows(CACHE, WIDTH, format))?;
                let bytes = (rows * (row_bytes + 4 + WIDTH * act::<D>())) as f64;
                let copies = maker.copies(bytes);
                let mut indices = Vec::new();
                for _ in 0..copies {
                    let some = maker.numbers(rows, CACHE);
                    indices.push(input(maker.device, &some)?);
                }
                let mut out = maker.device.alloc(rows * WIDTH)?;
                let work = Work { bytes, ..Work::default() };
                Ready::new(work, copies, move |device: &D, i| {
                    device.decode_rows(&cache, WIDTH, format, &indices[i], rows, &mut out)
                })
            });
        }
    }
}

/// Rows of an n-gram table. A GPU keeps a table of the full extent in host memory.
fn engram<D: Measure>(cases: &mut Cases<D>) {
    let table_rows = if cases.extent == Extent::Full { (1 << 22) + 1 } else { 1 << 21 };
    let table: Shared<D::Matrix> = Shared::new();
    for &tokens in cases.extent.of(&[12], &[1, 12, 128], &[1, 12, 128, 4096]) {
        let table = table.clone();
        let rows = tokens * COLUMNS;
        let shape = format!("fp8 rows of {MEMORY}, {rows} rows");
        cases.add("engram_gather", shape, move |maker| {
            let table = table.get(|| maker.matrix(Format::Fp8Row32, table_rows, MEMORY))?;
            let stored = (rows * (MEMORY + MEMORY / 32)) as f64;
            let moved = (rows * (8 + MEMORY * act::<D>())) as f64;
            let copies = maker.copies(stored + moved);
            let mut ids = Vec::new();
            for _ in 0..copies {
                let some = maker.numbers(rows, table_rows);
                let some: Vec<u64> = some.into_iter().map(u64::from).collect();
                ids.push(input(maker.device, &some)?);
            }
            let mut out = maker.device.alloc(rows * MEMORY)?;
            let work = match maker.device.is_on_host(&table) {
                true => Work { bytes: moved, host_bytes: stored, operations: 0.0 },
                false => Work { bytes: stored + moved, ..Work::default() },
            };
            Ready::new(work, copies, move |device: &D, i| {
                device.engram_gather(&table, &ids[i], rows, &mut out)
            })
        });
    }
}
