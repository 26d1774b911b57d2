//! What the machine can do: f32 products, and products with stored weights alone.

use crate::failure::Outcome;
use anyhow::Context;
use deepinfer::checkpoint::{Checkpoint, Part};
use deepinfer_device::tensor::StoredMatrix;
use deepinfer_device::{Cpu, Device, DeviceError, Format};
use gemm_common::Parallelism;
use std::sync::Arc;
use std::time::Instant;

/// f32 products by the `gemm` crate, in the layout that suits it best.
pub struct Gemm {
    device: Arc<Cpu>,
    x: Vec<f32>,
    w: Vec<f32>,
    out: Vec<f32>,
}

impl Gemm {
    const ROWS: usize = 512;
    const OUT: usize = 2048;
    const IN: usize = 2048;
    const TIMES: usize = 4;

    /// Makes the matrices.
    pub fn new(device: &Arc<Cpu>) -> Self {
        let fill = |n: usize| (0..n).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        let (x, w) = (fill(Self::ROWS * Self::IN), fill(Self::IN * Self::OUT));
        Self { device: device.clone(), x, w, out: vec![0.0; Self::ROWS * Self::OUT] }
    }

    /// Speed of some products.
    pub fn gflop_per_s(&mut self) -> f64 {
        let threads = self.device.threads();
        let parallelism =
            if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
        let (m, n, k) = (Self::OUT, Self::ROWS, Self::IN);
        let (x, w, out) = (&self.x, &self.w, &mut self.out);
        let start = Instant::now();
        self.device.pool().install(|| {
            for _ in 0..Self::TIMES {
                // SAFETY: `w` is [k, m], `x` is [n, k], `out` is [n, m], all row-major and of
                // exactly these sizes; the strides are those, and `out` is borrowed mutably.
                unsafe {
                    gemm_f32::gemm::f32::get_gemm_fn()(
                        m,
                        n,
                        k,
                        out.as_mut_ptr(),
                        m as isize,
                        1,
                        false,
                        w.as_ptr(),
                        m as isize,
                        1,
                        x.as_ptr(),
                        k as isize,
                        1,
                        0.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            }
        });
        std::hint::black_box(&self.out);
        2.0 * (Self::TIMES * m * n * k) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// The fp8 and fp4 matrices that one token reads, multiplied one after the other with one row.
pub struct Weights {
    device: Arc<Cpu>,
    fp8: Vec<Matrix>,
    fp4: Vec<Matrix>,
    x: Vec<f32>,
    out: Vec<f32>,
}

struct Matrix {
    weight: <Cpu as Device>::Matrix,
    bytes: usize,
}

impl Weights {
    /// Takes the matrices of the backbone; of the routed experts, as many as a token uses.
    pub fn new(checkpoint: &Checkpoint, device: &Arc<Cpu>) -> Outcome<Self> {
        let c = &checkpoint.config().text_config;
        let mut own = Checkpoint::open(checkpoint.source().clone())?;
        let (mut fp8, mut fp4) = (Vec::new(), Vec::new());
        let (mut widest, mut longest) = (0, 0);
        let names: Vec<(String, Part, Vec<u64>)> = checkpoint
            .tensors()
            .filter(|t| t.name.ends_with(".weight") && t.shape.len() == 2)
            .map(|t| (t.name.to_owned(), t.part, t.shape.to_vec()))
            .collect();
        for (name, part, shape) in names {
            let [rows, cols] = [shape[0] as usize, shape[1] as usize];
            let stored: StoredMatrix = match part {
                Part::Experts if expert(&name).is_some_and(|e| e < c.num_experts_per_tok) => {
                    let (h, i) = (c.hidden_size, c.moe_intermediate_size);
                    let down = name.ends_with(".w2.weight");
                    let (rows, cols) = if down { (h, i) } else { (i, h) };
                    own.take_matrix(&name, rows, cols)?
                }
                Part::Attention | Part::Indexer | Part::SharedExperts | Part::Engram => {
                    own.take_matrix(&name, rows, cols)?
                }
                _ => continue,
            };
            let list = match stored.format {
                Format::Fp8Block32 => &mut fp8,
                Format::Fp4Row32 => &mut fp4,
                _ => continue,
            };
            (widest, longest) = (widest.max(stored.cols), longest.max(stored.rows));
            let bytes = stored.stored_bytes();
            let weight = device.matrix(stored).with_context(|| name.clone())?;
            list.push(Matrix { weight, bytes });
        }
        let x = (0..widest).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect();
        Ok(Self { device: device.clone(), fp8, fp4, x, out: vec![0.0; longest] })
    }

    /// Bytes of fp8 matrices a second.
    pub fn fp8_gb_per_s(&mut self) -> Outcome<f64> {
        let device = self.device.clone();
        Self::pass(&device, &self.fp8, &self.x, &mut self.out)
    }

    /// Bytes of fp4 matrices a second.
    pub fn fp4_gb_per_s(&mut self) -> Outcome<f64> {
        let device = self.device.clone();
        Self::pass(&device, &self.fp4, &self.x, &mut self.out)
    }

    fn pass(device: &Cpu, list: &[Matrix], x: &[f32], out: &mut [f32]) -> Outcome<f64> {
        let mut input = device.alloc::<f32>(x.len())?;
        let mut output = device.alloc::<f32>(out.len())?;
        device.upload(x, &mut input, 0)?;
        let seconds = device.pool().install(|| {
            let start = Instant::now();
            list.iter().try_for_each(|m| device.linear(&input, &m.weight, 1, &mut output))?;
            Ok::<f64, DeviceError>(start.elapsed().as_secs_f64())
        })?;
        let bytes: usize = list.iter().map(|m| m.bytes).sum();
        Ok(bytes as f64 / seconds / 1e9)
    }
}

/// The number of a routed expert.
fn expert(name: &str) -> Option<usize> {
    name.split_once(".experts.")?.1.split('.').next()?.parse().ok()
}
