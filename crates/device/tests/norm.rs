//! Root mean square normalization.

mod common;

use common::*;
use deepinfer_device::Device;

fn norm<D: Device>(device: &D, x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let rows = x.len() / width;
    let mut out = output_act(device, x.len());
    let (x, weight) = (act(device, x), buffer(device, weight));
    device.rms_norm(&x, &weight, eps, width, rows, &mut out).expect("runs");
    read_act(device, &out)
}

fn matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for width in [1, 15, 16, 33, 192, 1280] {
        let mut random = Random::new(width as u64);
        let (x, weight) = (random.normals(3 * width, 2.0), random.normals(width, 1.0));
        let got = norm(device, &x, &weight, 1e-20);
        let want: Vec<f64> = x
            .chunks_exact(width)
            .flat_map(|x| {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + 1e-20).sqrt();
                x.iter().zip(&weight).map(move |(x, w)| f64::from(*x) * factor * f64::from(*w))
            })
            .collect();
        close(&got, &want, tolerance::<D>());
        all.extend(bits(&got));
    }
    // The tiny epsilon is what keeps a row of zeros finite.
    assert!(norm(device, &[0.0; 32], &[1.0; 32], 1e-20).iter().all(|x| *x == 0.0));
    all
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let width = 200;
    let mut random = Random::new(1);
    let (x, weight) = (random.normals(512 * width, 1.0), random.normals(width, 1.0));
    same_in_any_batch(512, |r| bits(&norm(device, rows_of(&x, width, &r), &weight, 1e-6)))
}

#[test]
fn rms_norm() {
    for_each_device!(matches_the_formula);
    for_each_device!(rows_do_not_see_each_other);
}
