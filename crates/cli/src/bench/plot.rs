//! `deepinfer bench plot`: shares of the limit as horizontal bars, drawn as SVG.

use super::report::{self, Report};
use crate::args::BenchPlot;
use crate::failure::{Failure, Outcome};
use crate::files;
use anyhow::Context;
use std::fmt::Write;

/// Colours of the files, readable on white and for the colour-blind.
const COLOURS: [&str; 6] = ["#2b6cb0", "#dd8a1f", "#2f855a", "#b83280", "#6b46c1", "#4a5568"];
const WIDTH: usize = 1080;
/// Where bars begin, and how long one of 100% is.
const LEFT: usize = 470;
const FULL: usize = 440;
/// Heights of a bar, and of what lies between rows.
const BAR: usize = 12;
const GAP: usize = 6;
/// Space for a heading above the first row of an operation.
const HEADING: usize = 24;
const TEXT: &str = "#1a202c";

/// Reads the reports and writes the picture.
pub fn run(args: &BenchPlot) -> Outcome {
    if args.files.len() > COLOURS.len() {
        let most = COLOURS.len();
        return Err(Failure::Usage(format!("{} files: at most {most} fit", args.files.len())));
    }
    if args.files.iter().any(|file| files::are_one(file, &args.out)) {
        let out = args.out.display();
        return Err(Failure::Usage(format!("--out {out} is one of the files to read")));
    }
    let mut reports = Vec::new();
    for file in &args.files {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        reports.push((stem, report::read(file)?));
    }
    let svg = draw(&reports);
    std::fs::write(&args.out, svg)
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    Ok(())
}

/// Text between tags, or in an attribute. Characters that XML does not allow become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => out.push(' '),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Operations and their shapes, in the order of the files, each once.
fn groups(reports: &[(String, Report)]) -> Vec<(&str, Vec<&str>)> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in reports.iter().flat_map(|(_, report)| &report.rows) {
        let at = groups.iter().position(|(operation, _)| *operation == row.operation);
        let at = at.unwrap_or_else(|| {
            groups.push((&row.operation, Vec::new()));
            groups.len() - 1
        });
        let shapes = &mut groups[at].1;
        if !shapes.contains(&row.shape.as_str()) {
            shapes.push(&row.shape);
        }
    }
    groups
}

/// A text; `more` are further attributes.
fn text(svg: &mut String, x: usize, y: usize, size: usize, more: &str, text: &str) {
    let text = escaped(text);
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{TEXT}\"{more}>{text}</text>"
    );
}

/// The picture; reports come with the names of their files.
fn draw(reports: &[(String, Report)]) -> String {
    let groups = groups(reports);
    let row_height = BAR * reports.len() + GAP;
    let top = 70 + 18 * reports.len();
    let rows: usize = groups.iter().map(|(_, shapes)| HEADING + row_height * shapes.len()).sum();
    let height = top + rows + 20;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"Helvetica, Arial, sans-serif\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(
        &mut svg,
        20,
        30,
        18,
        " font-weight=\"bold\"",
        "Least time (memory, arithmetic or launch, measured) over time measured",
    );
    for (i, (stem, report)) in reports.iter().enumerate() {
        let y = 44 + 18 * i;
        let colour = COLOURS[i % COLOURS.len()];
        let _ = writeln!(
            svg,
            "<rect x=\"20\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        );
        let name = match reports.len() {
            1 => report.device.clone(),
            _ => format!("{} ({stem})", report.device),
        };
        text(&mut svg, 40, y + 10, 12, "", &name);
    }
    for percent in [0, 25, 50, 75, 100] {
        let (x, y) = (LEFT + FULL * percent / 100, height - 20);
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{y}\" stroke=\"#cbd5e0\"/>"
        );
        let label = format!("{percent}%");
        text(&mut svg, x, top - 6, 11, " text-anchor=\"middle\"", &label);
    }
    let mut y = top;
    for (operation, shapes) in &groups {
        text(&mut svg, 20, y + HEADING - 7, 13, " font-weight=\"bold\"", operation);
        y += HEADING;
        for shape in shapes {
            let middle = y + (row_height - GAP) / 2 + 4;
            text(&mut svg, LEFT - 8, middle, 11, " text-anchor=\"end\"", shape);
            for (i, (_, report)) in reports.iter().enumerate() {
                let mut rows = report.rows.iter();
                let found = rows.find(|row| row.operation == *operation && row.shape == *shape);
                let Some(row) = found else { continue };
                // What caches serve may exceed the limit; its bar ends a little behind it.
                let length = (row.share.min(1.05) * FULL as f64).max(1.0);
                let (y, colour) = (y + BAR * i, COLOURS[i % COLOURS.len()]);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"{}\" \
                     fill=\"{colour}\"/>",
                    BAR - 1
                );
                let label = format!("{:.0}%, {}", 100.0 * row.share, duration(row.microseconds));
                text(&mut svg, LEFT + length as usize + 5, y + 10, 10, "", &label);
            }
            y += row_height;
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn duration(microseconds: f64) -> String {
    match microseconds {
        us if us < 9.95 => format!("{us:.1} us"),
        us if us < 9_999.5 => format!("{us:.0} us"),
        us => format!("{:.1} ms", us / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    /// The texts of a document; panics unless its tags are closed in order and its characters
    /// escaped.
    fn texts(svg: &str) -> Vec<String> {
        let (mut open, mut texts) = (Vec::new(), Vec::new());
        let mut rest = svg;
        while let Some(at) = rest.find('<') {
            let text = &rest[..at];
            assert!(!text.contains('>'), "a stray > in {text:?}");
            let entities = ["&amp;", "&lt;", "&gt;", "&quot;"];
            for (i, _) in text.match_indices('&') {
                assert!(entities.iter().any(|e| text[i..].starts_with(e)), "a stray & in {text:?}");
            }
            if open.last() == Some(&"text") {
                texts.push(text.to_owned());
            } else {
                assert_eq!(text.trim(), "", "text outside of a text");
            }
            let end = at + rest[at..].find('>').expect("a tag ends");
            let tag = &rest[at + 1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            assert!(!tag.contains('<'), "{tag}");
            let name = tag.trim_matches('/').split_whitespace().next().expect("a name");
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty() && rest.trim().is_empty());
        texts
    }

    #[test]
    fn the_picture_is_well_formed_and_holds_every_row() {
        let first =
            report("cpu & <fast>", &[("linear", "fp8 \"a\" x b", 0.5), ("route", "c", 1.7)]);
        let second = report("cuda:0", &[("linear", "only < here", 0.25), ("route", "c", 0.01)]);
        let svg = draw(&[("one".into(), first), ("two".into(), second)]);
        let texts = texts(&svg);
        for want in [
            "linear",
            "route",
            "fp8 &quot;a&quot; x b",
            "c",
            "only &lt; here",
            "cpu &amp; &lt;fast&gt; (one)",
            "cuda:0 (two)",
            "50%, 12 us",
            "170%, 12 us",
            "25%, 12 us",
            "1%, 12 us",
        ] {
            assert_eq!(texts.iter().filter(|text| *text == want).count(), 1, "{want}: {texts:?}");
        }
        // A bar a figure, the background, and two keys.
        assert_eq!(svg.matches("<rect").count(), 4 + 1 + 2);
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
    }

    #[test]
    fn one_file_needs_no_name() {
        let svg = draw(&[("one".into(), report("cpu", &[("a", "b", 0.5)]))]);
        assert!(texts(&svg).contains(&"cpu".to_owned()));
    }

    #[test]
    fn characters_are_escaped() {
        assert_eq!(escaped("a<b>&\"c\"\u{1}"), "a&lt;b&gt;&amp;&quot;c&quot; ");
    }
}
