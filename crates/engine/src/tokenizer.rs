//! `tokenizer.json`: text to token ids and back.
//!
//! Byte-level BPE through the `tokenizers` crate. Encoding never reads special tokens out of plain
//! text: the caller says where they are ([`Tokenizer::encode_with_specials`]) or asks for a scan
//! ([`Tokenizer::encode_scanning_specials`]). Decoding works on bytes ([`Decoder`]).

mod least;

use least::Pieces;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedVocabulary, Model};

/// Starts a text.
pub const BOS: &str = "<｜begin▁of▁sentence｜>";
/// Ends an answer.
pub const EOS: &str = "<｜end▁of▁sentence｜>";
/// Padding.
pub const PAD: &str = "<｜▁pad▁｜>";

/// A tokenizer that cannot be used, or text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Not a tokenizer file.
    #[error("tokenizer.json: {message}")]
    Parse {
        /// The parser's message.
        message: String,
    },
    /// A kind of tokenizer that this engine does not implement.
    #[error("tokenizer.json: {what} is {found}; this engine implements {supported} only")]
    Unsupported {
        /// Part of the file.
        what: &'static str,
        /// What the file says.
        found: String,
        /// What is implemented.
        supported: &'static str,
    },
    /// Some text could not be encoded.
    #[error("tokenizer.json: the vocabulary has no token for byte {byte:#04x} ({token:?})")]
    MissingByte {
        /// The byte.
        byte: u8,
        /// Its token's spelling.
        token: String,
    },
    /// A special token is not in the added vocabulary.
    #[error("the tokenizer has no special token {token:?}; the prompt format needs it")]
    MissingSpecial {
        /// Its spelling.
        token: String,
    },
    /// Special ranges that overlap, or do not lie on characters of the text.
    #[error("special range {range:?} does not fit the text of {bytes} bytes or the range before")]
    Range {
        /// The range.
        range: Range<usize>,
        /// Length of the text.
        bytes: usize,
    },
    /// The crate refused the text.
    #[error("text cannot be encoded: {message}")]
    Encode {
        /// Its message.
        message: String,
    },
}

type Result<T> = std::result::Result<T, TokenizerError>;

/// A loaded tokenizer. Shared by all requests.
pub struct Tokenizer {
    /// Without the added vocabulary, so that no text turns into a special token.
    plain: tokenizers::Tokenizer,
    added: HashMap<String, u32>,
    /// Spellings of added tokens by their first character, longest first.
    by_first: HashMap<char, Vec<(String, u32)>>,
    special: Vec<bool>,
    spellings: Vec<Option<String>>,
    /// Bytes of all tokens in id order, and where each starts.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    digest: [u8; 32],
    /// Whether the tokens of a text spell it: nothing is changed or left out before.
    spells: bool,
    /// Made for the first long text.
    pieces: OnceLock<Pieces>,
}

impl Tokenizer {
    /// Loads the content of a `tokenizer.json`.
    pub fn from_bytes(json: impl AsRef<[u8]>) -> Result<Self> {
        let json = json.as_ref();
        let parse = |error: tokenizers::Error| TokenizerError::Parse { message: error.to_string() };
        let mut spells = Kind::check(json)?;
        let mut plain = read(json)?;
        plain.with_truncation(None).map_err(parse)?;
        plain.with_padding(None);

        let added_tokens = plain.get_added_tokens_decoder();
        let top = plain.get_vocab(true).into_values().max();
        let size = top.map_or(0, |id| id as usize + 1);
        // A file with a few tokens and one enormous id would ask for any amount of memory.
        if size > json.len().saturating_add(1 << 16) {
            return Err(TokenizerError::Unsupported {
                what: "the largest token id",
                found: (size - 1).to_string(),
                supported: "ids without large gaps",
            });
        }
        let mut spellings: Vec<Option<String>> = vec![None; size];
        for (token, id) in plain.get_vocab(false) {
            // Tokens of two spellings need not spell their text.
            spells &= spellings[id as usize].replace(token).is_none();
        }
        let alphabet = byte_alphabet();
        let mut special = vec![false; size];
        let mut added = HashMap::new();
        let mut by_first: HashMap<char, Vec<(String, u32)>> = HashMap::new();
        for (id, token) in added_tokens {
            let Some(first) = token.content.chars().next() else { continue };
            let other = spellings[id as usize].replace(token.content.clone());
            spells &= other.is_none_or(|other| other == token.content);
            spells &= token_text(&token.content, &alphabet) == token.content.as_bytes();
            special[id as usize] = token.special;
            added.insert(token.content.clone(), id);
            by_first.entry(first).or_default().push((token.content, id));
        }
        for tokens in by_first.values_mut() {
            tokens.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
        }
        plain.with_added_vocabulary(AddedVocabulary::new());

        for (&character, &byte) in &alphabet {
            let token = character.to_string();
            if plain.get_model().token_to_id(&token).is_none() {
                return Err(TokenizerError::MissingByte { byte, token });
            }
        }
        let mut bytes = Vec::new();
        let mut starts = Vec::with_capacity(size + 1);
        for spelling in &spellings {
            starts.push(bytes.len() as u32);
            bytes.extend(token_text(spelling.as_deref().unwrap_or_default(), &alphabet));
        }
        starts.push(bytes.len() as u32);
        let digest = Sha256::digest(json).into();
        let pieces = OnceLock::new();
        Ok(Self {
            plain,
            added,
            by_first,
            special,
            spellings,
            bytes,
            starts,
            digest,
            spells,
            pieces,
        })
    }

    /// One more than the largest token id. The model's vocabulary may be larger.
    pub fn vocab_size(&self) -> usize {
        self.spellings.len()
    }

    /// Sha256 of the file: two tokenizers with the same digest are the same.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// Token ids of `text`, in which nothing is a special token, whatever it looks like. Adds
    /// nothing, no BOS either.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Token ids of `text`, whose `special` byte ranges (ascending, disjoint) are each one special
    /// token, and the rest plain text.
    pub fn encode_with_specials(&self, text: &str, special: &[Range<usize>]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut done = 0;
        for range in special {
            let parts = text.get(done..range.start).zip(text.get(range.clone()));
            let Some((before, token)) = parts else {
                let (range, bytes) = (range.clone(), text.len());
                return Err(TokenizerError::Range { range, bytes });
            };
            self.encode_into(before, &mut ids)?;
            ids.push(self.require_special(token)?);
            done = range.end;
        }
        self.encode_into(&text[done..], &mut ids)?;
        Ok(ids)
    }

    /// Token ids of a raw prompt: wherever the spelling of an added token occurs (the longest one
    /// from the left), it becomes that token. For prompts whose author writes the template.
    pub fn encode_scanning_specials(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with_specials(text, &self.find_specials(text))
    }

    /// Whether `text`, with or without special tokens in it, is certain to have at least `count`
    /// tokens. That takes a small part of the time of encoding it; a text of which it is not certain
    /// may have them, too.
    pub fn has_at_least(&self, count: usize, text: &str) -> bool {
        // A token spells at least one byte.
        if !self.spells || text.len() < count {
            return false;
        }
        let ids = 0..self.vocab_size() as u32;
        let pieces = self.pieces.get_or_init(|| Pieces::new(ids.map(|id| self.token_bytes(id))));
        pieces.are_at_least(count, text.as_bytes())
    }

    fn find_specials(&self, text: &str) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while let Some(first) = text[at..].chars().next() {
            let tokens = self.by_first.get(&first).map(Vec::as_slice).unwrap_or_default();
            let found = tokens.iter().find(|(token, _)| text[at..].starts_with(token));
            let length = found.map_or(first.len_utf8(), |(token, _)| token.len());
            if found.is_some() {
                ranges.push(at..at + length);
            }
            at += length;
        }
        ranges
    }

    fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self
            .plain
            .encode_fast(text, false)
            .map_err(|error| TokenizerError::Encode { message: error.to_string() })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// The text of `ids`, special tokens included. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that token `id` stands for; none for ids without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.starts.get(id..id.saturating_add(2)) {
            Some(&[start, end]) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// How the file spells token `id` (byte-level characters for ordinary tokens).
    pub fn spelling(&self, id: u32) -> Option<&str> {
        self.spellings.get(id as usize)?.as_deref()
    }

    /// The id of the added token `token`, if there is one.
    pub fn special_id(&self, token: &str) -> Option<u32> {
        self.added.get(token).copied()
    }

    /// The id of the added token `token`, or an error that names it.
    pub fn require_special(&self, token: &str) -> Result<u32> {
        self.special_id(token)
            .ok_or_else(|| TokenizerError::MissingSpecial { token: token.to_owned() })
    }

    /// Whether the file marks token `id` as special: plain output leaves such tokens out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// [`BOS`], if the tokenizer has it.
    pub fn bos(&self) -> Option<u32> {
        self.special_id(BOS)
    }

    /// [`EOS`], if the tokenizer has it.
    pub fn eos(&self) -> Option<u32> {
        self.special_id(EOS)
    }

    /// [`PAD`], if the tokenizer has it.
    pub fn pad(&self) -> Option<u32> {
        self.special_id(PAD)
    }
}

/// The parts of the file that say what kind of tokenizer it is.
#[derive(Deserialize)]
struct Kind {
    model: ModelKind,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    decoder: Option<DecoderKind>,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// Whether the tokens of every text spell it: nothing is changed or left out before.
fn spells(normalizer: &Value, pre_tokenizer: &Value) -> bool {
    let keeps = |step: &&Value| match step["type"].as_str() {
        Some("Split") => step["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        Some("ByteLevel") => step["add_prefix_space"] == false,
        kind => kind == Some("Digits"),
    };
    let steps = steps(pre_tokenizer);
    let to_bytes = steps.iter().filter(|step| step["type"] == "ByteLevel").count();
    self::steps(normalizer).is_empty() && steps.iter().all(keeps) && to_bytes == 1
}

/// What is done to a text, one after the other.
fn steps(part: &Value) -> Vec<&Value> {
    match part["type"].as_str() {
        None if part.is_null() => Vec::new(),
        Some("Sequence") => {
            let lists = [&part["normalizers"], &part["pretokenizers"]];
            lists.into_iter().filter_map(Value::as_array).flatten().flat_map(steps).collect()
        }
        _ => vec![part],
    }
}

#[derive(Deserialize)]
struct DecoderKind {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    decoders: Vec<DecoderKind>,
}

impl Kind {
    /// Refuses what this engine does not implement. The `tokenizers` crate panics on some of it,
    /// and on text that is not JSON, so it comes after this. Returns whether the tokens of a text
    /// spell all of it.
    fn check(json: &[u8]) -> Result<bool> {
        let kind: Kind = serde_json::from_slice(json)
            .map_err(|error| TokenizerError::Parse { message: error.to_string() })?;
        let model = kind.model;
        let unsupported = |what, found: &dyn std::fmt::Debug, supported| {
            Err(TokenizerError::Unsupported { what, found: format!("{found:?}"), supported })
        };
        if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return unsupported("model.type", &model.kind, "\"BPE\"");
        }
        if model.dropout.is_some_and(|dropout| dropout != 0.0) {
            return unsupported("model.dropout", &model.dropout, "null");
        }
        let prefix = &model.continuing_subword_prefix;
        if prefix.as_ref().is_some_and(|prefix| !prefix.is_empty()) {
            return unsupported("model.continuing_subword_prefix", prefix, "null");
        }
        let suffix = &model.end_of_word_suffix;
        if suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return unsupported("model.end_of_word_suffix", suffix, "null");
        }
        let kinds: Vec<String> = match kind.decoder {
            None => Vec::new(),
            Some(decoder) if decoder.kind == "Sequence" => {
                decoder.decoders.into_iter().map(|decoder| decoder.kind).collect()
            }
            Some(decoder) => vec![decoder.kind],
        };
        if kinds != ["ByteLevel"] {
            return unsupported("decoder", &kinds, "[\"ByteLevel\"]");
        }
        Ok(spells(&kind.normalizer, &kind.pre_tokenizer))
    }
}

/// Reads the file with the `tokenizers` crate. Its panics on odd files become errors.
fn read(json: &[u8]) -> Result<tokenizers::Tokenizer> {
    let read = || tokenizers::Tokenizer::from_bytes(json);
    let message = match std::panic::catch_unwind(read) {
        Ok(Ok(tokenizer)) if matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) => {
            return Ok(tokenizer);
        }
        Ok(Ok(_)) => "the model is not a BPE".into(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the tokenizers crate cannot read this file".into(),
    };
    Err(TokenizerError::Parse { message })
}

/// The byte-level alphabet in the order of its bytes: printable Latin-1 characters stand for themselves, the other bytes, in
/// order, for the characters from U+0100 on.
pub(crate) fn byte_characters() -> impl Iterator<Item = char> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100u32;
    (0..=255u8).map(move |byte| {
        let code = if printable(byte) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or_default()
    })
}

fn byte_alphabet() -> HashMap<char, u8> {
    byte_characters().zip(0..=255u8).collect()
}

/// A spelling made of byte-level characters stands for those bytes, any other for its own UTF-8.
fn token_text(spelling: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = spelling.chars().map(|c| alphabet.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| spelling.as_bytes().to_vec())
}

/// Turns tokens into text as they come. Every piece is whole characters; all pieces together are
/// what [`Tokenizer::decode`] gives for all tokens.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    /// The start of a character whose end is still to come: at most 3 bytes.
    pending: Vec<u8>,
    skip_special: bool,
}

impl Decoder {
    /// A decoder at the start of a text. `skip_special`: tokens that the tokenizer marks as
    /// special leave no text.
    pub fn new(skip_special: bool) -> Self {
        Self { pending: Vec::new(), skip_special }
    }

    /// Adds token `id`; appends to `out` the characters that are complete now. Bytes that no later
    /// token can complete become U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        if !(self.skip_special && tokenizer.is_special(id)) {
            self.push_bytes(tokenizer.token_bytes(id), out);
        }
    }

    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        let left = loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    break 0;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    // `valid` is UTF-8, so nothing is replaced here.
                    out.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        None => break after.len(),
                        Some(wrong) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[wrong..];
                        }
                    }
                }
            }
        };
        let keep = self.pending.len() - left;
        self.pending.drain(..keep);
    }

    /// Whether bytes wait for the rest of their character.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Ends the text: a character that never became complete is one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}
