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

/// The real tokenizer's file.
pub fn real_tokenizer() -> Vec<u8> {
    use std::io::Read;
    let packed = std::fs::File::open(testdata("deepseek-tokenizer/tokenizer.json.gz")).unwrap();
    let mut json = Vec::new();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut json).unwrap();
    json
}

/// A JSON file.
pub fn json(path: &std::path::Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The integers of tensor `name` of a safetensors file.
pub fn i64s(file: &[u8], name: &str) -> Vec<i64> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let data = tensor.data();
    match tensor.dtype() {
        safetensors::Dtype::I64 => {
            data.as_chunks::<8>().0.iter().map(|&word| i64::from_le_bytes(word)).collect()
        }
        safetensors::Dtype::I32 => {
            let (words, _) = data.as_chunks::<4>();
            words.iter().map(|&word| i64::from(i32::from_le_bytes(word))).collect()
        }
        other => panic!("{name}: {other:?}"),
    }
}

/// The f32 values of tensor `name` of a safetensors file.
pub fn f32s(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
    tensor.data().as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}
