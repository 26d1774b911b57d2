//! The file of answers.

use super::answer;
use crate::failure::{Failure, Outcome};
use crate::files;
use anyhow::Context;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The file of answers.
pub struct Output {
    /// Locked, if it is a file.
    file: File,
    /// The file that was there before errors were cut away, locked as well: a run that has opened it
    /// before it was replaced is refused, too.
    replaced: Option<File>,
    /// Ids that have an answer.
    pub done: BTreeSet<String>,
    /// How many errors were cut away.
    pub failed: usize,
    /// Bytes of half a line that were cut away.
    pub cut: usize,
    /// Whether it is a file, and no pipe or device.
    regular: bool,
}

impl Output {
    fn new(file: File, regular: bool) -> Self {
        Self { file, replaced: None, done: BTreeSet::new(), failed: 0, cut: 0, regular }
    }

    /// Adds whole lines.
    pub fn write(&mut self, lines: &str) -> Outcome {
        written(self.file.write_all(lines.as_bytes()))
    }

    /// Returns once all of it is stored.
    pub fn finish(&self) -> Outcome {
        // Pipes and devices store nothing.
        match self.regular {
            true => written(self.file.sync_all()),
            false => Ok(()),
        }
    }
}

/// Answers that nobody reads are an error, and no end as any other.
fn written(result: std::io::Result<()>) -> Outcome {
    result.context("cannot write the answers").map_err(Failure::Error)
}

/// What a line says of a request.
enum Said {
    /// It is answered.
    Answer(String),
    /// It failed.
    Error(String),
}

fn read(line: &[u8]) -> Option<Said> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    let id = value["custom_id"].as_str()?.to_owned();
    if value["error"].is_object() {
        return Some(Said::Error(id));
    }
    (value["response"].is_object() && value["error"].is_null()).then_some(Said::Answer(id))
}

/// Opens the answers to `input` for appending. Errors of the requests `ids` are cut away, and half a
/// line at the end. A file of anything else is left as it is, and so are pipes and devices, which
/// are written to only. A file is locked as long as the answers are open.
///
/// # Errors
/// If the file cannot be written, is the input, is open for another run's answers, or holds what is
/// no answer of a batch.
pub fn open(path: &Path, input: &Path, ids: &BTreeSet<&str>) -> Outcome<Output> {
    let name = path.display();
    let cannot_write = || format!("cannot write {name}");
    let there = std::fs::metadata(path).ok();
    if there.is_some_and(|there| !there.is_file() && !there.is_dir()) {
        let file = OpenOptions::new().write(true).open(path).with_context(cannot_write)?;
        return Ok(Output::new(file, false));
    }
    if files::are_one(path, input) {
        return Err(Failure::Usage(format!(
            "{name} holds the requests; give another file for the answers"
        )));
    }
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = open.with_context(cannot_write)?;
    lock(&file, path)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).with_context(|| format!("cannot read {name}"))?;
    let mut output = Output::new(file, true);
    let (mut kept, mut answers) = (Vec::new(), 0);
    for (number, line) in text.split_inclusive(|&b| b == b'\n').enumerate() {
        let whole = line.ends_with(b"\n");
        match read(line) {
            Some(Said::Error(id)) if ids.contains(id.as_str()) => output.failed += 1,
            Some(Said::Answer(id) | Said::Error(id)) => {
                output.done.insert(id);
                kept.extend_from_slice(line);
                if !whole {
                    // Cut off just before its end, or saved by an editor.
                    kept.push(b'\n');
                }
            }
            None if whole && line.trim_ascii().is_empty() => continue,
            // A crash may have left half a line.
            None if !whole && (answers > 0 || answer::begins(line)) => output.cut = line.len(),
            None => {
                return Err(Failure::Usage(format!(
                    "{name} line {} is no answer of a batch; give another output file",
                    number + 1
                )));
            }
        }
        answers += 1;
    }
    let whole = text.len() - output.cut;
    if output.failed > 0 {
        // Links stay.
        let path = path.canonicalize().with_context(cannot_write)?;
        let file = replace(&path, &kept)?;
        output.replaced = Some(std::mem::replace(&mut output.file, file));
    } else if output.cut > 0 {
        output.file.set_len(whole as u64).with_context(cannot_write)?;
    } else if text.last().is_some_and(|&last| last != b'\n') {
        output.write("\n")?;
    }
    output.file.seek(SeekFrom::End(0)).with_context(cannot_write)?;
    Ok(output)
}

/// Keeps other runs from a file of answers: they would write over each other's.
fn lock(file: &File, path: &Path) -> Outcome {
    let name = path.display();
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Failure::Usage(format!(
            "another run writes its answers to {name}; wait until it has ended, or give another \
             file for the answers"
        ))),
        // Not every file system has locks.
        Err(TryLockError::Error(error)) => {
            tell!("cannot lock {name} ({error}): do not run another batch with it");
            Ok(())
        }
    }
}

/// Replaces a file. The old one stays until the new one is whole, in a file of its own beside it.
/// Returns the new one, which is locked.
fn replace(path: &Path, content: &[u8]) -> Outcome<File> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".part");
    let partial = Path::new(&partial);
    let name = partial.display();
    let mut file = match OpenOptions::new().write(true).create_new(true).open(partial) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(Failure::Usage(format!(
                "{name} is there already, and would be overwritten while {} is renewed; move it \
                 away, or delete it if a run that was cut off has left it",
                path.display()
            )));
        }
        other => other.with_context(|| format!("cannot write {name}"))?,
    };
    lock(&file, path)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    let replaced = written.and_then(|()| std::fs::rename(partial, path));
    if replaced.is_err() {
        // Of no use to anybody, and in the way of the next run.
        let _ = std::fs::remove_file(partial);
    }
    replaced.with_context(|| format!("cannot write {name}"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "{\"custom_id\":\"a\",\"response\":{},\"error\":null}\n";
    const FAILED: &str = "{\"custom_id\":\"b\",\"error\":{\"code\":\"x\"}}\n";

    /// Opens a file of this content as the answers to `a` and `b`; with what it holds then.
    fn opened(content: &str) -> (Result<Output, String>, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        std::fs::write(&path, content).expect("it writes");
        let input = folder.path().join("in.jsonl");
        let output = match open(&path, &input, &BTreeSet::from(["a", "b"])) {
            Ok(mut output) => {
                output.write("end\n").expect("it writes");
                Ok(output)
            }
            Err(Failure::Usage(message)) => Err(message),
            Err(other) => panic!("{other:?}"),
        };
        (output, std::fs::read_to_string(&path).expect("it is there"))
    }

    #[test]
    fn half_a_line_is_cut_away_and_whole_ones_are_kept() {
        let line = answer::refused("b", "of no use");
        for half in [&line[..30], &line[..5]] {
            for before in ["", ANSWER] {
                let (output, text) = opened(&[before, half].concat());
                let output = output.expect("it opens");
                assert_eq!(text, [before, "end\n"].concat());
                assert_eq!((output.cut, output.failed), (half.len(), 0));
                assert_eq!(output.done.contains("a"), !before.is_empty());
            }
        }
        // After an answer, whatever comes is the rest of a line.
        let (output, text) = opened(&[ANSWER, "{\"custom_id\":\"b\""].concat());
        assert_eq!(output.expect("it opens").cut, 16);
        assert_eq!(text, [ANSWER, "end\n"].concat());
    }

    #[test]
    fn a_whole_answer_without_the_end_of_its_line_is_kept() {
        let (output, text) = opened(ANSWER.trim_end());
        let output = output.expect("it opens");
        assert!(output.done.contains("a") && output.cut == 0);
        assert_eq!(text, [ANSWER, "end\n"].concat());
        let (output, text) = opened(&[FAILED, ANSWER.trim_end()].concat());
        assert_eq!(output.expect("it opens").failed, 1);
        assert_eq!(text, [ANSWER, "end\n"].concat());
    }

    #[test]
    fn what_is_no_file_of_answers_is_left_alone() {
        for content in [
            "notes without an end",
            "notes\n",
            "\n\nnotes",
            "{\"custom_id\":\"b\",\"body\":{}}",
            "{\"custom_id\":\"b\",\"body\":{}}\n",
            "{\"id\":\"batch\", \"of\":",
            "[1]",
            "\u{0}\u{0}",
        ] {
            let (output, text) = opened(content);
            let message = output.err().unwrap_or_else(|| panic!("{content:?} was taken"));
            assert!(message.contains("no answer of a batch"), "{message}");
            assert_eq!(text, content);
        }
    }

    #[test]
    fn errors_are_cut_away_where_the_request_is_run_again() {
        let other = "{\"custom_id\":\"z\",\"error\":{\"code\":\"x\"}}\n";
        let (output, text) = opened(&[ANSWER, FAILED, other].concat());
        let output = output.expect("it opens");
        assert_eq!(output.failed, 1);
        assert!(output.done.contains("a") && !output.done.contains("b"));
        assert_eq!(text, [ANSWER, other, "end\n"].concat());
    }

    /// Also after errors were cut away, when the file is another one, and for who has the old one.
    #[test]
    fn a_file_of_answers_is_written_by_one_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        let open = || open(&path, &folder.path().join("in.jsonl"), &BTreeSet::from(["b"]));
        for (content, failed) in [("", 0), (ANSWER, 0), (&[ANSWER, FAILED].concat(), 1)] {
            std::fs::write(&path, content).expect("it writes");
            let old = File::open(&path).expect("it is there");
            let mut first = open().expect("it opens");
            assert_eq!(first.failed, failed);
            match open() {
                Err(Failure::Usage(message)) => {
                    assert!(message.contains("another run writes"), "{message}");
                }
                _ => panic!("two runs write {content:?}"),
            }
            assert!(matches!(old.try_lock(), Err(TryLockError::WouldBlock)));
            first.write("{}\n").expect("it writes");
            drop((first, old));
            let kept = std::fs::read_to_string(&path).expect("it is there");
            assert_eq!(kept, [content.trim_end_matches(FAILED), "{}\n"].concat());
            std::fs::write(&path, content).expect("it writes");
            open().expect("it opens again");
        }
    }

    #[test]
    fn no_other_file_is_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        let open = |name: &str| open(&file(name), &file("in.jsonl"), &BTreeSet::from(["b"]));
        std::fs::write(file("run.jsonl"), FAILED).expect("it writes");
        for other in ["run.part", "run.jsonl.part"] {
            std::fs::write(file(other), "requests").expect("it writes");
        }
        match open("run.jsonl") {
            Err(Failure::Usage(message)) => {
                assert!(message.contains("run.jsonl.part"), "{message}");
            }
            _ => panic!("a file was overwritten"),
        }
        std::fs::remove_file(file("run.jsonl.part")).expect("it was there");
        open("run.jsonl").expect("it opens");
        let kept = std::fs::read_to_string(file("run.part")).expect("it is there");
        assert_eq!(kept, "requests");
        assert!(!file("run.jsonl.part").exists());

        std::fs::write(file("in.jsonl"), ANSWER).expect("it writes");
        std::fs::hard_link(file("in.jsonl"), file("link.jsonl")).expect("a link");
        for input in ["in.jsonl", "link.jsonl"] {
            match open(input) {
                Err(Failure::Usage(message)) => assert!(message.contains("requests"), "{message}"),
                _ => panic!("the requests were taken for the output"),
            }
        }
    }
}
