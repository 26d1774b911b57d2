//! Random weights and rows: what a device makes is what the host makes.

use super::buffers::input;
use super::{Runner, Trouble};
use crate::formats::dequantize_matrix_row;
use crate::ops::Device;
use crate::random::{Content, Random as Numbers, RandomMatrix};
use crate::tensor::{Format, RowFormat};
use half::bf16;

/// The first `len` bytes, from a device and from the host. What lies behind them stays as it is.
fn bytes<D: Device>(device: &D, random: Numbers, len: usize) -> Result<bool, Trouble> {
    let mut buffer = input(device, &vec![0xa5u8; len + 9])?;
    device.random_bytes(&random, len, &mut buffer)?;
    let mut got = vec![0; len + 9];
    device.download(&buffer, 0, &mut got)?;
    Ok(got[..len] == random.bytes(len) && got[len..].iter().all(|byte| *byte == 0xa5))
}

/// All rows of a matrix, read as a table of embeddings.
fn matrix<D: Device>(device: &D, m: &RandomMatrix) -> Result<bool, Trouble> {
    let ids: Vec<u32> = (0..m.rows as u32).collect();
    let mut out = device.alloc(m.rows * m.cols)?;
    device.embed(&device.random_matrix(m)?, &input(device, &ids)?, m.rows, &mut out)?;
    let mut got = vec![0.0; m.rows * m.cols];
    device.download_act(&out, 0, &mut got)?;
    let stored = m.stored();
    let mut want = vec![0.0; m.cols];
    let rounded = |x: f32| if size_of::<D::Act>() == 2 { bf16::from_f32(x).to_f32() } else { x };
    Ok(got.chunks_exact(m.cols).enumerate().all(|(r, got)| {
        dequantize_matrix_row(&stored, r, &mut want);
        got.iter().zip(&want).all(|(got, want)| *got == rounded(*want))
    }))
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    let contents = [
        Content::Fp8,
        Content::Fp4,
        Content::Scale(120),
        Content::Bf16 { mean: 0.5, spread: 1.5 },
        Content::F32 { mean: 0.5, spread: 1.5 },
        Content::MixBase { streams: 4 },
        Content::Rows { format: RowFormat::Fp8x32, width: 512 },
        Content::Rows { format: RowFormat::Nvfp4x16, width: 512 },
        Content::Rows { format: RowFormat::Mxfp4x32, width: 128 },
        Content::Rows { format: RowFormat::Mxfp4x32, width: 33 },
    ];
    for content in contents {
        for len in [1 << 20, 4 * 1237] {
            runner.case("random_bytes", format!("{content:?}, {len} bytes"), |device, random| {
                bytes(device, Numbers { content, key: random.word() }, len)
            });
        }
    }
    for (format, content) in [
        (Format::F32, Content::F32 { mean: 0.0, spread: 1.0 }),
        (Format::Bf16, Content::Bf16 { mean: 0.0, spread: 1.0 }),
        (Format::Fp8Block32, Content::Fp8),
        (Format::Fp8Row32, Content::Fp8),
        (Format::Fp4Row32, Content::Fp4),
    ] {
        for (rows, cols) in [(64, 1280), (33, 100)] {
            runner.case(
                "random_matrix",
                format!("{format:?}, {rows} x {cols}"),
                |device, random| {
                    let scales = Numbers { content: Content::Scale(119), key: random.word() };
                    let values = Numbers { content, key: random.word() };
                    matrix(device, &RandomMatrix { format, rows, cols, values, scales })
                },
            );
        }
    }
}
