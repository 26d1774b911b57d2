//! Choice of experts.

mod common;

use common::*;
use deepinfer_device::Device;
use deepinfer_device::ops::Routing;

struct Router {
    experts: usize,
    k: usize,
    bias: Vec<f32>,
    bias_image: Option<Vec<f32>>,
}

impl Router {
    fn run<D: Device>(&self, device: &D, scores: &[f32], image: &[u8]) -> (Vec<u32>, Vec<f32>) {
        let rows = image.len();
        let (mut ids, mut weights) = (output(device, rows * self.k), output(device, rows * self.k));
        let bias_image = self.bias_image.as_ref().map(|bias| buffer(device, bias));
        let routing = Routing {
            scores: &buffer(device, scores),
            experts: self.experts,
            k: self.k,
            bias: &buffer(device, &self.bias),
            bias_image: bias_image.as_ref(),
            image: &buffer(device, image),
            scale: 1.5,
        };
        device.route(&routing, rows, &mut ids, &mut weights).expect("runs");
        (read(device, &ids), read(device, &weights))
    }
}

fn affinity(score: f32) -> f64 {
    f64::from(score).exp().ln_1p().sqrt()
}

fn matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random::new(4);
    let mut all = Vec::new();
    for (experts, k) in [(5, 5), (16, 4), (37, 3), (384, 6)] {
        let bias = random.normals(experts, 0.3);
        let bias_image = Some(random.normals(experts, 0.3));
        let router = Router { experts, k, bias, bias_image };
        let scores = random.normals(8 * experts, 3.0);
        let image = [0, 1, 0, 0, 1, 1, 0, 0];
        let (ids, weights) = router.run(device, &scores, &image);
        for (row, scores) in scores.chunks_exact(experts).enumerate() {
            let bias = if image[row] == 1 {
                router.bias_image.as_deref().expect("set above")
            } else {
                &router.bias[..]
            };
            let value = |id: usize| affinity(scores[id]) + f64::from(bias[id]);
            let ids = &ids[row * k..][..k];
            // In order, none better left out; close values may stand either way.
            let chosen: Vec<f64> = ids.iter().map(|id| value(*id as usize)).collect();
            assert!(chosen.windows(2).all(|w| w[0] >= w[1] - 1e-6), "{chosen:?}");
            let rest = (0..experts).filter(|id| !ids.contains(&(*id as u32))).map(value);
            assert!(rest.fold(f64::MIN, f64::max) <= chosen[k - 1] + 1e-6);
            let sum: f64 = ids.iter().map(|id| affinity(scores[*id as usize])).sum();
            let want: Vec<f64> =
                ids.iter().map(|id| affinity(scores[*id as usize]) / sum * 1.5).collect();
            close(&weights[row * k..][..k], &want, 2e-6);
        }
        all.extend(ids);
        all.extend(bits(&weights));
    }
    all
}

fn ties_and_extremes<D: Device>(device: &D) -> Vec<u32> {
    let router = Router { experts: 6, k: 3, bias: vec![0.0; 6], bias_image: None };
    let run = |scores: [f32; 6]| router.run(device, &scores, &[1]);
    // The lower id wins.
    assert_eq!(run([1.0; 6]).0, [0, 1, 2]);
    assert_eq!(run([0.0, 2.0, 1.0, 2.0, 1.0, 1.0]).0, [1, 3, 2]);
    // The bias chooses but does not weigh.
    let biased = Router { bias: vec![0.0, 0.0, 0.0, 9.0, 9.0, 9.0], ..router };
    let (ids, weights) = biased.run(device, &[5.0, 5.0, 5.0, 1.0, 1.0, 1.0], &[0]);
    assert_eq!(ids, [3, 4, 5]);
    close(&weights, &[0.5; 3], 1e-6);
    // Scores far below zero keep their ratio; NaN is never preferred to a number.
    let (ids, weights) = biased.run(device, &[0.0, 0.0, 0.0, -40.0, -42.0, -44.0], &[0]);
    assert_eq!(ids, [3, 4, 5]);
    let e = (-1f64).exp();
    let sum = 1.0 + e + e * e;
    close(&weights, &[1.5 / sum, 1.5 * e / sum, 1.5 * e * e / sum], 1e-5);
    let (ids, _) = biased.run(device, &[0.0, 0.0, 0.0, f32::NAN, -82.0, -84.0], &[0]);
    assert_eq!(ids, [4, 5, 0]);
    ids
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random::new(5);
    let experts = 40;
    let router = Router { experts, k: 6, bias: random.normals(experts, 0.2), bias_image: None };
    // Few distinct values: many ties.
    let scores: Vec<f32> = (0..512 * experts).map(|_| random.below(5) as f32 - 2.0).collect();
    same_in_any_batch(512, |r| {
        let (ids, weights) = router.run(device, rows_of(&scores, experts, &r), &vec![0; r.len()]);
        ids.chunks_exact(6)
            .zip(weights.chunks_exact(6))
            .flat_map(|(ids, weights)| [ids.to_vec(), bits(weights)].concat())
            .collect()
    })
}

#[test]
fn route() {
    for_each_device!(matches_the_formula);
    for_each_device!(ties_and_extremes);
    for_each_device!(rows_do_not_see_each_other);
}
