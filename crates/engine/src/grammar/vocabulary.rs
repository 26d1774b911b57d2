//! The tokenizer as grammars see it: bytes per token id.

use std::collections::HashMap;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::error::SetupError;
use super::guard::{caught, text};
use crate::tokenizer::Tokenizer;

/// Byte that marks a special token in the trie. It occurs in no UTF-8 text.
const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Token classes whose masks are kept ready: where a string may hold anything, the mask is one
/// of these and only the remaining tokens are walked. The short ones are for strings of a few
/// characters at most, the last one for free text.
const SLICES: [&str; 9] = [
    r#"[\x20\x0A\x0D\x09]+"#,
    r#"[^"\\\x00-\x1F\x7F]{1,10}"#,
    r#"[^"\\\x00-\x1F\x7F]{1,30}"#,
    r#"[^"\\\x00-\x1F\x7F]+"#,
    r#"[^"\\\x00-\x1F\x7F]{1,3}"#,
    r#"[^"\\\x00-\x1F\x7F]{1,4}"#,
    r#"[^"\\\x00-\x1F\x7F]{1,5}"#,
    r#"[^"\\\x00-\x1F\x7F]{1,8}"#,
    r#"(?s:.+)"#,
];

/// A model's tokens, prepared for mask computation. Built once a model and shared.
pub struct GrammarVocabulary {
    size: usize,
    eos: Vec<u32>,
    special: HashMap<String, u32>,
    env: TokEnv,
    factory: ParserFactory,
}

impl std::fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarVocabulary")
            .field("size", &self.size)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl GrammarVocabulary {
    /// `token_bytes[id]` are the bytes that the token stands for in the output (raw bytes, not
    /// the byte-level alphabet; parts of a UTF-8 sequence are fine; empty = the token is never
    /// allowed by a grammar). `special` lists every added token as (id, name): grammar text never
    /// produces these, only a reference to the token itself does, and their entry in
    /// `token_bytes` is ignored. `eos` are the ids that end a sequence.
    ///
    /// # Errors
    /// An empty table, no end-of-sequence id, or an id outside the table.
    pub fn new(
        token_bytes: &[Vec<u8>],
        special: &[(u32, String)],
        eos: &[u32],
    ) -> Result<Arc<Self>, SetupError> {
        let size = token_bytes.len();
        if size == 0 {
            return Err(SetupError::Empty { what: "the token table" });
        }
        let Some(&first_eos) = eos.first() else {
            return Err(SetupError::Empty { what: "the list of end-of-sequence tokens" });
        };
        let check = |what, token| {
            if (token as usize) < size {
                Ok(())
            } else {
                Err(SetupError::OutOfRange { what, token, vocab: size })
            }
        };
        for &id in eos {
            check("end-of-sequence token", id)?;
        }
        // A token of the table that starts with the marker byte would pass for a special one.
        let mut words: Vec<Vec<u8>> = token_bytes
            .iter()
            .map(|bytes| if bytes.contains(&MARKER) { Vec::new() } else { bytes.clone() })
            .collect();
        let mut names = HashMap::new();
        for (id, name) in special {
            check("special token", *id)?;
            words[*id as usize] = [&[MARKER], name.as_bytes()].concat();
            names.insert(name.clone(), *id);
        }
        for &id in eos {
            if words[id as usize].first() != Some(&MARKER) {
                words[id as usize] = [&[MARKER][..], format!("<eos-{id}>").as_bytes()].concat();
            }
        }
        let (env, factory) = caught(|| {
            let info = TokRxInfo::new(size as u32, first_eos);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
            // Not canonical: a mask holds every token that the grammar accepts, whichever way the
            // tokenizer would have split the text. So a mask says exactly what `accept` takes.
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SLICES.map(str::to_owned);
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                .map_err(text)?;
            factory.quiet();
            *factory.limits_mut() = ParserLimits {
                max_lexer_states: 100_000,
                verbose_errors: false,
                ..ParserLimits::default()
            };
            Ok((env, factory))
        })
        .map_err(|reason| SetupError::Fault { reason })?;
        Ok(Arc::new(Self { size, eos: eos.to_vec(), special: names, env, factory }))
    }

    /// The vocabulary of a model with `size` token ids that uses this tokenizer. Every added
    /// token is special here, whatever the file says. Ids without a token are never allowed.
    ///
    /// # Errors
    /// As [`new`](Self::new); also when the tokenizer has more ids than the model.
    pub fn of_tokenizer(
        tokenizer: &Tokenizer,
        size: usize,
        eos: &[u32],
    ) -> Result<Arc<Self>, SetupError> {
        if tokenizer.vocab_size() > size {
            let token = tokenizer.vocab_size() as u32 - 1;
            return Err(SetupError::OutOfRange { what: "token", token, vocab: size });
        }
        let bytes: Vec<Vec<u8>> =
            (0..size as u32).map(|id| tokenizer.token_bytes(id).to_vec()).collect();
        let special: Vec<(u32, String)> = (0..size as u32)
            .filter_map(|id| Some((id, tokenizer.spelling(id)?)))
            .filter(|(id, name)| tokenizer.special_id(name) == Some(*id))
            .map(|(id, name)| (id, name.to_owned()))
            .collect();
        Self::new(&bytes, &special, eos)
    }

    /// Number of token ids.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Words of one mask: ceil(size / 32).
    pub fn mask_words(&self) -> usize {
        self.size.div_ceil(32)
    }

    /// The ids that end a sequence.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Id of the special token of this name.
    pub fn special(&self, name: &str) -> Option<u32> {
        self.special.get(name).copied()
    }

    pub(super) fn env(&self) -> &TokEnv {
        &self.env
    }

    pub(super) fn factory(&self) -> &ParserFactory {
        &self.factory
    }
}

#[cfg(test)]
mod tests {
    use llguidance::earley::SlicedBiasComputer;

    use super::*;

    #[test]
    fn slices_extend_the_library_s() {
        let own: Vec<String> = SLICES.map(str::to_owned).to_vec();
        assert_eq!(own[..4], SlicedBiasComputer::json_slices());
    }

    #[test]
    fn refuses_ids_outside_the_table() {
        let bytes: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
        let error = GrammarVocabulary::new(&bytes, &[(300, "<x>".into())], &[0]).unwrap_err();
        assert_eq!(error, SetupError::OutOfRange { what: "special token", token: 300, vocab: 256 });
        assert!(GrammarVocabulary::new(&bytes, &[], &[]).is_err());
        assert!(GrammarVocabulary::new(&[], &[], &[0]).is_err());
    }
}
