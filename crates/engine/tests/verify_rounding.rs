//! Devices of bf16 activations against reference numbers: a right one passes, wrong ones fail where
//! they are wrong.

mod common;
mod files;
mod random;
mod rounding;

use common::load;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engram::Engram;
use deepinfer::model::Model;
use deepinfer::tokenizer::Tokenizer;
use deepinfer::verify::{Reference, Report, Status, Variant, verify_rounding};
use files::{checkpoints, testdata};
use rounding::{Fault, Rounding};
use std::path::Path;
use std::sync::Arc;

fn compare(folder: &Path, variants: &[Variant], fault: Option<Fault>) -> Report {
    let device = Rounding::new(fault);
    let mut checkpoint = Checkpoint::open(Source::directory(folder)).expect("the checkpoint opens");
    let tokenizer = Tokenizer::from_bytes(checkpoint.tokenizer_json().expect("tokenizer"))
        .expect("the tokenizer loads");
    let engram = Engram::new(&checkpoint.config().text_config, &tokenizer).expect("token map");
    let model = Model::load(&device, &mut checkpoint, engram, &mut |_, _| {}).expect("it loads");
    let (own, exact) = ((Arc::new(device), Arc::new(model)), load(folder, 2));
    let reference = Reference::open(folder).expect("the reference opens");
    let (own, exact) = ((&own.0, &own.1), (&exact.0, &exact.1));
    verify_rounding(own, exact, &reference, variants, &mut |_, _, _| {}).expect("comparable")
}

#[test]
fn a_right_device_passes() {
    for folder in checkpoints() {
        let report = compare(&folder, &[Variant::F32, Variant::Quantized], None);
        assert!(!report.failed(), "{}:\n{report}", folder.display());
    }
}

/// The lines that fail, without those of free runs.
fn failures(variant: Variant, fault: Fault) -> Vec<(&'static str, &'static str)> {
    let report = compare(&testdata("tiny-a"), &[variant], Some(fault));
    let failed = |c: &&deepinfer::verify::Check| c.status == Status::Fail;
    let mut lines: Vec<_> =
        report.checks.iter().filter(failed).map(|c| (c.variant, c.quantity)).collect();
    lines.dedup();
    lines
}

#[test]
fn wrong_devices_fail_where_they_are_wrong() {
    let exact = |fault| failures(Variant::F32, fault);
    let failed = exact(Fault::Truncates);
    assert!(failed.contains(&("f32/forced", "block_update")), "{failed:?}");
    let failed = exact(Fault::Scale);
    assert!(failed.contains(&("f32/forced", "attn_out")), "{failed:?}");
    assert!(failed.contains(&("f32/drafts", "attn_out")), "{failed:?}");
    let failed = exact(Fault::OneNumber);
    assert!(failed.contains(&("f32/forced", "window_keys")), "{failed:?}");
    let failed = exact(Fault::FewerExperts);
    assert!(failed.contains(&("f32/forced", "ffn_out")), "{failed:?}");
    assert!(failed.contains(&("f32/drafts", "ffn_out")), "{failed:?}");
    let failed = exact(Fault::FirstRows);
    assert!(failed.contains(&("f32/forced", "topk")), "{failed:?}");
    let failed = exact(Fault::Mixing);
    assert!(failed.contains(&("f32/forced", "block_update")), "{failed:?}");
    assert!(!failed.contains(&("f32/forced", "attn_out")), "{failed:?}");
    let failed = failures(Variant::Quantized, Fault::NextCode);
    assert!(failed.contains(&("quantized/forced", "stored_rows")), "{failed:?}");
    assert!(failed.contains(&("quantized/drafts", "stored_rows")), "{failed:?}");
}
