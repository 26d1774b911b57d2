//! Speed of linear layers and experts, as shares of what this machine can do in the same minute:
//! `cargo bench -p deepinfer-device --bench linear -- [--threads N] [--rounds N] [--isa NAME]
//! [--cpu-time] [--by-rows]`.
//!
//! With `--by-rows`, a matrix of each format at the row counts of decoding with drafts or in
//! batches, against the f32 rate. Without, one row (decode) against the rate at which all threads read memory; many rows (prefill) against
//! the f32 rate of the `gemm` crate. Figures of other machines or moments do not compare, so each
//! round measures the limit and the products in turn, and medians are printed. With `--threads 1
//! --cpu-time` (Linux), time is what the scheduler gave this thread: on a busy machine, wall time
//! says little.

use deepinfer_device::cpu::experts::{Experts, experts_forward};
use deepinfer_device::cpu::linear::{Weight, linear};
use deepinfer_device::cpu::{Cpu, Isa, Read};
use deepinfer_device::{Expert, Format, StoredMatrix};
use gemm_common::Parallelism;
use std::time::Instant;

const HIDDEN: usize = 5120;
const INNER: usize = 2304;
/// Megabytes of weights of each format: far more than caches hold.
const POOL_MB: usize = 700;
/// Rows of a prefill, and how many of how many experts each uses there.
const PREFILL: usize = 512;
const EXPERTS: usize = 16;
const K: usize = 4;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let option = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let number = |name: &str| option(name).and_then(|v| v.parse().ok());
    let isa = option("--isa").map_or(Isa::detect(), |name| {
        let named = Isa::available().find(|isa| format!("{isa:?}").eq_ignore_ascii_case(name));
        named.unwrap_or_else(|| panic!("no instruction set {name} here"))
    });
    let cpu = Cpu::with_isa(number("--threads"), isa).expect("a thread pool");
    let rounds = number("--rounds").unwrap_or(7);
    println!("{} threads, {:?}, medians of {rounds} rounds", cpu.threads(), cpu.isa());
    // Operations of a step follow each other on a thread of the pool.
    cpu.pool().install(|| {
        if args.iter().any(|a| a == "--by-rows") {
            return by_rows(&cpu, rounds);
        }
        decode(&cpu, rounds, number("--pool-mb").unwrap_or(POOL_MB) << 20);
        prefill(&cpu, rounds);
    });
}

/// Pseudo-random bytes, none of them a NaN code.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut words = vec![0u64; len.div_ceil(8)];
    for word in &mut words {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *word = (state ^ state >> 29) & 0xBFBF_BFBF_BFBF_BFBF;
    }
    let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

fn matrix(format: Format, rows: usize, cols: usize, seed: u64) -> StoredMatrix {
    let (r, c) = format.scale_shape(rows, cols).unwrap_or((0, 0));
    let scale: Vec<u8> = bytes(r * c, seed).iter().map(|b| 112 + b % 8).collect();
    // As in a mapped file, values start anywhere.
    let mut data = bytes(rows * format.row_bytes(cols) + 1, seed);
    if format == Format::Bf16 {
        // Sign and mantissa stay, the exponent becomes that of numbers in 1 ..= 2.
        data.iter_mut().skip(2).step_by(2).for_each(|b| *b = *b & 0x80 | 0x3F);
    }
    let data = bytes::Bytes::from(data).slice(1..);
    StoredMatrix::new(format, rows, cols, data, scale.into())
}

/// Matrices of `shapes` in turn, `bytes` in all.
fn pool(format: Format, shapes: &[(usize, usize)], bytes: usize) -> Vec<Weight> {
    let mut pool = Vec::new();
    let mut total = 0;
    for (i, (rows, cols)) in shapes.iter().cycle().enumerate() {
        if total >= bytes {
            break;
        }
        let w = Weight::new(matrix(format, *rows, *cols, i as u64)).expect("a weight");
        total += w.stored().stored_bytes();
        pool.push(w);
    }
    pool
}

fn values(n: usize) -> Vec<f32> {
    bytes(n, 9).iter().map(|b| *b as f32 / 128.0 - 1.0).collect()
}

fn seconds(f: impl FnOnce()) -> f64 {
    let cpu_time = std::env::args().any(|a| a == "--cpu-time");
    let start = (Instant::now(), cpu_time.then(thread_seconds));
    f();
    match start {
        (_, Some(start)) => thread_seconds() - start,
        (start, None) => start.elapsed().as_secs_f64(),
    }
}

/// Processor time of this thread.
fn thread_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let nanoseconds = stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    nanoseconds.expect("a number of nanoseconds") / 1e9
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// A row of figures: the rate of each round, in units of `work / second`, and the limit's.
fn report(name: &str, unit: &str, rates: &[f64], limits: &[f64]) {
    let shares: Vec<f64> = rates.iter().zip(limits).map(|(r, l)| r / l).collect();
    println!(
        "{name:<28} {:>7.1} {unit}   {:>5.1}% of the limit",
        median(rates),
        100.0 * median(&shares)
    );
}

fn decode(cpu: &Cpu, rounds: usize, size: usize) {
    let memory = Read::new(cpu);
    let attention =
        [(1280, 5120), (8192, 1280), (512, 5120), (1024, 4096), (5120, 8192), (2304, 5120)];
    let fp8 = pool(Format::Fp8Block32, &attention, size);
    let fp4 = pool(
        Format::Fp4Row32,
        &[(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)],
        size.max(120 << 20),
    );
    let bf16 = pool(Format::Bf16, &[(16384, HIDDEN)], size);
    let of = |w: &Weight| w.stored().clone();
    let experts: Vec<Expert<StoredMatrix>> = fp4
        .as_chunks::<3>()
        .0
        .iter()
        .map(|[w1, w3, w2]| Expert { w1: of(w1), w3: of(w3), w2: of(w2) })
        .collect();
    let routed = experts.len() / 6 * 6;
    let expert_bytes: usize = experts[..routed].iter().map(stored_bytes).sum();
    let experts = Experts::new(experts).expect("experts");
    let weight = |rows, cols, seed| {
        Weight::new(matrix(Format::Fp8Block32, rows, cols, seed)).expect("a weight")
    };
    let shared: Vec<Expert<Weight>> = (0..routed as u64 / 6)
        .map(|i| Expert {
            w1: weight(INNER, HIDDEN, 3 * i),
            w3: weight(INNER, HIDDEN, 3 * i + 1),
            w2: weight(HIDDEN, INNER, 3 * i + 2),
        })
        .collect();
    let shared_bytes = shared.len() * 3 * HIDDEN * INNER;

    let x = values(8192 * 8);
    let mut out = vec![0.0; 16384 * 8];
    let mut limits = Vec::new();
    let mut rates = [const { Vec::new() }; 6];
    for _ in 0..rounds {
        let t = seconds(|| memory.pass(cpu));
        limits.push(memory.bytes() as f64 / t / 1e9);
        for (rates, (pool, rows)) in
            rates.iter_mut().zip([(&fp8, 1), (&fp4, 1), (&bf16, 1), (&fp8, 6), (&fp4, 6)])
        {
            let total: usize = pool.iter().map(|w| w.stored().stored_bytes()).sum();
            let t = seconds(|| pool.iter().for_each(|w| linear(cpu, &x, w, rows, &mut out)));
            rates.push(total as f64 / t / 1e9);
        }
        let t = seconds(|| {
            for (i, one) in shared.iter().enumerate() {
                let ids: Vec<u32> = (0..6).map(|slot| (slot * shared.len() + i) as u32).collect();
                experts_forward(cpu, &x, &experts, one, &ids, &[0.1; 6], 6, 10.0, 1, &mut out);
            }
        });
        rates[5].push((expert_bytes + shared_bytes) as f64 / t / 1e9);
    }
    println!("memory read                  {:>7.1} GB/s", median(&limits));
    report("fp8, 1 row", "GB/s", &rates[0], &limits);
    report("fp4, 1 row", "GB/s", &rates[1], &limits);
    report("bf16, 1 row", "GB/s", &rates[2], &limits);
    report("fp8, 6 rows", "GB/s", &rates[3], &limits);
    report("fp4, 6 rows", "GB/s", &rates[4], &limits);
    report("6 experts and shared, 1 row", "GB/s", &rates[5], &limits);
}

fn by_rows(cpu: &Cpu, rounds: usize) {
    const ROWS: [usize; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 24, 32];
    let most = ROWS[ROWS.len() - 1];
    // More than the second cache holds.
    let formats = [Format::Fp8Block32, Format::Fp4Row32];
    let pools = formats.map(|format| pool(format, &[(INNER, HIDDEN)], 48 << 20));
    let x = values(most * HIDDEN);
    let (tall, wide) = (values(PREFILL * HIDDEN), values(INNER * HIDDEN));
    let mut out = vec![0.0; PREFILL * INNER];
    let work = |rows: usize| (2 * rows * INNER * HIDDEN) as f64 / 1e9;
    let mut limits = Vec::new();
    let mut rates = vec![Vec::new(); ROWS.len() * formats.len()];
    for _ in 0..rounds {
        limits.push(work(PREFILL) / seconds(|| yardstick(&tall, &wide, cpu.threads(), &mut out)));
        let cases = ROWS.iter().flat_map(|rows| pools.iter().map(move |pool| (*rows, pool)));
        for (rates, (rows, pool)) in rates.iter_mut().zip(cases) {
            let t = seconds(|| pool.iter().for_each(|w| linear(cpu, &x, w, rows, &mut out)));
            rates.push(work(rows) * pool.len() as f64 / t);
        }
    }
    println!("f32 gemm                     {:>7.1} GFLOP/s", median(&limits));
    for (i, rates) in rates.iter().enumerate() {
        let (rows, format) = (ROWS[i / formats.len()], formats[i % formats.len()]);
        report(&format!("{format:?}, {rows} rows"), "GFLOP/s", rates, &limits);
    }
}

fn stored_bytes(e: &Expert<StoredMatrix>) -> usize {
    e.w1.stored_bytes() + e.w3.stored_bytes() + e.w2.stored_bytes()
}

fn prefill(cpu: &Cpu, rounds: usize) {
    let formats = [Format::Fp8Block32, Format::Fp4Row32, Format::Bf16];
    let weights = formats.map(|f| Weight::new(matrix(f, INNER, HIDDEN, 1)).expect("a weight"));
    let x = values(PREFILL * HIDDEN);
    let w = values(INNER * HIDDEN);
    let mut out = vec![0.0; PREFILL * INNER];
    let work = (2 * PREFILL * INNER * HIDDEN) as f64 / 1e9;
    let expert = |format| {
        let weight = |rows, cols| matrix(format, rows, cols, 1);
        Expert { w1: weight(INNER, HIDDEN), w3: weight(INNER, HIDDEN), w2: weight(HIDDEN, INNER) }
    };
    let Expert { w1, w3, w2 } = expert(Format::Fp8Block32);
    let load = |m| Weight::new(m).expect("a weight");
    let shared = Expert { w1: load(w1), w3: load(w3), w2: load(w2) };
    let experts = (0..EXPERTS).map(|_| expert(Format::Fp4Row32)).collect();
    let experts = Experts::new(experts).expect("experts");
    let slot = |i: usize| ((i / K * 7 + i % K * (EXPERTS / K)) % EXPERTS) as u32;
    let ids: Vec<u32> = (0..PREFILL * K).map(slot).collect();
    let mut mixed = vec![0.0; PREFILL * HIDDEN];
    let mixed_work = work * (3 * (K + 1)) as f64;

    let mut limits = Vec::new();
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        limits.push(work / seconds(|| yardstick(&x, &w, cpu.threads(), &mut out)));
        for (rates, w) in rates.iter_mut().zip(&weights) {
            rates.push(work / seconds(|| linear(cpu, &x, w, PREFILL, &mut out)));
        }
        let scores = [0.1; PREFILL * K];
        let forward = || {
            let out = &mut mixed;
            experts_forward(cpu, &x, &experts, &shared, &ids, &scores, K, 10.0, PREFILL, out);
        };
        rates[3].push(mixed_work / seconds(forward));
    }
    println!("f32 gemm                     {:>7.1} GFLOP/s", median(&limits));
    for (format, rates) in formats.iter().zip(&rates) {
        report(&format!("{format:?}, {PREFILL} rows"), "GFLOP/s", rates, &limits);
    }
    let name = format!("{K} of {EXPERTS} experts, {PREFILL} rows");
    report(&name, "GFLOP/s", &rates[3], &limits);
}

/// `out = x @ w` in f32, `w` being `[HIDDEN, INNER]`, the layout that suits the `gemm` crate best.
fn yardstick(x: &[f32], w: &[f32], threads: usize, out: &mut [f32]) {
    let (m, n, k) = (INNER, PREFILL, HIDDEN);
    assert!(x.len() == n * k && w.len() == m * k && out.len() == n * m);
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    // SAFETY: the buffers have the lengths that sizes and strides ask for.
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
