//! `deepinfer bench ops`: every operation of a device against what the device can do.

use super::report::{Limits, Report, Row, Skipped};
use crate::args::BenchOps;
use crate::failure::{Failure, Outcome};
use crate::{open, text};
use deepinfer_device::bench::{self, Extent, Figures, Measure, Options};
use deepinfer_device::{Cpu, DeviceChoice};
use std::io::Write;
use std::num::NonZeroUsize;

/// Measures and prints.
pub fn run(args: &BenchOps) -> Outcome {
    match args.device.resolve() {
        DeviceChoice::Cuda(ordinal) => {
            if args.threads.is_some() {
                return Err(Failure::Usage("--threads is for the CPU".into()));
            }
            let cuda = crate::open::gpu(ordinal)?;
            let name = format!("cuda:{ordinal}, {}", cuda.info().name);
            measure(&cuda, name, Extent::Full, args)
        }
        DeviceChoice::Cpu | DeviceChoice::Auto => {
            let cpu = Cpu::new(args.threads.map(NonZeroUsize::get))?;
            let isa = format!("{:?}", cpu.isa()).to_lowercase();
            let name = format!("cpu, {isa}, {} threads", cpu.threads());
            measure(&cpu, name, Extent::Moderate, args)
        }
    }
}

fn measure<D: Measure>(device: &D, name: String, extent: Extent, args: &BenchOps) -> Outcome {
    let extent = if args.quick { Extent::Quick } else { extent };
    let options = Options { extent, only: args.only.clone().unwrap_or_default() };
    let cases = bench::cases::<D>(&options).len();
    if cases == 0 {
        let all = Options { only: String::new(), ..options };
        let mut names: Vec<_> = bench::cases::<D>(&all).into_iter().map(|(name, _)| name).collect();
        names.dedup();
        return Err(Failure::Usage(format!(
            "--only {}: no operation and shape contains it; there are {}",
            args.only.as_deref().unwrap_or_default(),
            names.join("; ")
        )));
    }
    let bar = open::bar("measuring", cases);
    let rows = bench::run(device, &options, &mut |operation, shape, row| match row {
        None => bar.set_message(format!("{operation}: {shape}")),
        Some(_) => bar.inc(1),
    })?;
    bar.finish_and_clear();
    let report = report(name, rows)?;
    if args.json {
        text::json(&report)?
    } else {
        print(&report)?
    }
    Ok(())
}

fn report(device: String, rows: Vec<bench::Row>) -> Outcome<Report> {
    let figures = |row: &bench::Row| row.result.as_ref().ok().copied();
    let limits: Vec<bench::Limits> =
        rows.iter().filter_map(figures).map(|figures| figures.limits).collect();
    let Some(limits) = bench::Limits::median(&limits) else {
        return Err(Failure::Error(anyhow::anyhow!("nothing of this fits into the memory")));
    };
    let (mut measured, mut skipped) = (Vec::new(), Vec::new());
    for bench::Row { operation, shape, result } in rows {
        let operation = operation.to_owned();
        match result {
            Ok(figures) => measured.push(row(operation, shape, &figures)),
            Err(error) => {
                skipped.push(Skipped { operation, shape, reason: error.to_string() });
            }
        }
    }
    let limits = Limits {
        memory_gigabytes_per_second: limits.memory / 1e9,
        host_gigabytes_per_second: limits.host.map(|host| host / 1e9),
        teraflops: limits.arithmetic / 1e12,
        launch_microseconds: limits.launch * 1e6,
    };
    Ok(Report { device, limits, rows: measured, skipped })
}

fn row(operation: String, shape: String, figures: &Figures) -> Row {
    let Figures { seconds, work, limits } = figures;
    let (bound, least) = limits.least(work);
    Row {
        operation,
        shape,
        microseconds: seconds * 1e6,
        gigabytes_per_second: (work.bytes + work.host_bytes) / seconds / 1e9,
        teraflops: (work.operations > 0.0).then(|| work.operations / seconds / 1e12),
        limit: bound.name().to_owned(),
        least_microseconds: least * 1e6,
        share: figures.share(),
    }
}

/// Three digits, or all before the point.
fn digits(x: f64) -> String {
    let decimals = match x {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        x if x >= 0.9995 => 2,
        _ => 3,
    };
    format!("{x:.decimals$}")
}

fn print(report: &Report) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let Limits {
        memory_gigabytes_per_second: memory,
        host_gigabytes_per_second: host,
        teraflops,
        launch_microseconds: launch,
    } = &report.limits;
    let host = host.map(|host| format!(", of host memory {} GB/s", digits(host)));
    writeln!(out, "{}", report.device)?;
    writeln!(
        out,
        "limits: memory read {} GB/s{}, arithmetic {} TFLOP/s, a call {} us",
        digits(*memory),
        host.unwrap_or_default(),
        digits(*teraflops),
        digits(*launch)
    )?;
    let head = ["operation", "shape", "us", "GB/s", "TFLOP/s", "bound by", "least us", "share"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(report.rows.iter().map(|row| {
        vec![
            row.operation.clone(),
            row.shape.clone(),
            digits(row.microseconds),
            digits(row.gigabytes_per_second),
            row.teraflops.map(digits).unwrap_or_default(),
            row.limit.clone(),
            digits(row.least_microseconds),
            format!("{:.1}%", 100.0 * row.share),
        ]
    }));
    text::table(&rows)?;
    for Skipped { operation, shape, reason } in &report.skipped {
        writeln!(out, "skipped: {operation} {shape}: {reason}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer_device::DeviceError;
    use deepinfer_device::bench::Work;

    #[test]
    fn numbers_have_three_digits() {
        for (x, want) in [(0.01234, "0.012"), (1.0, "1.00"), (12.345, "12.3"), (9.999, "10.0")] {
            assert_eq!(digits(x), want);
        }
        assert_eq!(digits(4649.7), "4650");
    }

    #[test]
    fn what_does_not_fit_is_said_and_the_rest_is_reported() {
        let limits =
            bench::Limits { memory: 1e12, host: Some(5e10), arithmetic: 1e14, launch: 4e-6 };
        let work = Work { bytes: 1e6, host_bytes: 0.0, operations: 4e9 };
        let figures = Figures { seconds: 8e-5, work, limits };
        let error = || DeviceError::OutOfMemory { what: "a buffer", wanted: 77 };
        let row = |shape: &str, result| bench::Row { operation: "a", shape: shape.into(), result };
        let report = report("x".into(), vec![row("1", Ok(figures)), row("2", Err(error()))]);
        let report = report.expect("a row was measured");
        assert_eq!((report.rows.len(), report.skipped.len()), (1, 1));
        assert!(report.skipped[0].reason.contains("77 bytes"));
        let Row { microseconds, gigabytes_per_second, teraflops, limit, share, .. } =
            &report.rows[0];
        assert_eq!((*microseconds, limit.as_str()), (80.0, "arithmetic"));
        assert!((gigabytes_per_second - 12.5).abs() < 1e-9 && (share - 0.5).abs() < 1e-9);
        assert!(teraflops.is_some_and(|t| (t - 50.0).abs() < 1e-9));
        assert!(super::report("x".into(), vec![row("2", Err(error()))]).is_err());
    }
}
