//! The least number of tokens that a text can have, found much faster than its tokens.
//!
//! However a text is encoded, its tokens spell it, one after the other. So it has at least as many
//! as the fewest pieces that it can be cut into, where a piece is any beginning of any token. The
//! fewest pieces of a text are never fewer than those of a beginning of it, as what is left of a
//! piece is a piece. So the last piece is best as long as it can be, and the longest piece that ends
//! at each byte is all that must be known: the automaton of Aho and Corasick finds it.

/// The automaton. A state is a piece; they are numbered by length, from the empty one on.
pub(super) struct Pieces {
    /// The last byte of every state but the first.
    bytes: Vec<u8>,
    /// Where in `bytes` the states begin that are longer than a state by one byte, sorted by it.
    starts: Vec<u32>,
    /// The longest shorter state that a state ends with.
    fallback: Vec<u32>,
    /// Bytes of a state.
    length: Vec<u32>,
}

impl Pieces {
    /// All beginnings of these tokens.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut tokens: Vec<(&[u8], u32)> = tokens.map(|token| (token, 0)).collect();
        tokens.retain(|(token, _)| !token.is_empty());
        tokens.sort_unstable();
        let (mut bytes, mut parents, mut length) = (Vec::new(), Vec::new(), vec![0]);
        let mut done = 0;
        while !tokens.is_empty() {
            for (token, state) in &mut tokens {
                let last = (*state, token[done]);
                // Tokens that begin alike stand side by side.
                if parents.last().zip(bytes.last()) != Some((&last.0, &last.1)) {
                    parents.push(last.0);
                    bytes.push(last.1);
                    length.push(done as u32 + 1);
                }
                *state = parents.len() as u32;
            }
            done += 1;
            tokens.retain(|(token, _)| token.len() > done);
        }
        let states = length.len() as u32;
        let start = |state| parents.partition_point(|&parent| parent < state) as u32;
        let starts = (0..=states).map(start).collect();
        let mut found = Self { bytes, starts, fallback: vec![0; states as usize], length };
        for (i, &parent) in parents.iter().enumerate().filter(|&(_, &parent)| parent > 0) {
            let shorter = found.fallback[parent as usize];
            found.fallback[i + 1] = found.next(shorter, found.bytes[i]);
        }
        found
    }

    /// The longest state that the text so far ends with, a byte after it was `state`.
    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            let longer =
                self.starts[state as usize] as usize..self.starts[state as usize + 1] as usize;
            if let Ok(i) = self.bytes[longer.clone()].binary_search(&byte) {
                return (longer.start + i) as u32 + 1;
            }
            if state == 0 {
                return 0;
            }
            state = self.fallback[state as usize];
        }
    }

    /// Whether `text` has at least `count` tokens, however it is encoded; if not, it may still have
    /// more. Stops as soon as that is certain.
    pub(super) fn are_at_least(&self, count: usize, text: &[u8]) -> bool {
        let longest = self.length.last().map_or(1, |&length| length as usize);
        let window = (longest + 1).next_power_of_two();
        // The fewest pieces of the last beginnings of the text, by their length.
        let mut fewest = vec![0; window];
        let mut state = 0;
        for (i, &byte) in text.iter().enumerate() {
            state = self.next(state, byte);
            // A byte that begins no token is a piece of its own.
            let piece = self.length[state as usize].max(1) as usize;
            let pieces = fewest[(i + 1 - piece) % window] + 1;
            if pieces >= count {
                return true;
            }
            fewest[(i + 1) % window] = pieces;
        }
        count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(tokens: &[&str]) -> Pieces {
        Pieces::new(tokens.iter().map(|token| token.as_bytes()))
    }

    /// The largest count that `text` is certain to have.
    fn least(pieces: &Pieces, text: &[u8]) -> usize {
        (0..).take_while(|&count| pieces.are_at_least(count, text)).last().unwrap_or(0)
    }

    #[test]
    fn the_fewest_pieces_are_found() {
        let found = pieces(&["a", "b", "abab", "bb", ""]);
        for (text, expected) in
            [("", 0), ("a", 1), ("abab", 1), ("aba", 1), ("ababa", 2), ("abb", 2), ("bbabab", 2)]
        {
            assert_eq!(least(&found, text.as_bytes()), expected, "{text}");
        }
        // Bytes without a token count, too.
        assert_eq!(least(&found, b"axxb"), 4);
    }

    proptest! {
        /// Against every way to cut a text.
        #[test]
        fn no_cut_has_fewer_pieces(tokens in prop::collection::vec("[ab]{1,5}", 1..6), text in "[ab]{0,20}") {
            let text = text.as_bytes();
            let is_piece =
                |piece: &[u8]| piece.len() == 1 || tokens.iter().any(|t| t.as_bytes().starts_with(piece));
            let mut fewest = vec![0];
            for end in 1..=text.len() {
                let cuts = (0..end).filter(|&start| is_piece(&text[start..end]));
                fewest.push(cuts.map(|start| fewest[start] + 1).min().expect("single bytes"));
            }
            let found = Pieces::new(tokens.iter().map(|token| token.as_bytes()));
            prop_assert_eq!(least(&found, text), fewest[text.len()]);
        }
    }
}
