//! Running the program on the models of the tests.

#![allow(dead_code)] // Not every test file needs all of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name)
}

pub fn run(args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_deepinfer");
    Command::new(program).args(args).output().expect("the program starts")
}

pub fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is JSON")
}

pub fn tiny() -> String {
    testdata("tiny-a").display().to_string()
}

pub fn demo() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    folder.display().to_string()
}

/// The demo model answers this with 81, after some thinking.
pub const QUESTION: &str = "What is 23 + 58?";
