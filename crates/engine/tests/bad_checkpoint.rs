//! Damaged and incomplete checkpoints: each has its own error, and its words.

mod files;

use deepinfer::checkpoint::{Checkpoint, CheckpointError, Dtype, Source};
use deepinfer::config::ConfigError;
use deepinfer_device::Format;
use files::testdata;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

/// A safetensors file with `header` and `data`.
fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A file of zeros with tensors one after the other: `(name, dtype, shape, bytes)`.
fn shard(tensors: &[(&str, &str, &[usize], usize)]) -> Vec<u8> {
    let mut at = 0;
    let mut entries = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        entries.push(format!("{}:{info}", json!(name)));
        at += bytes;
    }
    safetensors(&format!("{{{}}}", entries.join(",")), &vec![0; at])
}

/// A folder with tiny-a's configuration and the given files.
fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(testdata("tiny-a/config.json"), folder.path().join("config.json")).unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(Source::directory(folder))
}

fn single(file: Vec<u8>) -> Result<Checkpoint, CheckpointError> {
    open(folder(&[("model.safetensors", file)]).path())
}

fn index(map: Value) -> Vec<u8> {
    json!({"weight_map": map}).to_string().into_bytes()
}

/// The error of `result`, whose message contains all `words`.
#[track_caller]
fn refused<T>(result: Result<T, CheckpointError>, words: &[&str]) -> CheckpointError {
    let error = result.err().expect("a refusal");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    error
}

#[test]
fn missing_files() {
    let empty = tempfile::tempdir().unwrap();
    let error = refused(open(empty.path()), &["config.json", empty.path().to_str().unwrap()]);
    assert!(matches!(error, CheckpointError::MissingFile { .. }));

    let error = refused(open(folder(&[]).path()), &["model.safetensors.index.json"]);
    assert!(matches!(error, CheckpointError::MissingIndex { .. }));

    let map = json!({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"});
    let files = [
        ("model.safetensors.index.json", index(map)),
        ("one.safetensors", shard(&[("a", "U8", &[1], 1)])),
    ];
    let error = refused(open(folder(&files).path()), &["two.safetensors", "2 tensors", "b"]);
    assert!(matches!(error, CheckpointError::MissingShard { tensors: 2, .. }));

    let query = "layers.0.attn.wq_a";
    let checkpoint = single(shard(&[(&format!("{query}.weight"), "F8_E4M3", &[1], 1)])).unwrap();
    let missing = checkpoint.missing();
    assert_eq!(missing[0], "embed.weight");
    assert!(missing.contains(&format!("{query}.scale")), "{missing:?}");
    assert!(!missing.contains(&format!("{query}.weight")));
    assert!(!missing.iter().any(|name| name.contains("vision") || name.contains("bias_vl")));

    // A configuration need not say how many rows its tables have.
    let text = std::fs::read_to_string(testdata("tiny-a/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    assert!(config["text_config"]["engram_num_embeddings"].take().is_array());
    let files =
        [("config.json", config.to_string().into_bytes()), ("model.safetensors", shard(&[]))];
    let unsaid = open(folder(&files).path()).unwrap();
    assert_eq!(unsaid.missing(), single(shard(&[])).unwrap().missing());

    // Images are never needed, whatever their tensors are stored as.
    let image = "vision.encoder.patch_embed.weight";
    let checkpoint = single(shard(&[(image, "F8_E4M3", &[1], 1)])).unwrap();
    assert!(!checkpoint.missing().iter().any(|name| name.contains("vision")));

    let checkpoint = single(shard(&[])).unwrap();
    assert!(!checkpoint.has_tokenizer());
    let error = refused(checkpoint.tokenizer_json(), &["tokenizer.json"]);
    assert!(matches!(error, CheckpointError::MissingFile { .. }));
}

#[test]
fn wrong_architecture() {
    let folder = folder(&[]);
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"deepseek_v41\"", "\"deepseek_v4\"")).unwrap();
    let error = refused(open(folder.path()), &["deepseek_v4", "deepseek_v41"]);
    assert!(matches!(error, CheckpointError::Config(ConfigError::ModelType { .. })));
}

#[test]
fn wrong_index() {
    let with = |text: Vec<u8>| open(folder(&[("model.safetensors.index.json", text)]).path());
    for text in ["", "[]", "{}", "{\"weight_map\": 3}", "{\"weight_map\": {\"a\": 1}}"] {
        let error = refused(with(text.into()), &["model.safetensors.index.json"]);
        assert!(matches!(error, CheckpointError::IndexJson { .. }), "{text}");
    }
    for name in ["../x", "/etc/passwd", "a/b", "", "..", "."] {
        let error = refused(with(index(json!({"t": name}))), &["t", "is not a file name"]);
        assert!(matches!(error, CheckpointError::ShardName { .. }), "{name}");
    }
    let one = |map| {
        let shard = shard(&[("a", "U8", &[1], 1), ("b", "U8", &[1], 1)]);
        let files = [("model.safetensors.index.json", index(map)), ("s", shard)];
        open(folder(&files).path())
    };
    let error = refused(one(json!({"a": "s", "b": "s", "c": "s"})), &["s:", "c"]);
    assert!(matches!(error, CheckpointError::NotInShard { .. }));
    let error = refused(one(json!({"a": "s"})), &["s:", "b"]);
    assert!(matches!(error, CheckpointError::NotInIndex { .. }));
    assert!(one(json!({"a": "s", "b": "s"})).is_ok());
    assert!(one(json!({"model.a": "s", "b": "s"})).is_ok(), "a leading model. is nothing");
}

#[test]
fn wrong_header_length() {
    for length in [0usize, 1, 7] {
        let error = refused(single(vec![0; length]), &[&format!("{length} bytes")]);
        assert!(matches!(error, CheckpointError::TooShort { .. }));
    }
    let good = shard(&[("a", "U8", &[4], 4)]);
    let header = u64::from_le_bytes(*good.first_chunk().unwrap());
    for wrong in [good.len() as u64 - 7, u64::MAX, 1 << 40, 100_000_001] {
        let mut file = good.clone();
        file[..8].copy_from_slice(&wrong.to_le_bytes());
        let words = [&*wrong.to_string(), &*good.len().to_string()];
        let error = refused(single(file), &words);
        assert!(matches!(error, CheckpointError::HeaderLength { .. }), "{wrong}");
    }
    // Shorter and longer than the JSON, but within the file.
    for wrong in [header - 1, header + 1] {
        let mut file = good.clone();
        file[..8].copy_from_slice(&wrong.to_le_bytes());
        let error = refused(single(file), &["model.safetensors: header"]);
        assert!(matches!(error, CheckpointError::HeaderJson { .. }), "{wrong}");
    }
    // Longer by the spaces that pad a header: the JSON is fine, the data is too short.
    let mut file = safetensors(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, b"    ");
    let header = u64::from_le_bytes(*file.first_chunk().unwrap());
    file[..8].copy_from_slice(&(header + 2).to_le_bytes());
    let error = refused(single(file), &["truncated", "a ends at byte 4", "2 bytes are missing"]);
    assert!(matches!(error, CheckpointError::TruncatedShard { .. }));
}

#[test]
fn wrong_header_content() {
    let with = |header: &str| single(safetensors(header, &[0; 8]));
    for header in [
        "",
        "[]",
        "{\"a\":3}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}",
        "\u{1}",
    ] {
        let error = refused(with(header), &["model.safetensors: header"]);
        assert!(matches!(error, CheckpointError::HeaderJson { .. }), "{header}");
    }
    let error = refused(
        with(r#"{"w":{"dtype":"F7_X","shape":[8],"data_offsets":[0,8]}}"#),
        &["model.safetensors", "tensor w", "unknown dtype \"F7_X\""],
    );
    assert!(matches!(error, CheckpointError::UnknownDtype { .. }));
    let error = refused(
        with(r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#),
        &["tensor w", "[3]", "12 bytes", "hold 8"],
    );
    assert!(matches!(error, CheckpointError::TensorBytes { expected: 12, end: 8, .. }));
    let error = refused(
        with(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[8,0]}}"#),
        &["8..0", "hold -8"],
    );
    assert!(matches!(error, CheckpointError::TensorBytes { .. }));
    let error = refused(
        with(r#"{"w":{"dtype":"U8","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}}"#),
        &["tensor w", "too large"],
    );
    assert!(matches!(error, CheckpointError::TooLarge { .. }));
    let twice = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                    "model.w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    let error = refused(with(twice), &["tensor w exists twice"]);
    assert!(matches!(error, CheckpointError::DuplicateTensor { .. }));
    let error = refused(with(&twice.replace("model.w", "w")), &["tensor w exists twice"]);
    assert!(matches!(error, CheckpointError::DuplicateTensor { .. }));
}

#[test]
fn wrong_offsets() {
    let two = |first: [u64; 2], second: [u64; 2], data: usize| {
        let entry = |[begin, end]: [u64; 2]| json!({"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]});
        let header = json!({"a": entry(first), "b": entry(second)});
        single(safetensors(&header.to_string(), &vec![0; data]))
    };
    assert!(two([0, 3], [3, 8], 8).is_ok(), "offsets need no alignment");
    let error = refused(two([0, 5], [3, 8], 8), &["overlap", "a ends at byte 5", "b starts at 3"]);
    assert!(matches!(error, CheckpointError::OverlappingOffsets { first_end: 5, .. }));
    let error = refused(two([0, 8], [2, 4], 8), &["overlap"]);
    assert!(matches!(error, CheckpointError::OverlappingOffsets { second_begin: 2, .. }));
    let error = refused(two([0, 3], [4, 8], 8), &["bytes 3..4"]);
    assert!(matches!(error, CheckpointError::UnusedBytes { begin: 3, end: 4, .. }));
    let error = refused(two([0, 3], [3, 8], 9), &["bytes 8..9"]);
    assert!(matches!(error, CheckpointError::UnusedBytes { .. }));
    let error = refused(two([0, 3], [3, 8], 6), &["truncated", "b", "2 bytes are missing"]);
    assert!(matches!(error, CheckpointError::TruncatedShard { end: 8, data_bytes: 6, .. }));
}

/// A real shard cut anywhere, up to the last byte.
#[test]
fn truncated_shards() {
    let name = "model-00002-of-00003.safetensors";
    let whole = std::fs::read(testdata("tiny-a").join(name)).unwrap();
    let folder = folder(&[]);
    for file in [
        "model.safetensors.index.json",
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ] {
        std::fs::copy(testdata("tiny-a").join(file), folder.path().join(file)).unwrap();
    }
    let open_with = |bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).unwrap();
        open(folder.path())
    };
    assert!(open_with(&whole).is_ok());
    for length in [whole.len() - 1, whole.len() / 2, 31_801] {
        let error = refused(open_with(&whole[..length]), &[name, "truncated"]);
        assert!(matches!(error, CheckpointError::TruncatedShard { .. }));
    }
    for length in [31_799, 9, 8] {
        let error = refused(open_with(&whole[..length]), &[name]);
        assert!(matches!(error, CheckpointError::HeaderLength { .. }), "{length}");
    }
    assert!(matches!(open_with(&whole[..5]), Err(CheckpointError::TooShort { file_bytes: 5, .. })));
    assert!(matches!(open_with(&[]), Err(CheckpointError::TooShort { file_bytes: 0, .. })));
}

#[test]
fn wrong_shapes_show_both() {
    let mut checkpoint = single(shard(&[
        ("m.weight", "BF16", &[3, 4], 24),
        ("e.weight", "I8", &[64, 64], 4096),
        ("e.scale", "F8_E8M0", &[64, 4], 256),
        ("v", "F32", &[5], 20),
    ]))
    .unwrap();
    let error =
        refused(checkpoint.take_matrix("m.weight", 4, 3), &["m.weight", "[3, 4]", "[4, 3]"]);
    assert!(matches!(error, CheckpointError::WrongShape { .. }));
    // As if the fp4 codes were not packed.
    let error =
        refused(checkpoint.take_matrix("e.weight", 64, 64), &["[64, 64]", "[64, 32]", "4-bit"]);
    assert!(matches!(error, CheckpointError::WrongShape { .. }));
    let error = refused(checkpoint.take_vector("v", 6), &["v", "[5]", "[6]"]);
    assert!(matches!(error, CheckpointError::WrongShape { .. }));
    // A failed attempt takes nothing.
    assert!(checkpoint.take_matrix("m.weight", 3, 4).is_ok());
    assert!(checkpoint.take_matrix("e.weight", 64, 128).is_ok());
    assert!(checkpoint.take_vector("v", 5).is_ok());
    let error = refused(checkpoint.take_vector("v", 5), &["v", "already"]);
    assert!(matches!(error, CheckpointError::TakenTwice { .. }));
    let error = refused(checkpoint.take_vector("w", 5), &["w", "missing"]);
    assert!(matches!(error, CheckpointError::MissingTensor { .. }));
    assert!(checkpoint.finish(&[]).is_ok());
}

#[test]
fn wrong_scales() {
    let take = |tensors: &[(&str, &str, &[usize], usize)], rows, cols| {
        single(shard(tensors)).unwrap().take_matrix("x.weight", rows, cols)
    };
    let fp8 = ("x.weight", "F8_E4M3", &[64usize, 96][..], 64 * 96);
    let error = refused(take(&[fp8], 64, 96), &["x.weight", "F8_E4M3", "x.scale"]);
    assert!(matches!(error, CheckpointError::MissingScale { dtype: Dtype::F8_E4M3, .. }));
    let fp4 = ("x.weight", "U8", &[64usize, 48][..], 64 * 48);
    let error = refused(take(&[fp4], 64, 96), &["x.weight", "x.scale"]);
    assert!(matches!(error, CheckpointError::MissingScale { dtype: Dtype::U8, .. }));

    let scale = ("x.scale", "F8_E8M0", &[3usize, 2][..], 6);
    let words = ["x.scale", "[3, 2]", "[64, 96]", "[2, 3] or [64, 3]"];
    let error = refused(take(&[fp8, scale], 64, 96), &words);
    assert!(matches!(error, CheckpointError::WrongScaleShape { rows: 64, cols: 96, .. }));
    let tile = ("x.scale", "F8_E8M0", &[2usize, 3][..], 6);
    let error = refused(take(&[fp4, tile], 64, 96), &["[2, 3]", "[64, 3]"]);
    assert!(matches!(error, CheckpointError::WrongScaleShape { .. }));
    let float = ("x.scale", "F32", &[2usize, 3][..], 24);
    let error = refused(take(&[fp8, float], 64, 96), &["x.scale", "F32", "F8_E8M0"]);
    assert!(matches!(error, CheckpointError::WrongDtype { found: Dtype::F32, .. }));

    let error = refused(take(&[("x.weight", "I64", &[1, 2], 16)], 1, 2), &["x.weight", "I64"]);
    assert!(matches!(error, CheckpointError::WrongDtype { .. }));
    let mut checkpoint = single(shard(&[("v", "I8", &[4], 4)])).unwrap();
    let error = refused(checkpoint.take_vector("v", 4), &["v", "I8", "F32 or BF16"]);
    assert!(matches!(error, CheckpointError::WrongDtype { .. }));
}

/// Every spelling of every stored form.
#[test]
fn dtypes_that_load() {
    for (weight, shape, bytes, scale, scale_shape, format) in [
        ("F8_E4M3", [40, 70], 2800, "F8_E8M0", [2, 3], Format::Fp8Block32),
        ("F8_E4M3", [40, 70], 2800, "U8", [2, 3], Format::Fp8Block32),
        ("F8_E4M3", [40, 70], 2800, "U8", [40, 3], Format::Fp8Row32),
        ("I8", [40, 35], 1400, "F8_E8M0", [40, 3], Format::Fp4Row32),
        ("U8", [40, 35], 1400, "U8", [40, 3], Format::Fp4Row32),
        ("F4", [40, 70], 1400, "F8_E8M0", [40, 3], Format::Fp4Row32),
    ] {
        // An odd tensor before them: nothing is aligned.
        let mut checkpoint = single(shard(&[
            ("odd", "I64", &[0], 0),
            ("byte", "U8", &[1], 1),
            ("model.x.weight", weight, &shape, bytes),
            ("model.x.scale", scale, &scale_shape, scale_shape[0] * scale_shape[1]),
        ]))
        .unwrap();
        let matrix = checkpoint.take_matrix("x.weight", 40, 70).unwrap();
        assert_eq!((matrix.format, matrix.rows, matrix.cols), (format, 40, 70));
        let consumed = checkpoint.finish(&["odd", "byte"]).unwrap();
        assert_eq!((consumed.tensors, consumed.skipped_tensors), (2, 2));
    }
    let two = 1.5f32.to_le_bytes().into_iter().chain([0xc0, 0x3f]).collect::<Vec<u8>>();
    let header = json!({
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "BF16", "shape": [1, 1], "data_offsets": [4, 6]},
    });
    let mut checkpoint = single(safetensors(&header.to_string(), &two)).unwrap();
    assert_eq!(checkpoint.take_vector("a", 1).unwrap(), [1.5]);
    assert_eq!(checkpoint.take_array("b", &[1, 1]).unwrap(), [1.5]);
}

/// The same checkpoint inside the binary.
#[test]
fn embedded_files_are_a_checkpoint() {
    const CONFIG: &[u8] = include_bytes!("../../../testdata/tiny-a/config.json");
    static FILES: &[(&str, &[u8])] = &[("config.json", CONFIG)];
    let error = refused(Checkpoint::open(Source::Embedded(FILES)), &["inside this binary"]);
    assert!(matches!(error, CheckpointError::MissingIndex { .. }));

    static WITH_SHARD: &[(&str, &[u8])] = &[
        ("config.json", CONFIG),
        (
            "model.safetensors",
            b"\x38\0\0\0\0\0\0\0{\"v\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}} \x80\x3f",
        ),
    ];
    let mut checkpoint = Checkpoint::open(Source::Embedded(WITH_SHARD)).unwrap();
    assert_eq!(checkpoint.take_vector("v", 1).unwrap(), [1.0]);
}
