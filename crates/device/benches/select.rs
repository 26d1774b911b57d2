//! Rates of the index selection and of the sampler.
//!
//! `cargo bench -p deepinfer-device --bench select`

use deepinfer_device::ops::{CandidateShape, Candidates, PagedRows, RowMap, SampleRow, Selection};
use deepinfer_device::{Cpu, Device, Element, RowFormat};
use std::time::Instant;

const HEADS: usize = 32;
const WIDTH: usize = 128;
const K: usize = 512;

fn main() {
    // An argument is the number of threads.
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let cpu = Cpu::new(threads).expect("threads start");
    println!("{:?}, {} threads", cpu.isa(), cpu.threads());
    for (rows, context) in [(1, 8192), (1, 131_072), (4, 8192), (64, 8192), (256, 8192)] {
        select(&cpu, rows, context);
    }
    for rows in [1, 8] {
        sample(&cpu, rows);
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

fn select(cpu: &Cpu, rows: usize, context: usize) {
    let format = RowFormat::Mxfp4x32;
    let positions: Vec<u32> = ((context - rows) as u32..context as u32).collect();
    let map: RowMap<Cpu> = RowMap {
        rows,
        sequences: 1,
        sequence: buffer(cpu, &vec![0; rows]),
        window_from: buffer(cpu, &positions),
        window_to: buffer(cpu, &positions),
        position: buffer(cpu, &positions),
        fresh_from: buffer(cpu, &[0]),
        first_row: buffer(cpu, &[0]),
        slot: buffer(cpu, &[0]),
        pages: buffer(cpu, &(0..(context / 64) as u32).collect::<Vec<_>>()),
        max_pages: context / 64,
    };
    let x = buffer(cpu, &noise(context * WIDTH, 1.0));
    let mut cache = cpu.alloc(context * format.row_bytes(WIDTH)).expect("fits");
    cpu.encode_rows(&x, WIDTH, format, context, &mut cache).expect("runs");
    let args = Selection {
        q: &buffer(cpu, &noise(rows * HEADS * WIDTH, 1.0)),
        weights: &buffer(cpu, &noise(rows * HEADS, 0.01)),
        heads: HEADS,
        map: &map,
        keys: PagedRows { cache: &cache, format, width: WIDTH, rows_per_page: 64, ratio: 1 },
        k: K,
    };
    let mut out = cpu.alloc(rows * K).expect("fits");
    let shape = CandidateShape { block_size: 8, blocks: 2048 };
    let mut blocks = cpu.alloc(rows * shape.blocks).expect("fits");
    let keys = (rows * context) as f64;
    let report = |what: &str, keys: f64, time: f64| {
        println!(
            "select, {rows:4} rows x {context:7} keys, {what:8}: {:10.1} us a row, {:7.1} GFLOP/s",
            time * 1e6 / rows as f64,
            2.0 * keys * (HEADS * WIDTH) as f64 / time / 1e9
        );
    };
    let time = seconds(|| cpu.select(&args, Candidates::All, &mut out).expect("runs"));
    report("all", keys, time);
    let time = seconds(|| {
        cpu.select(&args, Candidates::Publish(shape, &mut blocks), &mut out).expect("runs");
    });
    report("publish", keys, time);
    let time =
        seconds(|| cpu.select(&args, Candidates::Within(shape, &blocks), &mut out).expect("runs"));
    report("within", (rows * context.min(shape.block_size * shape.blocks)) as f64, time);
}

fn sample(cpu: &Cpu, rows: usize) {
    let vocab = 129_280;
    let logits = buffer(cpu, &noise(rows * vocab, 8.0));
    let mut tokens = cpu.alloc(rows).expect("fits");
    let row = SampleRow {
        seed: 1,
        position: 7,
        sample: 0,
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
    };
    let kinds = [
        ("greedy", SampleRow { temperature: 0.0, ..row }),
        ("plain", row),
        ("top-k", SampleRow { top_k: 50, ..row }),
        ("top-p", SampleRow { top_p: 0.9, ..row }),
    ];
    for (name, row) in kinds {
        let list = vec![row; rows];
        let time = seconds(|| cpu.sample(&logits, vocab, &list, &mut tokens).expect("runs"));
        println!("sample, {rows:2} rows, {name:6}: {:8.1} us a row", time * 1e6 / rows as f64);
    }
}
