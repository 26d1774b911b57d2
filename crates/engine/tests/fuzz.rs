//! Untrusted bytes, driven by property tests. The same functions serve `cargo fuzz`.

mod files;

use deepinfer::config::ModelConfig;
use deepinfer::engram::Engram;
use deepinfer::fuzz;
use deepinfer::tokenizer::Tokenizer;
use files::testdata;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use std::sync::LazyLock;

fn read(name: &str) -> Vec<u8> {
    std::fs::read(testdata("tiny-a").join(name)).unwrap()
}

static CONFIG: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&read("config.json")).unwrap());
static TOKENIZER: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&read("tokenizer.json")).unwrap());
/// A shard's header with the first tensors only, and as much data.
static SHARD: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let header = json!({
        "a.weight": {"dtype": "F8_E4M3", "shape": [4, 6], "data_offsets": [0, 24]},
        "a.scale": {"dtype": "F8_E8M0", "shape": [1, 1], "data_offsets": [24, 25]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [25, 31]},
        "c": {"dtype": "F4", "shape": [1, 4], "data_offsets": [31, 33]},
        "__metadata__": {"format": "pt"},
    });
    with_header(&header, &[7; 33])
});
static MODEL: LazyLock<(Tokenizer, Engram)> = LazyLock::new(|| {
    let config = ModelConfig::from_json(&read("config.json")).unwrap();
    let tokenizer = Tokenizer::from_bytes(read("tokenizer.json")).unwrap();
    let engram = Engram::new(&config.text_config, &tokenizer).unwrap().unwrap();
    (tokenizer, engram)
});

fn with_header(header: &Value, data: &[u8]) -> Vec<u8> {
    let json = header.to_string();
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A change of some bytes of a file.
#[derive(Clone, Debug)]
enum Edit {
    Set(Index, u8),
    Insert(Index, u8),
    Remove(Index),
    Cut(Index),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let at = any::<Index>();
    let edit = prop_oneof![
        6 => (at, any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        2 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Edit::Insert(at, byte)),
        2 => any::<Index>().prop_map(Edit::Remove),
        1 => any::<Index>().prop_map(Edit::Cut),
    ];
    proptest::collection::vec(edit, 1..6)
}

fn edited(file: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut file = file.to_vec();
    for edit in edits {
        if file.is_empty() {
            break;
        }
        match edit {
            Edit::Set(at, byte) => *at.get_mut(&mut file) = *byte,
            Edit::Insert(at, byte) => file.insert(at.index(file.len()), *byte),
            Edit::Remove(at) => drop(file.remove(at.index(file.len()))),
            Edit::Cut(at) => file.truncate(at.index(file.len())),
        }
    }
    file
}

/// A value that stands where another one should.
fn odd_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3i64..40).prop_map(Value::from),
        prop_oneof![
            Just(u64::MAX),
            Just(1 << 24),
            Just(1 << 31),
            Just(1 << 32),
            Just(i64::MAX as u64)
        ]
        .prop_map(Value::from),
        prop_oneof![Just(0.5), Just(-1.0), Just(1e300)].prop_map(Value::from),
        "[a-z<>\\PC]{0,6}".prop_map(Value::from),
        proptest::collection::vec(-1i64..12, 0..12).prop_map(Value::from),
        Just(json!({})),
        Just(json!([[], {}])),
    ]
}

/// Replaces or removes the value that a walk by `turns` ends at.
fn change(value: &mut Value, turns: &[Index], new: &Option<Value>) {
    let Some((turn, rest)) = turns.split_first() else {
        *value = new.clone().unwrap_or_default();
        return;
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            let key = turn.get(&map.keys().cloned().collect::<Vec<_>>()).clone();
            match (new, rest) {
                (None, []) => drop(map.remove(&key)),
                _ => change(&mut map[&key], rest, new),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = turn.index(items.len());
            match (new, rest) {
                (None, []) => drop(items.remove(at)),
                _ => change(&mut items[at], rest, new),
            }
        }
        _ => *value = new.clone().unwrap_or_default(),
    }
}

type Change = (Vec<Index>, Option<Value>);

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let one = (
        proptest::collection::vec(any::<Index>(), 1..5),
        proptest::option::weighted(0.8, odd_value()),
    );
    proptest::collection::vec(one, 1..4)
}

fn changed(original: &Value, changes: &[Change]) -> Value {
    let mut value = original.clone();
    for (turns, new) in changes {
        change(&mut value, turns, new);
    }
    value
}

/// `usual` cases, or as many as `PROPTEST_CASES` says, for a longer run by hand.
fn cases(usual: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(usual),
    }
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        fuzz::safetensors_header(&bytes);
        fuzz::index(&bytes);
        fuzz::config(&bytes);
        fuzz::tokenizer(&bytes);
        fuzz::token_ids(&MODEL.0, &MODEL.1, &bytes);
    }

    #[test]
    fn edited_files(edits in edits()) {
        fuzz::safetensors_header(&edited(&SHARD, &edits));
        fuzz::config(&edited(CONFIG.to_string().as_bytes(), &edits));
        fuzz::index(&edited(br#"{"metadata":{},"weight_map":{"a":"b.st","c":"d"}}"#, &edits));
    }

    #[test]
    fn changed_headers(changes in changes()) {
        let length = u64::from_le_bytes(*SHARD.first_chunk().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&SHARD[8..8 + length]).unwrap();
        fuzz::safetensors_header(&with_header(&changed(&header, &changes), &[7; 33]));
    }

    #[test]
    fn changed_configurations(changes in changes()) {
        fuzz::config(changed(&CONFIG, &changes).to_string().as_bytes());
    }

    #[test]
    fn small_token_ids(ids in proptest::collection::vec(0u32..700, 0..60)) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        fuzz::token_ids(&MODEL.0, &MODEL.1, &bytes);
    }
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn changed_tokenizers(changes in changes()) {
        fuzz::tokenizer(changed(&TOKENIZER, &changes).to_string().as_bytes());
    }

    #[test]
    fn edited_tokenizers(edits in edits()) {
        fuzz::tokenizer(&edited(&read("tokenizer.json"), &edits));
    }
}

/// The files that the changes start from are good: the promises are tested at all.
#[test]
fn unchanged_files_are_accepted() {
    assert!(deepinfer::checkpoint::safetensors::parse_header("s", &SHARD).is_ok());
    assert!(ModelConfig::from_json(CONFIG.to_string().as_bytes()).is_ok());
    assert!(Tokenizer::from_bytes(TOKENIZER.to_string()).is_ok());
    fuzz::config(CONFIG.to_string().as_bytes());
    fuzz::tokenizer(TOKENIZER.to_string().as_bytes());
}
