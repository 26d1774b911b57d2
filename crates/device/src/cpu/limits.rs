//! What the processor can do, measured.

use super::Cpu;
use super::dispatch::{LANES, by_isa};
use super::isa::Isa;
use crate::bench::{Limits, Measure};
use crate::ops::{Device, Result};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// Reads more than 1 GB of memory with all threads.
pub struct Read {
    words: Vec<u64>,
}

impl Read {
    const WORDS: usize = 150_000_000;

    /// Fills the memory, so that every page is there.
    pub fn new(cpu: &Cpu) -> Self {
        let fill = || (0..Self::WORDS as u64).into_par_iter().collect();
        Self { words: cpu.pool().install(fill) }
    }

    /// Bytes of a pass.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.words[..])
    }

    /// Reads all once.
    pub fn pass(&self, cpu: &Cpu) {
        let part = self.words.len().div_ceil(cpu.threads());
        let sum: u64 = cpu.pool().install(|| {
            let parts = self.words.par_chunks(part);
            parts.map(sum_words).reduce(|| 0, u64::wrapping_add)
        });
        black_box(sum);
    }

    /// Gigabytes a second in one pass.
    pub fn gb_per_s(&self, cpu: &Cpu) -> f64 {
        let start = Instant::now();
        self.pass(cpu);
        self.bytes() as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// Four streams, so that the processor has enough reads under way.
fn sum_words(words: &[u64]) -> u64 {
    let quarter = words.len() / 4;
    let (a, rest) = words.split_at(quarter);
    let (b, rest) = rest.split_at(quarter);
    let (c, d) = rest.split_at(quarter);
    let mut sums = [0u64; 32];
    let blocks = quarter / 8;
    for i in 0..blocks {
        for (s, part) in [a, b, c, d].into_iter().enumerate() {
            for j in 0..8 {
                sums[s * 8 + j] = sums[s * 8 + j].wrapping_add(part[i * 8 + j]);
            }
        }
    }
    let ends = [&a[blocks * 8..], &b[blocks * 8..], &c[blocks * 8..], &d[blocks * 8..]];
    let tail = ends.iter().flat_map(|e| e.iter());
    sums.iter().chain(tail).fold(0, |sum, &x| sum.wrapping_add(x))
}

/// Sums of lanes that do not wait for each other: enough to keep two units busy, and no more than
/// registers hold (a sum is one register of AVX-512 and two of AVX2).
const WIDE: usize = 10;
const NARROW: usize = 5;

/// `times` multiply-adds to each of `N` sums.
#[inline(always)]
fn multiply_add<const N: usize>(times: usize, out: &mut f32) {
    let (factor, term) = (black_box(0.999f32), black_box(0.001f32));
    let mut sums = [[1.0f32; LANES]; N];
    for _ in 0..times {
        for sum in &mut sums {
            for l in 0..LANES {
                sum[l] = sum[l].mul_add(factor, term);
            }
        }
    }
    *out = sums.as_flattened().iter().sum();
}

by_isa! {
    fn multiply_add_wide(times: usize, out: &mut f32) {
        multiply_add::<WIDE>(times, out);
    }
}

by_isa! {
    fn multiply_add_narrow(times: usize, out: &mut f32) {
        multiply_add::<NARROW>(times, out);
    }
}

/// f32 operations a second of all threads, from registers.
fn operations(cpu: &Cpu) -> f64 {
    let wide = cpu.isa() >= Isa::Avx512;
    let seconds = |times: usize| {
        let start = Instant::now();
        cpu.pool().broadcast(|_| {
            let mut out = 0.0;
            match wide {
                true => multiply_add_wide(cpu.isa(), times, &mut out),
                false => multiply_add_narrow(cpu.isa(), times, &mut out),
            }
            black_box(out);
        });
        start.elapsed().as_secs_f64()
    };
    const FEW: usize = 1 << 16;
    // Some milliseconds, also if the first ones were spent waiting. The shortest counts: the others
    // shared a processor.
    let times = ((FEW as f64 * 5e-3 / seconds(FEW)) as usize).clamp(FEW, 1 << 30);
    let shortest = (0..3).map(|_| seconds(times)).fold(f64::INFINITY, f64::min);
    let sums = if wide { WIDE } else { NARROW };
    (2 * LANES * sums * cpu.threads()) as f64 * times as f64 / shortest
}

impl Measure for Cpu {
    type Yardstick = Read;

    /// Twice the caches that servers have.
    const ROTATED: usize = 512 << 20;
    const SERIES: f64 = 0.03;

    fn yardstick(&self) -> Result<Read> {
        Ok(Read::new(self))
    }

    fn limits(&self, read: &mut Read) -> Result<Limits> {
        let (x, weight, mut out) = (self.alloc(1)?, self.alloc(1)?, self.alloc(1)?);
        const CALLS: usize = 10_000;
        let nothing = |_| black_box(self).rms_norm(&x, &weight, 1.0, 1, 0, &mut out);
        let launch = self.seconds(|| (0..CALLS).try_for_each(nothing))? / CALLS as f64;
        let memory = read.gb_per_s(self) * 1e9;
        Ok(Limits { memory, host: None, arithmetic: operations(self), launch })
    }

    fn seconds(&self, calls: impl FnOnce() -> Result<()> + Send) -> Result<f64> {
        self.run(|| {
            let start = Instant::now();
            calls()?;
            Ok(start.elapsed().as_secs_f64())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_summed() {
        for len in [0, 1, 31, 32, 1000, 1003] {
            let words: Vec<u64> = (0..len).collect();
            assert_eq!(sum_words(&words), words.iter().sum::<u64>());
        }
    }

    #[test]
    fn limits_are_positive() {
        let cpu = Cpu::new(Some(2)).expect("threads start");
        let limits = cpu.limits(&mut Read { words: vec![1; 100_000] }).expect("it runs");
        let all = [limits.memory, limits.arithmetic, limits.launch];
        assert!(all.iter().all(|x| x.is_finite() && *x > 0.0), "{limits:?}");
    }
}
