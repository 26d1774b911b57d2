//! Opening a checkpoint and taking its tensors.

mod files;

use deepinfer::checkpoint::layout;
use deepinfer::checkpoint::{Checkpoint, CheckpointError, Source};
use deepinfer_device::Format;
use files::{checkpoints, testdata};

fn open(folder: &std::path::Path) -> Checkpoint {
    Checkpoint::open(Source::directory(folder)).unwrap()
}

/// The layout lists every tensor of the checkpoints, with its shape, and nothing else.
#[test]
fn layout_is_that_of_the_reference_checkpoints() {
    for folder in checkpoints() {
        let mut checkpoint = open(&folder);
        assert_eq!(checkpoint.missing(), Vec::<String>::new());
        let config = checkpoint.config().clone();
        let total = checkpoint.tensors().count();
        let rows = config.text_config.engram_num_embeddings.clone();
        let mut scales = 0;
        for spec in layout::tensors(&config, &rows) {
            if let [rows, cols] = spec.shape[..] {
                let matrix = checkpoint.take_matrix(&spec.name, rows, cols).unwrap();
                let plain = |format| matches!(format, Format::Bf16 | Format::F32);
                if plain(spec.format) {
                    assert!(plain(matrix.format), "{}", spec.name);
                } else {
                    assert_eq!(matrix.format, spec.format, "{}", spec.name);
                    scales += 1;
                }
            } else {
                let len = spec.shape[0];
                assert_eq!(checkpoint.take_vector(&spec.name, len).unwrap().len(), len);
            }
        }
        let consumed = checkpoint.finish(&[]).unwrap();
        assert_eq!(consumed.tensors, total);
        assert!(scales > 100);
    }
}

#[test]
fn what_nobody_takes_is_an_error_unless_it_is_skipped() {
    let checkpoint = open(&testdata("tiny-a"));
    let total = checkpoint.tensors().count();
    match checkpoint.finish(&[]) {
        Err(CheckpointError::Unused { count, examples }) => {
            assert_eq!(count, total);
            assert_eq!(examples[0], "aligner.w1.bias");
        }
        other => panic!("{other:?}"),
    }
    let mut skips = vec!["vision.", "aligner.", "layers.", "mtp."];
    skips.extend(["embed.weight", "head.weight", "norm.weight", "image_start", "image_end"]);
    match checkpoint.finish(&skips) {
        Err(CheckpointError::Unused { count: 1, examples }) => {
            assert_eq!(examples, ["image_newline"]);
        }
        other => panic!("{other:?}"),
    }
    skips.push("image_newline");
    let consumed = checkpoint.finish(&skips).unwrap();
    assert_eq!((consumed.tensors, consumed.skipped_tensors), (0, total));
    assert!(consumed.skipped_bytes > 4_000_000);
}
