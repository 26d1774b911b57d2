//! Paths of the test data.
#![allow(dead_code)] // each test binary uses some of these

use std::path::PathBuf;

/// A path in `testdata/`.
pub fn testdata(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata")).join(path)
}

/// A path in the full reference set beside the repository; `None` where it is not present.
pub fn goldens(path: &str) -> Option<PathBuf> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/goldens"));
    Some(root.join(path)).filter(|path| path.exists())
}

/// The checkpoints at hand: always `tiny-a`, and `tiny-b` from the full set.
pub fn checkpoints() -> Vec<PathBuf> {
    let mut folders = vec![testdata("tiny-a")];
    folders.extend(goldens("tiny-b"));
    folders
}
