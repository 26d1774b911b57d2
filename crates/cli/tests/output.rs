//! Standard output that nobody reads, or that is full.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Commands that succeed, with what they are told, for a model and a folder to write to.
fn commands(model: &str, folder: &str) -> Vec<(Vec<String>, &'static str)> {
    let line = |text: &str| -> Vec<String> {
        let word = |word: &str| word.replace("MODEL", model).replace("DIR", folder);
        text.split(' ').map(word).collect()
    };
    [
        "--help",
        "--version",
        "generate --help",
        "completions bash",
        "inspect --model MODEL --tensors",
        "inspect --model MODEL --tensors --json",
        "plan --model MODEL --memory 64GB --device cpu",
        "plan --model MODEL --memory 64GB --device cpu --json",
        "synth --out DIR/model --preset tiny",
        "generate --model MODEL --prompt x --max-tokens 3 --ignore-eos --device cpu",
        "generate --model MODEL --prompt x --max-tokens 3 --ignore-eos --device cpu --n 2",
        "generate --model MODEL --prompt x --max-tokens 3 --ignore-eos --device cpu --json",
        "eval --model MODEL --tasks DIR/tasks --device cpu",
        "selftest --device cpu --quick",
        "bench ops --device cpu --quick --only RMS_norm",
        "bench layer --device cpu --rows 1 --prefill 0 --context 100 --operations",
        "verify --model MODEL --reference MODEL --kv exact",
    ]
    .map(|text| (line(text), ""))
    .into_iter()
    .chain([(line("chat --model MODEL --device cpu"), "/help\n/effort\nhello\n")])
    .collect()
}

/// Runs them all, each with a standard output of its own.
fn run(stdout: &dyn Fn() -> Stdio, check: &dyn Fn(&[String], &Output, &str)) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny-a");
    let folder = tempfile::tempdir().expect("a folder");
    let tasks = folder.path().join("tasks");
    std::fs::create_dir(&tasks).expect("a folder");
    let item = r#"{"id": "a-0", "task": "a", "thinking": false, "score": "exact", "quick": true,
        "messages": [{"role": "user", "content": "x"}], "expected": "y", "max_tokens": 3}"#;
    std::fs::write(tasks.join("a.jsonl"), item.replace('\n', " ")).expect("it writes");
    let (model, place) = (model.display().to_string(), folder.path().display().to_string());
    for (args, told) in commands(&model, &place) {
        let input = folder.path().join("input");
        std::fs::write(&input, told).expect("it writes");
        let done = Command::new(env!("CARGO_BIN_EXE_deepinfer"))
            .args(&args)
            .env("XDG_DATA_HOME", folder.path())
            .stdin(std::fs::File::open(&input).expect("it is there"))
            .stdout(stdout())
            .stderr(Stdio::piped())
            .output()
            .expect("the program starts");
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!text.contains("panicked"), "{args:?}: {text}");
        check(&args, &done, &text);
    }
}

#[test]
fn a_reader_that_has_gone_ends_a_command_without_a_word() {
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    run(&closed, &|args, done, text| {
        assert_eq!(done.status.code(), Some(0), "{args:?}: {text}");
        assert!(!text.contains("error"), "{args:?}: {text}");
    });
}

/// Neither do messages need a reader.
#[test]
fn a_closed_standard_error_changes_nothing() {
    for (args, code) in [(&["plan", "--memory", "x"][..], 2), (&["frobnicate"], 2)] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let status =
            Command::new(env!("CARGO_BIN_EXE_deepinfer")).args(args).stderr(writer).status();
        assert_eq!(status.expect("the program starts").code(), Some(code), "{args:?}");
    }
}

#[test]
fn a_full_disk_is_one_error() {
    const FULL: &str = "/dev/full";
    if !Path::new(FULL).exists() {
        return;
    }
    let full = || std::fs::File::options().write(true).open(FULL).expect("it opens");
    let full = || Stdio::from(full());
    run(&full, &|args, done, text| {
        assert_eq!(done.status.code(), Some(1), "{args:?}: {text}");
        assert_eq!(text.matches("error: ").count(), 1, "{args:?}: {text}");
    });
}
