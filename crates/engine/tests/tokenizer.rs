//! Encoding and incremental decoding with the real tokenizer.

mod files;

use deepinfer::tokenizer::{BOS, Decoder, EOS, Tokenizer, TokenizerError};
use files::{real_tokenizer, testdata};
use proptest::prelude::*;
use std::sync::LazyLock;

static REAL: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_bytes(real_tokenizer()).unwrap());

fn stream(ids: &[u32], skip_special: bool) -> (String, Vec<String>) {
    let mut decoder = Decoder::new(skip_special);
    let (mut all, mut pieces) = (String::new(), Vec::new());
    for &id in ids {
        let mut piece = String::new();
        decoder.push(&REAL, id, &mut piece);
        all.push_str(&piece);
        pieces.push(piece);
    }
    let mut rest = String::new();
    decoder.finish(&mut rest);
    all.push_str(&rest);
    (all, pieces)
}

/// Texts, ids and decoded texts of the reference.
#[test]
fn encodes_and_decodes_as_the_reference() {
    let reference = files::json(&testdata("deepseek-tokenizer/engram.json"));
    let cases = reference["encode"].as_array().unwrap();
    assert!(cases.len() >= 3);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let ids = REAL.encode_scanning_specials(text).unwrap();
        assert_eq!(ids, expected, "{text:?}");
        assert_eq!(REAL.decode(&ids), case["decode"].as_str().unwrap());
    }
}

/// Text of a kind that a vocabulary is made for, and some that none is.
fn long_texts() -> [String; 4] {
    let prose = "The quick brown fox jumps over 1234 lazy dogs; she said: \"No!\"\n\tlet x = y;\n";
    let odd: String = (0x21..0x3000).filter_map(char::from_u32).collect();
    [prose.repeat(40), odd, " \n".repeat(900), format!("{}{}", BOS.repeat(50), "x".repeat(500))]
}

#[test]
fn what_is_said_to_be_too_long_is() {
    let tiny = Tokenizer::from_bytes(std::fs::read(testdata("tiny-a/tokenizer.json")).unwrap());
    for tokenizer in [&*REAL, &tiny.unwrap()] {
        for text in long_texts() {
            let plain = tokenizer.encode(&text).unwrap().len();
            let scanned = tokenizer.encode_scanning_specials(&text).unwrap().len();
            for count in [plain, scanned] {
                assert!(!tokenizer.has_at_least(count + 1, &text[..]), "{count} {}", &text[..20]);
            }
            assert!(tokenizer.has_at_least(1, &text) && tokenizer.has_at_least(scanned / 3, &text));
        }
        // Where a vocabulary fits, little is missing.
        let prose = &long_texts()[0];
        let count = tokenizer.encode(prose).unwrap().len();
        assert!(tokenizer.has_at_least(count * 3 / 4, prose), "{count}");
        assert!(!tokenizer.has_at_least(1, ""));
    }
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_is_said(text in "([a-z ]{0,9}|\\PC{0,5}|[0-9\\s]{0,9}){0,9}") {
        let count = REAL.encode(&text).unwrap().len();
        prop_assert!(!REAL.has_at_least(count + 1, &text));
        let scanned = REAL.encode_scanning_specials(&text).unwrap().len();
        prop_assert!(!REAL.has_at_least(scanned + 1, &text));
    }
}

fn tiny_file() -> serde_json::Value {
    let text = std::fs::read_to_string(testdata("tiny-a/tokenizer.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Whether the tokenizer of this file says anything of a text before it encodes it.
fn says(file: &serde_json::Value) -> bool {
    let tokenizer = Tokenizer::from_bytes(serde_json::to_vec(file).unwrap()).unwrap();
    tokenizer.has_at_least(1, "some text")
}

#[test]
fn nothing_is_said_of_texts_that_are_changed_before_they_are_encoded() {
    let file = tiny_file();
    assert!(says(&file));
    let mut composed = file.clone();
    composed["normalizer"] = serde_json::json!({"type": "NFC"});
    assert!(!says(&composed));
    let mut removed = file.clone();
    removed["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed".into();
    assert!(!says(&removed));
    let mut characters = file.clone();
    characters["pre_tokenizer"] = serde_json::Value::Null;
    assert!(!says(&characters));
    let mut spaced = file.clone();
    spaced["pre_tokenizer"]["pretokenizers"][3]["add_prefix_space"] = true.into();
    assert!(!says(&spaced));
}

/// Nobody writes such files; what is said of texts must hold all the same.
#[test]
fn nothing_is_said_where_a_token_has_two_spellings() {
    let file = tiny_file();
    let mut aliased = file.clone();
    let vocab = aliased["model"]["vocab"].as_object_mut().unwrap();
    let long = vocab["Ġrepresenting"].clone();
    vocab.insert("q".into(), long.clone());
    assert!(!says(&aliased));
    // As an added token it stands for itself, as another one for bytes.
    let mut renamed = file.clone();
    let mut added = renamed["added_tokens"][0].clone();
    added["id"] = long;
    added["content"] = "Ġrepresenting".into();
    renamed["added_tokens"].as_array_mut().unwrap().push(added);
    assert!(!says(&renamed));
}

#[test]
fn special_tokens_come_only_from_ranges() {
    let text = format!("{BOS}a{EOS}");
    let plain = REAL.encode(&text).unwrap();
    assert!(plain.iter().all(|&id| !REAL.is_special(id)));
    assert_eq!(REAL.decode(&plain), text);

    let bos = 0..BOS.len();
    let ids = REAL.encode_with_specials(&text, std::slice::from_ref(&bos)).unwrap();
    assert_eq!(ids[0], REAL.bos().unwrap());
    assert_eq!(ids[1..], REAL.encode(&text[BOS.len()..]).unwrap());

    let scanned = REAL.encode_scanning_specials(&text).unwrap();
    let letter = REAL.encode("a").unwrap()[0];
    assert_eq!(scanned, [REAL.bos().unwrap(), letter, REAL.eos().unwrap()]);
    // The longest spelling wins, and characters before it do not matter.
    let ids = REAL.encode_scanning_specials("<<think>").unwrap();
    assert_eq!(ids.last(), REAL.special_id("<think>").as_ref());
}

#[test]
fn wrong_ranges_and_unknown_specials_are_errors() {
    match REAL.encode_with_specials("<nothing>", std::slice::from_ref(&(0..9))) {
        Err(TokenizerError::MissingSpecial { token }) => assert_eq!(token, "<nothing>"),
        other => panic!("{other:?}"),
    }
    // Past the end; not in order; inside a character.
    for (first, second) in [(0..99, 99..99), (2..9, 0..2), (1..2, 2..9)] {
        let result = REAL.encode_with_specials("é<think>", &[first.clone(), second]);
        assert!(matches!(result, Err(TokenizerError::Range { .. })), "{first:?}: {result:?}");
    }
}

#[test]
fn characters_are_never_split() {
    let text = "naïve 👩‍👩‍👧‍👦 深度求索 🏳️‍🌈 ü";
    let ids = REAL.encode(text).unwrap();
    let (all, pieces) = stream(&ids, false);
    assert_eq!(all, text);
    assert!(pieces.iter().any(String::is_empty), "some token ends inside a character");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
}

#[test]
fn special_tokens_leave_no_text_on_request() {
    let ids = [REAL.bos().unwrap(), REAL.encode("a").unwrap()[0], REAL.eos().unwrap()];
    assert_eq!(stream(&ids, true).0, "a");
    assert_eq!(stream(&ids, false).0, format!("{BOS}a{EOS}"));
}

#[test]
fn ids_without_a_token_have_no_bytes() {
    assert_eq!(REAL.vocab_size(), 129_280);
    assert_eq!(REAL.token_bytes(129_280), b"");
    assert_eq!(REAL.token_bytes(u32::MAX), b"");
    assert_eq!(REAL.token_bytes(0), BOS.as_bytes());
    assert_eq!(REAL.spelling(u32::MAX), None);
}

#[test]
fn other_kinds_of_tokenizers_are_refused() {
    let text = std::fs::read_to_string(testdata("tiny-a/tokenizer.json")).unwrap();
    let original: serde_json::Value = serde_json::from_str(&text).unwrap();
    let load = |value: &serde_json::Value| Tokenizer::from_bytes(value.to_string()).err();
    assert!(load(&original).is_none());

    let mut changed = original.clone();
    changed["decoder"] = serde_json::json!({"type": "Fuse"});
    let message = load(&changed).unwrap().to_string();
    assert!(message.contains("decoder") && message.contains("ByteLevel"), "{message}");

    let mut changed = original.clone();
    changed["model"]["dropout"] = serde_json::json!(0.1);
    assert!(load(&changed).unwrap().to_string().contains("dropout"));

    let mut changed = original.clone();
    let vocab = changed["model"]["vocab"].as_object_mut().unwrap();
    let id = vocab.remove("Ā").unwrap();
    vocab.insert("never".into(), id);
    assert!(matches!(load(&changed), Some(TokenizerError::MissingByte { byte: 0, .. })));

    assert!(matches!(Tokenizer::from_bytes("{}"), Err(TokenizerError::Parse { .. })));
}

proptest! {
    /// Any token sequence: the pieces together are the whole text, decoded at once.
    #[test]
    fn pieces_make_the_whole(ids in proptest::collection::vec(0u32..129_290, 0..40)) {
        prop_assert_eq!(stream(&ids, false).0, REAL.decode(&ids));
    }

    /// Sequences rich in parts of characters.
    #[test]
    fn broken_characters_make_the_whole(bytes in proptest::collection::vec(128u8..=255, 0..40)) {
        let id = |byte: &u8| {
            (0..300).find(|&id| REAL.token_bytes(id) == [*byte]).expect("a token for each byte")
        };
        let ids: Vec<u32> = bytes.iter().map(id).collect();
        let (all, _) = stream(&ids, false);
        prop_assert_eq!(&all, &String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,60}") {
        let ids = REAL.encode(&text).unwrap();
        prop_assert_eq!(REAL.decode(&ids), text);
    }
}
