//! The best few of many scored indices, in bounded memory and independent of the order they come in.

use crate::ops::ABSENT;

/// A score as an integer that sorts as the score does: zeros are equal, NaN lies below everything.
#[inline(always)]
pub(crate) fn rank(score: f32) -> u32 {
    // Adding 0 turns -0 into +0.
    let bits = (score + 0.0).to_bits();
    let rank = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    if score.is_nan() { 0 } else { rank }
}

/// A ranked index; larger is better, and of equal ranks the lower index.
#[inline(always)]
pub(crate) fn entry(rank: u32, index: usize) -> u64 {
    u64::from(rank) << 32 | u64::from(!(index as u32))
}

/// The index of an entry.
#[inline(always)]
pub(crate) fn index_of(entry: u64) -> u32 {
    !(entry as u32)
}

/// The `k` largest of the entries pushed so far, and at most as many more.
pub(crate) struct Best {
    k: usize,
    entries: Vec<u64>,
    /// No entry up to here can be among the best.
    floor: Option<u64>,
}

impl Best {
    pub(crate) fn new(k: usize) -> Self {
        Self { k, entries: Vec::new(), floor: None }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, entry: u64) {
        if self.floor.is_none_or(|floor| entry > floor) {
            self.entries.push(entry);
            if self.entries.len() >= 2 * self.k.max(1) {
                self.prune();
            }
        }
    }

    pub(crate) fn extend(&mut self, other: Best) {
        other.entries.into_iter().for_each(|entry| self.push(entry));
    }

    fn prune(&mut self) {
        if self.k == 0 {
            self.entries.clear();
        } else if self.entries.len() > self.k {
            let (_, kth, _) = self.entries.select_nth_unstable_by(self.k - 1, |a, b| b.cmp(a));
            self.floor = Some(*kth);
            self.entries.truncate(self.k);
        }
    }

    /// Writes the indices of the best in ascending order, then [`ABSENT`].
    pub(crate) fn write_ascending(mut self, out: &mut [u32]) {
        self.prune();
        let count = self.entries.len();
        out[..count].iter_mut().zip(self.entries).for_each(|(out, entry)| *out = index_of(entry));
        out[..count].sort_unstable();
        out[count..].fill(ABSENT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_sort_as_scores() {
        let scores = [f32::NAN, f32::NEG_INFINITY, -1.0, -f32::MIN_POSITIVE, 0.0, 1e-45, 2.0];
        let ranks = scores.map(rank);
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
        assert_eq!(rank(-0.0), rank(0.0));
        assert!(rank(f32::INFINITY) < u32::MAX);
    }

    proptest! {
        #[test]
        fn best_equals_sorting(scores in prop::collection::vec(0u8..6, 0..200), k in 0usize..40) {
            let mut best = Best::new(k);
            let mut all = Vec::new();
            for (i, score) in scores.iter().enumerate() {
                best.push(entry(rank(f32::from(*score) - 3.0), i));
                all.push((-(i32::from(*score)), i as u32));
            }
            all.sort_unstable();
            let mut want: Vec<u32> = all.iter().take(k).map(|(_, i)| *i).collect();
            want.sort_unstable();
            want.resize(k, ABSENT);
            let mut got = vec![7; k];
            best.write_ascending(&mut got);
            prop_assert_eq!(got, want);
        }
    }
}
