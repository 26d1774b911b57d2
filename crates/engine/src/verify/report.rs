//! What a comparison found: one line for each prompt, cache format and quantity.

use super::tolerance::rounded;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;

/// Outcome of one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Within the tolerance.
    Pass,
    /// Outside.
    Fail,
    /// Nothing was compared; the note says why.
    NotCompared,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// `f32`, `quantized`, or `-` for what does not depend on the cache format.
    pub variant: &'static str,
    /// Prompt.
    pub prompt: String,
    /// What was compared.
    pub quantity: &'static str,
    /// Outcome.
    pub status: Status,
    /// Numbers, sets or tokens compared.
    pub compared: u64,
    /// How many were outside the tolerance (for sets and tokens: how many differ).
    pub outside: u64,
    /// Largest difference, for numbers.
    pub max_error: Option<f64>,
    /// Allowed difference, for numbers.
    pub tolerance: Option<f64>,
    /// Root of the mean squared error over that of the reference, for numbers. Where layers are
    /// judged one by one, the largest.
    pub relative_rms: Option<f64>,
    /// Mean error with signs, along the axis and along the number itself, over the root mean square
    /// of the reference: the largest of the layers. On devices that round.
    pub relative_bias: Option<f64>,
    /// Share of the reference's choices that are the same, where not all must be.
    pub overlap: Option<f64>,
    /// Where the largest difference is.
    pub worst: Option<String>,
    /// The first place outside the tolerance, in the order of computation.
    pub first: Option<String>,
    /// What a reader should know.
    pub note: Option<String>,
}

impl Check {
    /// Whether what lies outside may come from a value that lay on a rounding boundary of a cache
    /// format: few numbers, little beyond the tolerance.
    pub fn may_have_crossed(&self) -> bool {
        let few = self.outside as f64 <= 0.02 * self.compared as f64;
        let near = self.max_error.zip(self.tolerance).is_some_and(|(e, t)| e <= 10.0 * t);
        let small = self.relative_rms.is_some_and(|rms| rms <= 5e-3);
        self.status == Status::Fail && few && near && small
    }

    /// Lets such a line pass, with a note. Right only where every layer alone agrees with the
    /// reference.
    pub fn accept_crossing(&mut self) {
        if self.may_have_crossed() {
            self.status = Status::Pass;
            let note = "a value crossed a rounding boundary of the caches: numbers lie outside the \
                        tolerance, and every layer alone agrees from the reference's inputs";
            self.note = Some(note.to_owned());
        }
    }
}

/// All lines.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Lines, in the order of the comparison.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether anything failed, or nothing was compared at all.
    pub fn failed(&self) -> bool {
        self.checks.iter().any(|c| c.status == Status::Fail)
            || !self.checks.iter().any(|c| c.status == Status::Pass)
    }
}

/// Collects differences of one line.
#[derive(Clone, Debug)]
pub struct Tally {
    variant: &'static str,
    prompt: String,
    quantity: &'static str,
    tolerance: Option<f64>,
    /// How many may lie outside the tolerance: a value that sits on a rounding boundary of a cache
    /// format moves by a whole step.
    allowed_outside: f64,
    /// Limit of the relative root-mean-square error.
    allowed_rms: f64,
    compared: u64,
    outside: u64,
    max_error: f64,
    squares: (f64, f64),
    /// Largest relative root-mean-square error and bias of a layer, where layers are judged alone.
    layers: Option<(f64, f64)>,
    /// Share of choices that must be the same.
    least_overlap: Option<f64>,
    failed: bool,
    worst: Option<String>,
    first: Option<String>,
    notes: Vec<String>,
}

impl Tally {
    /// A line about numbers.
    pub fn numbers(
        variant: &'static str,
        prompt: &str,
        quantity: &'static str,
        tolerance: f64,
    ) -> Self {
        let mut tally = Self::sets(variant, prompt, quantity);
        tally.tolerance = Some(tolerance);
        tally
    }

    /// A line about things that are equal or not.
    pub fn sets(variant: &'static str, prompt: &str, quantity: &'static str) -> Self {
        Self {
            variant,
            prompt: prompt.to_owned(),
            quantity,
            tolerance: None,
            allowed_outside: 0.0,
            allowed_rms: f64::INFINITY,
            compared: 0,
            outside: 0,
            max_error: 0.0,
            squares: (0.0, 0.0),
            layers: None,
            least_overlap: None,
            failed: false,
            worst: None,
            first: None,
            notes: Vec::new(),
        }
    }

    /// Allows isolated differences: `share` of the numbers may lie outside the tolerance, and the
    /// relative root-mean-square error stays under `rms`.
    pub fn isolated(mut self, share: f64, rms: f64) -> Self {
        (self.allowed_outside, self.allowed_rms) = (share, rms);
        self
    }

    /// Compares rows of numbers; `place(i)` names number `i`.
    pub fn floats(&mut self, own: &[f32], reference: &[f32], place: impl Fn(usize) -> String) {
        assert_eq!(own.len(), reference.len(), "{}: lengths", self.quantity);
        let tolerance = self.tolerance.unwrap_or(0.0);
        for (i, (&a, &b)) in own.iter().zip(reference).enumerate() {
            let (a, b) = (f64::from(a), f64::from(b));
            // A NaN on either side is as wrong as can be.
            let error = if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() };
            self.squares.0 += error * error;
            self.squares.1 += b * b;
            if error > self.max_error {
                self.max_error = error;
                self.worst = Some(place(i));
            }
            if error > tolerance {
                self.outside += 1;
                if self.first.is_none() {
                    self.first = Some(format!("{}: {a:.6} instead of {b:.6}", place(i)));
                }
            }
        }
        self.compared += own.len() as u64;
    }

    /// Judges what one layer adds, by the bounds for devices that round: `own` and `expected` are
    /// its results, `before` what it started from (zeros if empty). `together` numbers share their
    /// errors, as the streams of a row do. Differences are relative to the update.
    pub fn update(
        &mut self,
        what: &str,
        own: &[f32],
        expected: &[f32],
        before: &[f32],
        together: usize,
        place: impl Fn(usize) -> String,
    ) {
        use rounded::{BIAS, CHANCE, PEAK, RMS, ULPS};
        assert_eq!(own.len(), expected.len(), "{}: lengths", self.quantity);
        if own.is_empty() {
            return;
        }
        let number = |x: &[f32], i: usize| x.get(i).map_or(0.0, |&x| f64::from(x));
        let count = own.len() as f64;
        let (mut squares, mut update, mut axis, mut along) = (0.0, 0.0, 0.0, 0.0);
        for i in 0..own.len() {
            let error = number(own, i) - number(expected, i);
            let added = number(expected, i) - number(before, i);
            squares += error * error;
            update += added * added;
            axis += error;
            along += error * if added == 0.0 { 0.0 } else { added.signum() };
        }
        let size = (update / count).sqrt().max(f64::MIN_POSITIVE);
        let rms = (squares / count).sqrt() / size;
        let bias = axis.abs().max(along.abs()) / count / size;
        let independent = count / together as f64;
        let chance = CHANCE * rms / independent.sqrt();
        let most = RMS * (1.0 + CHANCE / (2.0 * independent).sqrt());
        let mut worst = (0.0, 0);
        for i in 0..own.len() {
            let error = (number(own, i) - number(expected, i)).abs();
            // What it started from is rounded, too, and may be larger than the result.
            let rounded = ULPS * number(expected, i).abs().max(number(before, i).abs());
            let allowed = PEAK * RMS * size + rounded;
            // What is allowed for rounding the number itself is no error of the update.
            let over = (error - rounded).max(0.0) / size;
            if over > worst.0 {
                worst = (over, i);
            }
            if error.is_nan() || error > allowed {
                self.outside += 1;
                self.failed = true;
                let text = format!("{} instead of {}", number(own, i), number(expected, i));
                self.first.get_or_insert_with(|| format!("{}: {text}", place(i)));
            }
        }
        if worst.0 > self.max_error {
            self.max_error = worst.0;
            self.worst = Some(place(worst.1));
        }
        if rms.is_nan() || rms > most {
            self.failed = true;
            let text = format!("{what}: relative rms {rms:.2e}, and {most:.2e} is allowed");
            self.first.get_or_insert(text);
        }
        if bias.is_nan() || bias > BIAS + chance {
            self.failed = true;
            let allowed = BIAS + chance;
            let text = format!("{what}: bias {bias:.2e}, and {allowed:.1e} is allowed");
            self.first.get_or_insert(text);
        }
        let (most, bent) = self.layers.unwrap_or_default();
        let larger = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
        self.layers = Some((larger(most, rms), larger(bent, bias)));
        self.compared += own.len() as u64;
    }

    /// Counts the members of a set that another one shares; in all, a share of `least` must be.
    pub fn overlap(
        &mut self,
        own: &BTreeSet<u32>,
        expected: &BTreeSet<u32>,
        difference: impl FnOnce() -> String,
    ) {
        let all = own.len().max(expected.len());
        let other = all - own.intersection(expected).count();
        self.least_overlap = Some(rounded::OVERLAP);
        self.compared += all as u64;
        self.outside += other as u64;
        if other > 0 {
            self.first.get_or_insert_with(difference);
        }
    }

    /// Counts one thing that is equal or not.
    pub fn equal(&mut self, equal: bool, difference: impl FnOnce() -> String) {
        self.compared += 1;
        if !equal {
            self.outside += 1;
            if self.first.is_none() {
                self.first = Some(difference());
            }
        }
    }

    /// Adds something that a reader should know.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Closes the line.
    pub fn check(self) -> Check {
        let rms = (self.squares.0 / self.squares.1.max(f64::MIN_POSITIVE)).sqrt();
        let share = self.least_overlap.map_or(self.allowed_outside, |least| 1.0 - least);
        let allowed = (share * self.compared as f64).floor() as u64;
        let same = 1.0 - self.outside as f64 / self.compared.max(1) as f64;
        let numbers = self.tolerance.is_some() && self.compared > 0;
        let status = if self.compared == 0 {
            Status::NotCompared
        } else if self.failed
            || self.outside > allowed
            || (numbers && (rms > self.allowed_rms || self.max_error.is_infinite()))
        {
            Status::Fail
        } else {
            Status::Pass
        };
        let note = (!self.notes.is_empty()).then(|| self.notes.join("; "));
        Check {
            variant: self.variant,
            prompt: self.prompt,
            quantity: self.quantity,
            status,
            compared: self.compared,
            outside: self.outside,
            max_error: numbers.then_some(self.max_error),
            tolerance: self.tolerance,
            relative_rms: numbers.then_some(self.layers.map_or(rms, |l| l.0)),
            relative_bias: self.layers.map(|l| l.1),
            overlap: (self.least_overlap.is_some() && self.compared > 0).then_some(same),
            worst: self.worst,
            first: self.first,
            note,
        }
    }
}

impl fmt::Display for Report {
    /// A table: cache format and quantity, the worst prompt of each, then every failure.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&str, &str)> = Vec::new();
        for c in &self.checks {
            if !groups.contains(&(c.variant, c.quantity)) {
                groups.push((c.variant, c.quantity));
            }
        }
        let width = |of: fn(&(&str, &str)) -> usize| groups.iter().map(of).max().unwrap_or(0);
        let (narrow, wide) = (width(|g| g.0.len()).max(6), width(|g| g.1.len()).max(8));
        writeln!(
            f,
            "{:<narrow$}  {:<wide$}  {:>10} {:>9} {:>10} {:>10} {:>9} {:>9}  {:<6}  largest at",
            "caches",
            "quantity",
            "compared",
            "outside",
            "max error",
            "tolerance",
            "rms",
            "bias",
            "result"
        )?;
        for (variant, quantity) in groups {
            let of = |c: &&Check| (c.variant, c.quantity) == (variant, quantity);
            let checks: Vec<&Check> = self.checks.iter().filter(of).collect();
            let sum = |get: fn(&Check) -> u64| checks.iter().map(|c| get(c)).sum::<u64>();
            let worst = checks.iter().max_by(|a, b| {
                let key = |c: &Check| (c.status == Status::Fail, c.max_error.unwrap_or(-1.0));
                key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
            });
            let Some(worst) = worst else { continue };
            let largest = |get: fn(&Check) -> Option<f64>| {
                checks.iter().filter_map(|c| get(c)).max_by(f64::total_cmp)
            };
            let number = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.2e}"));
            let result = if checks.iter().any(|c| c.status == Status::Fail) {
                "FAIL"
            } else if checks.iter().any(|c| c.status == Status::Pass) {
                "pass"
            } else {
                "-"
            };
            let mut place = match &worst.worst {
                Some(place) => format!("{} {place}", worst.prompt),
                None => String::new(),
            };
            if result == "-" {
                place = worst.note.clone().unwrap_or_default();
            }
            writeln!(
                f,
                "{variant:<narrow$}  {quantity:<wide$}  {:>10} {:>9} {:>10} {:>10} {:>9} {:>9}  {result:<6}  {place}",
                sum(|c| c.compared),
                sum(|c| c.outside),
                number(worst.max_error),
                number(worst.tolerance),
                number(largest(|c| c.relative_rms)),
                number(largest(|c| c.relative_bias)),
            )?;
        }
        for c in self.checks.iter().filter(|c| c.status == Status::Fail) {
            write!(
                f,
                "\nFAIL {} {} {}: {} of {}",
                c.variant, c.prompt, c.quantity, c.outside, c.compared
            )?;
            if let Some(first) = &c.first {
                write!(f, "; first at {first}")?;
            }
            if let Some(rms) = c.relative_rms {
                write!(f, "; relative rms {rms:.2e}")?;
            }
        }
        // The same note for many lines is written once.
        let mut notes: Vec<(&str, Vec<String>)> = Vec::new();
        for c in &self.checks {
            let Some(note) = &c.note else { continue };
            let line = format!("{} {} {}", c.variant, c.prompt, c.quantity);
            match notes.iter_mut().find(|(text, _)| text == note) {
                Some((_, lines)) => lines.push(line),
                None => notes.push((note, vec![line])),
            }
        }
        if !notes.is_empty() {
            write!(f, "\nNotes:")?;
        }
        for (note, lines) in notes {
            write!(f, "\n- {note}:\n    {}", lines.join(", "))?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(own: &[f32], reference: &[f32]) -> Check {
        let mut tally = Tally::numbers("f32", "p1", "logits", 1e-3);
        tally.floats(own, reference, |i| format!("position {i}"));
        tally.check()
    }

    #[test]
    fn numbers_pass_within_the_tolerance_only() {
        assert_eq!(line(&[1.0, 2.0], &[1.0005, 2.0]).status, Status::Pass);
        let check = line(&[1.0, 2.0], &[1.0, 2.002]);
        assert_eq!(check.status, Status::Fail);
        assert_eq!(check.worst.as_deref(), Some("position 1"));
    }

    #[test]
    fn nan_fails_even_where_isolated_differences_are_allowed() {
        assert_eq!(line(&[f32::NAN], &[1.0]).status, Status::Fail);
        let mut tally = Tally::numbers("f32", "p1", "logits", 1e-3).isolated(0.5, 1.0);
        tally.floats(&[f32::NAN, 1.0, 1.0, 1.0], &[1.0; 4], |i| i.to_string());
        assert_eq!(tally.check().status, Status::Fail);
    }

    fn update(own: &dyn Fn(usize) -> f32) -> Check {
        let expected: Vec<f32> = (0..1024).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let own: Vec<f32> = (0..1024).map(|i| expected[i] + own(i)).collect();
        let mut tally = Tally::numbers("f32", "p1", "block_update", 4e-2);
        tally.update("layer 0", &own, &expected, &[], 1, |i| format!("element {i}"));
        tally.check()
    }

    /// A small error of the whole, one wrong number, a shift and a shrinking are each noticed.
    #[test]
    fn updates_are_judged_as_a_whole_by_their_worst_number_and_by_their_bias() {
        let sign = |i: usize| if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        assert_eq!(update(&|i| 3e-3 * sign(i)).status, Status::Pass);
        assert_eq!(update(&|i| 7e-3 * sign(i)).status, Status::Fail);
        assert_eq!(update(&|i| if i == 500 { 0.05 } else { 0.0 }).status, Status::Fail);
        assert_eq!(update(&|_| 2e-3).status, Status::Fail);
        let shrunk = |i: usize| -2e-3 * (((i * 37) % 101) as f32 / 50.0 - 1.0).signum();
        assert_eq!(update(&shrunk).status, Status::Fail);
        assert_eq!(update(&|i| if i == 3 { f32::NAN } else { 0.0 }).status, Status::Fail);
    }

    /// A number that a layer takes almost to zero was rounded at its old size.
    #[test]
    fn numbers_are_rounded_at_the_larger_of_both_sizes() {
        let before = vec![8.0f32; 1024];
        let expected: Vec<f32> = before.iter().map(|x| x - 8.0).collect();
        let judge = |error: f32| {
            let own: Vec<f32> = (0..1024).map(|i| if i == 9 { error } else { 0.0 }).collect();
            let mut tally = Tally::numbers("f32", "p1", "block_update", 4e-2);
            tally.update("layer 0", &own, &expected, &before, 1, |i| format!("element {i}"));
            tally.check().status
        };
        let most = 8.0 * (4e-2 + 1.0 / 128.0);
        assert_eq!((judge(0.99 * most), judge(1.01 * most)), (Status::Pass, Status::Fail));
    }

    #[test]
    fn choices_overlap_by_a_share() {
        let expected: BTreeSet<u32> = (0..100).collect();
        let judge = |wrong: u32| {
            let own: BTreeSet<u32> = (wrong..100 + wrong).collect();
            let mut tally = Tally::sets("f32", "p1", "topk");
            tally.overlap(&own, &expected, String::new);
            tally.check()
        };
        assert_eq!((judge(2).status, judge(2).overlap), (Status::Pass, Some(0.98)));
        assert_eq!(judge(3).status, Status::Fail);
    }

    #[test]
    fn nothing_compared_is_not_a_pass() {
        let tally = Tally::sets("-", "p1", "hash ids");
        let report = Report { checks: vec![tally.check()] };
        assert_eq!(report.checks[0].status, Status::NotCompared);
        assert!(report.failed());
    }
}
