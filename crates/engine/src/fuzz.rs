//! What untrusted bytes may do: give an error, or a value that keeps its promises. Each function
//! panics when a promise breaks; property tests and fuzzers call them.

use crate::checkpoint::{parse_index, safetensors};
use crate::config::ModelConfig;
use crate::engram::Hasher;
use crate::tokenizer::{Decoder, Tokenizer};

/// A safetensors file: tensors lie inside the file, apart from each other, and have the bytes that
/// their shapes need.
pub fn safetensors_header(file: &[u8]) {
    let Ok(entries) = safetensors::parse_header("fuzz", file) else { return };
    let mut covered = entries.first().map_or(0, |entry| entry.range.start);
    for entry in &entries {
        assert_eq!(entry.range.start, covered, "{entry:?}");
        let bits = entry.shape.iter().product::<u64>() * entry.dtype.bitsize() as u64;
        assert_eq!(entry.range.len() as u64, bits.div_ceil(8), "{entry:?}");
        covered = entry.range.end;
    }
    assert!(entries.is_empty() || covered == file.len());
}

/// A shard index: no shard lies outside the folder.
pub fn index(text: &[u8]) {
    let Ok(index) = parse_index(text) else { return };
    for shard in index.weight_map.values() {
        assert_eq!(std::path::Path::new(shard).components().count(), 1, "{shard:?}");
        assert!(shard != ".." && shard != ".");
    }
}

/// A `config.json`: an accepted one has sources for its layers, finds its hash functions, and is
/// the same after writing and reading.
pub fn config(text: &[u8]) {
    let Ok(config) = ModelConfig::from_json(text) else { return };
    let c = &config.text_config;
    for layer in 0..c.num_hidden_layers {
        let ratio = c.compress_ratios[layer];
        assert_eq!(c.kv_source(layer).is_some(), ratio > 0);
        if let (Some(kv), Some(index)) = (c.kv_source(layer), c.index_source(layer)) {
            assert!(kv <= index && index <= layer && c.is_kv_source(kv));
            assert_eq!(c.compress_ratios[kv], ratio);
            assert_eq!(c.kv_source(index), Some(kv));
        }
        assert!(c.decoder_start().is_none_or(|start| layer < start || ratio == 1));
    }
    assert_eq!(c.group_width() * c.o_groups, c.num_attention_heads * c.head_dim);
    let again = ModelConfig::from_json(config.to_json().as_bytes()).map(|c| format!("{c:?}"));
    assert_eq!(again.ok(), Some(format!("{config:?}")));
    if !c.engram_layer_ids.is_empty() && c.engram_layer_ids.len() < 4 {
        let mut free = c.clone();
        free.engram_num_embeddings.clear();
        assert!(Hasher::new(&free, 0).is_ok());
    }
}

/// A `tokenizer.json`: an accepted one encodes texts to ids that it has, no fewer than it says
/// beforehand, and gives them back.
pub fn tokenizer(json: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_bytes(json) else { return };
    for text in ["", "a b", "Größe 12\n\n你好 <think>", "<｜User｜>｜DSML｜\u{0}\u{fffd}"] {
        for ids in [tokenizer.encode(text), tokenizer.encode_scanning_specials(text)] {
            let Ok(ids) = ids else { continue };
            assert!(!tokenizer.has_at_least(ids.len() + 1, text));
            for id in ids {
                assert!((id as usize) < tokenizer.vocab_size());
            }
        }
    }
    let ids: Vec<u32> = (0..tokenizer.vocab_size().min(1000) as u32).collect();
    stream_equals_whole(&tokenizer, &ids);
}

/// Token ids of a prompt, four bytes each: pieces make the whole text, and rows lie in their
/// tables.
pub fn token_ids(tokenizer: &Tokenizer, engram: &crate::engram::Engram, bytes: &[u8]) {
    let (words, _) = bytes.as_chunks::<4>();
    let ids: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
    stream_equals_whole(tokenizer, &ids);
    let hasher = &engram.hasher;
    let mut window = vec![0; hasher.window_len()];
    let mut rows = vec![0; hasher.columns()];
    for end in 1..=ids.len() {
        let newest_first = ids[..end].iter().rev().map(|&id| Some(engram.compress(id)));
        hasher.fill_window(newest_first, &mut window);
        for (index, layer) in hasher.layers().iter().enumerate() {
            hasher.rows(index, &window, &mut rows);
            for (column, &row) in rows.iter().enumerate() {
                let first = layer.offsets[column];
                assert!((first..first + layer.primes[column]).contains(&row));
            }
        }
    }
}

fn stream_equals_whole(tokenizer: &Tokenizer, ids: &[u32]) {
    let mut decoder = Decoder::new(false);
    let mut text = String::new();
    for &id in ids {
        decoder.push(tokenizer, id, &mut text);
    }
    decoder.finish(&mut text);
    assert_eq!(text, tokenizer.decode(ids));
}
