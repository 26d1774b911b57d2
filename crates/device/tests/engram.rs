//! The n-gram memory.

mod common;

use common::*;
use deepinfer_device::formats::encode_matrix;
use deepinfer_device::ops::StreamShape;
use deepinfer_device::{Device, Format, StoredMatrix};

fn shape(streams: usize, hidden: usize) -> StreamShape {
    StreamShape { streams, hidden, iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 }
}

/// Streams, keys and values, and norm weights of some rows.
struct Case {
    shape: StreamShape,
    streams: Vec<f32>,
    kv: Vec<f32>,
    weight: Vec<f32>,
    image: Vec<u8>,
}

impl Case {
    fn random(streams: usize, hidden: usize, rows: usize) -> Self {
        let mut random = Random::new((streams + hidden) as u64);
        Self {
            shape: shape(streams, hidden),
            streams: random.normals(rows * streams * hidden, 2.0),
            kv: random.normals(rows * (streams + 1) * hidden, 1.0),
            weight: random.normals(streams * hidden, 1.0),
            image: (0..rows).map(|row| u8::from(row % 5 == 3)).collect(),
        }
    }

    fn run<D: Device>(&self, device: &D, r: std::ops::Range<usize>) -> Vec<f32> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let mut streams = in_place(device, rows_of(&self.streams, s * hidden, &r));
        let kv = act(device, rows_of(&self.kv, (s + 1) * hidden, &r));
        let (weight, image) =
            (buffer(device, &self.weight), buffer(device, &self.image[r.clone()]));
        device
            .engram_update(&mut streams, &kv, &weight, &image, &self.shape, r.len())
            .expect("runs");
        read_act(device, &streams)
    }

    fn reference(&self) -> Vec<f64> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let mut out = Vec::new();
        for (row, image) in self.image.iter().enumerate() {
            let kv = wide(&self.kv[row * (s + 1) * hidden..][..(s + 1) * hidden]);
            for i in 0..s {
                let stream = wide(&self.streams[(row * s + i) * hidden..][..hidden]);
                let (key, value) = (&kv[i * hidden..][..hidden], &kv[s * hidden..]);
                let weight = wide(&self.weight[i * hidden..][..hidden]);
                let dot: f64 = (0..hidden).map(|c| stream[c] * weight[c] * key[c]).sum();
                let dot = dot / rms(&stream) / rms(key) / (hidden as f64).sqrt();
                let gate = 1.0 / (1.0 + (-dot.signum() * dot.abs().max(1e-6).sqrt()).exp());
                let gate = if *image == 1 { 0.0 } else { gate };
                out.extend((0..hidden).map(|c| stream[c] + gate * value[c]));
            }
        }
        out
    }
}

fn update_matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (s, hidden) in [(1, 9), (2, 40), (4, 192)] {
        let case = Case::random(s, hidden, 7);
        let got = case.run(device, 0..7);
        close(&got, &case.reference(), 2.0 * tolerance::<D>());
        let image = 3 * s * hidden..4 * s * hidden;
        assert_eq!(got[image.clone()], case.streams[image], "image rows are left alone");
        all.extend(bits(&got));
    }
    all
}

fn an_exact_zero_gates_by_half<D: Device>(device: &D) -> Vec<u32> {
    let mut case = Case::random(1, 16, 1);
    case.kv[..16].fill(0.0);
    let got = case.run(device, 0..1);
    let want: Vec<f64> =
        (0..16).map(|c| f64::from(case.streams[c]) + 0.5 * f64::from(case.kv[16 + c])).collect();
    close(&got, &want, tolerance::<D>());
    bits(&got)
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let case = Case::random(3, 50, 512);
    same_in_any_batch(512, |r| bits(&case.run(device, r)))
}

fn gather_reads_rows<D: Device>(device: &D) -> Vec<u32> {
    let (rows, width) = (1000, 96);
    let values = Random::new(3).normals(rows * width, 1.0);
    let (data, scale) = encode_matrix(Format::Fp8Row32, &values, rows, width);
    let stored = StoredMatrix::new(Format::Fp8Row32, rows, width, data.into(), scale.into());
    let table = device.matrix(stored.clone()).expect("tables work everywhere");
    let mut random = Random::new(4);
    // Many repeated, in no order.
    let ids: Vec<u64> = (0..2048).map(|_| (random.below(300) * 3 + 99) as u64).collect();
    device.engram_prefetch(&table, &ids);
    device.engram_prefetch(&table, &[]);
    let run = |r: std::ops::Range<usize>| {
        let ids = buffer(device, &ids[4 * r.start..4 * r.end]);
        let mut out = output_act(device, 4 * r.len() * width);
        device.engram_gather(&table, &ids, 4 * r.len(), &mut out).expect("runs");
        bits(&read_act(device, &out))
    };
    let all = same_in_any_batch(512, run);
    let mut want = vec![0.0; width];
    for (id, got) in ids.iter().zip(all.chunks_exact(width)) {
        deepinfer_device::formats::dequantize_matrix_row(&stored, *id as usize, &mut want);
        assert_eq!(got, bits(&want));
    }
    all
}

#[test]
fn update() {
    for_each_device!(update_matches_the_formula);
    for_each_device!(an_exact_zero_gates_by_half);
    for_each_device!(rows_do_not_see_each_other);
}

#[test]
fn gather() {
    for_each_device!(gather_reads_rows);
}
