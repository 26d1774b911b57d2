//! `deepinfer bench layer`, on the small shape of the CPU.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_deepinfer");
    Command::new(program).args(["bench", "layer"]).args(args).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_kind_of_layer_is_measured() {
    let sizes = ["--rows", "1,3", "--prefill", "40,200", "--context", "100,300", "--chunk", "64"];
    let device = ["--device", "cpu", "--threads", "2"];
    let output = bench(&[&sizes[..], &device, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!((&report["released"], &report["layers"]), (&Value::from(false), &Value::from(8)));
    let cases = report["cases"].as_array().expect("cases");
    let named = |mode: &str| -> Vec<(u64, u64)> {
        let of = cases.iter().filter(|case| case["mode"] == mode);
        of.map(|c| (c["context"].as_u64().unwrap_or(0), c["rows"].as_u64().unwrap_or(0))).collect()
    };
    assert_eq!(named("decode"), [(100, 1), (100, 3), (300, 1), (300, 3)]);
    // 200 rows do not fit into 100 positions.
    assert_eq!(named("prefill"), [(100, 40), (300, 40), (300, 200)]);
    assert_eq!(named("prompt"), named("prefill"));
    assert_eq!(named("draft"), [(300, 1), (300, 3)]);
    for case in cases {
        let positive = |value: &Value| value.as_f64().is_some_and(|x| x.is_finite() && x > 0.0);
        assert!(positive(&case["seconds"]) && positive(&case["device_seconds"]), "{case}");
        let layers = case["layers"].as_array().expect("layers");
        let kinds: Vec<&str> = layers.iter().filter_map(|layer| layer["kind"].as_str()).collect();
        match case["mode"].as_str() {
            Some("prompt") => assert!(kinds.is_empty()),
            Some("draft") => assert_eq!(kinds, ["draft stage"]),
            _ => assert_eq!(kinds.len(), 7, "{kinds:?}"),
        }
        for layer in layers {
            assert!(positive(&layer["seconds"]) && positive(&layer["share_of_read"]), "{layer}");
        }
    }
}

#[test]
fn people_get_tables() {
    let output = bench(&["--device", "cpu", "--rows", "2", "--prefill", "0", "--context", "64"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    for part in ["a small shape", "decode at 64 positions", "encoder, own keys", "draft stage"] {
        assert!(out.contains(part), "{out}");
    }
    assert!(!out.contains("prefill"), "{out}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (args, reason) in [
        (&["--device", "cpu", "--slice", "7"][..], "small shape"),
        (&["--device", "cpu", "--context", "9999999"], "positions"),
        (&["--device", "cpu", "--context", "0"], "--context"),
        (&["--device", "cpu", "--slice", "5"], "6 to 40"),
        (&["--device", "cpu", "--chunk", "0"], "--chunk"),
    ] {
        let output = bench(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
}
