//! The CPU as a device: the reference for every operation.

mod attend;
mod best;
mod compress;
mod device;
mod dispatch;
mod engram;
pub mod experts;
pub mod isa;
mod lanes;
mod limits;
pub mod linear;
pub mod math;
mod memory;
mod norm;
mod paged;
mod parallel;
pub mod philox;
mod read_ahead;
mod rope;
mod route;
mod rows;
pub mod sample;
mod scratch;
mod select;
mod stored;
mod streams;
mod tile;
mod transpose;

pub use isa::Isa;
pub use limits::Read;
pub use memory::Buffer;

use crate::error::DeviceError;
use crate::ops::Result;

/// A CPU: a pool of threads and an instruction set.
pub struct Cpu {
    pool: rayon::ThreadPool,
    isa: Isa,
}

/// Most threads of a pool.
pub const MOST_THREADS: usize = 1024;

impl Cpu {
    /// A CPU with `threads` threads (all that the process may use if `None`) and the best
    /// instruction set of the processor.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        Self::with_isa(threads, Isa::detect())
    }

    /// The same with a plainer instruction set. One that the processor lacks is replaced by the
    /// best that it has.
    pub fn with_isa(threads: Option<usize>, isa: Isa) -> Result<Self> {
        let threads = threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
            .max(1);
        if threads > MOST_THREADS {
            let reason = format!("at most {MOST_THREADS} are of use");
            return Err(DeviceError::Threads { threads, reason });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("cpu-{i}"))
            .build()
            .map_err(|e| DeviceError::Threads { threads, reason: e.to_string() })?;
        Ok(Self { pool, isa: isa.min(Isa::detect()) })
    }

    /// The instruction set in use; the processor has it.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads that operations run on.
    pub fn pool(&self) -> &rayon::ThreadPool {
        &self.pool
    }

    /// How many threads operations run on.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}
