//! How many tokens to draft ahead.

/// Weight of a new measurement in an average.
const FRESH: f64 = 0.1;

/// One step in so many tries another length.
const TRY_EVERY: u64 = 24;

/// The draft length: fixed, or the one that has produced most tokens a second.
///
/// The choice changes how fast tokens come, never which.
#[derive(Clone, Debug)]
pub struct DraftLength {
    most: usize,
    adapt: bool,
    /// Tokens a second of steps with each length, for the present number of sequences.
    rates: Vec<Option<f64>>,
    bucket: u32,
    steps: u64,
}

impl DraftLength {
    /// At most `most` tokens; `adapt` looks for the best length.
    pub fn new(most: usize, adapt: bool) -> Self {
        Self { most, adapt, rates: vec![None; most + 1], bucket: 0, steps: 0 }
    }

    /// Length for a step in which `decoding` sequences decode.
    pub fn length(&mut self, decoding: usize) -> usize {
        if !self.adapt {
            return self.most;
        }
        let bucket = usize::BITS - decoding.leading_zeros();
        if bucket != self.bucket {
            self.bucket = bucket;
            self.rates.fill(None);
        }
        self.steps += 1;
        let rate = |n: &usize| self.rates[*n];
        let best = (0..=self.most)
            .filter(|n| rate(n).is_some())
            .max_by(|a, b| rate(a).partial_cmp(&rate(b)).unwrap_or(std::cmp::Ordering::Equal))
            .unwrap_or(self.most);
        if !self.steps.is_multiple_of(TRY_EVERY) {
            return best;
        }
        // Neighbours of the best one in turn.
        match (self.steps / TRY_EVERY).is_multiple_of(2) {
            true => (best + 1).min(self.most),
            false => best.saturating_sub(1),
        }
    }

    /// Notes that a step which only decoded, with this length, produced so many tokens.
    pub fn measured(&mut self, length: usize, tokens: usize, seconds: f64) {
        if !self.adapt || seconds <= 0.0 || tokens == 0 {
            return;
        }
        let new = tokens as f64 / seconds;
        let rate = &mut self.rates[length];
        *rate = Some(rate.map_or(new, |old| old + FRESH * (new - old)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every draft is accepted with probability `p` after the ones before it; a row costs `row`.
    fn best(p: f64, row: f64) -> usize {
        let mut length = DraftLength::new(5, true);
        let mut chosen = [0; 6];
        for _ in 0..5000 {
            let n = length.length(1);
            chosen[n] += 1;
            let tokens: f64 = (0..=n as i32).map(|i| p.powi(i)).sum();
            // Measured in units that keep fractions of tokens.
            length.measured(n, (tokens * 1000.0) as usize, 1.0 + row * n as f64);
        }
        (0..6).max_by_key(|&n| chosen[n]).unwrap_or(0)
    }

    #[test]
    fn the_length_that_pays_off_wins() {
        assert_eq!(best(0.95, 0.01), 5);
        assert_eq!(best(0.05, 0.5), 0);
        let middle = best(0.6, 0.2);
        assert!((1..=3).contains(&middle), "{middle}");
    }

    #[test]
    fn a_fixed_length_stays() {
        let mut length = DraftLength::new(3, false);
        length.measured(3, 1, 1.0);
        assert_eq!(length.length(1), 3);
    }
}
