//! Norms, rotation, residual streams, pooling.

use super::cases::{Cases, Maker, Ready, act};
use super::{Measure, Work};
use crate::inputs::input;
use crate::ops::{Mix, MixWeights, Result, StreamShape};
use crate::tensor::Format;

const HIDDEN: usize = 5120;
const STREAMS: usize = 4;
const HEADS: usize = 64;
const DIM: usize = 512;
const ROTATED: usize = 64;

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    let few = [1, 128];
    for &rows in cases.extent.of(&few, &[1, 6, 12, 128, 512], &[1, 6, 12, 128, 4096]) {
        border(cases, rows);
    }
    for &rows in cases.extent.of(&few, &[1, 128, 512], &[1, 128, 4096]) {
        norm(cases, rows);
    }
    for &rows in cases.extent.of(&few[1..], &[1, 128, 512], &[1, 128, 4096]) {
        rope(cases, rows);
    }
    for &groups in cases.extent.of(&[64], &[1, 64, 256], &[1, 64, 2048]) {
        pool(cases, groups);
    }
}

/// Weights and residual streams of a site.
struct Site<D: Measure> {
    weights: MixWeights<D>,
    streams: D::Buffer<D::Act>,
    mix: Mix<D>,
    y: D::Buffer<D::Act>,
}

fn site<D: Measure>(maker: &mut Maker<'_, D>, rows: usize) -> Result<Site<D>> {
    let outputs = (2 + STREAMS) * STREAMS;
    let s = STREAMS;
    Ok(Site {
        weights: MixWeights {
            function: maker.matrix(Format::F32, outputs, s * HIDDEN)?,
            base: maker.values(outputs, 1.0)?,
            scale: maker.values(3, 0.5)?,
        },
        streams: maker.acts(rows * s * HIDDEN)?,
        mix: Mix {
            pre: maker.values(rows * s, 0.25)?,
            post: maker.values(rows * s, 0.25)?,
            comb: maker.values(rows * s * s, 0.25)?,
        },
        y: maker.acts(rows * HIDDEN)?,
    })
}

/// The border of two sublayers, three operations: the output of one is added to the streams, the input of the next is
/// taken from them and normalized, and the next one's coefficients are computed. Counted are the
/// streams, read and written once, the output, the input, and the coefficients' weights.
fn border<D: Measure>(cases: &mut Cases<D>, rows: usize) {
    cases.add("streams_border", format!("{STREAMS} x {HIDDEN}, {rows} rows"), move |maker| {
        let shape = StreamShape {
            streams: STREAMS,
            hidden: HIDDEN,
            iterations: 20,
            hc_eps: 1e-6,
            norm_eps: 1e-20,
        };
        let outputs = (2 + STREAMS) * STREAMS;
        let weights = 4 * outputs * STREAMS * HIDDEN;
        let bytes = (weights + rows * HIDDEN * (2 * STREAMS + 2) * act::<D>()) as f64;
        let copies = maker.copies(bytes);
        let mut sites = (0..copies).map(|_| site(maker, rows)).collect::<Result<Vec<_>>>()?;
        let norm = maker.values(HIDDEN, 1.0)?;
        let mut collapsed = maker.device.alloc(rows * HIDDEN)?;
        let mut out = maker.device.alloc(rows * HIDDEN)?;
        let operations = (2 * rows * outputs * STREAMS * HIDDEN) as f64;
        let work = Work { bytes, operations, ..Work::default() };
        Ready::new(work, copies, move |device: &D, i| {
            let Site { weights, streams, mix, y } = &mut sites[i];
            device.streams_update(streams, y, mix, &shape, rows)?;
            device.streams_collapse_norm(
                streams,
                &mix.pre,
                &norm,
                &shape,
                rows,
                &mut collapsed,
                &mut out,
            )?;
            device.streams_mix(streams, weights, &shape, rows, mix)
        })
    });
}

fn norm<D: Measure>(cases: &mut Cases<D>, rows: usize) {
    cases.add("rms_norm", format!("of {HIDDEN}, {rows} rows"), move |maker| {
        let bytes = (2 * rows * HIDDEN * act::<D>() + 4 * HIDDEN) as f64;
        let copies = maker.copies(bytes);
        let x = (0..copies).map(|_| maker.acts(rows * HIDDEN)).collect::<Result<Vec<_>>>()?;
        let weight = maker.values(HIDDEN, 1.0)?;
        let mut out = maker.device.alloc(rows * HIDDEN)?;
        let work = Work { bytes, ..Work::default() };
        Ready::new(work, copies, move |device: &D, i| {
            device.rms_norm(&x[i], &weight, 1e-20, HIDDEN, rows, &mut out)
        })
    });
}

/// Queries of attention; only the rotated part moves.
fn rope<D: Measure>(cases: &mut Cases<D>, rows: usize) {
    let shape = format!("{HEADS} x {DIM}, last {ROTATED}, {rows} rows");
    cases.add("rope", shape, move |maker| {
        let bytes = (rows * ROTATED * (2 * HEADS * act::<D>() + 4)) as f64;
        let copies = maker.copies((rows * HEADS * DIM * act::<D>()) as f64);
        let mut x =
            (0..copies).map(|_| maker.acts(rows * HEADS * DIM)).collect::<Result<Vec<_>>>()?;
        let angle = |i: usize| i as f64 * 0.37;
        let angles = (0..rows * ROTATED / 2)
            .flat_map(|i| [angle(i).cos() as f32, angle(i).sin() as f32])
            .collect::<Vec<f32>>();
        let angles = input(maker.device, &angles)?;
        let work = Work { bytes, ..Work::default() };
        Ready::new(work, copies, move |device: &D, i| {
            device.rope(&mut x[i], &angles, HEADS, DIM, ROTATED, false, rows)
        })
    });
}

/// The compressor's groups of two rows.
fn pool<D: Measure>(cases: &mut Cases<D>, groups: usize) {
    const RATIO: usize = 2;
    cases.add("pool_groups", format!("{RATIO} of {DIM}, {groups} groups"), move |maker| {
        // Values and scores in, a row a group out, and the members' numbers.
        let bytes = (groups * (DIM * (2 * RATIO + 1) * act::<D>() + 4 * RATIO)) as f64;
        let copies = maker.copies(bytes);
        let rows = groups * RATIO;
        let mut all = Vec::new();
        for _ in 0..copies {
            all.push((maker.acts(rows * DIM)?, maker.acts(rows * DIM)?));
        }
        let pending = maker.device.alloc(2 * DIM)?;
        let members: Vec<u32> = (0..rows as u32).collect();
        let members = input(maker.device, &members)?;
        let mut out = maker.device.alloc(groups * DIM)?;
        let work = Work { bytes, ..Work::default() };
        Ready::new(work, copies, move |device: &D, i| {
            let (values, scores) = &all[i];
            device.pool_groups(values, scores, &pending, &members, RATIO, DIM, groups, &mut out)
        })
    });
}
