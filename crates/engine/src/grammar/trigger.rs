//! Thinking first: the token sequence after which a grammar starts.

use super::error::SetupError;

/// The end of free generation: a token sequence, usually the end-of-thinking token alone.
///
/// Ids are compared, not text: ordinary tokens that spell the tag do not trigger anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trigger {
    tokens: Vec<u32>,
    /// `fallback[i]`: length of the longest proper prefix of `tokens` that ends at `i`
    /// (Knuth, Morris, Pratt).
    fallback: Vec<usize>,
    bound: Option<u32>,
}

impl Trigger {
    /// The grammar starts after `tokens` have been produced in a row. Once the token `bound` has
    /// been produced before that, every next token is forced to continue `tokens`.
    ///
    /// # Errors
    /// `tokens` is empty.
    pub fn new(tokens: Vec<u32>, bound: Option<u32>) -> Result<Self, SetupError> {
        if tokens.is_empty() {
            return Err(SetupError::Empty { what: "the trigger sequence" });
        }
        let mut fallback = vec![0; tokens.len()];
        for i in 1..tokens.len() {
            let mut k = fallback[i - 1];
            while k > 0 && tokens[i] != tokens[k] {
                k = fallback[k - 1];
            }
            fallback[i] = if tokens[i] == tokens[k] { k + 1 } else { 0 };
        }
        Ok(Self { tokens, fallback, bound })
    }

    /// The sequence.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The token after which the sequence is forced.
    pub fn bound(&self) -> Option<u32> {
        self.bound
    }

    /// How much of the sequence the output ends with after `token`, given that it ended with
    /// `matched < len` tokens of it before.
    pub(super) fn advance(&self, matched: usize, token: u32) -> usize {
        let mut k = matched;
        while k > 0 && self.tokens[k] != token {
            k = self.fallback[k - 1];
        }
        if self.tokens[k] == token { k + 1 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn advance_finds_the_longest_prefix(
            tokens in prop::collection::vec(0u32..3, 1..6),
            output in prop::collection::vec(0u32..3, 0..40),
        ) {
            let trigger = Trigger::new(tokens.clone(), None).unwrap();
            let mut matched = 0;
            for end in 1..=output.len() {
                matched = trigger.advance(matched, output[end - 1]);
                let longest = (0..=tokens.len().min(end))
                    .rev()
                    .find(|&k| output[end - k..end] == tokens[..k])
                    .unwrap();
                prop_assert_eq!(matched, longest);
                if matched == tokens.len() {
                    break;
                }
            }
        }
    }

    #[test]
    fn refuses_an_empty_sequence() {
        assert!(Trigger::new(vec![], None).is_err());
    }
}
