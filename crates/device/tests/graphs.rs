//! Recorded series of operations.

mod common;

use common::*;
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// A series under two keys, again and again with other contents: what is launched as a whole gives
/// what its operations give.
fn repeats_with_new_contents<D: Device>(device: &D) -> Vec<u32> {
    let (width, eps) = (96, 1e-6);
    let mut random = Random::new(3);
    let weight = buffer(device, &random.normals(width, 1.0));
    let (mut x, mut rounded) = (output_act(device, 5 * width), output_act(device, 5 * width));
    let mut recorded = output_act(device, 5 * width);
    let mut plain = output_act(device, 5 * width);
    let mut graphs = device.graphs();
    let mut all = Vec::new();
    for round in 0..12 {
        let rows = [2, 5][round % 2];
        device.upload_act(&random.normals(rows * width, 2.0), &mut x, 0).expect("uploads");
        let mut series = |out: &mut D::Buffer<D::Act>| -> Result<()> {
            device.copy(&x, 0, &mut rounded, 0, rows * width)?;
            device.rms_norm(&rounded, &weight, eps, width, rows, out)?;
            device.rms_norm(out, &weight, eps, width, rows, &mut rounded)?;
            device.copy(&rounded, 0, out, 0, rows * width)
        };
        series(&mut plain).expect("runs");
        let key = [7, rows as u32, 0, 0];
        match &mut graphs {
            Some(graphs) => device.replay(graphs, key, || series(&mut recorded)).expect("runs"),
            None => series(&mut recorded).expect("runs"),
        }
        let (got, want) = (read_act(device, &recorded), read_act(device, &plain));
        assert_eq!(bits(&got), bits(&want), "round {round}");
        all.extend(bits(&got));
    }
    all
}

#[test]
fn recorded_series() {
    for_each_device!(repeats_with_new_contents);
}
