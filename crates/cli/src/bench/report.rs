//! The report of `bench ops`, as it is written and read.

use crate::failure::{Failure, Outcome};
use crate::files;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Figures of a device. Fields that it does not know are skipped when one is read.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// What was measured.
    pub device: String,
    /// What it can do: medians over the run.
    pub limits: Limits,
    /// What was measured, in order.
    pub rows: Vec<Row>,
    /// What did not fit into memory.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Reading the device's memory.
    pub memory_gigabytes_per_second: f64,
    /// Reading host memory, on a GPU.
    pub host_gigabytes_per_second: Option<f64>,
    /// Arithmetic; a multiply-add is two operations.
    pub teraflops: f64,
    /// From one call to the next of one that has nothing to do.
    pub launch_microseconds: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    pub operation: String,
    pub shape: String,
    /// Median of a call.
    pub microseconds: f64,
    /// Bytes that must move, over the time.
    pub gigabytes_per_second: f64,
    /// Operations that must be done, over the time; none where no products are.
    pub teraflops: Option<f64>,
    /// What bounds it: memory, host memory, arithmetic or launch.
    pub limit: String,
    /// What it takes at least.
    pub least_microseconds: f64,
    /// The least time over the time.
    pub share: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Skipped {
    pub operation: String,
    pub shape: String,
    pub reason: String,
}

/// Reads a report and checks it.
pub fn read(path: &Path) -> Outcome<Report> {
    let wrong = |what: String| Failure::Usage(format!("{}: {what}", path.display()));
    let text = files::text(path).map_err(|error| Failure::Usage(format!("{error:#}")))?;
    parse(&text).map_err(wrong)
}

/// The report in `text`, or what is wrong with it.
fn parse(text: &str) -> Result<Report, String> {
    let report: Report = serde_json::from_str(text)
        .map_err(|e| format!("this is no output of deepinfer bench ops --json: {e}"))?;
    if report.rows.is_empty() {
        return Err("there are no rows in it".into());
    }
    for (i, row) in report.rows.iter().enumerate() {
        let name = format!("{} {}", row.operation, row.shape);
        for (field, value) in [("share", row.share), ("microseconds", row.microseconds)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{field} of {name} is {value}; it must be above 0"));
            }
        }
        let is_same =
            |other: &&Row| (&other.operation, &other.shape) == (&row.operation, &row.shape);
        if report.rows[..i].iter().any(|other| is_same(&other)) {
            return Err(format!("{name} is there twice"));
        }
    }
    Ok(report)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A report with rows of these operations, shapes and shares.
    pub fn report(device: &str, rows: &[(&str, &str, f64)]) -> Report {
        let row = |(operation, shape, share): &(&str, &str, f64)| Row {
            operation: (*operation).to_owned(),
            shape: (*shape).to_owned(),
            microseconds: 12.5,
            gigabytes_per_second: 3.0,
            teraflops: None,
            limit: "memory".into(),
            least_microseconds: 12.5 * share,
            share: *share,
        };
        Report {
            device: device.into(),
            limits: Limits {
                memory_gigabytes_per_second: 20.0,
                host_gigabytes_per_second: None,
                teraflops: 0.3,
                launch_microseconds: 0.01,
            },
            rows: rows.iter().map(row).collect(),
            skipped: Vec::new(),
        }
    }

    #[test]
    fn bad_reports_are_refused_with_their_reason() {
        let text = |rows: &[(&str, &str, f64)]| {
            serde_json::to_string(&report("cpu", rows)).expect("it is JSON")
        };
        assert!(parse(&text(&[("a", "b", 0.5), ("a", "c", 1.5)])).is_ok());
        for (text, reason) in [
            ("{".to_owned(), "no output of"),
            ("[1]".to_owned(), "no output of"),
            (text(&[]), "no rows"),
            (text(&[("a", "b", 0.0)]), "share of a b is 0"),
            (text(&[("a", "b", -1.0)]), "share of a b is -1"),
            (text(&[("a", "b", 0.5), ("a", "b", 0.6)]), "a b is there twice"),
            (text(&[("a", "b", 0.5)]).replace("\"share\":0.5", "\"share\":\"x\""), "no output of"),
            (text(&[("a", "b", 0.5)]).replace("\"rows\"", "\"lines\""), "missing field `rows`"),
        ] {
            let error = parse(&text).expect_err(&text);
            assert!(error.contains(reason), "{error}, not {reason}");
        }
    }
}
