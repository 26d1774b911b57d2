//! Reading rows of a mapped table before they are wanted.

use crate::tensor::StoredMatrix;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Threads that wait for pages. They sleep on the disk, not on a core, so there are more of them
/// than cores.
const READERS: usize = 16;
/// Page size assumed when pages are touched; smaller than real ones does no harm.
const PAGE: usize = 4096;
/// Rows that the caller touches itself while the table is in memory: waking a thread takes longer.
const FEW: usize = 1024;
/// A row that takes longer came from a disk.
const SLOW: Duration = Duration::from_micros(20);
/// Calls after a slow row that leave all reading to the threads.
const COLD_CALLS: u32 = 16;

/// Threads that read rows, and whether those of late came from a disk.
pub(crate) struct ReadAhead {
    jobs: Sender<Job>,
    state: Arc<State>,
}

struct Job {
    table: StoredMatrix,
    ids: Vec<u64>,
}

struct State {
    slow: Duration,
    /// Calls left that count as cold.
    cold: AtomicU32,
}

impl ReadAhead {
    /// Starts the threads; `None` where they cannot start.
    pub fn start() -> Option<Self> {
        Self::with_slow(SLOW)
    }

    fn with_slow(slow: Duration) -> Option<Self> {
        let (jobs, inbox) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        let state = Arc::new(State { slow, cold: AtomicU32::new(0) });
        for i in 0..READERS {
            let (inbox, state) = (inbox.clone(), state.clone());
            let thread = std::thread::Builder::new().name(format!("engram-{i}"));
            thread.spawn(move || state.read_all(&inbox)).ok()?;
        }
        Some(Self { jobs, state })
    }

    /// Starts reading table rows; ids outside the table are skipped. Returns how many rows are left
    /// to the threads. Waits for the disk at most once: for the first row that was expected in
    /// memory and is not.
    pub fn begin(&self, table: &StoredMatrix, row_ids: &[u64]) -> usize {
        let rows = table.rows as u64;
        let mut ids: Vec<u64> = row_ids.iter().copied().filter(|id| *id < rows).collect();
        ids.sort_unstable();
        ids.dedup();
        let cold = self.state.cold.load(Ordering::Relaxed);
        self.state.cold.store(cold.saturating_sub(1), Ordering::Relaxed);
        let mut left = &ids[..];
        if cold == 0 && ids.len() <= FEW {
            left = &ids[self.state.read(table, &ids)..];
        }
        for ids in left.chunks(left.len().div_ceil(READERS).max(1)) {
            let _ = self.jobs.send(Job { table: table.clone(), ids: ids.to_vec() });
        }
        left.len()
    }
}

impl State {
    fn read_all(&self, inbox: &Mutex<Receiver<Job>>) {
        loop {
            let job = match inbox.lock() {
                Ok(inbox) => inbox.recv(),
                Err(_) => return,
            };
            let Ok(Job { table, mut ids }) = job else { return };
            while !ids.is_empty() {
                let done = self.read(&table, &ids);
                ids.drain(..done);
            }
        }
    }

    /// Reads rows up to the first slow one, and returns how many.
    fn read(&self, table: &StoredMatrix, ids: &[u64]) -> usize {
        let mut before = Instant::now();
        for (i, &id) in ids.iter().enumerate() {
            touch(table.row(id as usize));
            touch(table.row_scales(id as usize));
            let now = Instant::now();
            if now - before >= self.slow {
                self.cold.store(COLD_CALLS, Ordering::Relaxed);
                return i + 1;
            }
            before = now;
        }
        ids.len()
    }
}

/// Reads a byte of every page of `bytes`.
fn touch(bytes: &[u8]) {
    for byte in bytes.iter().step_by(PAGE).chain(bytes.last()) {
        std::hint::black_box(*byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Format;
    use bytes::Bytes;

    fn table(rows: usize) -> StoredMatrix {
        StoredMatrix::new(Format::Bf16, rows, 4, vec![0; rows * 8].into(), Bytes::new())
    }

    #[test]
    fn few_rows_in_memory_are_read_at_once() {
        let ahead = ReadAhead::with_slow(Duration::MAX).expect("threads start");
        let table = table(3000);
        assert_eq!(ahead.begin(&table, &[]), 0);
        for _ in 0..100 {
            assert_eq!(ahead.begin(&table, &[2999, 0, 17, 17, 3000, u64::MAX]), 0);
        }
        let many: Vec<u64> = (0..2 * FEW as u64).collect();
        assert_eq!(ahead.begin(&table, &many), many.len());
    }

    #[test]
    fn rows_from_a_disk_are_left_to_the_threads() {
        let ahead = ReadAhead::with_slow(Duration::ZERO).expect("threads start");
        let table = table(100);
        // The first row shows that it is slow.
        assert_eq!(ahead.begin(&table, &[1, 2, 3, 4, 4, 100]), 3);
        for _ in 0..3 * COLD_CALLS {
            let left = ahead.begin(&table, &[1, 2, 3, 4]);
            assert!(left >= 3, "{left}");
        }
    }
}
