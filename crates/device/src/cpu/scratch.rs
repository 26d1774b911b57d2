//! Working memory that each thread keeps from one operation to the next.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

thread_local! {
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Values in a cache line.
const LINE: usize = 64 / size_of::<f32>();

/// Values on loan to this thread until dropped.
pub(crate) struct Loan {
    memory: Vec<f32>,
    skip: usize,
    len: usize,
}

/// Lends `len` values that start at a cache line. Their contents are arbitrary.
pub(crate) fn take(len: usize) -> Loan {
    let mut memory = KEPT.with_borrow_mut(Vec::pop).unwrap_or_default();
    if memory.len() < len + LINE {
        memory.resize(len + LINE, 0.0);
    }
    let skip = memory.as_ptr().align_offset(64).min(LINE);
    Loan { memory, skip, len }
}

impl Deref for Loan {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        &self.memory[self.skip..self.skip + self.len]
    }
}

impl DerefMut for Loan {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.skip..self.skip + self.len]
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        KEPT.with_borrow_mut(|kept| kept.push(std::mem::take(&mut self.memory)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loans_nest() {
        for _ in 0..2 {
            let mut a = take(10);
            a.fill(1.0);
            let mut b = take(20);
            b.fill(2.0);
            assert_eq!(b.as_ptr() as usize % 64, 0);
            assert_eq!(a.iter().chain(b.iter()).sum::<f32>(), 50.0);
        }
        KEPT.with_borrow(|kept| assert_eq!(kept.len(), 2));
    }
}
