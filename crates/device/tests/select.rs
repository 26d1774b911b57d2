//! Choice of compressed rows, and of candidate blocks.

mod common;

use common::*;
use deepinfer_device::ops::{ABSENT, CandidateShape, Candidates, PagedRows, Selection};
use deepinfer_device::{Device, RowFormat};

const ROWS_PER_PAGE: usize = 16;

/// Which candidates a run uses.
enum Blocks<'a> {
    All,
    Publish(CandidateShape),
    Within(CandidateShape, &'a [u32]),
}

/// Two sequences with index keys, and queries for every position.
struct World {
    heads: usize,
    width: usize,
    ratio: usize,
    format: RowFormat,
    length: usize,
    /// By sequence: `[length, heads, width]`.
    q: Vec<Vec<f32>>,
    /// By sequence: `[length, heads]`.
    weights: Vec<Vec<f32>>,
    /// By sequence: `[length / ratio, width]`, as stored.
    keys: Vec<Vec<u8>>,
}

impl World {
    fn new(
        (heads, width): (usize, usize),
        ratio: usize,
        format: RowFormat,
        length: usize,
        value: impl Fn(&mut Random) -> f32,
    ) -> Self {
        let mut random = Random::new((heads * width) as u64);
        let mut many = |len: usize| -> Vec<Vec<f32>> {
            (0..2).map(|_| (0..len).map(|_| value(&mut random)).collect()).collect()
        };
        let q = many(length * heads * width);
        let weights = many(length * heads);
        let keys = many(length / ratio * width);
        let keys = keys.iter().map(|keys| encoded(keys, width, format)).collect();
        Self { heads, width, ratio, format, length, q, weights, keys }
    }

    /// Chosen rows `[rows, k]` and published blocks `[rows, blocks]` of a step.
    fn run<D: Device>(
        &self,
        device: &D,
        parts: &[(usize, usize, usize)],
        k: usize,
        blocks: &Blocks<'_>,
    ) -> (Vec<u32>, Vec<u32>) {
        let bytes = self.format.row_bytes(self.width);
        let pages = (self.length / self.ratio).div_ceil(ROWS_PER_PAGE).max(1);
        let mut cache = vec![0x33u8; 2 * pages * ROWS_PER_PAGE * bytes];
        let mut map = HostMap::default();
        let (mut q, mut weights) = (Vec::new(), Vec::new());
        for (i, (sequence, from, to)) in parts.iter().copied().enumerate() {
            let numbers: Vec<u32> =
                (0..pages).map(|p| (2 * (pages - 1 - p) + i % 2) as u32).collect();
            map.push(from, to - from, 8, 0, &numbers);
            for c in 0..to / self.ratio {
                let row = numbers[c / ROWS_PER_PAGE] as usize * ROWS_PER_PAGE + c % ROWS_PER_PAGE;
                cache[row * bytes..][..bytes]
                    .copy_from_slice(&self.keys[sequence][c * bytes..][..bytes]);
            }
            q.extend(rows_of(&self.q[sequence], self.heads * self.width, &(from..to)));
            weights.extend(rows_of(&self.weights[sequence], self.heads, &(from..to)));
        }
        let rows = map.sequence.len();
        let mut out = output(device, rows * k);
        let selection = Selection {
            q: &act(device, &q),
            weights: &buffer(device, &weights),
            heads: self.heads,
            map: &map.upload(device),
            keys: PagedRows {
                cache: &buffer(device, &cache),
                format: self.format,
                width: self.width,
                rows_per_page: ROWS_PER_PAGE,
                ratio: self.ratio,
            },
            k,
        };
        let mut published = Vec::new();
        match blocks {
            Blocks::All => device.select(&selection, Candidates::All, &mut out).expect("runs"),
            Blocks::Publish(shape) => {
                let mut to = output(device, rows * shape.blocks);
                device
                    .select(&selection, Candidates::Publish(*shape, &mut to), &mut out)
                    .expect("runs");
                published = read(device, &to);
            }
            Blocks::Within(shape, blocks) => {
                let from = buffer(device, blocks);
                device
                    .select(&selection, Candidates::Within(*shape, &from), &mut out)
                    .expect("runs");
            }
        }
        (read(device, &out), published)
    }

    fn visible(&self, p: usize) -> usize {
        (p + 1) / self.ratio
    }

    /// Scores of the visible rows in f64.
    fn scores(&self, sequence: usize, p: usize) -> Vec<f64> {
        let keys = decoded(&self.keys[sequence], self.width, self.format);
        let q = &self.q[sequence][p * self.heads * self.width..];
        keys.chunks_exact(self.width)
            .take(self.visible(p))
            .map(|key| {
                (0..self.heads)
                    .map(|h| {
                        let q = &q[h * self.width..][..self.width];
                        let dot = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
                        let weight = self.weights[sequence][p * self.heads + h];
                        dot.sum::<f64>().max(0.0) * f64::from(weight)
                    })
                    .sum()
            })
            .collect()
    }
}

/// The `k` best of scored indices, the lower index on ties, ascending, padded.
fn best(scores: impl Iterator<Item = (usize, f64)>, k: usize) -> Vec<u32> {
    let mut all: Vec<(usize, f64)> = scores.collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut rows: Vec<u32> = all.iter().take(k).map(|(i, _)| *i as u32).collect();
    rows.sort_unstable();
    rows.resize(k, ABSENT);
    rows
}

/// Small integers: scores are exact, and full of ties.
fn integers(random: &mut Random) -> f32 {
    random.below(5) as f32 - 2.0
}

fn normals(random: &mut Random) -> f32 {
    random.normal(1.0)
}

fn exact_choice_with_ties<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (ratio, k, block_size, blocks) in
        [(1, 5, 8, 4), (2, 16, 3, 2), (3, 100, 1, 7), (4, 1, 64, 1)]
    {
        let world = World::new((3, 6), ratio, RowFormat::F32, 300, integers);
        let shape = CandidateShape { block_size, blocks };
        let (rows, published) = world.run(device, &[(0, 0, 300)], k, &Blocks::Publish(shape));
        let (plain, _) = world.run(device, &[(0, 0, 300)], k, &Blocks::All);
        assert!(plain == rows, "publishing changes the choice");
        let (within, _) = world.run(device, &[(0, 0, 300)], k, &Blocks::Within(shape, &published));
        for p in 0..300 {
            let scores = world.scores(0, p);
            let want = best(scores.iter().copied().enumerate(), k);
            assert_eq!(&rows[p * k..][..k], want, "ratio {ratio}, position {p}");
            let mut maxima: Vec<f64> = scores
                .chunks(block_size)
                .map(|block| block.iter().copied().fold(f64::NEG_INFINITY, f64::max))
                .collect();
            if let Some(last) = maxima.last_mut() {
                *last = f64::INFINITY;
            }
            let want = best(maxima.iter().copied().enumerate(), blocks);
            let kept = &published[p * blocks..][..blocks];
            assert_eq!(kept, want, "blocks, ratio {ratio}, position {p}");
            let inside = |i: &usize| kept.contains(&((i / block_size) as u32));
            let want = best(scores.iter().copied().enumerate().filter(|(i, _)| inside(i)), k);
            assert_eq!(&within[p * k..][..k], want, "within, ratio {ratio}, position {p}");
        }
        all.extend(rows);
        all.extend(published);
        all.extend(within);
    }
    all
}

fn random_scores_up_to_rounding<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (shape, ratio) in [((8, 128), 1), ((5, 40), 2)] {
        let world = World::new(shape, ratio, RowFormat::Mxfp4x32, 500, normals);
        let k = 37;
        let (rows, _) = world.run(device, &[(1, 0, 500)], k, &Blocks::All);
        for p in [0, 1, 36, 37, 74, 200, 499] {
            let scores = world.scores(1, p);
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let least = sorted.get(k - 1).copied().unwrap_or(f64::NEG_INFINITY);
            let chosen: Vec<u32> =
                rows[p * k..][..k].iter().copied().filter(|c| *c != ABSENT).collect();
            assert_eq!(chosen.len(), k.min(scores.len()));
            assert!(chosen.is_sorted_by(|a, b| a < b));
            assert!(chosen.iter().all(|c| scores[*c as usize] >= least - 1e-4));
        }
        all.extend(rows);
    }
    all
}

fn long_contexts_are_shared_out<D: Device>(device: &D) -> Vec<u32> {
    let world = World::new((4, 32), 1, RowFormat::Mxfp4x32, 9000, normals);
    let shape = CandidateShape { block_size: 12, blocks: 50 };
    let (k, last) = (64, 9000);
    let (many, many_blocks) =
        world.run(device, &[(0, last - 40, last)], k, &Blocks::Publish(shape));
    let (one, blocks) = world.run(device, &[(0, last - 1, last)], k, &Blocks::Publish(shape));
    assert_eq!(one, many[39 * k..]);
    assert_eq!(blocks, many_blocks[39 * 50..]);
    let (within, _) = world.run(device, &[(0, last - 1, last)], k, &Blocks::Within(shape, &blocks));
    let (beside, _) =
        world.run(device, &[(0, last - 40, last)], k, &Blocks::Within(shape, &many_blocks));
    assert_eq!(within, beside[39 * k..]);
    [many, many_blocks, beside].concat()
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let world = World::new((3, 24), 2, RowFormat::Mxfp4x32, 600, integers);
    let shape = CandidateShape { block_size: 4, blocks: 6 };
    let k = 11;
    let run = |parts: &[(usize, usize, usize)]| -> Vec<u32> {
        let (rows, blocks) = world.run(device, parts, k, &Blocks::Publish(shape));
        let rows = rows.chunks_exact(k).zip(blocks.chunks_exact(6));
        rows.flat_map(|(rows, blocks)| [rows, blocks].concat()).collect()
    };
    let all = same_in_any_batch(512, |r| run(&[(0, 50 + r.start, 50 + r.end)]));
    let beside = run(&[(0, 50, 62), (1, 0, 33), (0, 562, 600)]);
    let width = k + 6;
    assert!(beside[..12 * width] == all[..12 * width]);
    assert!(beside[12 * width..][..33 * width] == run(&[(1, 0, 33)]));
    all
}

fn zeros_are_equal_and_nan_never_wins<D: Device>(device: &D) -> Vec<u32> {
    let mut world = World::new((1, 2), 1, RowFormat::F32, 6, |_| 1.0);
    // Scores by key: -0 * 1 and +0 * 1 are equal, then NaN, then negative ones.
    let keys = [[0.0, 0.0], [-1.0, 0.0], [f32::NAN, 0.0], [1.0, 0.0], [0.0, 0.0], [0.5, 0.0]];
    world.keys[0] = encoded(&keys.concat(), 2, RowFormat::F32);
    world.weights[0].fill(-1.0);
    // Row 3 scores -1, row 5 -0.5, row 2 NaN, the others -0.
    let run = |k| world.run(device, &[(0, 5, 6)], k, &Blocks::All).0;
    assert_eq!(run(1), [0]);
    assert_eq!(run(2), [0, 1]);
    assert_eq!(run(4), [0, 1, 4, 5]);
    assert_eq!(run(5), [0, 1, 3, 4, 5]);
    // Only when all are chosen.
    assert_eq!(run(7), [0, 1, 2, 3, 4, 5, ABSENT]);
    run(6)
}

#[test]
fn choice() {
    for_each_device!(exact_choice_with_ties);
    for_each_device!(zeros_are_equal_and_nan_never_wins);
    for_each_device!(random_scores_up_to_rounding);
}

#[test]
fn long() {
    for_each_device!(long_contexts_are_shared_out);
}

#[test]
fn rows() {
    for_each_device!(rows_do_not_see_each_other);
}
