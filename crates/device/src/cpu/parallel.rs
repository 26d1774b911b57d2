//! Cutting rows into tasks. Results never depend on the cut.

use crate::cpu::Cpu;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Arithmetic operations below which a task is not worth handing to another thread.
const LEAST_WORK: usize = 32 * 1024;

impl Cpu {
    /// Rows a task should take, of `rows` rows with about `work` operations each.
    pub(crate) fn rows_per_task(&self, rows: usize, work: usize) -> usize {
        if self.threads() == 1 {
            return rows.max(1);
        }
        let least = LEAST_WORK.div_ceil(work.max(1));
        rows.div_ceil(4 * self.threads()).max(least).min(rows).max(1)
    }

    /// Calls `f(first row, rows)` for blocks that cover the first `rows` rows of `out`, each of
    /// `width` elements.
    pub(crate) fn for_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        rows: usize,
        work: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        if rows == 0 || width == 0 {
            return;
        }
        let out = &mut out[..rows * width];
        let block = self.rows_per_task(rows, work);
        if block >= rows {
            return f(0, out);
        }
        self.pool().install(|| {
            out.par_chunks_mut(block * width).enumerate().for_each(|(i, out)| f(i * block, out));
        });
    }

    /// The same for two outputs.
    pub(crate) fn for_rows2<A: Send, B: Send>(
        &self,
        a: (&mut [A], usize),
        b: (&mut [B], usize),
        rows: usize,
        work: usize,
        f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        if rows == 0 || a.1 == 0 || b.1 == 0 {
            return;
        }
        let (first, second) = (&mut a.0[..rows * a.1], &mut b.0[..rows * b.1]);
        let block = self.rows_per_task(rows, work);
        if block >= rows {
            return f(0, first, second);
        }
        self.pool().install(|| {
            let second = second.par_chunks_mut(block * b.1);
            let tasks = first.par_chunks_mut(block * a.1).zip(second).enumerate();
            tasks.for_each(|(i, (first, second))| f(i * block, first, second));
        });
    }

    /// Calls `f` for every task, on all threads, with scratch that a thread reuses.
    pub(crate) fn for_each_with<T: Send, S: Send>(
        &self,
        tasks: Vec<T>,
        scratch: impl Fn() -> S + Sync + Send,
        f: impl Fn(&mut S, T) + Sync + Send,
    ) {
        if tasks.len() <= 1 || self.threads() == 1 {
            let mut scratch = scratch();
            return tasks.into_iter().for_each(|task| f(&mut scratch, task));
        }
        self.pool().install(|| tasks.into_par_iter().for_each_init(scratch, f));
    }

    /// The results of `f` for every task, in order of the tasks. Threads take tasks from the front:
    /// with long ones first, no thread waits long for another at the end.
    pub(crate) fn map<T: Sync, R: Send>(
        &self,
        tasks: &[T],
        f: impl Fn(&T) -> R + Sync + Send,
    ) -> Vec<R> {
        let threads = self.threads().min(tasks.len());
        if threads <= 1 {
            return tasks.iter().map(f).collect();
        }
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::with_capacity(tasks.len()));
        let work = || {
            let mut own = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(task) = tasks.get(i) else { break };
                own.push((i, f(task)));
            }
            results.lock().unwrap_or_else(PoisonError::into_inner).append(&mut own);
        };
        self.pool().install(|| {
            rayon::scope(|scope| {
                (1..threads).for_each(|_| scope.spawn(|_| work()));
                work();
            });
        });
        let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_unstable_by_key(|(i, _)| *i);
        results.into_iter().map(|(_, result)| result).collect()
    }
}
