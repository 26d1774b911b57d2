//! Numbered places with reference counts: pages, and slots.

use std::collections::VecDeque;

/// Places `0..size`. A place that nobody refers to is free; freed ones are reused last.
#[derive(Clone, Debug)]
pub struct Pool {
    refs: Vec<u32>,
    free: VecDeque<u32>,
}

impl Pool {
    /// A pool of free places.
    pub fn new(size: usize) -> Self {
        Self { refs: vec![0; size], free: (0..size as u32).collect() }
    }

    /// Takes a free place, with one reference.
    pub fn take(&mut self) -> Option<u32> {
        let place = self.free.pop_front()?;
        self.refs[place as usize] = 1;
        Some(place)
    }

    /// Adds a reference to a taken place.
    ///
    /// # Panics
    /// If the place is free.
    pub fn retain(&mut self, place: u32) {
        let refs = &mut self.refs[place as usize];
        assert!(*refs > 0, "place {place} is free");
        *refs += 1;
    }

    /// Drops a reference; the last one frees the place.
    ///
    /// # Panics
    /// If the place is free.
    pub fn release(&mut self, place: u32) {
        let refs = &mut self.refs[place as usize];
        assert!(*refs > 0, "place {place} is free");
        *refs -= 1;
        if *refs == 0 {
            self.free.push_back(place);
        }
    }

    /// References to a place.
    pub fn refs(&self, place: u32) -> u32 {
        self.refs[place as usize]
    }

    /// Free places.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// All places.
    pub fn size(&self) -> usize {
        self.refs.len()
    }

    /// Taken places.
    pub fn used(&self) -> usize {
        self.size() - self.available()
    }
}

/// What sequences and the prefix cache share.
#[derive(Clone, Debug)]
pub struct Pools {
    /// Pages of compressed rows and index keys.
    pub pages: Pool,
    /// Slots of rings and pending rows, of running sequences and of snapshots.
    pub slots: Pool,
}

impl Pools {
    /// Free pools.
    pub fn new(pages: usize, slots: usize) -> Self {
        Self { pages: Pool::new(pages), slots: Pool::new(slots) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_return_to_zero(ops in proptest::collection::vec((0u8..3, 0usize..64), 0..400)) {
            let mut pool = Pool::new(7);
            let mut held: Vec<u32> = Vec::new();
            for (op, pick) in ops {
                match op {
                    0 => match pool.take() {
                        Some(place) => {
                            prop_assert!(!held.contains(&place));
                            held.push(place);
                        }
                        None => prop_assert_eq!(pool.available(), 0),
                    },
                    1 if !held.is_empty() => {
                        let place = held[pick % held.len()];
                        pool.retain(place);
                        held.push(place);
                    }
                    _ if !held.is_empty() => pool.release(held.swap_remove(pick % held.len())),
                    _ => {}
                }
                let mut distinct = held.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(pool.used(), distinct.len());
                for &place in &distinct {
                    let count = held.iter().filter(|&&p| p == place).count();
                    prop_assert_eq!(pool.refs(place) as usize, count);
                }
            }
            held.drain(..).for_each(|place| pool.release(place));
            prop_assert_eq!(pool.used(), 0);
        }
    }
}
