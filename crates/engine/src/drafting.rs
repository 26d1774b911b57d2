//! How many tokens to draft, and how many drafts to verify: plain arithmetic, without a device.
//!
//! A draft is worth verifying if the time of one more row is less than what the chance of a token is
//! worth. Chances come from the draft stages' confidences, times from a [`CostCurve`] that is
//! measured when an engine starts. The scheduler chooses how many drafts a step verifies in all
//! ([`best_count`]), from the confidences of two rounds before: were the drafts at hand to decide
//! whether they are verified, the rejection scheme's choice would be biased. Which ones these are
//! ([`share`]) follows from the newest confidences, and is worked out where they are: by the worker.

mod costs;
mod known;
mod policy;
mod stored;

pub use costs::{CostCurve, Costs};
pub use known::KnownDrafts;
pub use policy::{DraftPlan, Policy};
pub use stored::StoredCosts;

/// Chances that drafts are accepted, for a block with these confidences: products of the chances
/// that each is, given that the ones before are. `correction` (one a position, 1 where it ends)
/// multiplies confidences, which stay below 1.
pub fn rates(confidences: &[f32], correction: &[f32]) -> Vec<f32> {
    let corrections = correction.iter().copied().chain(std::iter::repeat(1.0));
    let mut rate = 1.0;
    let each = confidences.iter().zip(corrections).map(|(&confidence, correction)| {
        let chance = confidence * correction;
        rate *= if chance.is_nan() { 0.0 } else { chance.clamp(0.0, 1.0) };
        rate
    });
    each.collect()
}

/// How many drafts to verify in all, and the tokens a second that this promises: the first best one
/// of the counts that take drafts in descending order of their rates. `seconds` is the time of a
/// step with so many rows; one row a sequence is run in any case.
pub fn best_count<R: AsRef<[f32]>>(rates: &[R], seconds: impl Fn(usize) -> f64) -> (usize, f64) {
    let mut all: Vec<f32> = rates.iter().flat_map(|r| r.as_ref()).copied().collect();
    all.retain(|&rate| rate > 0.0);
    all.sort_unstable_by(|a, b| b.total_cmp(a));
    let sequences = rates.len();
    let mut expected = sequences as f64;
    let mut best = (0, expected / seconds(sequences));
    for (i, rate) in all.into_iter().enumerate() {
        expected += f64::from(rate);
        let speed = expected / seconds(sequences + i + 1);
        if speed > best.1 {
            best = (i + 1, speed);
        }
    }
    best
}

/// How many drafts each sequence verifies when `count` drafts are verified in all: those of the
/// highest rates, the first sequences on ties. Rates of a sequence never rise, so they are always
/// its first ones; drafts of rate 0 are left out.
pub fn share<R: AsRef<[f32]>>(rates: &[R], count: usize) -> Vec<usize> {
    let mut all: Vec<(f32, usize)> = rates
        .iter()
        .enumerate()
        .flat_map(|(sequence, rates)| rates.as_ref().iter().map(move |&rate| (rate, sequence)))
        .filter(|&(rate, _)| rate > 0.0)
        .collect();
    // Stable: on ties the order of sequences stays.
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut shares = vec![0; rates.len()];
    all.into_iter().take(count).for_each(|(_, sequence)| shares[sequence] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rates_are_products_of_corrected_confidences() {
        assert_eq!(rates(&[0.5, 0.5, 0.5], &[]), [0.5, 0.25, 0.125]);
        assert_eq!(rates(&[0.5, 0.5], &[4.0, 0.5]), [1.0, 0.25]);
        assert_eq!(rates(&[0.5, f32::NAN, 1.0], &[]), [0.5, 0.0, 0.0]);
    }

    #[test]
    fn free_rows_are_all_used_and_dear_ones_not() {
        let rates = [vec![0.9, 0.8], vec![0.5, 0.1]];
        let (count, speed) = best_count(&rates, |_| 1.0);
        assert!(count == 4 && (speed - 4.3).abs() < 1e-6, "{count}, {speed}");
        assert_eq!(best_count(&rates, |rows| rows as f64), (0, 1.0));
        // Two of the four: tokens a second 2, 2.9, 3.7, 4.2, 4.3 over 1, 1, 1, 1.3, 1.6.
        let seconds = |rows: usize| 1.0 + 0.3 * (rows as f64 - 4.0).max(0.0);
        assert_eq!(best_count(&rates, seconds).0, 2);
        assert_eq!(best_count(&[] as &[Vec<f32>], |_| 1.0).0, 0);
    }

    #[test]
    fn the_likeliest_drafts_are_verified() {
        let rates = [vec![0.9, 0.3], vec![0.5, 0.4, 0.3], vec![], vec![0.0]];
        assert_eq!(share(&rates, 3), [1, 2, 0, 0]);
        assert_eq!(share(&rates, 4), [2, 2, 0, 0]);
        assert_eq!(share(&rates, 100), [2, 3, 0, 0]);
    }

    proptest! {
        #[test]
        fn shares_are_the_best_prefixes(
            blocks in proptest::collection::vec(
                proptest::collection::vec(0.0f32..1.0, 0..6), 0..6),
            count in 0usize..20,
        ) {
            let all: Vec<Vec<f32>> = blocks.iter().map(|c| rates(c, &[])).collect();
            let shares = share(&all, count);
            let possible = all.iter().flatten().filter(|&&r| r > 0.0).count();
            prop_assert_eq!(shares.iter().sum::<usize>(), count.min(possible));
            let taken = all.iter().zip(&shares).flat_map(|(r, &n)| &r[..n]);
            let least = taken.copied().fold(f32::INFINITY, f32::min);
            let left = all.iter().zip(&shares).flat_map(|(r, &n)| &r[n..]);
            prop_assert!(left.copied().fold(0.0, f32::max) <= least);
        }
    }
}
