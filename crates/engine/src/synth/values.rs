//! Random tensor content: a function of (seed, tensor name, place), so that any part of any tensor
//! can be made alone, on any thread or device, and is always the same.

use crate::checkpoint::layout::TensorSpec;
use deepinfer_device::random::{Content, Random, RandomMatrix};
use deepinfer_device::{Format, splitmix};

/// One tensor of a file: a value tensor or its scales.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Type in the file.
    pub dtype: &'static str,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub random: Random,
}

/// Root mean square of an `Fp8` code, and of an `Fp4` code.
const FP8_RMS: f32 = 0.845;
const FP4_RMS: f32 = 2.93;
/// Root mean square of a scale relative to the smaller one.
const SCALE_RMS: f32 = 1.58;

/// The files' tensors for `spec`: the values, and the scales if the format has them. `streams` is
/// the number of residual streams.
pub fn stored(spec: &TensorSpec, streams: usize, seed: u64) -> Vec<StoredTensor> {
    let tensor = |name: &str, dtype, shape: Vec<usize>, content| StoredTensor {
        random: Random { content, key: splitmix::mix(seed ^ hash(name)) },
        name: name.to_owned(),
        dtype,
        shape,
    };
    let (rows, cols) = match spec.shape[..] {
        [rows, cols] => (rows, cols),
        _ => (spec.shape[0], 1),
    };
    // Weights keep the size of their input: a sum over `cols` inputs of size 1 has size 1.
    let size = if spec.format == Format::Fp8Row32 { 1.0 } else { (cols as f32).powf(-0.5) };
    let exponent = |rms: f32| (127 + (size / (rms * SCALE_RMS)).log2().round() as i32) as u8;
    let values = match spec.format {
        Format::Fp8Block32 | Format::Fp8Row32 => {
            tensor(&spec.name, "F8_E4M3", spec.shape.clone(), Content::Fp8)
        }
        Format::Fp4Row32 => tensor(&spec.name, "I8", vec![rows, cols.div_ceil(2)], Content::Fp4),
        Format::Bf16 | Format::F32 => {
            let (mean, spread) = level(&spec.name, size);
            let (dtype, content) = match spec.format {
                _ if spec.name.ends_with("_base") => ("F32", Content::MixBase { streams }),
                Format::F32 => ("F32", Content::F32 { mean, spread }),
                _ => ("BF16", Content::Bf16 { mean, spread }),
            };
            tensor(&spec.name, dtype, spec.shape.clone(), content)
        }
    };
    let mut out = vec![values];
    if let Some((scale_rows, scale_cols)) = spec.format.scale_shape(rows, cols) {
        let rms = if spec.format == Format::Fp4Row32 { FP4_RMS } else { FP8_RMS };
        let stem = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        let name = format!("{stem}.scale");
        let content = Content::Scale(exponent(rms));
        out.push(tensor(&name, "F8_E8M0", vec![scale_rows, scale_cols], content));
    }
    out
}

/// Mean and largest deviation of a plain tensor; `size` is the wanted root mean square of a
/// projection's weights.
fn level(name: &str, size: f32) -> (f32, f32) {
    let last = name.strip_suffix(".weight").unwrap_or(name).rsplit('.').next().unwrap_or_default();
    match last {
        _ if last.ends_with("norm") || last.starts_with("norm") => (1.0, 0.1),
        "q_weight" | "k_weight" => (1.0, 0.1),
        _ if last.ends_with("_scale") => (0.5, 0.1),
        "attn_sink" => (0.0, 1.0),
        "bias" | "bias_vl" => (0.0, 0.1),
        "embed" | "image_start" | "image_end" | "image_newline" => (0.0, 1.7),
        // Logits wide enough to be told apart.
        "head" => (0.0, 4.0 * size),
        _ => (0.0, 3f32.sqrt() * size),
    }
}

impl StoredTensor {
    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        let size = match self.dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        self.shape.iter().map(|&n| n as u64).product::<u64>() * size
    }

    /// Writes the bytes from `start` (a multiple of 8) on into `out`.
    pub fn fill(&self, start: u64, out: &mut [u8]) {
        self.random.fill(start, out);
    }
}

/// The matrix `spec` of a checkpoint with this seed.
///
/// # Panics
/// If it is no matrix.
pub fn matrix(spec: &TensorSpec, streams: usize, seed: u64) -> RandomMatrix {
    let [rows, cols] = spec.shape[..] else { panic!("{} is no matrix", spec.name) };
    let tensors = stored(spec, streams, seed);
    let [values, scales] = [&tensors[0], tensors.last().unwrap_or(&tensors[0])];
    RandomMatrix { format: spec.format, rows, cols, values: values.random, scales: scales.random }
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(tensor: &StoredTensor) -> Vec<u8> {
        let mut out = vec![0; tensor.bytes() as usize];
        tensor.fill(0, &mut out);
        out
    }

    fn spec(name: &str, shape: &[usize], format: Format) -> TensorSpec {
        TensorSpec { name: name.into(), shape: shape.to_vec(), format }
    }

    #[test]
    fn names_and_seeds_give_other_numbers() {
        let make =
            |name: &str, seed| bytes(&stored(&spec(name, &[32, 32], Format::Bf16), 4, seed)[0]);
        assert_eq!(make("a", 1), make("a", 1));
        assert_ne!(make("a", 1), make("b", 1));
        assert_ne!(make("a", 1), make("a", 2));
    }

    /// A projection of inputs of size 1 gives outputs of size about 1, in every format.
    #[test]
    fn weights_have_the_size_that_keeps_activations() {
        for cols in [64usize, 1024, 5120] {
            for format in [Format::Fp8Block32, Format::Fp4Row32, Format::Bf16] {
                let matrix = matrix(&spec("wq.weight", &[64, cols], format), 4, 3).stored();
                let mut row = vec![0.0; cols];
                let mut squares = 0.0;
                for r in 0..64 {
                    deepinfer_device::formats::blocks::dequantize_matrix_row(&matrix, r, &mut row);
                    squares += row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                }
                let size = (squares / 64.0).sqrt();
                assert!((0.6..1.6).contains(&size), "{format:?} {cols}: {size}");
            }
        }
    }
}
