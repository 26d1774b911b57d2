//! An assistant's turn as it arrives: thinking, then the answer.

use deepinfer::tokenizer::{Decoder, Tokenizer};

/// Ends the thinking part of a turn.
pub const THINKING_END: &str = "</think>";

/// Splits the tokens of a turn.
pub struct Speech<'a> {
    tokenizer: &'a Tokenizer,
    decoder: Decoder,
    thinking_end: Option<u32>,
    thinks: bool,
    /// Thinking so far.
    pub thinking: String,
    /// Answer so far.
    pub answer: String,
}

/// What some tokens added.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// To the thinking part.
    pub thinking: String,
    /// To the answer.
    pub answer: String,
}

impl<'a> Speech<'a> {
    /// The start of a turn, which `thinks` first or not.
    pub fn new(tokenizer: &'a Tokenizer, thinks: bool) -> Self {
        Self {
            tokenizer,
            decoder: Decoder::new(true),
            thinking_end: tokenizer.special_id(THINKING_END),
            thinks,
            thinking: String::new(),
            answer: String::new(),
        }
    }

    /// Adds a token.
    pub fn push(&mut self, token: u32) -> Piece {
        let mut text = String::new();
        if self.thinks && Some(token) == self.thinking_end {
            self.decoder.finish(&mut text);
            let piece = self.add(text);
            self.thinks = false;
            return piece;
        }
        self.decoder.push(self.tokenizer, token, &mut text);
        self.add(text)
    }

    /// Ends the turn.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        self.decoder.finish(&mut text);
        self.add(text)
    }

    fn add(&mut self, text: String) -> Piece {
        let mut piece = Piece::default();
        if self.thinks {
            self.thinking.push_str(&text);
            piece.thinking = text;
        } else {
            self.answer.push_str(&text);
            piece.answer = text;
        }
        piece
    }
}
