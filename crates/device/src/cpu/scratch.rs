//! Working memory that each thread keeps from one operation to the next.

use std::cell::RefCell;

thread_local! {
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Lends `len` values that start at a cache line. Their contents are arbitrary.
pub(crate) fn with<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut kept = KEPT.with_borrow_mut(Vec::pop).unwrap_or_default();
    let spare = LINE / size_of::<f32>();
    if kept.len() < len + spare {
        kept.resize(len + spare, 0.0);
    }
    let skip = kept.as_ptr().align_offset(LINE).min(spare);
    let result = f(&mut kept[skip..skip + len]);
    KEPT.with_borrow_mut(|stack| stack.push(kept));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loans_nest() {
        let sum = with(10, |a| {
            a.fill(1.0);
            with(20, |b| {
                b.fill(2.0);
                assert_eq!(b.as_ptr() as usize % LINE, 0);
                a.iter().sum::<f32>() + b.iter().sum::<f32>()
            })
        });
        assert_eq!(sum, 50.0);
    }
}
