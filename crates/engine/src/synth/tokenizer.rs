//! A byte-level BPE of any size, made of bytes, letter strings and the special tokens of the
//! V4.1 format. It reads and writes every text; its tokens mean nothing.

use deepseek_recipe_core::special_tokens::SpecialToken;
use serde_json::{Map, Value, json};

/// Stands at positions that a draft block leaves open.
pub const NOISE: &str = "<｜place▁holder▁no▁0｜>";

/// Special tokens after the ordinary ones; BOS, EOS and padding come before them.
const SPECIALS: &[&str] = &[
    NOISE,
    SpecialToken::User.default_str(),
    SpecialToken::Assistant.default_str(),
    SpecialToken::System.default_str(),
    SpecialToken::ThinkingStart.default_str(),
    SpecialToken::ThinkingEnd.default_str(),
    SpecialToken::Dsml.default_str(),
    SpecialToken::LatestReminder.default_str(),
    SpecialToken::Image.default_str(),
    SpecialToken::Ref.default_str(),
    SpecialToken::RefEnd.default_str(),
    SpecialToken::Box.default_str(),
    SpecialToken::BoxEnd.default_str(),
    SpecialToken::Point.default_str(),
    SpecialToken::PointEnd.default_str(),
    SpecialToken::Polygon.default_str(),
    SpecialToken::PolygonEnd.default_str(),
];

const FIRST: [&str; 3] = [crate::tokenizer::BOS, crate::tokenizer::EOS, crate::tokenizer::PAD];

/// Letters by their frequency in English, so that short vocabularies merge common strings.
const LETTERS: &str = "etaoinshrdlucmfwypvbgkjqxz";

/// Smallest vocabulary: bytes and special tokens.
pub const LEAST: usize = FIRST.len() + 256 + SPECIALS.len();

/// Id of the special token `token` in a vocabulary of `size`.
pub fn special_id(size: usize, token: &str) -> Option<u32> {
    let place = SPECIALS.iter().position(|&special| special == token)?;
    Some((size - SPECIALS.len() + place) as u32)
}

/// The text of a `tokenizer.json` with `size` tokens (at least [`LEAST`], at most some 490,000).
pub fn tokenizer_json(size: usize) -> String {
    let mut vocab = Map::new();
    let mut add = |token: &str| {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    };
    FIRST.iter().for_each(|token| add(token));
    crate::tokenizer::byte_characters().for_each(|c| add(&c.to_string()));
    let merges = merges(size.saturating_sub(LEAST));
    for (left, right) in &merges {
        add(&format!("{left}{right}"));
    }
    let merges: Vec<Value> = merges.into_iter().map(|(a, b)| json!(format!("{a} {b}"))).collect();
    let added = |id: usize, content: &str, special: bool| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        })
    };
    let ends = FIRST.iter().enumerate().map(|(id, token)| added(id, token, true));
    let format = SPECIALS
        .iter()
        .enumerate()
        .map(|(place, token)| added(size - SPECIALS.len() + place, token, *token == NOISE));
    let split = |pattern: &str| {
        json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        })
    };
    let byte_level = |prefix: bool, trim: bool, regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim,
            "use_regex": regex,
        })
    };
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": ends.chain(format).collect::<Vec<_>>(),
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split(r"\p{N}{1,3}"),
            split(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
            byte_level(false, true, false),
        ]},
        "post_processor": byte_level(true, false, true),
        "decoder": byte_level(true, true, true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": merges,
        },
    });
    file.to_string()
}

/// The first `count` letter strings, shorter ones first, with and without a space before them;
/// each is a shorter one and a letter.
fn merges(count: usize) -> Vec<(String, String)> {
    let mut out = Vec::with_capacity(count);
    // U+0120 is how byte-level BPE spells a space.
    let mut stems: Vec<String> =
        std::iter::once('\u{120}').chain(LETTERS.chars()).map(String::from).collect();
    while out.len() < count {
        let mut longer = Vec::new();
        for stem in &stems {
            for letter in LETTERS.chars() {
                if out.len() == count {
                    return out;
                }
                out.push((stem.clone(), letter.to_string()));
                longer.push(format!("{stem}{letter}"));
            }
        }
        stems = longer;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    #[test]
    fn the_generated_tokenizer_is_complete() {
        for size in [LEAST, 1024, 30_000] {
            let tokenizer = Tokenizer::from_bytes(tokenizer_json(size)).unwrap();
            assert_eq!(tokenizer.vocab_size(), size);
            assert!((0..size as u32).all(|id| tokenizer.spelling(id).is_some()));
            assert_eq!(tokenizer.bos(), Some(0));
            for token in SPECIALS {
                assert_eq!(tokenizer.special_id(token), special_id(size, token));
            }
            let text = "Hello there, größe 12345\n 你好!";
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
            assert!(crate::chat::ChatTemplate::new(&tokenizer).is_ok());
        }
    }
}
