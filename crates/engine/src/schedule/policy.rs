//! How decoding and prefilling share the device's time.
//!
//! Time is shared, not tokens. A step that also reads prompts takes longer than one that only
//! decodes; the difference is a debt, which the time of decoding pays off before the next prompt
//! rows run. So running requests keep half their rate, and prompts get nearly half the time.

/// Weight of a new measurement in an average.
const FRESH: f64 = 0.2;

/// Longest time that prompt rows may add to one step beside decoding ones, in seconds; that of a
/// step which only decodes, if it is longer.
const LONGEST_STALL: f64 = 0.2;

/// What decoding gets back for a second lost: a little more than it, so that it keeps half its rate
/// over short times too.
const INTEREST: f64 = 1.1;

/// Most that decoding may be owed when a short prompt is let in all the same, in seconds.
const NEWCOMER_DEBT: f64 = 1.0;

/// Fewest prompt rows in a step that has any.
const FEWEST_ROWS: usize = 16;

/// Debts and measurements.
#[derive(Clone, Debug, Default)]
pub struct TimeShares {
    /// Seconds that decoding has lost to prompts and not got back.
    debt: f64,
    /// Seconds of a step that only decodes.
    decode_seconds: Option<f64>,
    /// Seconds of a prompt row.
    row_seconds: Option<f64>,
}

impl TimeShares {
    /// Whether prompts may go on in a step beside `decoding` sequences that decode.
    pub fn prompts_may_run(&self, decoding: usize) -> bool {
        decoding == 0 || self.debt <= 0.0
    }

    /// Whether short prompts that have just arrived may go on in such a step all the same.
    pub fn newcomers_may_run(&self) -> bool {
        self.debt <= NEWCOMER_DEBT
    }

    /// Most prompt rows that a step may have beside `decoding` sequences.
    pub fn most_rows(&self, decoding: usize) -> usize {
        match self.row_seconds {
            Some(row) if decoding > 0 && row > 0.0 => {
                let stall = LONGEST_STALL.max(self.decode_seconds.unwrap_or(0.0));
                ((stall / row) as usize).max(FEWEST_ROWS)
            }
            _ => usize::MAX,
        }
    }

    /// Notes that a step was planned. Returns the debt that it was charged with.
    pub fn planned(&mut self, prompt_rows: usize, decode_rows: usize) -> f64 {
        if decode_rows == 0 {
            self.debt = 0.0;
            return 0.0;
        }
        let prompts = prompt_rows as f64 * self.row_seconds.unwrap_or(0.0);
        let charge = prompts * INTEREST - self.decode_seconds.unwrap_or(0.0);
        self.debt += charge;
        charge
    }

    /// Notes what a step took that had been charged with `charge`.
    pub fn measured(&mut self, prompt_rows: usize, decode_rows: usize, charge: f64, seconds: f64) {
        if prompt_rows == 0 {
            average(&mut self.decode_seconds, seconds);
            self.settle(-charge - seconds);
            return;
        }
        let alone = if decode_rows > 0 { self.decode_seconds.unwrap_or(0.0) } else { 0.0 };
        let added = (seconds - alone).max(0.0);
        average(&mut self.row_seconds, added / prompt_rows as f64);
        if decode_rows > 0 {
            self.settle(added * INTEREST - alone - charge);
        }
    }

    /// Changes the debt. At most one step is paid in advance.
    fn settle(&mut self, change: f64) {
        self.debt = (self.debt + change).max(-self.decode_seconds.unwrap_or(0.0));
    }
}

fn average(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + FRESH * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device whose steps take `decode` seconds and `row` more for each prompt row.
    fn run(decode: f64, row: f64, chunk: usize) -> (f64, f64) {
        let mut shares = TimeShares::default();
        let (mut time, mut steps, mut rows) = (0.0, 0.0, 0.0);
        for _ in 0..20_000 {
            let prompt = match shares.prompts_may_run(1) {
                true => chunk.min(shares.most_rows(1)),
                false => 0,
            };
            let charge = shares.planned(prompt, 1);
            let seconds = decode + prompt as f64 * row;
            shares.measured(prompt, 1, charge, seconds);
            time += seconds;
            steps += 1.0;
            rows += prompt as f64;
        }
        (steps / time, rows / time)
    }

    #[test]
    fn decoding_and_prompts_get_half_the_time_each() {
        for (decode, row, chunk) in [(0.01, 0.001, 512), (0.1, 0.001, 512), (0.01, 0.01, 512)] {
            let (steps, rows) = run(decode, row, chunk);
            assert!(steps * decode >= 0.495, "decoding keeps {} of its rate", steps * decode);
            assert!(rows * row >= 0.45, "prompts keep {} of theirs", rows * row);
        }
    }

    #[test]
    fn an_empty_device_is_for_prompts() {
        let mut shares = TimeShares::default();
        for _ in 0..10 {
            assert!(shares.prompts_may_run(0));
            let charge = shares.planned(512, 0);
            shares.measured(512, 0, charge, 1.0);
        }
    }
}
