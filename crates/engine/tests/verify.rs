//! The model against reference numbers of another implementation.

mod common;
mod files;
mod random;

use common::load;
use deepinfer::verify::{Options, Reference, Report, Status, Variant, verify};
use files::{goldens, testdata};
use std::path::Path;

fn compare(checkpoint: &Path, reference: &Path, forced: bool) -> Report {
    let (cpu, model) = load(checkpoint, 2);
    let reference = Reference::open(reference).expect("the reference opens");
    let options = Options { variants: vec![Variant::F32, Variant::Quantized], forced };
    verify(&cpu, &model, &reference, &options, &mut |_, _, _| {}).expect("comparable")
}

/// Checkpoints with their references: always the one in the repository, and all of the full set
/// where that is present.
fn all(forced: bool) {
    let full = ["tiny-a", "tiny-b"].into_iter().filter_map(goldens);
    for folder in std::iter::once(testdata("tiny-a")).chain(full) {
        let report = compare(&folder, &folder, forced);
        assert!(!report.failed(), "{}:\n{report}", folder.display());
    }
}

#[test]
fn free_runs_agree_with_the_reference() {
    all(false);
}

#[test]
fn forced_runs_agree_with_the_reference() {
    all(true);
}

/// Every quantity that the model computes is compared for at least one prompt.
#[test]
fn nothing_is_left_out() {
    let folder = testdata("tiny-a");
    let report = compare(&folder, &folder, false);
    let passed = |quantity: &str, variant: &str| {
        report
            .checks
            .iter()
            .any(|c| c.quantity == quantity && c.variant == variant && c.status == Status::Pass)
    };
    assert!(passed("hash_ids", "-"));
    for variant in ["f32", "quantized"] {
        for quantity in [
            "streams_after_engram",
            "compressed_kv",
            "index_keys",
            "topk",
            "candidates",
            "attn_out",
            "experts",
            "expert_weights",
            "ffn_out",
            "streams",
            "pre_mix",
            "features",
            "hidden",
            "logits",
            "greedy",
            "chunked_prefill",
            "drafts",
            "draft_logits",
            "confidence",
        ] {
            assert!(passed(quantity, variant), "{variant} {quantity}:\n{report}");
        }
    }
}

/// A comparison that cannot fail would be worth nothing: change the reference a little.
#[test]
fn a_changed_reference_is_noticed() {
    let folder = testdata("tiny-a");
    let json = std::fs::read_to_string(folder.join("reference.json")).expect("it is there");
    let mut index: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let prompts = index["prompts"].as_array_mut().expect("a list");
    for prompt in prompts {
        for variant in ["f32", "quantized"] {
            let token = &mut prompt[variant]["greedy"][3];
            *token = (token.as_u64().expect("a token") ^ 1).into();
        }
    }
    let changed = tempfile::tempdir().expect("a folder");
    std::fs::write(changed.path().join("reference.json"), index.to_string()).expect("it writes");
    let tensors = std::fs::read(folder.join("reference.safetensors")).expect("it is there");
    std::fs::write(changed.path().join("reference.safetensors"), tensors).expect("it writes");
    let report = compare(&folder, changed.path(), false);
    let failed = |quantity: &str| {
        report.checks.iter().any(|c| c.quantity == quantity && c.status == Status::Fail)
    };
    assert!(failed("greedy"), "{report}");
    assert!(!failed("logits"), "{report}");
}

/// A reference of another checkpoint is refused, with both shapes.
#[test]
fn a_foreign_reference_is_refused() {
    let Some(other) = goldens("tiny-b") else { return };
    let (cpu, model) = load(&testdata("tiny-a"), 1);
    let reference = Reference::open(&other).expect("the reference opens");
    let options = Options { variants: vec![Variant::F32], forced: false };
    let error = verify(&cpu, &model, &reference, &options, &mut |_, _, _| {}).err();
    let message = error.expect("it is refused").to_string();
    assert!(message.contains("do not belong together"), "{message}");
}
