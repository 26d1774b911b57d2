//! What the card can do, measured.

use super::Cuda;
use super::launch::args;
use super::memory::{Buffer, Ptr};
use super::staging::Pinned;
use super::stored::{Matrix, Placement};
use crate::bench::{Limits, Measure, median};
use crate::ops::{Device, Result};

/// Bytes that are read from device memory, where that is large enough: far more than caches hold.
const MOST: usize = 4 << 30;
/// Bytes that are read from host memory.
const HOST: usize = 64 << 20;
/// Blocks of 256 threads that a multiprocessor holds: all that it can, and half of it.
const READERS: usize = 8;
const MULTIPLIERS: usize = 4;
/// Products that a warp adds to each of its eight sums.
const PRODUCTS: u32 = 2048;
/// Kernels that are started one after the other.
const STARTS: usize = 400;
/// Measurements, of which the median counts.
const TIMES: usize = 3;

/// Memory to read.
pub struct Yardstick {
    memory: Buffer<u8>,
    host: Pinned,
    out: Buffer<u32>,
}

impl Measure for Cuda {
    type Yardstick = Yardstick;

    /// Four times the cache of the largest cards.
    const ROTATED: usize = 256 << 20;
    const SERIES: f64 = 4e-3;

    fn yardstick(&self) -> Result<Yardstick> {
        let bytes = MOST.min(self.memory()?.0 / 8).next_multiple_of(16);
        let mut host = Pinned::new(&self.context, HOST, true)?;
        host.bytes_mut().fill(0);
        Ok(Yardstick { memory: self.alloc(bytes)?, host, out: self.alloc(1)? })
    }

    fn limits(&self, yardstick: &mut Yardstick) -> Result<Limits> {
        let Yardstick { memory, host, out } = yardstick;
        let out = out.head(1);
        let bytes = memory.len();
        let memory = self.often(|| self.read_limit(memory.head(bytes), bytes, out))?;
        let host_ptr = host.ptr()?;
        let host = self.often(|| self.read_limit(host_ptr, HOST, out))?;
        let blocks = MULTIPLIERS * self.info().multiprocessors;
        let multiply = || {
            let args = args![PRODUCTS, out];
            self.launch("limits", "limit_multiply", [blocks, 1, 1], 256, 0, args)
        };
        // Two operations a multiply-add, in products of 16 x 16 x 8 of eight warps a block.
        let operations = (2 * 16 * 16 * 8 * 8 * 8 * PRODUCTS as usize * blocks) as f64;
        let arithmetic = operations / self.often(multiply)?;
        let start = || self.launch("limits", "limit_nothing", [1, 1, 1], 32, 0, &[]);
        let launch = self.often(|| (0..STARTS).try_for_each(|_| start()))? / STARTS as f64;
        let (memory, host) = (bytes as f64 / memory, HOST as f64 / host);
        Ok(Limits { memory, host: Some(host), arithmetic, launch })
    }

    fn is_on_host(&self, matrix: &Matrix) -> bool {
        matrix.placement() == Placement::Host
    }

    fn seconds(&self, calls: impl FnOnce() -> Result<()> + Send) -> Result<f64> {
        Ok(f64::from(self.time(calls)?) / 1e3)
    }
}

impl Cuda {
    fn read_limit(&self, from: Ptr, bytes: usize, out: Ptr) -> Result<()> {
        let blocks = [READERS * self.info().multiprocessors, 1, 1];
        let args = args![from, (bytes / 16) as u64, out];
        self.launch("limits", "limit_read", blocks, 256, 0, args)
    }

    /// Median seconds of some measurements, after one that does not count.
    fn often(&self, calls: impl Fn() -> Result<()> + Send + Sync) -> Result<f64> {
        self.seconds(&calls)?;
        let mut times = (0..TIMES).map(|_| self.seconds(&calls)).collect::<Result<Vec<f64>>>()?;
        Ok(median(&mut times))
    }
}
