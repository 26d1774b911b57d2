//! The report for people.

use super::Report;
use super::measure::{Case, LayerTime, Mode};
use crate::text;
use std::io::{Result, Write};

/// Tables by mode and context: kinds of layers down, rows across.
pub fn report(r: &Report, operations: bool) -> Result<()> {
    let mut out = std::io::stdout();
    let sizes = if r.released { "released sizes" } else { "a small shape" };
    writeln!(
        out,
        "{}; {sizes}: {} layers and {} draft stages, hidden {}, {} experts; seed {}",
        r.device, r.layers, r.draft_stages, r.hidden, r.experts, r.seed
    )?;
    writeln!(out, "memory is read at {:.1} GB/s", r.read_gb_per_s)?;
    if let Some(m) = &r.memory {
        let [weights, caches, work, free, all] =
            [m.bytes.weights, m.bytes.caches, m.bytes.work, m.free, m.all]
                .map(|n| text::bytes(n as u64));
        writeln!(
            out,
            "weights {weights}, caches {caches}, work space {work}; {free} of {all} free"
        )?;
    }
    writeln!(out, "n-gram tables {}", text::bytes(r.engram_bytes))?;
    let mut done: Vec<(Mode, usize)> = Vec::new();
    for case in &r.cases {
        if done.contains(&(case.mode, case.context)) {
            continue;
        }
        done.push((case.mode, case.context));
        let same = |other: &&Case| (other.mode, other.context) == (case.mode, case.context);
        let cases: Vec<&Case> = r.cases.iter().filter(same).collect();
        writeln!(out)?;
        writeln!(out, "{}", heading(case))?;
        text::table(&table(&cases))?;
        if operations {
            for kind in case.layers.iter().filter(|layer| !layer.operations.is_empty()) {
                writeln!(out)?;
                writeln!(out, "{}, by operation, us", kind.kind)?;
                text::table(&by_operation(&cases, kind.kind))?;
            }
        }
    }
    Ok(())
}

fn heading(case: &Case) -> String {
    let context = text::count(case.context as u64);
    match case.mode {
        Mode::Decode => format!("decode at {context} positions; us, and share of the memory rate"),
        Mode::Prefill => format!("prefill up to {context} positions; us, and TFLOP/s"),
        Mode::Prompt => {
            format!("the same, each layer with the rows that matter; {context} positions")
        }
        Mode::Draft => {
            "a block of drafts in each sequence; us, and share of the memory rate".to_owned()
        }
    }
}

fn us(seconds: f64) -> String {
    format!("{:.1}", 1e6 * seconds)
}

fn table(cases: &[&Case]) -> Vec<Vec<String>> {
    let of_sequences = matches!(cases[0].mode, Mode::Decode | Mode::Draft);
    let what = if of_sequences { "sequences" } else { "rows" };
    let line = |name: &str, cell: &dyn Fn(&Case) -> String| -> Vec<String> {
        let cells = cases.iter().map(|case| cell(case));
        std::iter::once(name.to_owned()).chain(cells).collect()
    };
    let mut rows = vec![line(what, &|case| case.rows.to_string())];
    for (i, layer) in cases[0].layers.iter().enumerate() {
        let name = format!("{} ({})", layer.kind, layer.layers);
        rows.push(line(&name, &|case| case.layers.get(i).map_or(String::new(), |l| cell(case, l))));
    }
    let whole = if cases[0].mode == Mode::Draft { "one stage" } else { "whole step" };
    rows.push(line(&format!("{whole} on the device"), &|case| us(case.device_seconds)));
    rows.push(line("as called, launches included", &|case| us(case.seconds)));
    rows.push(line("of that, launching", &|case| us(case.queued_seconds)));
    if cases.iter().any(|case| case.tokens_per_s.is_some()) {
        let tokens = |case: &Case| case.tokens_per_s.map_or(String::new(), |n| format!("{n:.0}"));
        rows.push(line("tokens/s as called", &tokens));
    }
    if cases.iter().any(|case| !case.own_pages) {
        let pages = |case: &Case| if case.own_pages { "own" } else { "shared" }.to_owned();
        rows.push(line("pages", &pages));
    }
    rows
}

fn cell(case: &Case, layer: &LayerTime) -> String {
    match case.mode {
        Mode::Prefill | Mode::Prompt => format!("{} {:.0}", us(layer.seconds), layer.tflop_per_s),
        _ => format!("{} {:.0}%", us(layer.seconds), 100.0 * layer.share_of_read),
    }
}

/// Operations of a kind of layers down, rows across.
fn by_operation(cases: &[&Case], kind: &str) -> Vec<Vec<String>> {
    let find = |case: &Case, name: &str| -> Option<f64> {
        let layer = case.layers.iter().find(|layer| layer.kind == kind)?;
        layer.operations.iter().find(|o| o.name == name).map(|o| o.seconds)
    };
    let mut names: Vec<&str> = Vec::new();
    for layer in cases.iter().flat_map(|case| &case.layers).filter(|layer| layer.kind == kind) {
        for o in &layer.operations {
            if !names.contains(&o.name.as_str()) {
                names.push(&o.name);
            }
        }
    }
    let head = std::iter::once("operation".to_owned());
    let mut rows = vec![head.chain(cases.iter().map(|case| case.rows.to_string())).collect()];
    for name in names {
        let cells = cases.iter().map(|case| find(case, name).map_or(String::new(), us));
        rows.push(std::iter::once(name.to_owned()).chain(cells).collect::<Vec<_>>());
    }
    rows
}
