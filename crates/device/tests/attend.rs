//! Attention over selected rows, window and sink.

mod common;

use common::*;
use deepinfer_device::ops::{ABSENT, Attention, PagedRows, Selected, WindowRows};
use deepinfer_device::{Device, RowFormat};

const RATIO: usize = 2;
const ROWS_PER_PAGE: usize = 8;

/// Sequences with their whole history: keys by position, compressed rows, and a choice of rows for
/// every position.
struct World {
    heads: usize,
    dim: usize,
    window: usize,
    k: usize,
    formats: (RowFormat, RowFormat),
    length: usize,
    /// By sequence: `[length, heads, dim]`.
    q: Vec<Vec<f32>>,
    /// By sequence: `[length, row bytes]`.
    window_rows: Vec<Vec<u8>>,
    /// By sequence: `[length / RATIO, row bytes]`.
    compressed: Vec<Vec<u8>>,
    /// By sequence: `[length, k]`.
    selected: Vec<Vec<u32>>,
    sink: Vec<f32>,
}

impl World {
    fn new(
        (heads, dim): (usize, usize),
        (window, k): (usize, usize),
        formats: (RowFormat, RowFormat),
        length: usize,
    ) -> Self {
        let mut random = Random::new((heads * dim + k) as u64);
        let mut many =
            |len: usize| -> Vec<Vec<f32>> { (0..2).map(|_| random.normals(len, 1.5)).collect() };
        let q = many(length * heads * dim);
        let stored = |rows: Vec<Vec<f32>>, format| -> Vec<Vec<u8>> {
            rows.iter().map(|rows| encoded(rows, dim, format)).collect()
        };
        let window_rows = stored(many(length * dim), formats.0);
        let compressed = stored(many(length / RATIO * dim), formats.1);
        let mut selected = vec![Vec::new(); 2];
        for sequence in &mut selected {
            for p in 0..length {
                let visible = (p + 1) / RATIO;
                let mut rows: Vec<u32> = (0..visible as u32).collect();
                while rows.len() > k {
                    rows.remove(random.below(rows.len()));
                }
                rows.resize(k, ABSENT);
                sequence.extend(rows);
            }
        }
        let sink = random.normals(heads, 1.0);
        Self { heads, dim, window, k, formats, length, q, window_rows, compressed, selected, sink }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// Runs a step: for each (sequence, slot), rows `from..to`. Returns `[rows, heads, dim]`.
    fn run<D: Device>(&self, device: &D, parts: &[(usize, usize, usize)]) -> Vec<f32> {
        let (heads, dim) = (self.heads, self.dim);
        let ring_len = self.window + 3;
        let bytes = self.formats.0.row_bytes(dim);
        let compressed_bytes = self.formats.1.row_bytes(dim);
        let pages = (self.length / RATIO).div_ceil(ROWS_PER_PAGE).max(1);
        let mut map = HostMap::default();
        let mut ring = vec![0x55u8; 4 * ring_len * bytes];
        let mut cache = vec![0x55u8; 2 * pages * ROWS_PER_PAGE * compressed_bytes];
        let (mut q, mut fresh, mut selected) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (sequence, from, to)) in parts.iter().copied().enumerate() {
            // Slots and pages in no particular order.
            let slot = (3 - i) as u32;
            let numbers: Vec<u32> =
                (0..pages).map(|p| (2 * (pages - 1 - p) + i % 2) as u32).collect();
            map.push(from, to - from, self.window, slot, &numbers);
            for p in from.saturating_sub(self.window)..from {
                let at = (slot as usize * ring_len + p % ring_len) * bytes;
                ring[at..at + bytes]
                    .copy_from_slice(&self.window_rows[sequence][p * bytes..][..bytes]);
            }
            for c in 0..to / RATIO {
                let row = numbers[c / ROWS_PER_PAGE] as usize * ROWS_PER_PAGE + c % ROWS_PER_PAGE;
                cache[row * compressed_bytes..][..compressed_bytes].copy_from_slice(
                    &self.compressed[sequence][c * compressed_bytes..][..compressed_bytes],
                );
            }
            let range = from..to;
            q.extend(rows_of(&self.q[sequence], heads * dim, &range));
            fresh.extend(rows_of(&self.window_rows[sequence], bytes, &range));
            selected.extend(rows_of(&self.selected[sequence], self.k, &range));
        }
        let rows = map.sequence.len();
        let mut out = output_act(device, rows * heads * dim);
        let (ring, fresh) = (buffer(device, &ring), buffer(device, &fresh));
        let (cache, indices) = (buffer(device, &cache), buffer(device, &selected));
        let selected = (self.k > 0).then_some(Selected {
            indices: &indices,
            k: self.k,
            keys: PagedRows {
                cache: &cache,
                format: self.formats.1,
                width: dim,
                rows_per_page: ROWS_PER_PAGE,
                ratio: RATIO,
            },
        });
        let attention = Attention {
            q: &act(device, &q),
            heads,
            head_dim: dim,
            map: &map.upload(device),
            window: WindowRows { ring: &ring, ring_len, fresh: &fresh, format: self.formats.0 },
            selected,
            sink: &buffer(device, &self.sink),
            scale: self.scale(),
        };
        device.attend(&attention, &mut out).expect("runs");
        read_act(device, &out)
    }

    /// The formula in f64, for one row.
    fn reference(&self, sequence: usize, p: usize) -> Vec<f64> {
        let dim = self.dim;
        let window = decoded(&self.window_rows[sequence], dim, self.formats.0);
        let compressed = decoded(&self.compressed[sequence], dim, self.formats.1);
        let chosen = &self.selected[sequence][p * self.k..][..self.k];
        let mut keys: Vec<&[f32]> = chosen
            .iter()
            .filter(|c| **c != ABSENT)
            .map(|c| &compressed[*c as usize * dim..][..dim])
            .collect();
        keys.extend(((p + 1).saturating_sub(self.window)..=p).map(|p| &window[p * dim..][..dim]));
        let mut out = Vec::new();
        for head in 0..self.heads {
            let q = &self.q[sequence][(p * self.heads + head) * dim..][..dim];
            let score = |key: &&[f32]| -> f64 {
                let dot: f64 = q.iter().zip(*key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                dot * f64::from(self.scale())
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let sink = f64::from(self.sink[head]);
            let top = scores.iter().copied().fold(sink, f64::max);
            let total: f64 =
                scores.iter().map(|s| (s - top).exp()).sum::<f64>() + (sink - top).exp();
            out.extend((0..dim).map(|c| {
                let weighted =
                    scores.iter().zip(&keys).map(|(s, k)| (s - top).exp() * f64::from(k[c]));
                weighted.sum::<f64>() / total
            }));
        }
        out
    }
}

const RELEASED: (RowFormat, RowFormat) = (RowFormat::Fp8x32, RowFormat::Nvfp4x16);
const EXACT: (RowFormat, RowFormat) = (RowFormat::F32, RowFormat::F32);

fn matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    let worlds = [
        World::new((1, 16), (4, 0), EXACT, 20),
        World::new((5, 48), (16, 7), RELEASED, 150),
        World::new((8, 64), (70, 60), EXACT, 150),
        World::new((6, 192), (128, 100), RELEASED, 300),
    ];
    for world in &worlds {
        for p in [0, 1, 3, world.window, world.length - 1] {
            let p = p.min(world.length - 1);
            let got = world.run(device, &[(1, p, p + 1)]);
            close(&got, &world.reference(1, p), 4.0 * tolerance::<D>());
            all.extend(bits(&got));
        }
    }
    all
}

fn chunks_do_not_matter<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for formats in [RELEASED, EXACT] {
        let world = World::new((5, 32), (20, 40), formats, 140);
        let whole = bits(&world.run(device, &[(0, 0, 140)]));
        for chunk in [1, 7, 19, 20, 21, 64, 139] {
            let mut pieces = Vec::new();
            for from in (0..140).step_by(chunk) {
                pieces.extend(bits(&world.run(device, &[(0, from, (from + chunk).min(140))])));
            }
            assert!(pieces == whole, "chunks of {chunk}");
        }
        all.extend(whole);
    }
    all
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let world = World::new((4, 32), (9, 5), RELEASED, 600);
    let width = world.heads * world.dim;
    let all =
        same_in_any_batch(512, |r| bits(&world.run(device, &[(0, 50 + r.start, 50 + r.end)])));
    // Nor other sequences.
    let other = bits(&world.run(device, &[(1, 3, 40)]));
    let beside = bits(&world.run(device, &[(0, 50, 62), (1, 3, 40), (0, 562, 600)]));
    assert!(beside[..12 * width] == all[..12 * width]);
    assert!(beside[12 * width..][..other.len()] == other[..]);
    assert!(beside.len() == (12 + 37 + 38) * width);
    all
}

fn block_rows_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    // A draft block: every row has the same window, which ends behind the block.
    let (heads, dim, window) = (3, 32, 8);
    let mut random = Random::new(6);
    let format = RowFormat::F32;
    let keys = random.normals(13 * dim, 1.0);
    let q = random.normals(heads * dim, 1.0);
    let mut map = HostMap::default();
    map.push(8, 5, window, 0, &[]);
    map.window_from.fill(0);
    map.window_to.fill(13);
    let mut out = output_act(device, 5 * heads * dim);
    let attention = Attention {
        q: &act(device, &q.repeat(5)),
        heads,
        head_dim: dim,
        map: &map.upload(device),
        window: WindowRows {
            ring: &buffer(device, &encoded(&keys[..8 * dim], dim, format)),
            ring_len: 8,
            fresh: &buffer(device, &encoded(&keys[8 * dim..], dim, format)),
            format,
        },
        selected: None,
        sink: &buffer(device, &[0.0; 3]),
        scale: 0.2,
    };
    device.attend(&attention, &mut out).expect("runs");
    let got = bits(&read_act(device, &out));
    let rows: Vec<&[u32]> = got.chunks_exact(heads * dim).collect();
    assert!(rows.iter().all(|row| *row == rows[0]));
    got
}

#[test]
fn formula() {
    for_each_device!(matches_the_formula);
}

#[test]
fn chunks() {
    for_each_device!(chunks_do_not_matter);
}

#[test]
fn rows() {
    for_each_device!(rows_do_not_see_each_other);
}

#[test]
fn draft_block() {
    for_each_device!(block_rows_see_each_other);
}
