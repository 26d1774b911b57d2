//! `deepinfer batch`: a file of requests in OpenAI's batch format.
//!
//! Every answer is written as a whole line as soon as it is there, so that a run that was cut off
//! goes on where it ended: ids that have an answer are not run again, half a line is cut away, and
//! so are the errors of requests that are run again.

mod answer;
mod body;

use crate::args::Batch;
use crate::failure::{Failure, Outcome};
use crate::{engine, open};
use anyhow::Context;
use body::{Job, Kind, Line};
use deepinfer::chat::ChatTemplate;
use deepinfer::engine::Engine;
use deepinfer::request::{Completion, RequestHandle};
use std::collections::{BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

/// A request under way.
struct Running {
    id: String,
    kind: Kind,
    handle: RequestHandle,
    completion: Completion,
}

/// Runs all requests that have no answer yet.
pub fn run(args: &Batch) -> Outcome {
    let lines = read_input(&args.input)?;
    let ids = lines.iter().map(Line::id).collect();
    let Output { file: mut output, done, failed } = open_output(&args.output, &ids)?;
    let left: VecDeque<&Line> = lines.iter().filter(|line| !done.contains(line.id())).collect();
    if left.len() < lines.len() {
        eprintln!("{} of {} answers are there already", lines.len() - left.len(), lines.len());
    }
    if failed > 0 {
        eprintln!("{failed} requests had failed and are run again");
    }
    let config = engine::many(&args.engine, &args.run)?;
    let engine = engine::start(&args.model, &config)?;
    let failed = serve(&engine, left, &mut output, config.max_seqs * 2)?;
    output.sync_all().context("cannot write the answers")?;
    if failed > 0 {
        eprintln!("{failed} requests failed; their lines say why");
        return Err(Failure::Check);
    }
    Ok(())
}

/// Reads the requests. A line that is no request at all is an error of the file; one that asks for
/// something impossible gets an error as its answer.
fn read_input(path: &Path) -> Outcome<Vec<Line>> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
    let (mut lines, mut ids) = (Vec::new(), BTreeSet::new());
    for (number, text) in BufReader::new(file).lines().enumerate() {
        let text = text.with_context(|| format!("cannot read {name}"))?;
        if text.trim().is_empty() {
            continue;
        }
        let line = Line::parse(&text)
            .map_err(|e| Failure::Usage(format!("{name} line {}: {e}", number + 1)))?;
        if !ids.insert(line.id().to_owned()) {
            let id = line.id();
            return Err(Failure::Usage(format!(
                "{name} line {}: custom_id {id:?} occurs twice; answers are told apart by it",
                number + 1
            )));
        }
        lines.push(line);
    }
    Ok(lines)
}

/// The file of answers.
struct Output {
    /// Open for appending.
    file: File,
    /// Ids that have an answer.
    done: BTreeSet<String>,
    /// How many errors were cut away.
    failed: usize,
}

/// Opens the answers for appending. Errors of the requests `ids` are cut away.
fn open_output(path: &Path, ids: &BTreeSet<&str>) -> Outcome<Output> {
    let name = path.display();
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = open.with_context(|| format!("cannot write {name}"))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).with_context(|| format!("cannot read {name}"))?;
    // A crash may have left half a line.
    let whole = text.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
    let (mut done, mut failed, mut kept) = (BTreeSet::new(), 0, Vec::new());
    for (number, line) in text[..whole].split_inclusive(|&b| b == b'\n').enumerate() {
        let value = serde_json::from_slice::<serde_json::Value>(line);
        let answer = value.ok().filter(|v| v["response"].is_object() || v["error"].is_object());
        match answer.as_ref().map(|v| (v["custom_id"].as_str(), v["error"].is_null())) {
            _ if line == b"\n" => {}
            Some((Some(id), false)) if ids.contains(id) => failed += 1,
            Some((Some(id), _)) => {
                done.insert(id.to_owned());
                kept.extend_from_slice(line);
            }
            _ => {
                return Err(Failure::Usage(format!(
                    "{name} line {} is no answer of a batch; give another output file",
                    number + 1
                )));
            }
        }
    }
    if failed > 0 {
        replace(path, &kept)?;
        let open = OpenOptions::new().write(true).open(path);
        file = open.with_context(|| format!("cannot write {name}"))?;
    } else {
        file.set_len(whole as u64).with_context(|| format!("cannot write {name}"))?;
    }
    file.seek(SeekFrom::End(0)).with_context(|| format!("cannot write {name}"))?;
    Ok(Output { file, done, failed })
}

/// Replaces a file. The old one stays until the new one is whole, in a file of its own beside it.
fn replace(path: &Path, content: &[u8]) -> Outcome {
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
    let written = file.write_all(content).and_then(|()| file.sync_all());
    let replaced = written.and_then(|()| std::fs::rename(partial, path));
    if replaced.is_err() {
        // Of no use to anybody, and in the way of the next run.
        let _ = std::fs::remove_file(partial);
    }
    Ok(replaced.with_context(|| format!("cannot write {name}"))?)
}

/// Keeps `at_once` requests under way and writes answers as they come. Returns how many failed.
fn serve(
    engine: &Engine,
    mut left: VecDeque<&Line>,
    output: &mut File,
    at_once: usize,
) -> Outcome<usize> {
    let tokenizer = engine::tokenizer(engine)?;
    // Checkpoints without a chat format can still complete plain text.
    let template = ChatTemplate::new(tokenizer).ok();
    let bar = open::bar("answering", left.len());
    let mut failed = 0;
    let mut running: Vec<Running> = Vec::new();
    let mut write = |line: serde_json::Value| -> Outcome {
        output.write_all(format!("{line}\n").as_bytes()).context("cannot write the answers")?;
        bar.inc(1);
        Ok(())
    };
    while !left.is_empty() || !running.is_empty() {
        while running.len() < at_once
            && let Some(line) = left.pop_front()
        {
            let job = line.job(tokenizer, template.as_ref());
            let started = job.and_then(|Job { request, kind }| {
                let handle = engine.submit(request).map_err(|e| e.to_string())?;
                Ok((handle, kind))
            });
            match started {
                Ok((handle, kind)) => {
                    let (id, completion) = (line.id().to_owned(), Completion::default());
                    running.push(Running { id, kind, handle, completion });
                }
                Err(reason) => {
                    failed += 1;
                    write(answer::refused(line.id(), &reason))?;
                }
            }
        }
        let mut still = Vec::with_capacity(running.len());
        for mut request in running {
            let mut ended = None;
            while ended.is_none()
                && let Some(event) = request.handle.try_recv()
            {
                match request.completion.push(event) {
                    Ok(false) => {}
                    Ok(true) => ended = Some(Ok(())),
                    Err(error) => ended = Some(Err(error)),
                }
            }
            match ended {
                None => still.push(request),
                Some(Ok(())) => {
                    let body = answer::body(&request.kind, tokenizer, &request.completion);
                    write(answer::done(&request.id, body))?;
                }
                Some(Err(error)) => {
                    failed += 1;
                    write(answer::refused(&request.id, &error.to_string()))?;
                }
            }
        }
        running = still;
        if !running.is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    bar.finish_and_clear();
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_is_cut_away_and_whole_ones_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        let whole = "{\"custom_id\":\"a\",\"response\":{}}\n";
        std::fs::write(&path, [whole, "{\"custom_id\":\"b\""].concat()).expect("it writes");
        let output = open_output(&path, &BTreeSet::from(["a", "b"])).expect("it opens");
        assert_eq!(output.done.into_iter().collect::<Vec<_>>(), ["a"]);
        let text = std::fs::read_to_string(&path).expect("it is there");
        assert_eq!(text, whole);
        std::fs::write(&path, "some text\n").expect("it writes");
        assert!(open_output(&path, &BTreeSet::new()).is_err());
    }

    #[test]
    fn errors_are_cut_away_where_the_request_is_run_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        let answer = "{\"custom_id\":\"a\",\"response\":{},\"error\":null}\n";
        let failed = "{\"custom_id\":\"b\",\"error\":{\"code\":\"x\"}}\n";
        let other = "{\"custom_id\":\"z\",\"error\":{\"code\":\"x\"}}\n";
        std::fs::write(&path, [answer, failed, other].concat()).expect("it writes");
        let mut output = open_output(&path, &BTreeSet::from(["a", "b"])).expect("it opens");
        assert_eq!(output.failed, 1);
        assert!(output.done.contains("a") && !output.done.contains("b"));
        output.file.write_all(b"end\n").expect("it writes");
        let text = std::fs::read_to_string(&path).expect("it is there");
        assert_eq!(text, [answer, other, "end\n"].concat());
    }

    #[test]
    fn no_other_file_is_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        let failed = "{\"custom_id\":\"b\",\"error\":{\"code\":\"x\"}}\n";
        std::fs::write(file("run.jsonl"), failed).expect("it writes");
        for other in ["run.part", "run.jsonl.part"] {
            std::fs::write(file(other), "requests").expect("it writes");
        }
        match open_output(&file("run.jsonl"), &BTreeSet::from(["b"])) {
            Err(Failure::Usage(message)) => {
                assert!(message.contains("run.jsonl.part"), "{message}");
            }
            _ => panic!("a file was overwritten"),
        }
        std::fs::remove_file(file("run.jsonl.part")).expect("it was there");
        open_output(&file("run.jsonl"), &BTreeSet::from(["b"])).expect("it opens");
        let kept = std::fs::read_to_string(file("run.part")).expect("it is there");
        assert_eq!(kept, "requests");
        assert!(!file("run.jsonl.part").exists());
    }

    #[test]
    fn requests_are_no_answers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, "{\"custom_id\":\"b\",\"body\":{}}\n").expect("it writes");
        match open_output(&path, &BTreeSet::from(["b"])) {
            Err(Failure::Usage(message)) => assert!(message.contains("no answer"), "{message}"),
            _ => panic!("requests were taken for answers"),
        }
    }

    #[test]
    fn ids_are_unique() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("in.jsonl");
        let line =
            r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}"#;
        std::fs::write(&path, format!("{line}\n\n{line}\n")).expect("it writes");
        match read_input(&path) {
            Err(Failure::Usage(message)) => assert!(message.contains("line 3"), "{message}"),
            _ => panic!("a second request of the same id was taken"),
        }
    }
}
