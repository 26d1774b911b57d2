//! Which rows go on through the decoder. Prompt rows stop at the boundary, or at the decoder layer
//! from which on nothing that matters depends on them ([`PlanSequence::rows_from`]).

use crate::plan::{PlanSequence, StepPlan};

/// Rows that go on from a decoder layer on, where they or their windows differ from those of the
/// layer before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// The layer, counted from the decoder's first.
    pub depth: usize,
    /// Numbers of the rows in the step, ascending.
    pub rows: Vec<u32>,
    /// Their numbers among the rows of the layer before.
    pub keep: Vec<u32>,
    /// First positions in their windows.
    pub window_from: Vec<u32>,
    /// By sequence: position of its first row here.
    pub fresh_from: Vec<u32>,
    /// By sequence: number of its first row here.
    pub first_row: Vec<u32>,
}

/// What `layers` decoder layers run of a plan; nothing where they run all rows with whole windows.
pub fn kept(plan: &StepPlan, layers: usize, window: u32) -> Vec<Kept> {
    let mut all = Vec::new();
    // By sequence: first row, and how far back its windows reach.
    let mut before: Vec<(u32, u32)> =
        plan.sequences.iter().map(|q| (q.start, q.start.saturating_sub(window - 1))).collect();
    for depth in 0..layers {
        let from = |q: &PlanSequence| {
            let (rows_from, window_from) = q.rows_from((layers - depth) as u32, window);
            let from = rows_from.clamp(q.start, q.end());
            (from, window_from.max(from.saturating_sub(window - 1)))
        };
        let now: Vec<(u32, u32)> = plan.sequences.iter().map(from).collect();
        if now != before {
            all.push(Kept::new(plan, depth, &before, &now, window));
            before = now;
        }
    }
    all
}

impl Kept {
    fn new(
        plan: &StepPlan,
        depth: usize,
        before: &[(u32, u32)],
        now: &[(u32, u32)],
        window: u32,
    ) -> Self {
        let mut kept = Kept { depth, ..Kept::default() };
        let (mut step_row, mut row_before) = (0, 0);
        for ((q, &(old, _)), &(from, window_from)) in plan.sequences.iter().zip(before).zip(now) {
            kept.fresh_from.push(from);
            kept.first_row.push(kept.rows.len() as u32);
            for p in from..q.end() {
                kept.rows.push(step_row + (p - q.start));
                kept.keep.push(row_before + (p - old));
                kept.window_from.push((p + 1).saturating_sub(window).max(window_from).min(p + 1));
            }
            step_row += q.end() - q.start;
            row_before += q.end() - old;
        }
        kept
    }
}
