//! The compressed vocabulary: tokens whose normalized texts agree share an id.

use crate::tokenizer::Tokenizer;
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use tokenizers::normalizers::replace::{Replace, ReplacePattern};
use tokenizers::normalizers::utils::{Lowercase, Sequence};
use tokenizers::normalizers::{NFD, NFKC, Strip, StripAccents};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// Stands for a text of exactly one space while the ends of texts are stripped.
const SENTINEL: char = '\u{e000}';
/// Starts a cached map; another number means another rule or layout.
const MAGIC: &[u8; 8] = b"DITMAP01";
/// Below this many tokens a map is made faster than it is read.
const WORTH_CACHING: usize = 10_000;

/// Compressed ids by token id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMap {
    ids: Vec<u32>,
    size: usize,
}

impl TokenMap {
    /// Computes the map of `tokenizer`: every token id, added tokens too, in order. A token's key
    /// is its normalized text (the text itself where that is empty), or its spelling where the
    /// bytes are not UTF-8; ids count the keys by first appearance.
    pub fn compute(tokenizer: &Tokenizer) -> Self {
        let tokens: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
        let normalize = normalizer();
        let keys: Vec<String> =
            tokens.par_iter().map(|&id| key(tokenizer, &normalize, id)).collect();
        let mut numbers: HashMap<String, u32> = HashMap::with_capacity(keys.len());
        let ids = keys
            .into_iter()
            .map(|key| {
                let next = numbers.len() as u32;
                *numbers.entry(key).or_insert(next)
            })
            .collect();
        Self { ids, size: numbers.len() }
    }

    /// The map of `tokenizer`, from `folder` if it is there and intact; else computed, and written
    /// there if that is possible. The tokenizer's digest names the file.
    pub fn cached(tokenizer: &Tokenizer, folder: Option<&Path>) -> Self {
        let Some(folder) = folder.filter(|_| tokenizer.vocab_size() >= WORTH_CACHING) else {
            return Self::compute(tokenizer);
        };
        let digest: String = tokenizer.digest().iter().map(|byte| format!("{byte:02x}")).collect();
        let path = folder.join("token-map").join(digest);
        let stored = std::fs::read(&path).ok().and_then(|bytes| Self::from_cache(&bytes));
        if let Some(map) = stored.filter(|map| map.ids.len() == tokenizer.vocab_size()) {
            return map;
        }
        let map = Self::compute(tokenizer);
        // A cache that cannot be written costs time at the next start, and nothing else.
        let _ = write_atomically(&path, &map.to_cache());
        map
    }

    /// Compressed id of token `id`; `None` for ids without a token.
    pub fn get(&self, id: u32) -> Option<u32> {
        self.ids.get(id as usize).copied()
    }

    /// All compressed ids, by token id.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// How many compressed ids there are.
    pub fn size(&self) -> usize {
        self.size
    }

    fn to_cache(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.ids.iter().flat_map(|id| id.to_le_bytes()));
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        bytes
    }

    fn from_cache(bytes: &[u8]) -> Option<Self> {
        let (content, digest) = bytes.split_last_chunk::<32>()?;
        if Sha256::digest(content).as_slice() != digest {
            return None;
        }
        let (words, []) = content.strip_prefix(MAGIC)?.as_chunks::<4>() else { return None };
        let ids: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let size = ids.iter().max().map_or(0, |&id| id as usize + 1);
        Some(Self { ids, size })
    }
}

/// The rule's normalizer: NFKC, NFD, no accents, lower case, runs of `[ \t\r\n]` as one space,
/// stripped ends, except that one space alone stays.
fn normalizer() -> NormalizerWrapper {
    let replace = |pattern: &str, with: &str| {
        let pattern = ReplacePattern::Regex(pattern.to_owned());
        // Both patterns are constants of this file, and a test runs them.
        #[allow(clippy::expect_used)]
        Replace::new(pattern, with).expect("a valid pattern")
    };
    let sentinel = SENTINEL.to_string();
    Sequence::new(vec![
        NFKC.into(),
        NFD.into(),
        StripAccents.into(),
        Lowercase.into(),
        replace(r"[ \t\r\n]+", " ").into(),
        replace("^ $", &sentinel).into(),
        Strip::new(true, true).into(),
        replace(&sentinel, " ").into(),
    ])
    .into()
}

fn key(tokenizer: &Tokenizer, normalizer: &NormalizerWrapper, id: u32) -> String {
    let text = String::from_utf8_lossy(tokenizer.token_bytes(id));
    if text.contains(char::REPLACEMENT_CHARACTER) {
        return tokenizer.spelling(id).unwrap_or_default().to_owned();
    }
    let normal = if text.is_ascii() { normalize_ascii(&text) } else { slow(normalizer, &text) };
    if normal.is_empty() { text.into_owned() } else { normal }
}

fn slow(normalizer: &NormalizerWrapper, text: &str) -> String {
    let mut normalized = NormalizedString::from(text);
    match normalizer.normalize(&mut normalized) {
        Ok(()) => normalized.get().to_owned(),
        Err(_) => String::new(),
    }
}

/// What [`normalizer`] does to ASCII: the Unicode forms and accents have no part in it.
fn normalize_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if !matches!(c, ' ' | '\t' | '\r' | '\n') {
            out.push(c.to_ascii_lowercase());
        } else if !out.ends_with(' ') {
            out.push(' ');
        }
    }
    if out == " " { out } else { out.trim().to_owned() }
}

fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // Another process may write the same map: each has a file of its own, and renames it whole.
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(name);
    let mut file = std::fs::File::create(&temporary)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ascii_needs_no_unicode_rules() {
        let normalizer = normalizer();
        let pieces = [" ", "", "  ", "\n", "a", "A B", " a", "a ", "\t\t", "\x0b", "\x0c a", "\0"];
        for a in pieces {
            for b in pieces {
                for c in pieces {
                    let text = format!("{a}{b}{c}");
                    assert_eq!(normalize_ascii(&text), slow(&normalizer, &text), "{text:?}");
                }
            }
        }
        for byte in 0..128u8 {
            let text = char::from(byte).to_string();
            assert_eq!(normalize_ascii(&text), slow(&normalizer, &text), "{text:?}");
        }
    }

    #[test]
    fn the_normalizer_folds_what_the_rule_says() {
        let fold = |text: &str| slow(&normalizer(), text);
        assert_eq!(fold("Ｃａｆé"), "cafe");
        assert_eq!(fold("É\u{301}"), "e");
        assert_eq!(fold("\u{3000}"), " ");
        assert_eq!(fold("\u{a0}x"), "x");
    }
}
