//! A device tests itself: operations of every kind at the released model's shapes and at odd ones, on
//! fresh inputs, against the plain CPU.
//!
//! For each case the operation runs over the most rows first. Then
//! - some rows are computed alone by the plain CPU: integers, selections, codes and copies must be
//!   equal; rounded numbers are judged by the root mean square of their errors and by the mean of
//!   the signed errors, both relative to the root mean square of the reference;
//! - all rows are computed in batches of the next smaller size, the first and the last in smaller
//!   ones, and must be the same bits;
//! - outputs were filled with a pattern before, and what lies behind them must still hold it.

mod attend;
mod buffers;
mod experts;
mod far;
mod linear;
mod random;
mod rows;
mod sample;
mod select;
mod small;

use crate::cpu::{Cpu, Isa};
use crate::error::DeviceError;
use crate::ops::Device;
use buffers::Random;
use std::ops::Range;
use std::time::Instant;

/// Row counts of the full test.
const ROWS: [usize; 6] = [1, 7, 127, 129, 1536, 4097];
/// Row counts of the quick one.
const FEW_ROWS: [usize; 3] = [1, 7, 129];

/// What is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Small shapes and few rows.
    pub quick: bool,
    /// Start of the random numbers.
    pub seed: u64,
}

/// Errors of rounded numbers, relative to the root mean square of the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// Root mean square.
    pub rms: f64,
    /// Mean with signs.
    pub bias: f64,
}

/// One operation at one shape.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the operation.
    pub operation: &'static str,
    /// Its sizes, in words.
    pub shape: String,
    /// The most rows it ran over.
    pub rows: usize,
    /// Errors against the reference; none where results must be equal.
    pub errors: Option<Errors>,
    /// What is wrong, in words; none if all is well.
    pub failure: Option<String>,
    /// Time that the case took.
    pub seconds: f64,
}

/// Runs the test, and tells `observe` about each case. The order of cases is fixed.
///
/// # Errors
/// If the reference's threads cannot start. What goes wrong on the device is a failed case.
pub fn run<D: Device>(
    device: &D,
    options: Options,
    observe: &mut dyn FnMut(&Case),
) -> Result<Vec<Case>, DeviceError> {
    let plain = Cpu::with_isa(None, Isa::Scalar)?;
    let random = Random::new(options.seed);
    let mut runner = Runner { device, plain, options, random, observe, cases: Vec::new() };
    rows::run(&mut runner);
    small::run(&mut runner);
    random::run(&mut runner);
    linear::run(&mut runner);
    attend::run(&mut runner);
    select::run(&mut runner);
    experts::run(&mut runner);
    sample::run(&mut runner);
    // A CPU addresses all of its memory in the same way.
    if !options.quick && size_of::<D::Act>() == 2 {
        far::run(&mut runner, far::Reach::DEVICE);
    }
    Ok(runner.cases)
}

/// Results of some rows, the same number for each.
enum Output {
    /// Must be equal.
    Exact(Vec<u32>),
    /// May be rounded differently.
    Rounded(Vec<f32>),
}

impl Output {
    /// The bits of row `row` of `rows`.
    fn bits(&self, rows: Range<usize>, of: usize) -> Vec<u32> {
        let cut = |len: usize| rows.start * len / of..rows.end * len / of;
        match self {
            Output::Exact(x) => x[cut(x.len())].to_vec(),
            Output::Rounded(x) => x[cut(x.len())].iter().map(|x| x.to_bits()).collect(),
        }
    }
}

/// Why there is no output.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("wrote behind the output")]
    Overrun,
}

/// An operation at one shape, with inputs for the most rows it runs over.
trait Operation {
    /// Weights and the like on a device.
    type Ready<D: Device>;

    fn name(&self) -> &'static str;
    fn shape(&self) -> String;
    /// Bound of the relative root mean square of errors where activations are bf16; a tenth of it
    /// bounds their mean, apart from chance. 0 where results must be equal.
    fn bound(&self) -> f64 {
        0.0
    }
    fn prepare<D: Device>(&self, device: &D) -> Result<Self::Ready<D>, Trouble>;
    fn run<D: Device>(
        &self,
        device: &D,
        ready: &Self::Ready<D>,
        rows: Range<usize>,
    ) -> Result<Output, Trouble>;
}

struct Runner<'a, D: Device> {
    device: &'a D,
    plain: Cpu,
    options: Options,
    random: Random,
    observe: &'a mut dyn FnMut(&Case),
    cases: Vec<Case>,
}

impl<D: Device> Runner<'_, D> {
    /// The row counts of a case that runs over at most `most` rows.
    fn rows(&self, most: usize) -> Vec<usize> {
        let counts: &[usize] = if self.options.quick { &FEW_ROWS } else { &ROWS };
        counts.iter().copied().filter(|n| *n <= most).collect()
    }

    /// Most rows of a case that could run over `most`.
    fn most(&self, most: usize) -> usize {
        self.rows(most).last().copied().unwrap_or(1)
    }

    /// Tests an operation whose inputs are for `most` rows.
    fn check<O: Operation>(&mut self, operation: &O, most: usize) {
        let start = Instant::now();
        let (errors, failure) = match self.compare(operation, most) {
            Ok((errors, failure)) => (errors, failure),
            Err(trouble) => (None, Some(trouble.to_string())),
        };
        let case = Case {
            operation: operation.name(),
            shape: operation.shape(),
            rows: most,
            errors,
            failure,
            seconds: start.elapsed().as_secs_f64(),
        };
        (self.observe)(&case);
        self.cases.push(case);
    }

    /// Tests something that is right or not. What asks for more memory than there is, is skipped.
    fn case(
        &mut self,
        operation: &'static str,
        mut shape: String,
        test: impl FnOnce(&D, &mut Random) -> Result<bool, Trouble>,
    ) {
        let start = Instant::now();
        let failure = match test(self.device, &mut self.random) {
            Ok(true) => None,
            Ok(false) => Some("not what it should be".to_owned()),
            Err(Trouble::Device(DeviceError::OutOfMemory { wanted, .. })) => {
                shape = format!("{shape}: skipped, {} MiB are not free", wanted >> 20);
                None
            }
            Err(trouble) => Some(trouble.to_string()),
        };
        let seconds = start.elapsed().as_secs_f64();
        let case = Case { operation, shape, rows: 1, errors: None, failure, seconds };
        (self.observe)(&case);
        self.cases.push(case);
    }

    fn compare<O: Operation>(
        &self,
        operation: &O,
        most: usize,
    ) -> Result<(Option<Errors>, Option<String>), Trouble> {
        let ready = operation.prepare(self.device)?;
        let all = operation.run(self.device, &ready, 0..most)?;
        let plain = operation.prepare(&self.plain)?;
        let mut sums = Sums::default();
        let mut failure = None;
        let picked =
            if self.options.quick { [0, most - 1, most / 2] } else { [0, most - 1, most / 3] };
        for row in picked {
            match operation.run(&self.plain, &plain, row..row + 1)? {
                Output::Exact(want) => {
                    let got = all.bits(row..row + 1, most);
                    if let Some(at) = (0..want.len()).find(|i| got.get(*i) != Some(&want[*i])) {
                        let (got, want) = (got.get(at).copied().unwrap_or(0), want[at]);
                        failure = Some(format!("row {row}: value {at} is {got:#x}, not {want:#x}"));
                    }
                }
                Output::Rounded(want) => {
                    let got = all.bits(row..row + 1, most);
                    sums.add(got.iter().map(|x| f32::from_bits(*x)), &want);
                }
            }
        }
        let errors = sums.errors();
        if let Some(errors) = errors {
            failure = failure.or(sums.judge(errors, bound::<D>(operation.bound())));
        }
        let counts: Vec<usize> = self.rows(most).into_iter().filter(|n| *n < most).collect();
        for n in &counts {
            // Batches of the largest size cover all rows.
            let starts: Vec<usize> = match (Some(n) == counts.last(), *n < 16) {
                (true, _) => (0..most).step_by(*n).collect(),
                (_, true) => vec![0, most - n],
                _ => vec![0],
            };
            for from in starts {
                let to = most.min(from + n);
                let some = operation.run(self.device, &ready, from..to)?;
                if some.bits(0..to - from, to - from) != all.bits(from..to, most) {
                    let text = format!("rows {from}..{to} alone have other bits");
                    failure = failure.or(Some(text));
                }
            }
        }
        Ok((errors, failure))
    }
}

/// The bound for a device's activations.
fn bound<D: Device>(bf16: f64) -> f64 {
    if size_of::<D::Act>() == 2 { bf16 } else { 1e-5 }
}

/// Sums over compared numbers.
#[derive(Default)]
struct Sums {
    count: f64,
    reference: f64,
    error: f64,
    square: f64,
    not_finite: usize,
}

impl Sums {
    fn add(&mut self, got: impl Iterator<Item = f32>, want: &[f32]) {
        for (got, want) in got.zip(want) {
            let (got, want) = (f64::from(got), f64::from(*want));
            if !got.is_finite() || !want.is_finite() {
                self.not_finite += 1;
                continue;
            }
            self.count += 1.0;
            self.reference += want * want;
            self.error += got - want;
            self.square += (got - want).powi(2);
        }
    }

    fn errors(&self) -> Option<Errors> {
        if self.count + self.not_finite as f64 == 0.0 {
            return None;
        }
        let count = self.count.max(1.0);
        let rms = (self.reference / count).sqrt().max(f64::MIN_POSITIVE);
        Some(Errors { rms: (self.square / count).sqrt() / rms, bias: self.error / count / rms })
    }

    fn judge(&self, errors: Errors, bound: f64) -> Option<String> {
        if self.not_finite > 0 {
            return Some(format!("{} values are not finite", self.not_finite));
        }
        if errors.rms > bound {
            return Some(format!("errors of {:.1e}, and {bound:.1e} is allowed", errors.rms));
        }
        // The mean of as many errors without bias.
        let chance = 4.0 * errors.rms / self.count.max(1.0).sqrt();
        if errors.bias.abs() > bound / 10.0 + chance {
            let most = bound / 10.0 + chance;
            return Some(format!("a bias of {:.1e}, and {most:.1e} is allowed", errors.bias));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_bias_and_infinities_are_noticed() {
        let want = vec![1.0f32; 1000];
        let judged = |got: &dyn Fn(usize) -> f32| {
            let mut sums = Sums::default();
            sums.add((0..1000).map(got), &want);
            sums.errors().and_then(|errors| sums.judge(errors, 1e-2))
        };
        assert_eq!(judged(&|i| if i % 2 == 0 { 1.005 } else { 0.995 }), None);
        assert!(
            judged(&|i| if i % 2 == 0 { 1.05 } else { 0.95 }).is_some_and(|t| t.contains("errors"))
        );
        assert!(judged(&|_| 1.005).is_some_and(|t| t.contains("bias")));
        assert!(
            judged(&|i| if i == 7 { f32::NAN } else { 1.0 }).is_some_and(|t| t.contains("finite"))
        );
        let mut sums = Sums::default();
        sums.add([5.0, 99.0].into_iter(), &[f32::NAN, 1.0]);
        assert!(sums.errors().and_then(|errors| sums.judge(errors, 1e-2)).is_some());
    }

    #[test]
    fn the_fast_cpu_passes_the_quick_test() {
        let device = Cpu::new(None).expect("threads start");
        let options = Options { quick: true, seed: 1 };
        let cases = run(&device, options, &mut |_| {}).expect("threads start");
        assert!(cases.len() > 20);
        for case in &cases {
            assert_eq!(case.failure, None, "{} {}", case.operation, case.shape);
        }
    }

    #[test]
    fn a_gpu_passes_the_quick_test() {
        let Some(device) = crate::cuda::test_gpu() else { return };
        let options = Options { quick: true, seed: 2 };
        let cases = run(&device, options, &mut |_| {}).expect("threads start");
        let failed: Vec<&Case> = cases.iter().filter(|case| case.failure.is_some()).collect();
        assert!(failed.is_empty(), "{failed:#?}");
    }
}
