//! The scheduler's part: whether to draft, and how many drafts to verify in all.

use super::{CostCurve, Costs, best_count, rates};

/// Weight of a new figure in an average.
const FRESH: f64 = 0.1;

/// Rounds of drafting before it is given up for a small loss. For a large one it is after a few.
const ROUNDS: usize = 8;

/// Steps without drafting after it was first given up, and at most.
const SHORTEST_PAUSE: usize = 32;
const LONGEST_PAUSE: usize = 512;

/// Verified drafts that the correction of confidences is slow by.
const INERTIA: f64 = 8.0;

/// Weight that a verified draft keeps for the correction when the next one comes.
const KEEP: f64 = 0.995;

/// How a step drafts. The choice changes how fast tokens come, never which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftPlan {
    /// Tokens to draft after the step, for each sequence.
    pub draft: usize,
    /// Drafts to verify in all, at most; `None`: all that there are.
    pub verify: Option<usize>,
}

/// A fixed draft length, or blocks of which the drafts that pay off are verified.
#[derive(Clone, Debug)]
pub struct Policy {
    most: usize,
    auto: Option<Auto>,
}

#[derive(Clone, Debug)]
struct Auto {
    costs: Costs,
    calibration: Calibration,
    /// Usual chances by position, for sequences that have not told theirs, and how many blocks they
    /// come from.
    usual: Vec<f32>,
    blocks: usize,
    /// Tokens a second with drafting over those without, on average; rounds that it is made of.
    gain: f64,
    rounds: usize,
    /// Steps without drafting that remain, and how many the next pause has.
    pause: usize,
    next_pause: usize,
}

impl Policy {
    /// At most `most` tokens, always.
    pub fn fixed(most: usize) -> Self {
        Self { most, auto: None }
    }

    /// Blocks of `most` tokens. Without a curve, all drafts are verified.
    pub fn auto(most: usize, curve: CostCurve) -> Self {
        let auto = Auto {
            costs: Costs::new(curve),
            calibration: Calibration::new(most),
            usual: vec![1.0; most],
            blocks: 0,
            gain: 0.0,
            rounds: 0,
            pause: 0,
            next_pause: SHORTEST_PAUSE,
        };
        Self { most, auto: (most > 0).then_some(auto) }
    }

    /// Chances of the drafts of a sequence, from the confidences that it told two rounds ago.
    pub fn rates(&self, confidences: Option<&[f32]>) -> Vec<f32> {
        match (&self.auto, confidences) {
            (Some(auto), Some(told)) if !told.is_empty() => {
                rates(told, &auto.calibration.correction)
            }
            (Some(auto), _) => auto.usual.clone(),
            (None, _) => Vec::new(),
        }
    }

    /// What the worker multiplies confidences by.
    pub fn correction(&self) -> Vec<f32> {
        self.auto.as_ref().map_or(Vec::new(), |auto| auto.calibration.correction.clone())
    }

    /// Plans a step in which sequences with drafts of these chances decode.
    pub fn plan(&mut self, rates: &[Vec<f32>]) -> DraftPlan {
        let most = self.most;
        let Some(auto) = &mut self.auto else { return DraftPlan { draft: most, verify: None } };
        if rates.is_empty() || auto.costs.is_empty() {
            let draft = if auto.pause > 0 { 0 } else { most };
            return DraftPlan { draft, verify: None };
        }
        auto.plan(most, rates)
    }

    /// Notes how the verification of a sequence's drafts went, whose confidences were these.
    pub fn verified(&mut self, confidences: &[f32], verified: usize, accepted: usize) {
        if let Some(auto) = &mut self.auto {
            auto.calibration.add(&confidences[..verified.min(confidences.len())], accepted);
        }
    }

    /// Notes the confidences of drafts whose round is over: those of drafts at hand must not decide
    /// how many of them are verified.
    pub fn drafted(&mut self, confidences: &[f32]) {
        let Some(auto) = &mut self.auto else { return };
        let new = rates(confidences, &auto.calibration.correction);
        auto.blocks += 1;
        let weight = FRESH.max(1.0 / auto.blocks as f64) as f32;
        for (usual, rate) in auto.usual.iter_mut().zip(new) {
            *usual += weight * (rate - *usual);
        }
    }

    /// Notes what a step took that only decoded: rows, seconds without drafting, and sequences that
    /// drafted with the seconds for it.
    pub fn measured(&mut self, rows: usize, seconds: f64, drafting: Option<(usize, f64)>) {
        let Some(auto) = &mut self.auto else { return };
        auto.costs.measured_step(rows, seconds);
        if let Some((sequences, seconds)) = drafting {
            auto.costs.measured_draft(sequences, seconds);
        }
    }
}

impl Auto {
    fn plan(&mut self, most: usize, rates: &[Vec<f32>]) -> DraftPlan {
        let sequences = rates.len();
        if self.pause > 0 {
            self.pause -= 1;
            // What was drafted before the pause is there, and costs nothing more.
            let (verify, _) = best_count(rates, |rows| self.costs.step(rows));
            return DraftPlan { draft: 0, verify: Some(verify) };
        }
        let drafting = self.costs.draft(sequences);
        let (verify, speed) = best_count(rates, |rows| self.costs.step(rows) + drafting);
        let gain = speed * self.costs.step(sequences) / sequences as f64;
        self.rounds += 1;
        let weight = FRESH.max(1.0 / self.rounds as f64);
        self.gain += weight * (gain - self.gain);
        // Everything is verified once at first, so that confidences can be corrected.
        if self.rounds <= 2 {
            return DraftPlan { draft: most, verify: None };
        }
        let doubt = if self.rounds < ROUNDS { 1.0 / self.rounds as f64 } else { 0.0 };
        if self.gain + doubt >= 1.0 {
            if self.rounds >= ROUNDS {
                self.next_pause = SHORTEST_PAUSE;
            }
            return DraftPlan { draft: most, verify: Some(verify) };
        }
        self.pause = self.next_pause;
        self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
        (self.gain, self.rounds) = (0.0, 0);
        DraftPlan { draft: 0, verify: Some(verify) }
    }
}

/// How far confidences are from what happens, by position.
#[derive(Clone, Debug)]
struct Calibration {
    /// Sums of confidences, and accepted drafts.
    sums: Vec<(f64, f64)>,
    correction: Vec<f32>,
}

impl Calibration {
    fn new(most: usize) -> Self {
        Self { sums: vec![(0.0, 0.0); most], correction: vec![1.0; most] }
    }

    /// Takes in a verified block: a draft after a rejected one tells nothing.
    fn add(&mut self, confidences: &[f32], accepted: usize) {
        for (i, &confidence) in confidences.iter().enumerate().take(accepted + 1) {
            let Some((told, happened)) = self.sums.get_mut(i) else { break };
            *told = *told * KEEP + f64::from(confidence);
            *happened = *happened * KEEP + if i < accepted { 1.0 } else { 0.0 };
        }
        // A position of which little is known is as far off as the one before it.
        let mut before = 1.0;
        for (correction, (told, happened)) in self.correction.iter_mut().zip(&self.sums) {
            before = (happened + INERTIA * before) / (told + INERTIA);
            *correction = before as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences whose drafts are accepted with chance `p` each, told as `told`; a row costs `row`
    /// beside a step's 1. Returns tokens a second.
    fn run(policy: &mut Policy, sequences: usize, p: f32, told: f32, steps: usize) -> f64 {
        let curve = curve(policy);
        let mut random = 1u64;
        let mut uniform = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 40) as f32 / (1u64 << 24) as f32
        };
        let mut blocks = vec![Vec::new(); sequences];
        let (mut tokens, mut seconds) = (0, 0.0);
        for _ in 0..steps {
            let rates: Vec<Vec<f32>> =
                blocks.iter().map(|b: &Vec<f32>| policy.rates(Some(b))).collect();
            let plan = policy.plan(&rates);
            let now: Vec<Vec<f32>> =
                blocks.iter().map(|b| super::rates(b, &policy.correction())).collect();
            let shares = match plan.verify {
                Some(count) => super::super::share(&now, count),
                None => blocks.iter().map(Vec::len).collect(),
            };
            for (block, &n) in blocks.iter_mut().zip(&shares) {
                let accepted = (0..n).take_while(|_| uniform() < p).count();
                policy.verified(block, n, accepted);
                tokens += 1 + accepted;
                *block = vec![told; plan.draft];
                policy.drafted(block);
            }
            let rows = sequences + shares.iter().sum::<usize>();
            let drafting = if plan.draft > 0 { curve.draft(sequences) } else { 0.0 };
            policy.measured(
                rows,
                curve.step(rows),
                (plan.draft > 0).then_some((sequences, drafting)),
            );
            seconds += curve.step(rows) + drafting;
        }
        tokens as f64 / seconds
    }

    fn policy(row: f64) -> Policy {
        let steps = (1..=24).map(|n| (n, 1.0 + row * (n - 1) as f64)).collect();
        Policy::auto(5, CostCurve::new(steps, vec![(1, 0.1), (4, 0.2)]))
    }

    fn curve(policy: &Policy) -> CostCurve {
        let costs = &policy.auto.as_ref().expect("auto").costs;
        CostCurve::new((1..=24).map(|n| (n, costs.step(n))).collect(), vec![(1, 0.1), (4, 0.2)])
    }

    /// Tokens a second of the best fixed length.
    fn best_fixed(sequences: usize, p: f64, row: f64) -> f64 {
        let speed = |n: usize| {
            let tokens: f64 = (0..=n as i32).map(|i| p.powi(i)).sum();
            let drafting = if n > 0 { if sequences == 1 { 0.1 } else { 0.2 } } else { 0.0 };
            let rows = sequences * (1 + n);
            sequences as f64 * tokens / (1.0 + row * (rows - 1) as f64 + drafting)
        };
        (0..=5).map(speed).fold(0.0, f64::max)
    }

    #[test]
    fn it_keeps_up_with_the_best_fixed_length() {
        for sequences in [1, 4] {
            for (p, row) in [(0.95, 0.02), (0.8, 0.1), (0.6, 0.2), (0.3, 0.3), (0.05, 0.5)] {
                // Confidences that say too little or too much are corrected.
                for told in [p, 0.5 * p, (p + 1.0) / 2.0] {
                    let found = run(&mut policy(row), sequences, p, told, 4000);
                    let best = best_fixed(sequences, f64::from(p), row);
                    assert!(
                        found > 0.95 * best,
                        "{sequences} sequences, p {p} told {told}, row {row}: {found} of {best}"
                    );
                }
            }
        }
    }

    #[test]
    fn drafting_that_never_pays_is_given_up_and_tried_again() {
        let mut policy = policy(0.5);
        let mut drafted = 0;
        for _ in 0..3000 {
            let rates = [policy.rates(Some(&[0.05; 5]))];
            drafted += usize::from(policy.plan(&rates).draft > 0);
        }
        assert!((1..150).contains(&drafted), "{drafted} of 3000 steps drafted");
        // When the text becomes easy, it comes back.
        for _ in 0..600 {
            policy.plan(&[policy.rates(Some(&[0.99; 5]))]);
        }
        let rates = [policy.rates(Some(&[0.99; 5]))];
        assert!(policy.plan(&rates).draft > 0);
    }

    #[test]
    fn a_fixed_length_stays() {
        let mut policy = Policy::fixed(3);
        let plan = DraftPlan { draft: 3, verify: None };
        policy.measured(4, 1.0, None);
        assert_eq!(policy.plan(&[Vec::new()]), plan);
        // Nothing is known of the costs: everything is verified.
        let mut unknown = Policy::auto(3, CostCurve::default());
        assert_eq!(unknown.plan(&[unknown.rates(None)]), plan);
    }

    #[test]
    fn corrections_follow_what_happens() {
        let mut calibration = Calibration::new(2);
        for i in 0..400 {
            // The first is accepted in half of the cases, the second then always.
            calibration.add(&[0.9, 0.25], if i % 2 == 0 { 2 } else { 0 });
        }
        let found = &calibration.correction;
        assert!((found[0] * 0.9 - 0.5).abs() < 0.05, "{found:?}");
        assert!(found[1] * 0.25 > 0.8, "{found:?}");
    }
}
