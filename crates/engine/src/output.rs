//! From tokens to text, and stop strings.

use crate::tokenizer::{Decoder, Tokenizer};
use std::sync::Arc;

/// The text of one request's output as it grows.
pub struct OutputText {
    tokenizer: Option<Arc<Tokenizer>>,
    decoder: Decoder,
    stop: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl OutputText {
    /// Empty text that ends before any of `stop`. Without a tokenizer it stays empty.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, stop: Vec<String>) -> Self {
        Self { tokenizer, decoder: Decoder::new(true), stop, held: String::new(), stopped: false }
    }

    /// Adds a token; appends to `out` the text that is certain now. Returns whether a stop string
    /// has appeared, if they are looked for; then `out` ends before it.
    pub fn push(&mut self, token: u32, look: bool, out: &mut String) -> bool {
        let Some(tokenizer) = &self.tokenizer else { return false };
        if self.stopped {
            return true;
        }
        self.decoder.push(tokenizer, token, &mut self.held);
        self.release(look, out)
    }

    /// Ends the text: nothing is held back any more. Returns as [`OutputText::push`].
    pub fn finish(&mut self, look: bool, out: &mut String) -> bool {
        if self.stopped {
            return true;
        }
        self.decoder.finish(&mut self.held);
        let stopped = self.release(look, out);
        out.push_str(&std::mem::take(&mut self.held));
        stopped
    }

    fn release(&mut self, look: bool, out: &mut String) -> bool {
        if !look {
            out.push_str(&std::mem::take(&mut self.held));
            return false;
        }
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop)).min() {
            out.push_str(&self.held[..at]);
            self.held.clear();
            self.stopped = true;
            return true;
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let certain = self.held.len() - keep;
        out.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        false
    }
}

/// Length of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .find(|&n| {
            text.is_char_boundary(text.len() - n) && stop.starts_with(&text[text.len() - n..])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn feed(stop: &[&str], pieces: &[&str]) -> (String, bool) {
        let stop = stop.iter().map(|s| s.to_string()).collect();
        let mut text = OutputText::new(None, stop);
        let mut out = String::new();
        for piece in pieces {
            text.held.push_str(piece);
            if text.release(true, &mut out) {
                return (out, true);
            }
        }
        let stopped = text.finish(true, &mut out);
        (out, stopped)
    }

    #[test]
    fn stop_strings_are_found_over_borders() {
        assert_eq!(feed(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(feed(&["END"], &["a E", "N", "d b"]), ("a ENd b".into(), false));
        assert_eq!(feed(&["b", "abc"], &["xa", "b"]), ("xa".into(), true));
        assert_eq!(feed(&["ß!"], &["aß", "b"]), ("aßb".into(), false));
        assert_eq!(feed(&["x"], &["a", "EN"]), ("aEN".into(), false));
    }

    proptest! {
        /// However the text is cut, the result is that of the whole text.
        #[test]
        fn cuts_do_not_matter(text in "[abß]{0,12}", stop in "[abß]{1,3}", cut in 0usize..4) {
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> =
                chars.chunks(cut + 1).map(|piece| piece.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_string(), true),
                None => (text.clone(), false),
            };
            prop_assert_eq!(feed(&[&stop], &pieces), expected);
        }
    }
}
