//! Norms, rotation, residual streams, pooling, the n-gram update.

use super::buffers::{Random, act, guarded_act, input, output, output_act, part, read, read_act};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{Device, Mix, MixWeights, StreamShape};
use crate::tensor::{Format, StoredMatrix};
use std::ops::Range;

struct Norm {
    width: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl Operation for Norm {
    type Ready<D: Device> = D::Buffer<f32>;

    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn shape(&self) -> String {
        format!("of {}", self.width)
    }

    fn bound(&self) -> f64 {
        3e-3
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<D::Buffer<f32>, Trouble> {
        Ok(input(device, &self.weight)?)
    }

    fn run<D: Device>(
        &self,
        device: &D,
        weight: &D::Buffer<f32>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let x = act(device, part(&self.x, self.width, &rows))?;
        let mut out = output_act(device, rows.len() * self.width)?;
        device.rms_norm(&x, weight, 1e-20, self.width, rows.len(), &mut out)?;
        Ok(Output::Rounded(read_act(device, &out)?))
    }
}

struct Rope {
    heads: usize,
    dim: usize,
    dims: usize,
    inverse: bool,
    x: Vec<f32>,
    angles: Vec<f32>,
}

impl Operation for Rope {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "rope"
    }

    fn shape(&self) -> String {
        let way = if self.inverse { ", inverse" } else { "" };
        format!("{} x {}, last {}{way}", self.heads, self.dim, self.dims)
    }

    fn bound(&self) -> f64 {
        3e-3
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let Self { heads, dim, dims, inverse, .. } = *self;
        let mut x = guarded_act(device, part(&self.x, heads * dim, &rows))?;
        let angles = input(device, part(&self.angles, dims, &rows))?;
        device.rope(&mut x, &angles, heads, dim, dims, inverse, rows.len())?;
        Ok(Output::Rounded(read_act(device, &x)?))
    }
}

struct Pool {
    ratio: usize,
    width: usize,
    values: Vec<f32>,
    scores: Vec<f32>,
}

impl Operation for Pool {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "pool_groups"
    }

    fn shape(&self) -> String {
        format!("{} of {}", self.ratio, self.width)
    }

    fn bound(&self) -> f64 {
        3e-3
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    /// The first member of every group waits in the pending rows, the others are of this step.
    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let (ratio, width, n) = (self.ratio, self.width, rows.len());
        let values = act(device, part(&self.values, ratio * width, &rows))?;
        let scores = act(device, part(&self.scores, ratio * width, &rows))?;
        let mut pending = output::<D, f32>(device, n * 2 * width)?;
        let waits = |i: usize| i.is_multiple_of(ratio);
        let indices: Vec<u64> = (0..n * ratio)
            .map(|i| if waits(i) { (n - 1 - i / ratio) as u64 } else { u64::MAX })
            .collect();
        device.store_pending(
            &values,
            &scores,
            &input(device, &indices)?,
            width,
            n * ratio,
            &mut pending,
        )?;
        let members: Vec<u32> = (0..n * ratio)
            .map(|i| if waits(i) { (n - 1 - i / ratio) as u32 | 1 << 31 } else { i as u32 })
            .collect();
        let members = input(device, &members)?;
        let mut out = output_act(device, n * width)?;
        device.pool_groups(&values, &scores, &pending, &members, ratio, width, n, &mut out)?;
        read::<D, f32>(device, &pending)?;
        Ok(Output::Rounded(read_act(device, &out)?))
    }
}

struct Engram {
    shape: StreamShape,
    streams: Vec<f32>,
    kv: Vec<f32>,
    weight: Vec<f32>,
    image: Vec<u8>,
}

impl Operation for Engram {
    type Ready<D: Device> = D::Buffer<f32>;

    fn name(&self) -> &'static str {
        "engram_update"
    }

    fn shape(&self) -> String {
        format!("{} x {}", self.shape.streams, self.shape.hidden)
    }

    fn bound(&self) -> f64 {
        3e-3
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<D::Buffer<f32>, Trouble> {
        Ok(input(device, &self.weight)?)
    }

    fn run<D: Device>(
        &self,
        device: &D,
        weight: &D::Buffer<f32>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let mut streams = guarded_act(device, part(&self.streams, s * hidden, &rows))?;
        let kv = act(device, part(&self.kv, (s + 1) * hidden, &rows))?;
        let image = input(device, &self.image[rows.clone()])?;
        device.engram_update(&mut streams, &kv, weight, &image, &self.shape, rows.len())?;
        Ok(Output::Rounded(read_act(device, &streams)?))
    }
}

/// Coefficients of a hyper-connection, and what they do to the streams.
struct Streams {
    shape: StreamShape,
    function: StoredMatrix,
    base: Vec<f32>,
    streams: Vec<f32>,
    y: Vec<f32>,
    /// The coefficients are compared; else the streams.
    mix: bool,
}

impl Operation for Streams {
    type Ready<D: Device> = MixWeights<D>;

    fn name(&self) -> &'static str {
        if self.mix {
            "streams_mix"
        } else {
            "streams_update, streams_collapse, streams_collapse_norm"
        }
    }

    fn shape(&self) -> String {
        format!("{} x {}", self.shape.streams, self.shape.hidden)
    }

    fn bound(&self) -> f64 {
        if self.mix { 1e-4 } else { 5e-3 }
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<MixWeights<D>, Trouble> {
        Ok(MixWeights {
            function: device.matrix(self.function.clone())?,
            base: input(device, &self.base)?,
            scale: input(device, &[0.7, 0.9, 1.1])?,
        })
    }

    fn run<D: Device>(
        &self,
        device: &D,
        weights: &MixWeights<D>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let StreamShape { streams: s, hidden, .. } = self.shape;
        let n = rows.len();
        let mut streams = guarded_act(device, part(&self.streams, s * hidden, &rows))?;
        let mut mix = Mix::<D> {
            pre: output(device, n * s)?,
            post: output(device, n * s)?,
            comb: output(device, n * s * s)?,
        };
        device.streams_mix(&streams, weights, &self.shape, n, &mut mix)?;
        if self.mix {
            let pre: Vec<f32> = read(device, &mix.pre)?;
            let post: Vec<f32> = read(device, &mix.post)?;
            let comb: Vec<f32> = read(device, &mix.comb)?;
            let rows = pre.chunks_exact(s).zip(post.chunks_exact(s)).zip(comb.chunks_exact(s * s));
            return Ok(Output::Rounded(rows.flat_map(|((a, b), c)| [a, b, c].concat()).collect()));
        }
        let y = act(device, part(&self.y, hidden, &rows))?;
        device.streams_update(&mut streams, &y, &mix, &self.shape, n)?;
        let (mut out, mut normed) =
            (output_act(device, n * hidden)?, output_act(device, n * hidden)?);
        let (pre, shape) = (&mix.pre, &self.shape);
        let weight = input(device, &self.y[..hidden])?;
        device.streams_collapse_norm(&streams, pre, &weight, shape, n, &mut out, &mut normed)?;
        device.streams_collapse(&streams, pre, shape, n, &mut out)?;
        let (streams, out) = (read_act(device, &streams)?, read_act(device, &out)?);
        let normed = read_act(device, &normed)?;
        let rows = streams.chunks_exact(s * hidden).zip(out.chunks_exact(hidden));
        let rows = rows.zip(normed.chunks_exact(hidden));
        Ok(Output::Rounded(rows.flat_map(|((a, b), c)| [a, b, c].concat()).collect()))
    }
}

fn shape(streams: usize, hidden: usize) -> StreamShape {
    StreamShape { streams, hidden, iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 }
}

fn streams(random: &mut Random, streams: usize, hidden: usize, rows: usize, mix: bool) -> Streams {
    let coefficients = (2 + streams) * streams;
    Streams {
        shape: shape(streams, hidden),
        function: random.matrix(Format::F32, coefficients, streams * hidden),
        base: random.values(coefficients),
        streams: random.values(rows * streams * hidden),
        y: random.values(rows * hidden),
        mix,
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    for (width, most) in [(33, 4097), (512, 4097), (1280, 4097), (5120, 1536)] {
        let most = runner.most(most);
        let (x, weight) = (runner.random.values(most * width), runner.random.values(width));
        runner.check(&Norm { width, x, weight }, most);
    }
    for (heads, dim, dims, inverse, most) in
        [(3, 24, 6, true, 4097), (64, 512, 64, false, 129), (32, 128, 64, true, 1536)]
    {
        let most = runner.most(most);
        let x = runner.random.values(most * heads * dim);
        let angle = |i: usize| i as f64 * 0.37;
        let angles =
            (0..most * dims / 2).flat_map(|i| [angle(i).cos() as f32, angle(i).sin() as f32]);
        runner.check(&Rope { heads, dim, dims, inverse, x, angles: angles.collect() }, most);
    }
    for (ratio, width, most) in [(2, 512, 1536), (3, 33, 4097)] {
        let most = runner.most(most);
        let values = runner.random.values(most * ratio * width);
        let scores = runner.random.values(most * ratio * width).iter().map(|x| 4.0 * x).collect();
        runner.check(&Pool { ratio, width, values, scores }, most);
    }
    for (count, hidden, most) in [(2, 40, 4097), (4, 5120, 129)] {
        let most = runner.most(most);
        let random = &mut runner.random;
        let engram = Engram {
            shape: shape(count, hidden),
            streams: random.values(most * count * hidden),
            kv: random.values(most * (count + 1) * hidden),
            weight: random.values(count * hidden),
            image: (0..most).map(|row| u8::from(row % 4 == 2)).collect(),
        };
        runner.check(&engram, most);
        for mix in [true, false] {
            let case = streams(&mut runner.random, count, hidden, most, mix);
            runner.check(&case, most);
        }
    }
}
