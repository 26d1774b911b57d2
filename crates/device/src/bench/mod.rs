//! How fast the operations of the model are at the released model's shapes, as shares of what the
//! device can do.
//!
//! An operation has bytes that must move and operations of arithmetic that must be done, however it
//! is written ([`Work`]). The device's own rates are measured beside every case ([`Limits`]); the
//! least time is the longest of what bytes, arithmetic and the start of one kernel take. A share is
//! the least time over the time measured.
//!
//! Calls follow each other without waiting and take their weights and inputs from copies in turn, so
//! many that caches do not hold them ([`Measure::ROTATED`] bytes, but at most [`COPIES`] copies: what
//! is smaller than a copy's part of that comes from caches). The median over several series of calls
//! counts.

mod attend;
mod cases;
mod experts;
mod linear;
mod rows;
mod sample;
mod select;
mod small;

use crate::error::DeviceError;
use crate::inputs::Random;
use crate::ops::{Device, Result};
use cases::{Case, Cases, Maker, Ready};

/// Most copies of an operation's inputs.
pub const COPIES: usize = 512;
/// Series of calls, of which the median counts.
const SERIES: usize = 7;
/// Fewest series, where calls are slow.
const FEWEST: usize = 3;
/// Most calls in a series.
const CALLS: usize = 200;

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes read from the device's memory in a second.
    pub memory: f64,
    /// Bytes that the device reads from host memory in a second; none where that is the same.
    pub host: Option<f64>,
    /// Operations a second, a multiply-add being two: f32 on a CPU; on a GPU products of bf16 with
    /// f32 sums by `mma.sync`, the tensor cores' instruction that every supported card has.
    pub arithmetic: f64,
    /// Seconds from one call to the next of an operation that has nothing to do.
    pub launch: f64,
}

/// What an operation cannot do without. Everything is counted once that is read or written by any
/// implementation: weights and cache rows in their stored form (of the experts and cache rows, those
/// that are chosen, each once a call), inputs and outputs; not what lies between the steps of an
/// operation. Arithmetic counts products of matrices and with cache rows; what is done value by
/// value counts as nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes read from or written to the device's memory.
    pub bytes: f64,
    /// Bytes read from host memory, where the device keeps a table there.
    pub host_bytes: f64,
    /// Operations, a multiply-add being two.
    pub operations: f64,
}

/// What bounds an operation from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Bytes of the device's memory.
    Memory,
    /// Bytes of host memory.
    Host,
    /// Arithmetic.
    Arithmetic,
    /// The start of a kernel.
    Launch,
}

impl Bound {
    /// In a word.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Host => "host memory",
            Bound::Arithmetic => "arithmetic",
            Bound::Launch => "launch",
        }
    }
}

impl Limits {
    /// The seconds that `work` takes at least, and what bounds it.
    pub fn least(&self, work: &Work) -> (Bound, f64) {
        let host = work.host_bytes / self.host.unwrap_or(self.memory);
        let all = [
            (Bound::Launch, self.launch),
            (Bound::Memory, work.bytes / self.memory),
            (Bound::Host, host),
            (Bound::Arithmetic, work.operations / self.arithmetic),
        ];
        all.into_iter().fold((Bound::Launch, 0.0), |a, b| if b.1 > a.1 { b } else { a })
    }

    /// Medians of each limit; `None` without any.
    pub fn median(all: &[Limits]) -> Option<Limits> {
        let of =
            |limit: fn(&Limits) -> f64| median(&mut all.iter().map(limit).collect::<Vec<f64>>());
        let host: Vec<f64> = all.iter().filter_map(|l| l.host).collect();
        (!all.is_empty()).then(|| Limits {
            memory: of(|l| l.memory),
            host: (!host.is_empty()).then(|| median(&mut host.clone())),
            arithmetic: of(|l| l.arithmetic),
            launch: of(|l| l.launch),
        })
    }
}

/// A device whose operations can be timed.
pub trait Measure: Device {
    /// What measuring the limits needs.
    type Yardstick;

    /// Bytes of inputs that are more than its caches hold.
    const ROTATED: usize;
    /// Seconds that a series of calls should take.
    const SERIES: f64;

    /// Makes what [`Measure::limits`] needs.
    fn yardstick(&self) -> Result<Self::Yardstick>;
    /// Measures what the device can do now.
    fn limits(&self, yardstick: &mut Self::Yardstick) -> Result<Limits>;
    /// Seconds that the operations that `calls` starts take, from the first to the end of the last.
    fn seconds(&self, calls: impl FnOnce() -> Result<()> + Send) -> Result<f64>;
    /// Whether the device reads this matrix from host memory.
    fn is_on_host(&self, matrix: &Self::Matrix) -> bool {
        let _ = matrix;
        false
    }
}

/// How many shapes are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One or two of each operation: seconds, on two cores too.
    Quick,
    /// Fewer rows than a GPU takes at a time, and a smaller vocabulary: a minute or two on a CPU.
    Moderate,
    /// The released model's shapes from one row to thousands.
    Full,
}

impl Extent {
    /// The list for this extent.
    fn of<'a, T>(self, quick: &'a [T], moderate: &'a [T], full: &'a [T]) -> &'a [T] {
        match self {
            Extent::Quick => quick,
            Extent::Moderate => moderate,
            Extent::Full => full,
        }
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which shapes.
    pub extent: Extent,
    /// Only cases whose name and shape, with a space between them, contain this; all if empty.
    pub only: String,
}

/// An operation at one shape.
#[derive(Debug)]
pub struct Row {
    /// Name of the operation.
    pub operation: &'static str,
    /// Its sizes, in words.
    pub shape: String,
    /// What was measured, or why nothing was: memory ran out.
    pub result: Result<Figures>,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Median seconds of a call.
    pub seconds: f64,
    /// What a call must do.
    pub work: Work,
    /// What the device could do at that moment.
    pub limits: Limits,
}

impl Figures {
    /// The least time over the time measured.
    pub fn share(&self) -> f64 {
        self.limits.least(&self.work).1 / self.seconds
    }
}

/// The cases of an extent: name and shape, in order.
pub fn cases<D: Measure>(options: &Options) -> Vec<(&'static str, String)> {
    let cases = all::<D>(options);
    cases.into_iter().map(|case| (case.operation, case.shape)).collect()
}

fn all<D: Measure>(options: &Options) -> Vec<Case<D>> {
    let mut cases = Cases::new(options.extent);
    linear::add(&mut cases);
    experts::add(&mut cases);
    select::add(&mut cases);
    attend::add(&mut cases);
    rows::add(&mut cases);
    small::add(&mut cases);
    sample::add(&mut cases);
    let mut list = cases.list;
    let only = options.only.to_lowercase();
    list.retain(|case| format!("{} {}", case.operation, case.shape).to_lowercase().contains(&only));
    list
}

/// Measures, and tells `observe` about each case: before it, with no row, and after it.
///
/// # Errors
/// If the device fails. A case for which memory runs out is a row that says so.
pub fn run<D: Measure>(
    device: &D,
    options: &Options,
    observe: &mut dyn FnMut(&'static str, &str, Option<&Row>),
) -> Result<Vec<Row>> {
    run_cases(device, all::<D>(options), observe)
}

fn run_cases<D: Measure>(
    device: &D,
    cases: Vec<Case<D>>,
    observe: &mut dyn FnMut(&'static str, &str, Option<&Row>),
) -> Result<Vec<Row>> {
    let mut yardstick = device.yardstick()?;
    let mut maker = Maker::new(device, Random::new(1));
    let mut rows = Vec::new();
    for case in cases {
        observe(case.operation, &case.shape, None);
        let result =
            (case.prepare)(&mut maker).and_then(|ready| measure(device, ready, &mut yardstick));
        let result = match result {
            Err(error) if !matches!(error, DeviceError::OutOfMemory { .. }) => return Err(error),
            result => result,
        };
        let row = Row { operation: case.operation, shape: case.shape, result };
        observe(row.operation, &row.shape, Some(&row));
        rows.push(row);
    }
    Ok(rows)
}

fn measure<D: Measure>(
    device: &D,
    ready: Ready<D>,
    yardstick: &mut D::Yardstick,
) -> Result<Figures> {
    let Ready { work, copies, mut call } = ready;
    let mut next = 0;
    let mut series = |calls: usize| {
        let first = next;
        next += calls;
        let seconds =
            device.seconds(|| (first..next).try_for_each(|i| call(device, i % copies)))?;
        Ok::<f64, DeviceError>(seconds / calls as f64)
    };
    // Pages are there, and scratch memory is as large as it gets, after the first call.
    series(1)?;
    let once = series(1)?.max(1e-8);
    let calls = ((D::SERIES / once) as usize).clamp(1, CALLS);
    let times = ((SERIES as f64 * D::SERIES / once) as usize / calls).clamp(FEWEST, SERIES);
    let limits = device.limits(yardstick)?;
    // The clock has risen after a series that does not count.
    series(calls)?;
    let mut seconds = (0..times).map(|_| series(calls)).collect::<Result<Vec<f64>>>()?;
    Ok(Figures { seconds: median(&mut seconds), work, limits })
}

/// The value in the middle, or the mean of the two there; NaN without values.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    const LIMITS: Limits = Limits { memory: 1e9, host: Some(1e8), arithmetic: 1e12, launch: 1e-6 };

    #[test]
    fn the_longest_part_bounds() {
        let work = |bytes, host_bytes, operations| Work { bytes, host_bytes, operations };
        assert_eq!(LIMITS.least(&work(10.0, 0.0, 0.0)), (Bound::Launch, 1e-6));
        assert_eq!(LIMITS.least(&work(1e6, 0.0, 1e8)), (Bound::Memory, 1e-3));
        assert_eq!(LIMITS.least(&work(1e6, 1e6, 1e8)), (Bound::Host, 1e-2));
        assert_eq!(LIMITS.least(&work(1e6, 1e6, 1e12)), (Bound::Arithmetic, 1.0));
        let cpu = Limits { host: None, ..LIMITS };
        assert_eq!(cpu.least(&work(0.0, 1e6, 0.0)), (Bound::Host, 1e-3));
        let figures = Figures { seconds: 2e-3, work: work(1e6, 0.0, 0.0), limits: LIMITS };
        assert_eq!(figures.share(), 0.5);
    }

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&mut []).is_nan());
        let faster = Limits { memory: 3e9, host: None, ..LIMITS };
        let both = Limits::median(&[LIMITS, faster]).expect("two");
        assert_eq!((both.memory, both.host, both.launch), (2e9, Some(1e8), 1e-6));
        assert_eq!(Limits::median(&[]), None);
    }

    #[test]
    fn a_case_without_memory_is_skipped_and_a_failing_device_ends_all() {
        let error = |fits: bool| match fits {
            true => DeviceError::Stopped,
            false => DeviceError::OutOfMemory { what: "a buffer", wanted: 9 },
        };
        let measured = |failing: bool| {
            let mut cases = Cases::<Cpu>::new(Extent::Quick);
            cases.add("large", "a".into(), move |_| Err(error(failing)));
            cases.add("small", "b".into(), |maker| {
                let (x, weight) = (maker.acts(8)?, maker.values(8, 1.0)?);
                let mut out = maker.device.alloc(8)?;
                Ready::new(Work::default(), 3, move |device: &Cpu, i| {
                    assert!(i < 3);
                    device.rms_norm(&x, &weight, 1.0, 8, 1, &mut out)
                })
            });
            let mut seen = Vec::new();
            let cpu = Cpu::new(Some(1)).expect("threads start");
            let rows = run_cases(&cpu, cases.list, &mut |operation, _, row| {
                seen.push((operation, row.map(|row| row.result.is_ok())));
            });
            (rows, seen)
        };
        let (rows, seen) = measured(false);
        let order =
            [("large", None), ("large", Some(false)), ("small", None), ("small", Some(true))];
        assert_eq!(seen, order);
        let rows = rows.expect("the device works");
        assert!(matches!(rows[0].result, Err(DeviceError::OutOfMemory { wanted: 9, .. })));
        assert!(rows[1].result.as_ref().is_ok_and(|figures| figures.seconds > 0.0));
        let (rows, seen) = measured(true);
        assert!(matches!(rows, Err(DeviceError::Stopped)) && seen == [("large", None)]);
    }

    #[test]
    fn cases_are_distinct_and_can_be_chosen() {
        let extents = [Extent::Quick, Extent::Moderate, Extent::Full];
        for extent in extents {
            let options = Options { extent, only: String::new() };
            let mut names = cases::<Cpu>(&options);
            let count = names.len();
            assert!(count >= 15);
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count);
            let options = Options { extent, only: "RMS_norm of".into() };
            let norms = cases::<Cpu>(&options);
            assert!(!norms.is_empty() && norms.iter().all(|(name, _)| *name == "rms_norm"));
        }
    }
}
