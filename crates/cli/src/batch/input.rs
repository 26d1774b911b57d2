//! The file of requests.

use super::body::Line;
use crate::failure::{Failure, Outcome};
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Most bytes of a line, and of the file.
const LONGEST_LINE: u64 = 64 << 20;
const LONGEST: u64 = 1 << 30;

/// Reads the requests. A line that is no request at all is an error of the file; one that asks for
/// something impossible gets an error as its answer.
pub fn read(path: &Path) -> Outcome<Vec<Line>> {
    let name = path.display();
    let cannot_read = || format!("cannot read {name}");
    let file = File::open(path).with_context(cannot_read);
    let texts = file.and_then(|file| {
        lines(BufReader::new(file), LONGEST_LINE, LONGEST).with_context(cannot_read)
    });
    let texts = texts.map_err(|error| Failure::option("INPUT", &error))?;
    let (mut lines, mut ids) = (Vec::new(), BTreeSet::new());
    for (number, text) in texts {
        let line = Line::parse(&text)
            .map_err(|reason| Failure::Usage(format!("{name} line {number}{reason}")))?;
        if !ids.insert(line.id().to_owned()) {
            let id = line.id();
            return Err(Failure::Usage(format!(
                "{name} line {number}: custom_id {id:?} occurs twice; answers are told apart by it",
            )));
        }
        lines.push(line);
    }
    if lines.is_empty() {
        return Err(Failure::Usage(format!("no requests in {name}")));
    }
    Ok(lines)
}

/// The lines that hold something, with their numbers from 1. Input without end is refused.
fn lines(
    mut from: impl BufRead,
    most_a_line: u64,
    most: u64,
) -> anyhow::Result<Vec<(usize, String)>> {
    let (mut lines, mut all) = (Vec::new(), 0);
    for number in 1.. {
        let mut bytes = Vec::new();
        let read = from.by_ref().take(most_a_line + 1).read_until(b'\n', &mut bytes)? as u64;
        if read > most_a_line {
            bail!("line {number} has more than {most_a_line} bytes");
        }
        all += read;
        if all > most {
            bail!("it holds more than {most} bytes; cut it into several");
        }
        if read == 0 {
            break;
        }
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(_) => bail!("line {number} is no UTF-8 text"),
        };
        // Some editors begin a file with a mark of its encoding.
        let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
        if !text.trim().is_empty() {
            lines.push((number, text.trim().to_owned()));
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}"#;

    fn refused(content: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, content).expect("it writes");
        match read(&path) {
            Err(Failure::Usage(message)) => message,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("{content:?} was taken"),
        }
    }

    #[test]
    fn ids_are_unique() {
        assert!(refused(&format!("{LINE}\n\n{LINE}\n")).contains("line 3: custom_id \"a\""));
    }

    #[test]
    fn faults_are_placed_and_named() {
        for (line, wanted) in [
            ("not json", "line 3 is no JSON object (column 2)"),
            ("[]", "line 3 is no JSON object"),
            ("7", "line 3 is no JSON object"),
            ("{\"custom_id\":\"b\"", "line 3 is no JSON object (column 16)"),
            ("{\"custom_id\":\"b\"} x", "line 3 is no JSON object (column 19)"),
            ("{\"custom_id\":\"b\"}", "line 3: missing field `url`"),
            ("{\"custom_id\":7}", "line 3: custom_id: invalid type"),
        ] {
            let message = refused(&format!("{LINE}\n\n{line}\n"));
            assert!(message.contains(wanted), "{message}");
            assert_eq!(message.matches("line ").count(), 1, "{message}");
        }
        for empty in ["", "\n \n", "\u{feff}\n"] {
            assert!(refused(empty).starts_with("no requests in "), "{empty:?}");
        }
    }

    #[test]
    fn a_mark_of_the_encoding_and_other_ends_of_lines_are_skipped() {
        let found = lines("\u{feff}a\r\n\r\nb".as_bytes(), 10, 100).expect("lines");
        assert_eq!(found, [(1, "a".to_owned()), (3, "b".to_owned())]);
    }

    #[test]
    fn input_without_end_is_refused() {
        let error = |from: &mut dyn BufRead| lines(from, 10, 100).expect_err("no end").to_string();
        let zeros = &mut BufReader::new(std::io::repeat(0));
        assert!(error(zeros).contains("line 1 has more than 10 bytes"));
        let breaks = &mut BufReader::new(std::io::repeat(b'\n'));
        assert!(error(breaks).contains("more than 100 bytes"));
    }
}
