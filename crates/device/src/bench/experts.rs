//! Routed and shared experts.

use super::cases::{Cases, Maker, Ready, Shared, act};
use super::linear::products;
use super::{Measure, Work};
use crate::inputs::input;
use crate::ops::{Result, Routing};
use crate::tensor::{Expert, Format, StoredMatrix};

const HIDDEN: usize = 5120;
const INNER: usize = 2304;
const EXPERTS: usize = 384;
const K: usize = 6;
/// Choices that are used in turn.
const CHOICES: usize = 16;

/// Weights of a layer.
struct Layer<D: Measure> {
    routed: D::Experts,
    shared: Expert<D::Matrix>,
    /// Bytes of a routed expert, and of the shared one.
    bytes: (usize, usize),
}

fn stored_bytes(e: &Expert<StoredMatrix>) -> usize {
    [&e.w1, &e.w3, &e.w2].map(StoredMatrix::stored_bytes).iter().sum()
}

fn layer<D: Measure>(maker: &mut Maker<'_, D>) -> Result<Layer<D>> {
    let routed: Vec<_> =
        (0..EXPERTS).map(|_| maker.expert(Format::Fp4Row32, HIDDEN, INNER)).collect();
    let shared = maker.expert(Format::Fp8Block32, HIDDEN, INNER);
    let bytes = (stored_bytes(&routed[0]), stored_bytes(&shared));
    let device = maker.device;
    let routed = device.experts(routed)?;
    let Expert { w1, w3, w2 } = shared;
    let shared = Expert { w1: device.matrix(w1)?, w3: device.matrix(w3)?, w2: device.matrix(w2)? };
    Ok(Layer { routed, shared, bytes })
}

/// `K` different experts for each of `rows` rows.
fn choose<D: Measure>(maker: &mut Maker<'_, D>, rows: usize) -> Vec<u32> {
    let mut ids = Vec::with_capacity(rows * K);
    for _ in 0..rows {
        let from = ids.len();
        while ids.len() < from + K {
            let id = maker.random.below(EXPERTS) as u32;
            if !ids[from..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

fn distinct(ids: &[u32]) -> usize {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids.len()
}

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    let weights = Shared::new();
    for &rows in cases.extent.of(&[1], &[1, 8, 32, 128], &[1, 8, 32, 128, 4096]) {
        let weights = weights.clone();
        let shape = format!("fp4 {EXPERTS} top-{K} and fp8 shared, {HIDDEN} x {INNER}, M {rows}");
        cases.add("experts_forward", shape, move |maker| {
            let layer = weights.get(|| layer(maker))?;
            let (mut choices, mut read) = (Vec::new(), 0);
            for _ in 0..CHOICES {
                let ids = choose(maker, rows);
                read += distinct(&ids);
                choices.push(input(maker.device, &ids)?);
            }
            let scores = input(maker.device, &vec![0.25f32; rows * K])?;
            let x = maker.acts(rows * HIDDEN)?;
            let mut out = maker.device.alloc(rows * HIDDEN)?;
            // Experts that no row chose are not read.
            let experts = read as f64 / CHOICES as f64;
            let bytes = experts * layer.bytes.0 as f64
                + (layer.bytes.1 + rows * (2 * HIDDEN * act::<D>() + 8 * K)) as f64;
            let work = Work { bytes, ..products(3 * rows * (K + 1), HIDDEN, INNER) };
            Ready::new(work, CHOICES, move |device: &D, i| {
                let Layer { routed, shared, .. } = &*layer;
                let ids = &choices[i];
                device.experts_forward(&x, routed, shared, ids, &scores, K, 10.0, rows, &mut out)
            })
        });
    }
    route(cases);
}

/// The choice of experts by their scores.
fn route<D: Measure>(cases: &mut Cases<D>) {
    for &rows in cases.extent.of(&[128], &[1, 128, 512], &[1, 128, 4096]) {
        cases.add("route", format!("{K} of {EXPERTS}, {rows} rows"), move |maker| {
            // Scores in, ids and weights out.
            let bytes = (rows * (4 * EXPERTS + 8 * K)) as f64;
            let copies = maker.copies(bytes);
            let mut scores = Vec::new();
            for _ in 0..copies {
                scores.push(maker.values(rows * EXPERTS, 4.0)?);
            }
            let bias = maker.values(EXPERTS, 0.1)?;
            let image = input(maker.device, &vec![0u8; rows])?;
            let mut ids = maker.device.alloc(rows * K)?;
            let mut weights = maker.device.alloc(rows * K)?;
            let work = Work { bytes, ..Work::default() };
            Ready::new(work, copies, move |device: &D, i| {
                let routing = Routing {
                    scores: &scores[i],
                    experts: EXPERTS,
                    k: K,
                    bias: &bias,
                    bias_image: None,
                    image: &image,
                    scale: 1.5,
                };
                device.route(&routing, rows, &mut ids, &mut weights)
            })
        });
    }
}
