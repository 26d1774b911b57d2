//! The mixture of experts: the same bits for every row count, thread count and instruction set, and
//! equal to its formula written out.

mod common;

use common::*;
use deepinfer_device::cpu::experts::{Experts, experts_forward};
use deepinfer_device::cpu::linear::{Weight, linear};
use deepinfer_device::cpu::{Cpu, Isa, math};
use deepinfer_device::formats::encode_matrix;
use deepinfer_device::{Device, Expert, Format, StoredMatrix};
use proptest::prelude::*;

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() % 2000) as f32 / 1000.0 - 1.0).collect()
    }

    fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> StoredMatrix {
        let x = self.values(rows * cols);
        let (data, scale) = encode_matrix(format, &x, rows, cols);
        StoredMatrix::new(format, rows, cols, data.into(), scale.into())
    }

    fn expert(&mut self, format: Format, hidden: usize, inner: usize) -> Expert<StoredMatrix> {
        Expert {
            w1: self.matrix(format, inner, hidden),
            w3: self.matrix(format, inner, hidden),
            w2: self.matrix(format, hidden, inner),
        }
    }

    /// `k` distinct ids below `experts` for each row, and a weight for each.
    fn routes(&mut self, rows: usize, k: usize, experts: usize) -> (Vec<u32>, Vec<f32>) {
        let mut ids = Vec::new();
        for _ in 0..rows {
            let mut left: Vec<u32> = (0..experts as u32).collect();
            ids.extend((0..k).map(|_| left.swap_remove(self.next() as usize % left.len())));
        }
        let weights = ids.iter().map(|_| (self.next() % 1000) as f32 / 1000.0).collect();
        (ids, weights)
    }
}

/// A layer's experts and what is needed to check them.
struct Layer {
    stored: Vec<Expert<StoredMatrix>>,
    experts: Experts,
    shared: Expert<Weight>,
    hidden: usize,
    k: usize,
    limit: f32,
}

fn weights(e: &Expert<StoredMatrix>) -> Expert<Weight> {
    let weight = |m: &StoredMatrix| Weight::new(m.clone()).expect("a weight");
    Expert { w1: weight(&e.w1), w3: weight(&e.w3), w2: weight(&e.w2) }
}

impl Layer {
    fn new(random: &mut Numbers, hidden: usize, inner: usize, experts: usize, k: usize) -> Self {
        let stored: Vec<_> =
            (0..experts).map(|_| random.expert(Format::Fp4Row32, hidden, inner)).collect();
        let shared = weights(&random.expert(Format::Fp8Block32, hidden, inner));
        let experts = Experts::new(stored.clone()).expect("experts");
        Self { stored, experts, shared, hidden, k, limit: 2.0 }
    }

    fn run(&self, cpu: &Cpu, x: &[f32], ids: &[u32], weights: &[f32], rows: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * self.hidden];
        let (experts, shared) = (&self.experts, &self.shared);
        experts_forward(cpu, x, experts, shared, ids, weights, self.k, self.limit, rows, &mut out);
        out
    }

    /// The formula, one row at a time.
    fn formula(&self, x: &[f32], ids: &[u32], scores: &[f32], rows: usize) -> Vec<f32> {
        let cpu = Cpu::with_isa(Some(1), Isa::Scalar).expect("a pool");
        let expert = |e: &Expert<Weight>, x: &[f32]| {
            let (mut g, mut u) = (vec![0.0; e.w1.rows()], vec![0.0; e.w1.rows()]);
            linear(&cpu, x, &e.w1, 1, &mut g);
            linear(&cpu, x, &e.w3, 1, &mut u);
            let limit = self.limit;
            let h = g.iter().zip(&u);
            let h: Vec<f32> =
                h.map(|(g, u)| math::silu(g.min(limit)) * u.clamp(-limit, limit)).collect();
            let mut y = vec![0.0; self.hidden];
            linear(&cpu, &h, &e.w2, 1, &mut y);
            y
        };
        let mut out = Vec::new();
        for row in 0..rows {
            let x = &x[row * self.hidden..][..self.hidden];
            let mut sum = vec![0.0f32; self.hidden];
            for slot in row * self.k..(row + 1) * self.k {
                let y = expert(&weights(&self.stored[ids[slot] as usize]), x);
                sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += scores[slot] * y);
            }
            let y = expert(&self.shared, x);
            sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += y);
            out.extend(sum);
        }
        out
    }
}

fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits(), "{what}: [{i}] is {g:e}, not {w:e}");
    }
}

#[test]
fn bits_do_not_depend_on_rows_threads_or_instructions() {
    let mut random = Numbers(7);
    for (hidden, inner, experts, k) in [(192, 96, 8, 3), (72, 40, 5, 5)] {
        let layer = Layer::new(&mut random, hidden, inner, experts, k);
        let x = random.values(512 * hidden);
        let (ids, scores) = random.routes(512, k, experts);
        let want = layer.formula(&x, &ids, &scores, 512);
        for isa in Isa::available() {
            for threads in [1, 2] {
                let cpu = Cpu::with_isa(Some(threads), isa).expect("a pool");
                for rows in ROWS {
                    let what = format!("hidden {hidden}, {rows} rows, {isa:?}, {threads} threads");
                    let got = layer.run(&cpu, &x, &ids, &scores, rows);
                    assert_bits(&what, &got, &want[..rows * hidden]);
                }
            }
        }
    }
}

#[test]
fn a_row_keeps_its_bits_among_others() {
    let mut random = Numbers(8);
    let layer = Layer::new(&mut random, 64, 32, 6, 2);
    let x = random.values(40 * 64);
    let (ids, scores) = random.routes(40, 2, 6);
    let cpu = Cpu::new(Some(2)).expect("a pool");
    let all = layer.run(&cpu, &x, &ids, &scores, 40);
    for i in 0..40 {
        let alone = layer.run(&cpu, &x[i * 64..], &ids[i * 2..], &scores[i * 2..], 1);
        assert_bits("alone", &alone, &all[i * 64..][..64]);
    }
}

#[test]
fn experts_must_fit_together() {
    let mut random = Numbers(9);
    let good = random.expert(Format::Fp4Row32, 64, 32);
    let mut bad = random.expert(Format::Fp4Row32, 64, 32);
    bad.w2 = random.matrix(Format::Fp4Row32, 64, 96);
    let message = Experts::new(vec![good, bad]).expect_err("w2 is too wide").to_string();
    assert!(message.contains("w2 of an expert must be 64 x 32"), "{message}");
}

#[test]
fn nan_is_not_clamped_away() {
    let mut random = Numbers(10);
    let layer = Layer::new(&mut random, 64, 32, 4, 1);
    let mut x = random.values(2 * 64);
    x[70] = f32::NAN;
    let cpu = Cpu::new(Some(1)).expect("a pool");
    let out = layer.run(&cpu, &x, &[0, 1], &[1.0, 1.0], 2);
    assert!(out[..64].iter().all(|v| v.is_finite()));
    assert!(out[64..].iter().all(|v| v.is_nan()));
}

/// A layer for any device.
struct Anywhere {
    routed: Vec<Expert<StoredMatrix>>,
    shared: Expert<StoredMatrix>,
    k: usize,
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

const LIMIT: f32 = 0.75;

impl Anywhere {
    fn new(
        (hidden, inner): (usize, usize),
        (experts, k): (usize, usize),
        (routed, shared): (Format, Format),
        rows: usize,
    ) -> Self {
        let mut numbers = Numbers((hidden + experts) as u64);
        let (ids, weights) = numbers.routes(rows, k, experts);
        // Exact in bf16, so that every device gets the same input.
        let x = Random::new(hidden as u64).normals(rows * hidden, 1.0);
        let small = |mut e: Expert<StoredMatrix>| {
            // Products of about the size of their input.
            for m in [&mut e.w1, &mut e.w3, &mut e.w2] {
                if m.scale.is_empty() {
                    continue;
                }
                let scales: Vec<u8> = m.scale.iter().map(|byte| byte - 3).collect();
                m.scale = scales.into();
            }
            e
        };
        Self {
            routed: (0..experts).map(|_| small(numbers.expert(routed, hidden, inner))).collect(),
            shared: small(numbers.expert(shared, hidden, inner)),
            k,
            x,
            ids,
            weights,
        }
    }

    fn run<D: Device>(&self, device: &D, r: std::ops::Range<usize>) -> Vec<f32> {
        let hidden = self.shared.w1.cols;
        let experts = device.experts(self.routed.clone()).expect("experts");
        let place = |m: &StoredMatrix| device.matrix(m.clone()).expect("a matrix");
        let Expert { w1, w3, w2 } = &self.shared;
        let shared = Expert { w1: place(w1), w3: place(w3), w2: place(w2) };
        let x = act(device, rows_of(&self.x, hidden, &r));
        let ids = buffer(device, rows_of(&self.ids, self.k, &r));
        let weights = buffer(device, rows_of(&self.weights, self.k, &r));
        let mut out = output_act(device, r.len() * hidden);
        let (k, rows) = (self.k, r.len());
        device
            .experts_forward(&x, &experts, &shared, &ids, &weights, k, LIMIT, rows, &mut out)
            .expect("runs");
        read_act(device, &out)
    }

    /// The formula in f64.
    fn reference(&self, row: usize) -> Vec<f64> {
        let hidden = self.shared.w1.cols;
        let product = |w: &StoredMatrix, x: &[f64]| -> Vec<f64> {
            let mut values = vec![0.0; w.cols];
            let dot = |r: usize| {
                deepinfer_device::formats::dequantize_matrix_row(w, r, &mut values);
                values.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
            };
            (0..w.rows).map(dot).collect()
        };
        let x: Vec<f64> = self.x[row * hidden..][..hidden].iter().map(|x| f64::from(*x)).collect();
        let limit = f64::from(LIMIT);
        let expert = |e: &Expert<StoredMatrix>| -> Vec<f64> {
            let gate = product(&e.w1, &x).into_iter().map(|g| g.min(limit));
            let up = product(&e.w3, &x).into_iter().map(|u| u.clamp(-limit, limit));
            let h: Vec<f64> = gate.zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            product(&e.w2, &h)
        };
        let mut sum = expert(&self.shared);
        for slot in row * self.k..(row + 1) * self.k {
            let y = expert(&self.routed[self.ids[slot] as usize]);
            let weight = f64::from(self.weights[slot]);
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += weight * y);
        }
        sum
    }
}

const RELEASED: (Format, Format) = (Format::Fp4Row32, Format::Fp8Block32);

fn every_device_follows_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (sizes, choice, formats, rows) in [
        ((192, 96), (8, 3), RELEASED, 130),
        ((32, 32), (37, 5), RELEASED, 9),
        ((160, 224), (3, 1), (Format::Bf16, Format::Fp8Block32), 70),
        ((64, 128), (2, 2), (Format::Fp8Block32, Format::Bf16), 70),
    ] {
        let layer = Anywhere::new(sizes, choice, formats, rows);
        let got = layer.run(device, 0..rows);
        for row in [0, 1, rows / 2, rows - 1] {
            let got = &got[row * sizes.0..][..sizes.0];
            close(got, &layer.reference(row), 4.0 * tolerance::<D>());
        }
        all.extend(bits(&got));
    }
    all
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let layer = Anywhere::new((96, 160), (6, 2), RELEASED, 512);
    same_in_any_batch(512, |r| bits(&layer.run(device, r)))
}

#[test]
fn any_device() {
    for_each_device!(every_device_follows_the_formula);
    for_each_device!(rows_do_not_see_each_other);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn any_shape_equals_the_formula(
        hidden in 1usize..140,
        inner in 1usize..100,
        experts in 1usize..9,
        k in 0usize..9,
        rows in 1usize..12,
        seed in any::<u64>(),
    ) {
        let k = k.min(experts);
        let mut random = Numbers(seed);
        let layer = Layer::new(&mut random, hidden, inner, experts, k);
        let x = random.values(rows * hidden);
        let (ids, scores) = random.routes(rows, k, experts);
        let want = layer.formula(&x, &ids, &scores, rows);
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(1), isa).expect("a pool");
            let got = layer.run(&cpu, &x, &ids, &scores, rows);
            assert_bits(&format!("{isa:?}"), &got, &want);
        }
    }
}
