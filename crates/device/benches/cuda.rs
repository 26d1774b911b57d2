//! Times of operations on a GPU: `cargo bench -p deepinfer-device --bench cuda`. Weights are rotated
//! so that they come from memory, not from the cache.

use deepinfer_device::ops::{Mix, MixWeights, StreamShape};
use deepinfer_device::{Cuda, Device, DeviceError, Format, RowFormat, StoredMatrix};
use half::bf16;

/// Bytes of weights to rotate through, more than any cache.
const ROTATED: usize = 512 << 20;
/// Times measured; the median counts.
const TIMES: usize = 7;

fn main() {
    match Cuda::open(0).and_then(|cuda| run(&cuda)) {
        Ok(()) => {}
        Err(DeviceError::NoDriver | DeviceError::NoDevice { .. }) => println!("no GPU here"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// The median time of one call in microseconds; `f` gets the number of the call.
fn median(
    cuda: &Cuda,
    mut f: impl FnMut(usize) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let mut calls = 0;
    let mut batch = |count: usize| {
        cuda.time(|| {
            (0..count).try_for_each(|_| {
                calls += 1;
                f(calls)
            })
        })
    };
    let once = f64::from(batch(3)?) / 3.0;
    let count = ((2.0 / once.max(1e-4)) as usize).clamp(3, 200);
    let mut times = Vec::new();
    for _ in 0..TIMES {
        times.push(f64::from(batch(count)?) / count as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[TIMES / 2] * 1e3)
}

/// A weight of any bytes that are numbers.
fn weight(
    cuda: &Cuda,
    format: Format,
    n: usize,
    k: usize,
) -> Result<<Cuda as Device>::Matrix, DeviceError> {
    let byte = |i: usize| ((i * 2_654_435_761) >> 7) as u8 & 0xb7;
    let data: Vec<u8> = (0..n * format.row_bytes(k)).map(byte).collect();
    let (rows, groups) = format.scale_shape(n, k).unwrap_or((0, 0));
    let scale = vec![120; rows * groups];
    cuda.matrix(StoredMatrix::new(format, n, k, data.into(), scale.into()))
}

fn run(cuda: &Cuda) -> Result<(), DeviceError> {
    println!("{:?}", cuda.info());
    borders(cuda)?;
    linears(cuda)
}

/// The border of two sublayers: update, mixing coefficients, collapse, norm.
fn borders(cuda: &Cuda) -> Result<(), DeviceError> {
    let (s, h) = (4, 5120);
    let shape =
        StreamShape { streams: s, hidden: h, iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 };
    let outputs = (2 + s) * s;
    let values = |n: usize| (0..n).map(|i| (i % 17) as f32 / 16.0 - 0.5).collect::<Vec<_>>();
    let site = MixWeights::<Cuda> {
        function: weight(cuda, Format::F32, outputs, s * h)?,
        base: uploaded(cuda, &values(outputs))?,
        scale: uploaded(cuda, &[0.5, 0.5, 0.5])?,
    };
    let norm = uploaded(cuda, &values(h))?;
    for t in [1, 6, 12, 128, 4096] {
        let mut x = cuda.alloc::<bf16>(t * s * h)?;
        cuda.upload_act(&values(t * s * h), &mut x, 0)?;
        let mut y = cuda.alloc::<bf16>(t * h)?;
        let mut out = cuda.alloc::<bf16>(t * h)?;
        let mut mix =
            Mix { pre: cuda.alloc(t * s)?, post: cuda.alloc(t * s)?, comb: cuda.alloc(t * s * s)? };
        let mixing = median(cuda, |_| cuda.streams_mix(&x, &site, &shape, t, &mut mix))?;
        let update = median(cuda, |_| cuda.streams_update(&mut x, &y, &mix, &shape, t))?;
        let collapse = median(cuda, |_| cuda.streams_collapse(&x, &mix.pre, &shape, t, &mut out))?;
        let norming = median(cuda, |_| cuda.rms_norm(&out, &norm, 1e-20, h, t, &mut y))?;
        let mut bytes = cuda.alloc::<u8>(t * 528)?;
        let encode = median(cuda, |_| cuda.encode_rows(&x, 512, RowFormat::Fp8x32, t, &mut bytes))?;
        println!(
            "border T {t}: mix {mixing:.1} + update {update:.1} + collapse {collapse:.1} + norm \
             {norming:.1} = {:.1} us; encode fp8 rows {encode:.1} us",
            mixing + update + collapse + norming
        );
    }
    Ok(())
}

fn uploaded(cuda: &Cuda, values: &[f32]) -> Result<<Cuda as Device>::Buffer<f32>, DeviceError> {
    let mut buffer = cuda.alloc(values.len())?;
    cuda.upload(values, &mut buffer, 0)?;
    Ok(buffer)
}

fn linears(cuda: &Cuda) -> Result<(), DeviceError> {
    let shapes = [
        (Format::Fp8Block32, 1280, 5120),
        (Format::Fp8Block32, 32768, 1280),
        (Format::Fp8Block32, 5120, 8192),
        (Format::Bf16, 384, 5120),
        (Format::Bf16, 129_280, 5120),
        (Format::F32, 24, 20480),
    ];
    for (format, n, k) in shapes {
        let first = weight(cuda, format, n, k)?;
        let bytes = n * format.row_bytes(k);
        let mut weights = vec![first];
        while weights.len() * bytes < ROTATED && weights.len() < 32 {
            weights.push(weight(cuda, format, n, k)?);
        }
        for m in [1, 8, 16, 32, 64, 128, 512, 4096] {
            if n > 100_000 && m > 128 {
                continue;
            }
            let values: Vec<bf16> =
                (0..m * k).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect();
            let mut x = cuda.alloc::<bf16>(m * k)?;
            cuda.upload(&values, &mut x, 0)?;
            let mut out = cuda.alloc::<bf16>(m * n)?;
            let time = median(cuda, |i| cuda.linear(&x, &weights[i % weights.len()], m, &mut out))?;
            let moved = (bytes + 2 * m * (n + k)) as f64;
            let tera = 2.0 * (m * n * k) as f64 / time * 1e-6;
            println!(
                "linear {format:?} {n} x {k}, M {m}: {time:.1} us, {:.0} GB/s, {tera:.1} TFLOP/s",
                moved / time * 1e-3
            );
        }
    }
    Ok(())
}
