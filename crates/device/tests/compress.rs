//! Pooling of groups, and the rows that wait for their group to fill.

mod common;

use common::*;
use deepinfer_device::Device;

const PENDING: u32 = 1 << 31;

fn pooled<D: Device>(
    device: &D,
    values: &[f32],
    scores: &[f32],
    pending: &[f32],
    members: &[u32],
    ratio: usize,
    width: usize,
) -> Vec<f32> {
    let groups = members.len() / ratio;
    let mut out = output_act(device, groups * width);
    let (values, scores) = (act(device, values), act(device, scores));
    let (pending, members) = (buffer(device, pending), buffer(device, members));
    device
        .pool_groups(&values, &scores, &pending, &members, ratio, width, groups, &mut out)
        .expect("runs");
    read_act(device, &out)
}

fn matches_the_formula<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for (ratio, width) in [(1, 5), (2, 16), (2, 128), (3, 33), (4, 192)] {
        let mut random = Random::new(ratio as u64);
        let groups = 5;
        let rows = groups * ratio;
        let values = random.normals(rows * width, 1.0);
        let mut scores = random.normals(rows * width, 4.0);
        scores[0] = 1e30;
        let members: Vec<u32> = (0..rows as u32).rev().collect();
        let got = pooled(device, &values, &scores, &[], &members, ratio, width);
        let mut want = Vec::new();
        for group in members.chunks_exact(ratio) {
            for c in 0..width {
                let at = |m: &u32| *m as usize * width + c;
                let top = group.iter().map(|m| scores[at(m)]).fold(f32::MIN, f32::max);
                let e = |m: &u32| (f64::from(scores[at(m)]) - f64::from(top)).exp();
                let sum: f64 = group.iter().map(e).sum();
                want.push(group.iter().map(|m| e(m) * f64::from(values[at(m)])).sum::<f64>() / sum);
            }
        }
        close(&got, &want, tolerance::<D>());
        all.extend(bits(&got));
    }
    all
}

fn pending_rows_give_the_same_bits<D: Device>(device: &D) -> Vec<u32> {
    let (ratio, width) = (4, 48);
    let mut random = Random::new(9);
    let (values, scores) = (random.normals(4 * width, 1.0), random.normals(4 * width, 3.0));
    let together = pooled(device, &values, &scores, &[], &[0, 1, 2, 3], ratio, width);
    for waiting in 1..ratio {
        // Rows 0..waiting come in an earlier step and wait in slots 5, 3, 1.
        let mut pending = output::<D, f32>(device, 6 * 2 * width);
        let slots = [5u64, 3, 1];
        let (v, s) = (act(device, &values), act(device, &scores));
        let mut indices = slots[..waiting].to_vec();
        indices.push(u64::MAX);
        let indices = buffer(device, &indices);
        device.store_pending(&v, &s, &indices, width, waiting + 1, &mut pending).expect("runs");
        let pending = read(device, &pending);
        let written = pending.iter().filter(|x| **x != f32::POISON).count();
        assert_eq!(written, waiting * 2 * width);
        let mut members: Vec<u32> =
            slots[..waiting].iter().map(|slot| *slot as u32 | PENDING).collect();
        members.extend((0..(ratio - waiting) as u32).collect::<Vec<_>>());
        let (values, scores) = (&values[waiting * width..], &scores[waiting * width..]);
        let later = pooled(device, values, scores, &pending, &members, ratio, width);
        assert_eq!(bits(&later), bits(&together), "{waiting} rows waited");
    }
    bits(&together)
}

fn groups_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let (ratio, width) = (2, 72);
    let mut random = Random::new(3);
    let (values, scores) = (random.normals(1024 * width, 1.0), random.normals(1024 * width, 2.0));
    same_in_any_batch(512, |r| {
        let members: Vec<u32> = (2 * r.start as u32..2 * r.end as u32).collect();
        bits(&pooled(device, &values, &scores, &[], &members, ratio, width))
    })
}

#[test]
fn pool_groups() {
    for_each_device!(matches_the_formula);
    for_each_device!(pending_rows_give_the_same_bits);
    for_each_device!(groups_do_not_see_each_other);
}
