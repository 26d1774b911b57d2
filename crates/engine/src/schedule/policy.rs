//! How decoding and prefilling share the device's time.
//!
//! Time is shared, not tokens. What a step takes beyond one that only decodes is lost to decoding: a
//! debt, which the time of decoding pays off before the next prompt rows run. So running requests
//! keep half their rate over any [`WINDOW`], and prompts get nearly half the time. How long a step
//! will take is learned from those before it ([`Cost`]); where that was wrong, the debt is set
//! right by what the step took.

/// Seconds over which running requests keep half their rate.
const WINDOW: f64 = 2.0;

/// What decoding gets back for a second lost, where steps are short. Were it 1, decoding would have
/// half of the time on average, and less than that in windows that begin and end with prompts.
const INTEREST: f64 = 1.085;

/// How much the interest grows with the part of a window that a step takes, up to
/// [`MOST_INTEREST`]: a window holds few long steps, and rows that joined lately make one longer.
const LONG_STEPS: f64 = 0.3;

/// Most that decoding gets back for a second lost.
const MOST_INTEREST: f64 = 1.15;

/// Most that decoding may be owed, in seconds, where steps are short. With debts between 0 and `d`,
/// prompts run for at most `(WINDOW + d) / (1 + INTEREST)` of a window: 0.494 of it. The rest is for
/// steps that take longer than expected. Were it much less, what a step costs whatever its rows
/// would count.
const MOST_OWED: f64 = 0.03 * WINDOW;

/// Fewest prompt rows in a step that has any.
const FEWEST_ROWS: usize = 8;

/// One step in so many only decodes, to know how long that takes.
const DECODE_EVERY: u32 = 100;

/// Part of a decoding step's time at most that counts as lost to requests which joined lately.
const MOST_JOINING: f64 = 0.2;

/// Weight of a new measurement in an average.
const FRESH: f64 = 0.2;

/// Debts and measurements.
#[derive(Clone, Debug)]
pub struct TimeShares {
    /// Seconds that decoding has lost to prompts and not got back.
    debt: f64,
    /// Seconds of a step that only decodes, by its rows.
    decode: Cost,
    /// Seconds that prompt rows add to a step, by their number.
    prompt: Cost,
    /// Whether `prompt` was measured beside decoding.
    beside: bool,
    /// Rows that decode, of late.
    usual_rows: f64,
    /// Steps since the last one that only decoded.
    mixed: u32,
}

impl Default for TimeShares {
    fn default() -> Self {
        Self {
            debt: 0.0,
            decode: Cost::new(0.0),
            prompt: Cost::new(1.0),
            beside: false,
            usual_rows: 0.0,
            mixed: 0,
        }
    }
}

impl TimeShares {
    /// Most prompt rows in a step beside `decoding` rows that decode; 0 while decoding is owed time.
    pub fn prompt_rows(&self, decoding: usize) -> usize {
        if decoding == 0 {
            return usize::MAX;
        }
        if self.debt > 0.0 || self.mixed >= DECODE_EVERY {
            return 0;
        }
        // As much as one step that decodes can pay for, so that every step may have some; more
        // where such a step is short.
        let (own, now) = (self.own_seconds(decoding), self.decode.of(decoding));
        let seconds = MOST_OWED.max(own) / interest(own) - (now - own);
        self.prompt.rows_in(seconds).max(FEWEST_ROWS)
    }

    /// Whether a short prompt of `rows` rows that has just arrived may run although decoding is
    /// owed time.
    pub fn newcomer_may_run(&self, rows: usize) -> bool {
        // A step that only decodes comes first where it is due: otherwise newcomers would put it
        // off, and with it every long prompt.
        self.mixed < DECODE_EVERY && self.debt + INTEREST * self.prompt.of(rows) <= MOST_OWED
    }

    /// Notes that a step was planned. Returns the debt that it was charged with.
    pub fn planned(&mut self, prompt_rows: usize, decode_rows: usize) -> f64 {
        if decode_rows == 0 {
            (self.debt, self.usual_rows, self.mixed) = (0.0, 0.0, 0);
            return 0.0;
        }
        let rows = decode_rows as f64;
        self.usual_rows = match self.usual_rows {
            0.0 => rows,
            usual => (usual + FRESH / 2.0 * (rows - usual)).min(rows),
        };
        self.mixed = if prompt_rows == 0 { 0 } else { self.mixed + 1 };
        let seconds = self.decode.of(decode_rows) + self.prompt.of(prompt_rows);
        let charge = self.charge(decode_rows, seconds);
        self.debt += charge;
        charge
    }

    /// Notes what a step took that had been charged with `charge`.
    pub fn measured(&mut self, prompt_rows: usize, decode_rows: usize, charge: f64, seconds: f64) {
        if prompt_rows == 0 {
            self.decode.add(decode_rows, seconds);
        } else if decode_rows > 0 {
            if !std::mem::replace(&mut self.beside, true) {
                self.prompt = Cost::new(1.0);
            }
            self.prompt.add(prompt_rows, (seconds - self.decode.of(decode_rows)).max(0.0));
        } else if !self.beside {
            self.prompt.add(prompt_rows, seconds);
        }
        if decode_rows > 0 {
            // At most one step is paid in advance.
            let least = -self.decode.of(decode_rows);
            self.debt = (self.debt + self.charge(decode_rows, seconds) - charge).max(least);
        }
    }

    /// What decoding is owed after a step of `seconds`, beyond what it was owed before.
    fn charge(&self, decode_rows: usize, seconds: f64) -> f64 {
        let own = self.own_seconds(decode_rows);
        interest(own) * (seconds - own) - own
    }

    /// Seconds of a step that only decodes, without the rows that joined lately: those are not held
    /// against the others.
    fn own_seconds(&self, decode_rows: usize) -> f64 {
        let now = self.decode.of(decode_rows);
        let usual = self.decode.at((decode_rows as f64).min(self.usual_rows));
        usual.clamp(now * (1.0 - MOST_JOINING), now)
    }
}

/// What decoding gets back for a second lost, if its own part of a step takes `own` seconds.
fn interest(own: f64) -> f64 {
    (INTEREST + LONG_STEPS * own / WINDOW).min(MOST_INTEREST)
}

/// What rows cost: seconds as a line over their number, fitted to the last measurements. Where these
/// are all of one size, `part` of the cost is taken to grow with the rows, the rest to be there
/// anyway.
#[derive(Clone, Debug)]
struct Cost {
    part: f64,
    /// Averages of rows and seconds; 0 before the first measurement.
    rows: f64,
    seconds: f64,
    variance: f64,
    covariance: f64,
}

impl Cost {
    fn new(part: f64) -> Self {
        Self { part, rows: 0.0, seconds: 0.0, variance: 0.0, covariance: 0.0 }
    }

    fn add(&mut self, rows: usize, seconds: f64) {
        let rows = rows as f64;
        if self.rows == 0.0 {
            (self.rows, self.seconds) = (rows, seconds);
            return;
        }
        let (dx, dy) = (rows - self.rows, seconds - self.seconds);
        self.rows += FRESH * dx;
        self.seconds += FRESH * dy;
        self.variance = (1.0 - FRESH) * (self.variance + FRESH * dx * dx);
        self.covariance = (1.0 - FRESH) * (self.covariance + FRESH * dx * dy);
    }

    /// Seconds a row more.
    fn slope(&self) -> f64 {
        if self.rows == 0.0 {
            return 0.0;
        }
        let whole = self.seconds / self.rows;
        // Sizes within a twentieth of each other say little.
        let doubt = (0.05 * self.rows).powi(2);
        let slope = (self.covariance + doubt * self.part * whole) / (self.variance + doubt);
        slope.clamp(0.25 * self.part * whole, whole)
    }

    fn at(&self, rows: f64) -> f64 {
        (self.seconds + self.slope() * (rows - self.rows)).max(0.0)
    }

    fn of(&self, rows: usize) -> f64 {
        if rows == 0 { 0.0 } else { self.at(rows as f64) }
    }

    /// Most rows that take at most `seconds`; no more than twice as many as have been measured.
    fn rows_in(&self, seconds: f64) -> usize {
        let slope = self.slope();
        let most = 2.0 * self.rows;
        if slope <= 0.0 {
            return most as usize;
        }
        (self.rows + (seconds - self.seconds) / slope).clamp(0.0, most) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device: seconds of a step that decodes, of a step's prompt rows on top of that, and of each.
    struct Costs {
        decode: f64,
        prompts: f64,
        row: f64,
    }

    /// Shares of decoding and of prompts: what each gets of what it would get alone, with chunks of
    /// 512 rows.
    fn run(device: &Costs) -> (f64, f64) {
        let mut shares = TimeShares::default();
        let (mut time, mut steps, mut rows) = (0.0, 0.0, 0.0);
        for _ in 0..20_000 {
            let prompt = shares.prompt_rows(1).min(512);
            let charge = shares.planned(prompt, 1);
            let prompts = if prompt > 0 { device.prompts } else { 0.0 };
            let seconds = device.decode + prompts + prompt as f64 * device.row;
            shares.measured(prompt, 1, charge, seconds);
            time += seconds;
            steps += 1.0;
            rows += prompt as f64;
        }
        let alone = device.prompts / 512.0 + device.row;
        (steps * device.decode / time, rows * alone / time)
    }

    #[test]
    fn decoding_and_prompts_get_half_the_time_each() {
        for (decode, prompts, row) in [
            (0.01, 0.0, 0.001),
            (0.1, 0.0, 0.001),
            (0.01, 0.0, 0.01),
            (0.05, 0.01, 0.0003),
            (0.2, 0.02, 0.001),
        ] {
            let (decoding, prompt) = run(&Costs { decode, prompts, row });
            let name = format!("{decode} {prompts} {row}: {decoding} {prompt}");
            assert!(decoding >= 0.52, "{name}");
            assert!(prompt >= 0.4, "{name}");
        }
    }

    /// Rows cost what the model says, and a step with prompts costs more than its rows.
    #[test]
    fn costs_are_learned() {
        let mut cost = Cost::new(1.0);
        for i in 0..200 {
            cost.add(100 + i * 37 % 200, 0.5 + 0.01 * f64::from(100 + i as u32 * 37 % 200));
        }
        assert!((cost.of(150) - 2.0).abs() < 0.02, "{}", cost.of(150));
        assert!((cost.of(400) - 4.5).abs() < 0.2, "{}", cost.of(400));
        assert!(cost.rows_in(2.0).abs_diff(150) < 4, "{}", cost.rows_in(2.0));
        // Of one size only: all of it grows.
        let mut cost = Cost::new(1.0);
        (0..10).for_each(|_| cost.add(64, 1.0));
        assert!((cost.of(128) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn an_empty_device_is_for_prompts() {
        let mut shares = TimeShares::default();
        for _ in 0..10 {
            assert_eq!(shares.prompt_rows(0), usize::MAX);
            let charge = shares.planned(512, 0);
            shares.measured(512, 0, charge, 1.0);
        }
    }

    /// Requests that come and go do not slow down those that stay by more than prompts may.
    #[test]
    fn those_who_join_are_not_held_against_others() {
        let mut shares = TimeShares::default();
        let device = |prompt: usize, decode: usize| {
            0.3 + 0.05 * decode as f64 + if prompt > 0 { 0.02 * prompt as f64 } else { 0.0 }
        };
        let (mut slowest, mut window) = (f64::INFINITY, Vec::new());
        for step in 0..2000 {
            let decode = if step % 50 < 5 && step > 200 { 5 } else { 4 };
            let prompt = shares.prompt_rows(decode);
            let charge = shares.planned(prompt, decode);
            let seconds = device(prompt, decode);
            shares.measured(prompt, decode, charge, seconds);
            window.push(seconds);
            if window.len() > 4 {
                window.remove(0);
            }
            let time: f64 = window.iter().sum();
            if step > 100 {
                slowest = slowest.min(window.len() as f64 * device(0, 4) / time);
            }
        }
        assert!(slowest >= 0.5, "{slowest}");
    }
}
