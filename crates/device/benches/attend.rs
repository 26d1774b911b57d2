//! Rates of attention over quantized caches, and of the residual streams' mixing.
//!
//! `cargo bench -p deepinfer-device --bench attend`

use deepinfer_device::ops::{
    Attention, Mix, MixWeights, PagedRows, RowMap, Selected, StreamShape, WindowRows,
};
use deepinfer_device::{Cpu, Device, Element, Format, RowFormat, StoredMatrix};
use std::time::Instant;

const HEADS: usize = 64;
const DIM: usize = 512;
const WINDOW: usize = 128;
const K: usize = 512;

fn main() {
    // An argument is the number of threads.
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let cpu = Cpu::new(threads).expect("threads start");
    println!("{:?}, {} threads", cpu.isa(), cpu.threads());
    for rows in [1, 4, 64, 256] {
        attend(&cpu, rows);
    }
    for rows in [1, 4, 64, 256] {
        streams(&cpu, rows);
    }
}

/// Least seconds of a call: what it takes when nothing else runs.
fn seconds(mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    f();
    let runs = (0.5 / start.elapsed().as_secs_f64().max(1e-6)).clamp(5.0, 2000.0) as usize;
    let times = (0..runs).map(|_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

fn noise(len: usize, scale: f32) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next() * scale).collect()
}

fn buffer<E: Element>(cpu: &Cpu, host: &[E]) -> <Cpu as Device>::Buffer<E> {
    let mut buffer = cpu.alloc(host.len()).expect("fits");
    cpu.upload(host, &mut buffer, 0).expect("uploads");
    buffer
}

fn encoded(cpu: &Cpu, rows: usize, format: RowFormat) -> <Cpu as Device>::Buffer<u8> {
    let x = buffer(cpu, &noise(rows * DIM, 1.0));
    let mut out = cpu.alloc(rows * format.row_bytes(DIM)).expect("fits");
    cpu.encode_rows(&x, DIM, format, rows, &mut out).expect("runs");
    out
}

fn attend(cpu: &Cpu, rows: usize) {
    let context = 8192;
    let from = context - rows;
    let positions: Vec<u32> = (from as u32..context as u32).collect();
    let map: RowMap<Cpu> = RowMap {
        rows,
        sequences: 1,
        sequence: buffer(cpu, &vec![0; rows]),
        window_from: buffer(
            cpu,
            &positions.iter().map(|p| p + 1 - WINDOW as u32).collect::<Vec<_>>(),
        ),
        window_to: buffer(cpu, &positions.iter().map(|p| p + 1).collect::<Vec<_>>()),
        position: buffer(cpu, &positions),
        fresh_from: buffer(cpu, &[from as u32]),
        first_row: buffer(cpu, &[0]),
        slot: buffer(cpu, &[0]),
        pages: buffer(cpu, &(0..(context / 64) as u32).collect::<Vec<_>>()),
        max_pages: context / 64,
    };
    let indices: Vec<u32> =
        (0..rows).flat_map(|r| (0..K).map(move |i| (i * 15 + r % 15) as u32)).collect();
    let q = buffer(cpu, &noise(rows * HEADS * DIM, 1.0));
    let args = Attention {
        q: &q,
        heads: HEADS,
        head_dim: DIM,
        map: &map,
        window: WindowRows {
            ring: &encoded(cpu, WINDOW, RowFormat::Fp8x32),
            ring_len: WINDOW,
            fresh: &encoded(cpu, rows, RowFormat::Fp8x32),
            format: RowFormat::Fp8x32,
        },
        selected: Some(Selected {
            indices: &buffer(cpu, &indices),
            k: K,
            keys: PagedRows {
                cache: &encoded(cpu, context, RowFormat::Nvfp4x16),
                format: RowFormat::Nvfp4x16,
                width: DIM,
                rows_per_page: 64,
                ratio: 1,
            },
        }),
        sink: &buffer(cpu, &[0.0; HEADS]),
        scale: 0.04,
    };
    let mut out = cpu.alloc(rows * HEADS * DIM).expect("fits");
    let time = seconds(|| cpu.attend(&args, &mut out).expect("runs"));
    let flops = 4.0 * (rows * HEADS * DIM * (K + WINDOW)) as f64;
    println!(
        "attend, {rows:4} rows x {} keys: {:9.1} us a row, {:7.1} GFLOP/s",
        K + WINDOW,
        time * 1e6 / rows as f64,
        flops / time / 1e9
    );
}

fn streams(cpu: &Cpu, rows: usize) {
    let shape =
        StreamShape { streams: 4, hidden: 5120, iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 };
    let (s, width) = (shape.streams, shape.streams * shape.hidden);
    let outputs = (2 + s) * s;
    let bytes: Vec<u8> =
        noise(outputs * width, 0.01).iter().flat_map(|x| x.to_le_bytes()).collect();
    let stored = StoredMatrix::new(Format::F32, outputs, width, bytes.into(), Vec::new().into());
    let weights = MixWeights {
        function: cpu.matrix(stored).expect("fits"),
        base: buffer(cpu, &noise(outputs, 1.0)),
        scale: buffer(cpu, &[1.0; 3]),
    };
    let mut streams = buffer(cpu, &noise(rows * width, 1.0));
    let y = buffer(cpu, &noise(rows * shape.hidden, 1.0));
    let mut x = cpu.alloc(rows * shape.hidden).expect("fits");
    let mut mix = Mix {
        pre: cpu.alloc(rows * s).expect("fits"),
        post: cpu.alloc(rows * s).expect("fits"),
        comb: cpu.alloc(rows * s * s).expect("fits"),
    };
    let row = 1e6 / rows as f64;
    let time =
        seconds(|| cpu.streams_mix(&streams, &weights, &shape, rows, &mut mix).expect("runs"));
    println!("streams_mix,      {rows:4} rows: {:9.1} us a row", time * row);
    let time = seconds(|| {
        cpu.streams_collapse(&streams, &mix.pre, &shape, rows, &mut x).expect("runs");
    });
    println!("streams_collapse, {rows:4} rows: {:9.1} us a row", time * row);
    let time = seconds(|| cpu.streams_update(&mut streams, &y, &mix, &shape, rows).expect("runs"));
    println!("streams_update,   {rows:4} rows: {:9.1} us a row", time * row);
}
