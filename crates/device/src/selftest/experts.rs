//! Choice of experts, and their products.

use super::buffers::{Random, act, input, output, output_act, part, read, read_act};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{Device, Routing};
use crate::tensor::{Expert, Format, StoredMatrix};
use std::ops::Range;

struct Route {
    experts: usize,
    k: usize,
    scores: Vec<f32>,
    bias: Vec<f32>,
    image: Vec<u8>,
}

impl Operation for Route {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "route"
    }

    fn shape(&self) -> String {
        format!("{} of {}", self.k, self.experts)
    }

    fn bound(&self) -> f64 {
        0.0
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let (experts, k, n) = (self.experts, self.k, rows.len());
        let bias_image = input(device, &self.bias[experts..])?;
        let routing = Routing {
            scores: &input(device, part(&self.scores, experts, &rows))?,
            experts,
            k,
            bias: &input(device, &self.bias[..experts])?,
            bias_image: Some(&bias_image),
            image: &input(device, &self.image[rows])?,
            scale: 1.5,
        };
        let (mut ids, mut weights) = (output(device, n * k)?, output::<D, f32>(device, n * k)?);
        device.route(&routing, n, &mut ids, &mut weights)?;
        let (ids, weights) = (read(device, &ids)?, read(device, &weights)?);
        let rows = ids.chunks_exact(k).zip(weights.chunks_exact(k));
        let all = rows.flat_map(|(ids, weights)| {
            ids.iter().copied().chain(weights.iter().map(|w| w.to_bits())).collect::<Vec<_>>()
        });
        Ok(Output::Exact(all.collect()))
    }
}

struct Experts {
    routed: Vec<Expert<StoredMatrix>>,
    shared: Expert<StoredMatrix>,
    k: usize,
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Experts {
    fn new(
        random: &mut Random,
        (hidden, inner): (usize, usize),
        (count, k): (usize, usize),
        formats: (Format, Format),
        rows: usize,
    ) -> Self {
        let mut ids = Vec::with_capacity(rows * k);
        for _ in 0..rows {
            let from = ids.len();
            while ids.len() < from + k {
                // Low ids more often, so that some experts have many rows.
                let most = random.below(count) + 1;
                let id = random.below(most) as u32;
                if !ids[from..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        Self {
            routed: (0..count).map(|_| random.expert(formats.0, hidden, inner)).collect(),
            shared: random.expert(formats.1, hidden, inner),
            k,
            x: random.values(rows * hidden),
            ids,
            weights: random.values(rows * k).iter().map(|w| w.abs()).collect(),
        }
    }
}

impl Operation for Experts {
    type Ready<D: Device> = (D::Experts, Expert<D::Matrix>);

    fn name(&self) -> &'static str {
        "experts_forward"
    }

    fn shape(&self) -> String {
        let (w1, count) = (&self.shared.w1, self.routed.len());
        let format = self.routed[0].w1.format;
        format!("{} x {}, {} of {count} {format:?}", w1.cols, w1.rows, self.k)
    }

    fn bound(&self) -> f64 {
        6e-3
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<Self::Ready<D>, Trouble> {
        let routed = device.experts(self.routed.clone())?;
        let Expert { w1, w3, w2 } = self.shared.clone();
        let shared =
            Expert { w1: device.matrix(w1)?, w3: device.matrix(w3)?, w2: device.matrix(w2)? };
        Ok((routed, shared))
    }

    fn run<D: Device>(
        &self,
        device: &D,
        (routed, shared): &Self::Ready<D>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let (hidden, k, n) = (self.shared.w1.cols, self.k, rows.len());
        let x = act(device, part(&self.x, hidden, &rows))?;
        let ids = input(device, part(&self.ids, k, &rows))?;
        let weights = input(device, part(&self.weights, k, &rows))?;
        let mut out = output_act(device, n * hidden)?;
        device.experts_forward(&x, routed, shared, &ids, &weights, k, 2.5, n, &mut out)?;
        Ok(Output::Rounded(read_act(device, &out)?))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    for (experts, k) in [(384, 6), (128, 3), (37, 5)] {
        let most = runner.most(usize::MAX);
        let random = &mut runner.random;
        let scores = random.values(most * experts).iter().map(|x| 4.0 * x).collect();
        let bias = random.values(2 * experts);
        let image = (0..most).map(|row| u8::from(row % 3 == 1)).collect();
        runner.check(&Route { experts, k, scores, bias, image }, most);
    }
    let released = (Format::Fp4Row32, Format::Fp8Block32);
    let quick = [
        ((192, 96), (12, 3), released, 1536),
        ((64, 32), (5, 1), (Format::Bf16, Format::Bf16), 1536),
        ((96, 160), (3, 3), (Format::Fp8Block32, Format::Fp8Block32), 1536),
    ];
    let real = [((5120, 2304), (10, 6), released, 1536)];
    let cases = quick.iter().chain(if runner.options.quick { &real[..0] } else { &real[..] });
    for (sizes, choice, formats, most) in cases {
        let most = runner.most(*most);
        let experts = Experts::new(&mut runner.random, *sizes, *choice, *formats, most);
        runner.check(&experts, most);
    }
}
