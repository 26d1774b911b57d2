//! The demo model's tasks notice a broken mechanism: each test breaks one and sees the answers go
//! wrong. What works is right on (nearly) all of these items.

use std::path::{Path, PathBuf};
use std::process::Command;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// The demo model with `change` made to its configuration and `damage` to its tensors.
fn broken(
    change: impl Fn(&mut serde_json::Value),
    damage: impl Fn(&str, &mut [u8]),
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(demo()).expect("the demo model") {
        let path = entry.expect("an entry").path();
        if !path.is_file() {
            continue;
        }
        let name = path.file_name().and_then(|n| n.to_str()).expect("a name").to_owned();
        let mut bytes = std::fs::read(&path).expect("the file");
        if name == "config.json" {
            let mut config = serde_json::from_slice(&bytes).expect("JSON");
            change(&mut config);
            bytes = serde_json::to_vec(&config).expect("JSON");
        } else if name.ends_with(".safetensors") {
            let (header, metadata) =
                safetensors::SafeTensors::read_metadata(&bytes).expect("a shard");
            for (tensor, info) in metadata.tensors() {
                let (from, to) = info.data_offsets;
                damage(&tensor, &mut bytes[8 + header + from..8 + header + to]);
            }
        }
        std::fs::write(folder.path().join(name), bytes).expect("the copy");
    }
    folder
}

/// Share of right answers of the quick items of `task`.
fn accuracy(model: &Path, task: &str) -> f64 {
    let tasks = tempfile::tempdir().expect("a folder");
    let file = format!("{task}.jsonl.gz");
    std::fs::copy(demo().join("eval").join(&file), tasks.path().join(&file)).expect("the items");
    let output = Command::new(env!("CARGO_BIN_EXE_deepinfer"))
        .args(["eval", "--suite", "quick", "--json"])
        .arg("--model")
        .arg(model)
        .arg("--tasks")
        .arg(tasks.path())
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    report["tasks"][0]["accuracy"].as_f64().expect("an accuracy")
}

fn none(_: &str, _: &mut [u8]) {}

/// Sets every tensor whose name ends in `suffix` to zero.
fn zero(suffix: &str) -> impl Fn(&str, &mut [u8]) {
    move |tensor, bytes| {
        if tensor.ends_with(suffix) {
            bytes.fill(0);
        }
    }
}

#[test]
fn the_whole_model_is_right() {
    let model = broken(|_| {}, none);
    for task in ["retrieval_250", "fact", "copy", "sort"] {
        assert!(accuracy(model.path(), task) > 0.85, "{task}");
    }
}

#[test]
fn without_index_selection_values_are_not_found() {
    // Queries of zero score every row alike, and the lowest rows are taken.
    let model = broken(|_| {}, zero(".indexer.wq_b.weight"));
    assert!(accuracy(model.path(), "retrieval_250") < 0.5);
}

#[test]
fn with_wrong_engram_rows_facts_are_forgotten() {
    let model = broken(
        |_| {},
        |tensor, bytes| {
            if tensor.ends_with(".engram.embed.weight") {
                // Every row holds another one's values.
                let half = bytes.len() / 2;
                bytes.rotate_left(half);
            }
        },
    );
    assert!(accuracy(model.path(), "fact") < 0.5);
}

#[test]
fn with_a_short_window_copying_fails() {
    let model = broken(|config| config["text_config"]["sliding_window"] = 2.into(), none);
    assert!(accuracy(model.path(), "copy") < 0.5);
}

#[test]
fn without_compressed_rows_values_are_not_found() {
    // Groups whose values are nothing: as if they had been dropped.
    let model = broken(|_| {}, zero(".attn.compressor.wkv.weight"));
    assert!(accuracy(model.path(), "retrieval_250") < 0.5);
}

#[test]
fn without_the_encoders_groups_sorting_fails() {
    let model = broken(|_| {}, zero("layers.2.attn.compressor.wkv.weight"));
    assert!(accuracy(model.path(), "sort") < 0.5);
}
