//! The Engram front end against the reference numbers.

mod files;

use deepinfer::config::ModelConfig;
use deepinfer::engram::{Engram, EngramError, Hasher, TokenMap};
use deepinfer::tokenizer::Tokenizer;
use files::{checkpoints, json, real_tokenizer, testdata};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

fn config(folder: &Path) -> ModelConfig {
    ModelConfig::from_json(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn tokenizer(folder: &Path) -> Tokenizer {
    Tokenizer::from_bytes(std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap()
}

fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

fn check_layers(hasher: &Hasher, primes: &Value, offsets: &Value, multipliers: &Value) {
    let primes: Vec<Vec<u64>> = numbers(primes);
    let offsets: Vec<Vec<u64>> = numbers(offsets);
    let multipliers: Vec<Vec<String>> = numbers(multipliers);
    assert_eq!(hasher.layers().len(), primes.len());
    for (index, layer) in hasher.layers().iter().enumerate() {
        assert_eq!(layer.primes, primes[index]);
        assert_eq!(layer.offsets, offsets[index]);
        let text: Vec<String> = layer.multipliers.iter().map(i64::to_string).collect();
        assert_eq!(text, multipliers[index]);
    }
}

/// Row ids of every token of a text, layer by layer and column by column.
fn hash_ids(engram: &Engram, ids: &[u32], image: Option<u32>) -> Vec<Vec<Vec<u64>>> {
    let hasher = &engram.hasher;
    let mut window = vec![0; hasher.window_len()];
    (0..ids.len())
        .map(|at| {
            let newest_first = ids[..=at]
                .iter()
                .rev()
                .map(|&id| if Some(id) == image { None } else { Some(engram.compress(id)) });
            hasher.fill_window(newest_first, &mut window);
            let layer = |index| {
                let mut rows = vec![0; hasher.columns()];
                hasher.rows(index, &window, &mut rows);
                rows
            };
            (0..hasher.layers().len()).map(layer).collect()
        })
        .collect()
}

#[test]
fn the_real_tokenizer_gives_the_released_map_and_hashes() {
    let reference = json(&testdata("deepseek-tokenizer/engram.json"));
    let tokenizer = Tokenizer::from_bytes(real_tokenizer()).unwrap();
    let map = TokenMap::compute(&tokenizer);
    assert_eq!(map.size(), 99_092);
    let bytes: Vec<u8> = map.ids().iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(digest, reference["token_map_sha256_le_int64"].as_str().unwrap());
    let first: Vec<u32> = numbers(&reference["token_map_first_200"]);
    assert_eq!(map.ids()[..200], first);

    let mut config = config(&testdata("tiny-a")).text_config;
    config.engram_layer_ids = vec![1, 14];
    config.engram_num_embeddings = vec![384_006_168, 384_016_682];
    config.engram_max_ngram_size = 4;
    config.engram_n_heads = 8;
    config.engram_vocab_size = 16_000_000;
    config.engram_compressed_vocab_size = 99_092;
    let hasher = Hasher::new(&config, map.get(2).unwrap()).unwrap();
    check_layers(
        &hasher,
        &reference["primes"],
        &reference["offsets"],
        &reference["multipliers_for_99092"],
    );
    let sample = &reference["sample"];
    let ids: Vec<u32> = numbers(&sample["ids"]);
    let engram = Engram { map, hasher };
    let expected: Vec<Vec<Vec<u64>>> = numbers(&sample["hash_ids"]);
    let found = hash_ids(&engram, &ids, None);
    assert_eq!(found.len(), 64);
    assert_eq!(found, expected);
}

#[test]
fn the_test_checkpoints_give_their_maps_and_hashes() {
    for folder in checkpoints() {
        let reference = json(&folder.join("reference.json"));
        let file = std::fs::read(folder.join("reference.safetensors")).unwrap();
        let config = config(&folder);
        let tokenizer = tokenizer(&folder);
        let engram = Engram::new(&config.text_config, &tokenizer).unwrap().unwrap();
        let constants = &reference["engram"];
        check_layers(
            &engram.hasher,
            &constants["primes"],
            &constants["offsets"],
            &constants["multipliers"],
        );
        let map = files::i64s(&file, "engram.token_map");
        let found: Vec<i64> = engram.map.ids().iter().map(|&id| i64::from(id)).collect();
        assert_eq!(found, map);
        let prompts = reference["prompts"].as_array().unwrap();
        assert!(prompts.len() >= 3);
        for prompt in prompts {
            let name = prompt["name"].as_str().unwrap();
            let ids: Vec<u32> = numbers(&prompt["ids"]);
            let found: Vec<i64> = hash_ids(&engram, &ids, config.image_token_id)
                .into_iter()
                .flatten()
                .flatten()
                .map(|row| row as i64)
                .collect();
            assert_eq!(found, files::i64s(&file, &format!("{name}.engram_hash")), "{name}");
        }
    }
}

#[test]
fn a_cached_map_is_used_and_a_damaged_one_is_not() {
    let tokenizer = Tokenizer::from_bytes(real_tokenizer()).unwrap();
    let map = TokenMap::compute(&tokenizer);
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(TokenMap::cached(&tokenizer, Some(folder.path())), map);
    let files: Vec<_> = std::fs::read_dir(folder.path().join("token-map")).unwrap().collect();
    let path = files[0].as_ref().unwrap().path();
    assert_eq!(files.len(), 1);
    let intact = std::fs::read(&path).unwrap();

    // A forged map with a right checksum is read: the cache is used at all.
    let mut forged = intact[..intact.len() - 32].to_vec();
    forged[8..12].copy_from_slice(&7u32.to_le_bytes());
    let digest = Sha256::digest(&forged);
    forged.extend_from_slice(&digest);
    std::fs::write(&path, &forged).unwrap();
    assert_eq!(TokenMap::cached(&tokenizer, Some(folder.path())).get(0), Some(7));

    for damage in [vec![], intact[..1000].to_vec(), b"DITMAP01".repeat(100), {
        let mut flipped = intact.clone();
        flipped[5000] ^= 1;
        flipped
    }] {
        std::fs::write(&path, damage).unwrap();
        assert_eq!(TokenMap::cached(&tokenizer, Some(folder.path())), map);
        assert_eq!(std::fs::read(&path).unwrap(), intact, "the file is repaired");
    }
    // A folder that cannot be written is no error.
    std::fs::remove_dir_all(folder.path().join("token-map")).unwrap();
    std::fs::write(folder.path().join("token-map"), b"in the way").unwrap();
    assert_eq!(TokenMap::cached(&tokenizer, Some(folder.path())), map);
}

#[test]
fn sizes_that_disagree_are_refused() {
    let folder = testdata("tiny-a");
    let (config, tokenizer) = (config(&folder).text_config, tokenizer(&folder));
    let mut changed = config.clone();
    changed.engram_compressed_vocab_size = 514;
    match Engram::new(&changed, &tokenizer) {
        Err(EngramError::CompressedVocab { computed: 515, stated: 514 }) => {}
        other => panic!("{other:?}"),
    }
    let mut changed = config.clone();
    changed.engram_num_embeddings[1] += 1;
    match Engram::new(&changed, &tokenizer) {
        Err(EngramError::TableRows { layer: 4, computed: 834, stated: 835 }) => {}
        other => panic!("{other:?}"),
    }
    let mut changed = config;
    changed.engram_pad_token_id = Some(608);
    assert!(matches!(Engram::new(&changed, &tokenizer), Err(EngramError::Pad { pad: 608, .. })));
}
