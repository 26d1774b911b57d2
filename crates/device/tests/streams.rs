//! Residual streams.

mod common;

use common::*;
use deepinfer_device::ops::{Mix, MixWeights, StreamShape};
use deepinfer_device::{Device, Format, StoredMatrix};

fn shape(streams: usize, hidden: usize) -> StreamShape {
    StreamShape { streams, hidden, iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 }
}

/// Weights of a site on the host.
struct Site {
    function: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
}

impl Site {
    fn random(shape: &StreamShape, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let outputs = (2 + shape.streams) * shape.streams;
        let width = shape.streams * shape.hidden;
        Self {
            function: random.normals(outputs * width, 1.0 / (width as f32).sqrt()),
            base: random.normals(outputs, 0.5),
            scale: vec![0.75, 1.25, 2.0],
        }
    }

    fn upload<D: Device>(&self, device: &D) -> MixWeights<D> {
        let outputs = self.base.len();
        let bytes: Vec<u8> = self.function.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (data, none) = (bytes.into(), Vec::new().into());
        let columns = self.function.len() / outputs;
        let stored = StoredMatrix::new(Format::F32, outputs, columns, data, none);
        MixWeights {
            function: device.matrix(stored).expect("plain weights work everywhere"),
            base: buffer(device, &self.base),
            scale: buffer(device, &self.scale),
        }
    }
}

/// `pre`, `post` and `comb` of all rows.
fn mixed<D: Device>(
    device: &D,
    streams: &[f32],
    site: &MixWeights<D>,
    shape: &StreamShape,
) -> [Vec<f32>; 3] {
    let s = shape.streams;
    let rows = streams.len() / (s * shape.hidden);
    let mut mix = Mix {
        pre: output(device, rows * s),
        post: output(device, rows * s),
        comb: output(device, rows * s * s),
    };
    device.streams_mix(&act(device, streams), site, shape, rows, &mut mix).expect("runs");
    [read(device, &mix.pre), read(device, &mix.post), read(device, &mix.comb)]
}

/// The formula in f64.
fn mix_reference(x: &[f32], site: &Site, shape: &StreamShape) -> [Vec<f64>; 3] {
    let s = shape.streams;
    let wide = |x: &f32| f64::from(*x);
    let mean = x.iter().map(|x| wide(x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(shape.norm_eps)).sqrt();
    let eps = f64::from(shape.hc_eps);
    let product = |i: usize| {
        let row = &site.function[i * x.len()..][..x.len()];
        row.iter().zip(x).map(|(w, x)| wide(w) * wide(x)).sum::<f64>() * factor
    };
    let affine = |i: usize, k: usize| product(i) * wide(&site.scale[k]) + wide(&site.base[i]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let pre = (0..s).map(|i| sigmoid(affine(i, 0)) + eps).collect();
    let post = (0..s).map(|i| 2.0 * sigmoid(affine(s + i, 1))).collect();
    let mut comb: Vec<f64> = (0..s * s).map(|i| affine(2 * s + i, 2)).collect();
    for row in comb.chunks_exact_mut(s) {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter_mut().for_each(|x| *x = x.exp() / sum + eps);
    }
    let columns = |comb: &mut Vec<f64>| {
        for j in 0..s {
            let sum: f64 = (0..s).map(|i| comb[i * s + j]).sum::<f64>() + eps;
            (0..s).for_each(|i| comb[i * s + j] /= sum);
        }
    };
    columns(&mut comb);
    for _ in 1..shape.iterations {
        for row in comb.chunks_exact_mut(s) {
            let sum = row.iter().sum::<f64>() + eps;
            row.iter_mut().for_each(|x| *x /= sum);
        }
        columns(&mut comb);
    }
    [pre, post, comb]
}

fn mix_matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (s, hidden) in [(1, 20), (2, 33), (4, 128), (4, 192), (8, 64)] {
        let shape = shape(s, hidden);
        let site = Site::random(&shape, 1);
        let x = Random::new(hidden as u64).normals(3 * s * hidden, 3.0);
        let got = mixed(device, &x, &site.upload(device), &shape);
        for (row, x) in x.chunks_exact(s * hidden).enumerate() {
            let want = mix_reference(x, &site, &shape);
            for (got, want) in got.iter().zip(&want) {
                close(&got[row * want.len()..][..want.len()], want, 5e-6);
            }
        }
        for comb in got[2].chunks_exact(s * s) {
            let columns = (0..s).map(|j| (0..s).map(|i| comb[i * s + j]).sum::<f32>());
            assert!(columns.into_iter().all(|sum| (sum - 1.0).abs() < 1e-4));
        }
        all.extend(got.iter().flat_map(|x| bits(x)));
    }
    all
}

/// Input streams, output of a sublayer, `pre`, `post` and `comb` of `rows` rows.
struct Case {
    shape: StreamShape,
    streams: Vec<f32>,
    y: Vec<f32>,
    pre: Vec<f32>,
    post: Vec<f32>,
    comb: Vec<f32>,
}

impl Case {
    fn random(s: usize, hidden: usize, rows: usize) -> Self {
        let mut random = Random::new((s * hidden) as u64);
        Self {
            shape: shape(s, hidden),
            streams: random.normals(rows * s * hidden, 2.0),
            y: random.normals(rows * hidden, 1.0),
            pre: random.normals(rows * s, 0.5),
            post: random.normals(rows * s, 0.5),
            comb: random.normals(rows * s * s, 0.5),
        }
    }

    fn rows(&self) -> usize {
        self.y.len() / self.shape.hidden
    }

    fn updated<D: Device>(&self, device: &D, r: std::ops::Range<usize>) -> Vec<f32> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let mut streams = in_place(device, rows_of(&self.streams, s * hidden, &r));
        let mix = Mix {
            pre: buffer(device, rows_of(&self.pre, s, &r)),
            post: buffer(device, rows_of(&self.post, s, &r)),
            comb: buffer(device, rows_of(&self.comb, s * s, &r)),
        };
        let y = act(device, rows_of(&self.y, hidden, &r));
        device.streams_update(&mut streams, &y, &mix, &self.shape, r.len()).expect("runs");
        read_act(device, &streams)
    }

    fn collapsed<D: Device>(&self, device: &D, r: std::ops::Range<usize>) -> Vec<f32> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let streams = act(device, rows_of(&self.streams, s * hidden, &r));
        let pre = buffer(device, rows_of(&self.pre, s, &r));
        let mut out = output_act(device, r.len() * hidden);
        device.streams_collapse(&streams, &pre, &self.shape, r.len(), &mut out).expect("runs");
        read_act(device, &out)
    }
}

fn sums_match_the_formulas<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (s, hidden) in [(1, 7), (3, 65), (4, 128), (4, 192)] {
        let case = Case::random(s, hidden, 3);
        let stream =
            |row: usize, i: usize, c: usize| f64::from(case.streams[(row * s + i) * hidden + c]);
        let (mut updated, mut collapsed) = (Vec::new(), Vec::new());
        for row in 0..case.rows() {
            for j in 0..s {
                for c in 0..hidden {
                    let y = f64::from(case.y[row * hidden + c]);
                    let comb = |i| f64::from(case.comb[(row * s + i) * s + j]);
                    let mixed: f64 = (0..s).map(|i| comb(i) * stream(row, i, c)).sum();
                    updated.push(f64::from(case.post[row * s + j]) * y + mixed);
                }
            }
            for c in 0..hidden {
                let pre = |i| f64::from(case.pre[row * s + i]);
                collapsed.push((0..s).map(|i| pre(i) * stream(row, i, c)).sum());
            }
        }
        let got = case.updated(device, 0..case.rows());
        close(&got, &updated, 2.0 * tolerance::<D>());
        all.extend(bits(&got));
        let got = case.collapsed(device, 0..case.rows());
        close(&got, &collapsed, 2.0 * tolerance::<D>());
        all.extend(bits(&got));
    }
    all
}

fn start_and_mean<D: Device>(device: &D) -> Vec<u32> {
    let (rows, s, hidden) = (3, 4, 10);
    let shape = shape(s, hidden);
    let x = Random::new(8).normals(rows * hidden, 1.0);
    let mut streams = output_act(device, rows * s * hidden);
    device.streams_start(&act(device, &x), &shape, rows, &mut streams).expect("runs");
    let host = read_act(device, &streams);
    for (i, stream) in host.chunks_exact(hidden).enumerate() {
        assert_eq!(stream, &x[i / s * hidden..][..hidden]);
    }
    // The mean goes to its columns only.
    let streams = Random::new(9).normals(rows * s * hidden, 1.0);
    let (width, column) = (3 * hidden, hidden);
    let mut out = output_act(device, rows * width);
    device
        .streams_mean(&act(device, &streams), &shape, rows, &mut out, width, column)
        .expect("runs");
    let got = read_act(device, &out);
    for (row, got) in got.chunks_exact(width).enumerate() {
        let want: Vec<f64> = (0..hidden)
            .map(|c| {
                let stream = |i| f64::from(streams[(row * s + i) * hidden + c]);
                (0..s).map(stream).sum::<f64>() / s as f64
            })
            .collect();
        close(&got[column..column + hidden], &want, tolerance::<D>());
        let others = got[..column].iter().chain(&got[column + hidden..]);
        assert!(others.into_iter().all(|x| *x == f32::POISON));
    }
    bits(&got)
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let case = Case::random(4, 40, 512);
    let site = Site::random(&case.shape, 2).upload(device);
    let mut all = same_in_any_batch(512, |r| bits(&case.updated(device, r)));
    all.extend(same_in_any_batch(512, |r| bits(&case.collapsed(device, r))));
    all.extend(same_in_any_batch(512, |r| {
        let streams = rows_of(&case.streams, 160, &r);
        let [pre, post, comb] = mixed(device, streams, &site, &case.shape);
        let rows = pre.chunks_exact(4).zip(post.chunks_exact(4)).zip(comb.chunks_exact(16));
        rows.flat_map(|((pre, post), comb)| bits(&[pre, post, comb].concat())).collect()
    }));
    all
}

#[test]
fn mix() {
    for_each_device!(mix_matches_the_formula);
}

#[test]
fn sums() {
    for_each_device!(sums_match_the_formulas);
    for_each_device!(start_and_mean);
}

#[test]
fn rows() {
    for_each_device!(rows_do_not_see_each_other);
}
