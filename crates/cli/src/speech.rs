//! An assistant's turn as it arrives: thinking, then the answer.

use deepinfer::chat;
use deepinfer::request::Token;
use deepinfer::tokenizer::Tokenizer;
use std::ops::Range;

/// Splits the text of a turn. The text is the engine's, so that it ends before stop strings.
pub struct Speech<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens up to the end of the thinking.
    ids: Vec<u32>,
    /// Bytes of text so far.
    length: usize,
    /// Where the thinking ends in the text, once that is known.
    end: Option<Range<usize>>,
}

/// What an event added.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Piece<'t> {
    /// To the thinking part.
    pub thinking: &'t str,
    /// To the answer.
    pub answer: &'t str,
}

impl<'a> Speech<'a> {
    /// The start of a turn, which `thinks` first or not.
    pub fn new(tokenizer: &'a Tokenizer, thinks: bool) -> Self {
        Self { tokenizer, ids: Vec::new(), length: 0, end: (!thinks).then_some(0..0) }
    }

    /// Splits what an event adds. `text` may lag behind the `tokens`.
    pub fn push<'t>(&mut self, tokens: &[Token], text: &'t str) -> Piece<'t> {
        if self.end.is_none() {
            let fresh = self.ids.len();
            self.ids.extend(tokens.iter().map(|token| token.id));
            let end = self.tokenizer.special_id(chat::THINKING_END);
            if self.ids[fresh..].iter().any(|&id| Some(id) == end) {
                self.end = chat::thinking_end(self.tokenizer, &self.ids);
            }
        }
        let here = |at: usize| at.saturating_sub(self.length).min(text.len());
        let (before, after) = match &self.end {
            None => (text.len(), text.len()),
            Some(end) => (here(end.start), here(end.end)),
        };
        self.length += text.len();
        Piece {
            thinking: text.get(..before).unwrap_or_default(),
            answer: text.get(after..).unwrap_or_default(),
        }
    }
}

/// The thinking, if the turn `thinks` first, and the answer of a turn that has ended.
pub fn split(
    tokenizer: &Tokenizer,
    thinks: bool,
    ids: &[u32],
    text: &str,
) -> (Option<String>, String) {
    if !thinks {
        return (None, text.to_owned());
    }
    let (thinking, answer) = chat::split_thinking(tokenizer, ids, text);
    (Some(thinking), answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/tokenizer.json");
        Tokenizer::from_bytes(std::fs::read(path).expect("it is there")).expect("it loads")
    }

    /// Text that comes late, in pieces that end anywhere.
    #[test]
    fn late_text_is_split_at_the_end_of_the_thinking() {
        let tokenizer = tokenizer();
        let whole = "so 23 + 58</think>That is 81.";
        let ids = tokenizer.encode_scanning_specials(whole).expect("it encodes");
        for (size, cut) in (1..whole.len()).flat_map(|n| [(n, whole.len()), (n, 14), (n, 24)]) {
            let text = &whole[..cut];
            let mut speech = Speech::new(&tokenizer, true);
            let (mut thinking, mut answer) = (String::new(), String::new());
            // All tokens come with the first piece of the text.
            let mut tokens: Vec<_> = ids.iter().map(|&id| Token { id, logprobs: None }).collect();
            for start in (0..cut).step_by(size) {
                let added = &text[start..cut.min(start + size)];
                let piece = speech.push(&std::mem::take(&mut tokens), added);
                thinking.push_str(piece.thinking);
                answer.push_str(piece.answer);
            }
            let expected = split(&tokenizer, true, &ids, text);
            assert_eq!((Some(thinking), answer), expected, "{size} {cut}");
        }
        let (thinking, answer) = split(&tokenizer, true, &ids, whole);
        assert_eq!((thinking.as_deref(), answer.as_str()), (Some("so 23 + 58"), "That is 81."));
        let mut plain = Speech::new(&tokenizer, false);
        assert_eq!(plain.push(&[], "81"), Piece { thinking: "", answer: "81" });
    }
}
