//! Numbered places with reference counts: pages, and slots.

use std::collections::VecDeque;

/// Places `0..size`. A place that nobody refers to is free; freed ones are reused last. References
/// of the prefix cache are told apart: it gives them up when others want the place.
#[derive(Clone, Debug)]
pub struct Pool {
    /// All references.
    refs: Vec<u32>,
    /// Those of the prefix cache.
    cached: Vec<u32>,
    free: VecDeque<u32>,
    reclaimable: usize,
}

impl Pool {
    /// A pool of free places.
    pub fn new(size: usize) -> Self {
        let free = (0..size as u32).collect();
        Self { refs: vec![0; size], cached: vec![0; size], free, reclaimable: 0 }
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
        let (refs, cached) = self.counts(place);
        assert!(*refs > 0, "place {place} is free");
        let reclaimed = *refs == *cached;
        *refs += 1;
        self.reclaimable -= usize::from(reclaimed);
    }

    /// Drops a reference; the last one frees the place.
    ///
    /// # Panics
    /// If the place has none, but for those of the prefix cache.
    pub fn release(&mut self, place: u32) {
        let (refs, cached) = self.counts(place);
        assert!(*refs > *cached, "place {place} is free");
        *refs -= 1;
        match (*refs, *refs == *cached) {
            (0, _) => self.free.push_back(place),
            (_, only_cached) => self.reclaimable += usize::from(only_cached),
        }
    }

    /// Adds a reference of the prefix cache to a taken place.
    ///
    /// # Panics
    /// If the place is free.
    pub fn retain_cached(&mut self, place: u32) {
        let (refs, cached) = self.counts(place);
        assert!(*refs > 0, "place {place} is free");
        *refs += 1;
        *cached += 1;
    }

    /// Drops a reference of the prefix cache; the last one of all frees the place.
    ///
    /// # Panics
    /// If the prefix cache has none.
    pub fn release_cached(&mut self, place: u32) {
        let (refs, cached) = self.counts(place);
        assert!(*cached > 0, "place {place} is not cached");
        *refs -= 1;
        *cached -= 1;
        if *refs == 0 {
            self.free.push_back(place);
            self.reclaimable -= 1;
        }
    }

    fn counts(&mut self, place: u32) -> (&mut u32, &mut u32) {
        (&mut self.refs[place as usize], &mut self.cached[place as usize])
    }

    /// References to a place.
    pub fn refs(&self, place: u32) -> u32 {
        self.refs[place as usize]
    }

    /// Free places.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Taken places to which only the prefix cache refers: those that it can free.
    pub fn reclaimable(&self) -> usize {
        self.reclaimable
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
        fn counts_return_to_zero(
            ops in proptest::collection::vec((0u8..5, 0usize..64, any::<bool>()), 0..400),
        ) {
            let mut pool = Pool::new(7);
            // Places, and whether the reference is one of the cache.
            let mut held: Vec<(u32, bool)> = Vec::new();
            let release = |pool: &mut Pool, (place, cached)| match cached {
                true => pool.release_cached(place),
                false => pool.release(place),
            };
            for (op, pick, cached) in ops {
                match op {
                    0 => match pool.take() {
                        Some(place) => {
                            prop_assert!(held.iter().all(|&(other, _)| other != place));
                            held.push((place, false));
                        }
                        None => prop_assert_eq!(pool.available(), 0),
                    },
                    1 | 2 if !held.is_empty() => {
                        let (place, _) = held[pick % held.len()];
                        if cached { pool.retain_cached(place) } else { pool.retain(place) }
                        held.push((place, cached));
                    }
                    _ if !held.is_empty() => {
                        let reference = held.swap_remove(pick % held.len());
                        release(&mut pool, reference);
                    }
                    _ => {}
                }
                let count = |place: u32, which: fn(bool) -> bool| {
                    held.iter().filter(|&&(p, cached)| p == place && which(cached)).count()
                };
                let (mut used, mut reclaimable) = (0, 0);
                for place in 0..7 {
                    prop_assert_eq!(pool.refs(place) as usize, count(place, |_| true));
                    used += usize::from(count(place, |_| true) > 0);
                    let others = count(place, |cached| !cached);
                    reclaimable += usize::from(others == 0 && count(place, |_| true) > 0);
                }
                prop_assert_eq!((pool.used(), pool.reclaimable()), (used, reclaimable));
            }
            held.drain(..).for_each(|reference| release(&mut pool, reference));
            prop_assert_eq!((pool.used(), pool.reclaimable()), (0, 0));
        }
    }
}
