//! Rotary position embedding.

mod common;

use common::*;
use deepinfer_device::Device;

fn angles(rows: usize, rope_dims: usize) -> Vec<f32> {
    let angle = |i: usize| (i as f64) * 0.37 - 20.0;
    (0..rows * rope_dims / 2).flat_map(|i| [angle(i).cos() as f32, angle(i).sin() as f32]).collect()
}

fn rotated<D: Device>(
    device: &D,
    x: &[f32],
    angles: &[f32],
    (heads, dim, dims): (usize, usize, usize),
    inverse: bool,
) -> Vec<f32> {
    let rows = x.len() / (heads * dim);
    let (mut x, angles) = (in_place(device, x), buffer(device, angles));
    device.rope(&mut x, &angles, heads, dim, dims, inverse, rows).expect("runs");
    read_act(device, &x)
}

fn matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (heads, dim, dims) in [(1, 8, 8), (3, 24, 6), (2, 64, 64), (4, 40, 0), (5, 512, 64)] {
        let rows = 3;
        let x = Random::new(dim as u64).normals(rows * heads * dim, 1.0);
        let angles = angles(rows, dims);
        for inverse in [false, true] {
            let got = rotated(device, &x, &angles, (heads, dim, dims), inverse);
            let mut want: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            for row in 0..rows {
                for head in 0..heads {
                    for pair in 0..dims / 2 {
                        let i = (row * heads + head) * dim + dim - dims + 2 * pair;
                        let angle = &angles[row * dims + 2 * pair..];
                        let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
                        let sin = if inverse { -sin } else { sin };
                        let (a, b) = (f64::from(x[i]), f64::from(x[i + 1]));
                        (want[i], want[i + 1]) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
            }
            close(&got, &want, tolerance::<D>());
            all.extend(bits(&got));
        }
    }
    all
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let (heads, dim, dims) = (2, 48, 16);
    let x = Random::new(2).normals(512 * heads * dim, 1.0);
    let angles = angles(512, dims);
    same_in_any_batch(512, |r| {
        let x = rows_of(&x, heads * dim, &r);
        bits(&rotated(device, x, rows_of(&angles, dims, &r), (heads, dim, dims), false))
    })
}

#[test]
fn rope() {
    for_each_device!(matches_the_formula);
    for_each_device!(rows_do_not_see_each_other);
}
