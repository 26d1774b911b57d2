//! What steps and drafting cost.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Times by size, measured when the device did nothing else.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostCurve {
    /// Rows of a step that decodes, and its seconds without drafting; rows ascend, seconds do not
    /// fall.
    pub steps: Vec<(usize, f64)>,
    /// Sequences, and the seconds of drafting a block for each.
    pub drafts: Vec<(usize, f64)>,
}

impl CostCurve {
    /// A curve through measured points.
    pub fn new(steps: Vec<(usize, f64)>, drafts: Vec<(usize, f64)>) -> Self {
        let (mut steps, mut drafts) = (steps, drafts);
        rise(&mut steps);
        rise(&mut drafts);
        Self { steps, drafts }
    }

    /// Whether nothing has been measured.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Seconds of a step with so many rows.
    pub fn step(&self, rows: usize) -> f64 {
        between(&self.steps, rows)
    }

    /// Seconds of drafting for so many sequences.
    pub fn draft(&self, sequences: usize) -> f64 {
        between(&self.drafts, sequences)
    }
}

/// More work does not take less time: where it seems so, something disturbed the measurement.
fn rise(points: &mut [(usize, f64)]) {
    points.sort_unstable_by_key(|&(size, _)| size);
    let mut least = f64::INFINITY;
    for (_, seconds) in points.iter_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
}

/// Linear between points, and beyond the last ones as between them.
fn between(points: &[(usize, f64)], size: usize) -> f64 {
    let next = points.partition_point(|&(s, _)| s < size).clamp(1, points.len().max(2) - 1);
    match (points.get(next - 1), points.get(next)) {
        (Some(&(a, from)), Some(&(b, to))) if size > a && b > a => {
            from + (to - from) * (size - a) as f64 / (b - a) as f64
        }
        (Some(&(_, seconds)), _) => seconds,
        _ => 0.0,
    }
}

/// Samples kept for each number of rows.
const SAMPLES: usize = 31;

/// Fewest samples of a number of rows that count.
const ENOUGH: usize = 10;

/// Samples of drafting kept for each number of sequences, and the fewest that count.
const DRAFT_SAMPLES: usize = 9;
const DRAFT_ENOUGH: usize = 5;

/// A curve, corrected by what steps really take: longer texts make every row dearer.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    curve: CostCurve,
    /// Seconds a row above the curve, by rows, and the middle one.
    excess: BTreeMap<usize, (VecDeque<f64>, f64)>,
    /// Seconds that every row takes beyond the curve.
    slope: f64,
    /// Seconds of drafting, by sequences.
    drafts: BTreeMap<usize, VecDeque<f64>>,
}

impl Costs {
    /// Starts from a curve.
    pub fn new(curve: CostCurve) -> Self {
        Self { curve, ..Self::default() }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.curve.is_empty()
    }

    /// Seconds of a step with so many rows, drafting left out.
    pub fn step(&self, rows: usize) -> f64 {
        self.curve.step(rows) + self.slope * rows as f64
    }

    /// Seconds of drafting for so many sequences.
    pub fn draft(&self, sequences: usize) -> f64 {
        match self.drafts.get(&sequences) {
            Some(samples) if samples.len() >= DRAFT_ENOUGH => median(samples),
            _ => self.curve.draft(sequences),
        }
    }

    /// Notes what a step took that only decoded.
    pub fn measured_step(&mut self, rows: usize, seconds: f64) {
        if rows == 0 || self.is_empty() {
            return;
        }
        let excess = (seconds - self.curve.step(rows)) / rows as f64;
        let (samples, middle) = self.excess.entry(rows).or_default();
        add(samples, excess, SAMPLES);
        *middle = median(samples);
        let enough = self.excess.values().filter(|(samples, _)| samples.len() >= ENOUGH);
        let medians: VecDeque<f64> = enough.map(|&(_, middle)| middle).collect();
        self.slope = if medians.is_empty() { 0.0 } else { median(&medians).max(0.0) };
    }

    /// Notes what drafting took.
    pub fn measured_draft(&mut self, sequences: usize, seconds: f64) {
        add(self.drafts.entry(sequences).or_default(), seconds, DRAFT_SAMPLES);
    }
}

fn add(samples: &mut VecDeque<f64>, new: f64, most: usize) {
    if samples.len() == most {
        samples.pop_front();
    }
    samples.push_back(new);
}

/// The middle one; 0 of none.
fn median(samples: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = samples.iter().copied().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve() -> CostCurve {
        CostCurve::new(vec![(1, 1.0), (2, 1.5), (6, 3.5)], vec![(1, 0.1), (4, 0.4)])
    }

    #[test]
    fn sizes_between_points_are_interpolated() {
        let curve = curve();
        let steps: Vec<f64> = [0, 1, 2, 4, 6, 10].iter().map(|&n| curve.step(n)).collect();
        assert_eq!(steps, [1.0, 1.0, 1.5, 2.5, 3.5, 5.5]);
        assert!((curve.draft(2) - 0.2).abs() < 1e-9);
        assert_eq!(CostCurve::default().step(3), 0.0);
        assert_eq!(CostCurve::new(vec![(1, 2.0)], vec![]).step(7), 2.0);
    }

    #[test]
    fn a_disturbed_point_is_pulled_down() {
        let curve = CostCurve::new(vec![(1, 1.0), (2, 9.0), (3, 2.0)], vec![]);
        assert_eq!(curve.steps, [(1, 1.0), (2, 2.0), (3, 2.0)]);
    }

    #[test]
    fn what_rows_really_take_is_added() {
        let mut costs = Costs::new(curve());
        for _ in 0..ENOUGH - 1 {
            costs.measured_step(2, 2.5);
        }
        assert_eq!(costs.step(2), 1.5, "too few samples");
        costs.measured_step(2, 2.5);
        assert_eq!(costs.step(2), 2.5);
        assert_eq!(costs.step(6), 6.5, "half a second more for each row");
        // Faster than the curve: it stays.
        (0..SAMPLES).for_each(|_| costs.measured_step(2, 0.5));
        assert_eq!(costs.step(2), 1.5);
    }

    #[test]
    fn drafting_is_as_it_was_lately() {
        let mut costs = Costs::new(curve());
        (0..DRAFT_ENOUGH).for_each(|_| costs.measured_draft(1, 0.3));
        assert_eq!(costs.draft(1), 0.3);
        assert!((costs.draft(2) - 0.2).abs() < 1e-9);
    }
}
