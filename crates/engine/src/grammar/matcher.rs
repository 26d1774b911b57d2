//! The state of one sequence under a grammar.

use std::sync::Arc;

use super::error::MatchError;
use super::guard::text;
use super::parser::Lease;
use super::trigger::Trigger;
use super::vocabulary::GrammarVocabulary;

/// Follows one sequence through its grammar: which tokens may come next, and what happens when
/// one does.
///
/// A mask has one bit a token id: bit `i % 32` of word `i / 32`, set when the token is allowed.
/// A set bit and a successful [`accept`](Self::accept) are the same statement, up to a fault.
///
/// With a [`Trigger`], the output is free (except that the sequence cannot end) until the trigger
/// sequence is complete; then the grammar starts. When the grammar is complete only
/// end-of-sequence ids are allowed, then and after one was accepted.
///
/// Faults of the grammar library, panics included, are caught here and end this matcher alone.
pub struct Matcher {
    vocabulary: Arc<GrammarVocabulary>,
    trigger: Option<Arc<Trigger>>,
    parser: Lease,
    phase: Phase,
    /// The phase before each accepted token.
    history: Vec<Phase>,
    fault: Option<MatchError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Before the trigger: how much of its sequence the output ends with, and whether the rest
    /// of it is forced.
    Free {
        matched: usize,
        forced: bool,
    },
    Grammar,
    /// An end-of-sequence id was accepted.
    Ended,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("phase", &self.phase)
            .field("accepted", &self.history.len())
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(super) fn new(
        vocabulary: Arc<GrammarVocabulary>,
        parser: Lease,
        trigger: Option<Arc<Trigger>>,
    ) -> Self {
        let phase = match trigger {
            Some(_) => Phase::Free { matched: 0, forced: false },
            None => Phase::Grammar,
        };
        Self { vocabulary, trigger, parser, phase, history: Vec::new(), fault: None }
    }

    /// Number of tokens accepted so far.
    pub fn len(&self) -> usize {
        self.history.len()
    }

    /// Whether no token was accepted yet.
    pub fn is_empty(&self) -> bool {
        self.history.is_empty()
    }

    /// Whether the grammar constrains the next token (false while the trigger is awaited).
    pub fn is_active(&self) -> bool {
        !matches!(self.phase, Phase::Free { .. })
    }

    /// Whether nothing but the end of the sequence can follow.
    pub fn is_finished(&self) -> bool {
        match self.phase {
            Phase::Free { .. } => false,
            Phase::Grammar => self.fault.is_none() && self.parser.is_complete(),
            Phase::Ended => true,
        }
    }

    /// The error that ended this matcher.
    pub fn fault(&self) -> Option<&MatchError> {
        self.fault.as_ref()
    }

    /// From the next token on the trigger sequence is forced, as if its bound token had just been
    /// accepted: the way to end thinking at a budget. Without effect once the grammar is active.
    /// Taking back the token before this call takes this call back too.
    pub fn force_trigger(&mut self) {
        if let Phase::Free { forced, .. } = &mut self.phase {
            *forced = true;
        }
    }

    /// Writes the mask of the next token, [`GrammarVocabulary::mask_words`] words. Bits beyond
    /// the vocabulary are zero. A plain call that changes nothing; it may take milliseconds where
    /// a grammar is met in a new state, so it belongs beside the device's work.
    ///
    /// # Errors
    /// [`MatchError::MaskSize`], [`MatchError::Fault`].
    pub fn mask(&mut self, out: &mut [u32]) -> Result<(), MatchError> {
        let words = self.vocabulary.mask_words();
        if out.len() != words {
            return Err(MatchError::MaskSize { got: out.len(), want: words });
        }
        self.check_fault()?;
        match self.phase {
            Phase::Free { matched, forced: true } => {
                out.fill(0);
                set(out, self.trigger_token(matched), true);
            }
            Phase::Free { forced: false, .. } => {
                out.fill(u32::MAX);
                let spare = words * 32 - self.vocabulary.size();
                out[words - 1] >>= spare;
                for &eos in self.vocabulary.eos() {
                    set(out, eos, false);
                }
            }
            Phase::Grammar if !self.parser.is_complete() => {
                let allowed = self.run(|lease| lease.run(|p| p.compute_mask().map_err(text)))?;
                let (full, spare) = (self.vocabulary.size() / 32, self.vocabulary.size() % 32);
                out.copy_from_slice(&allowed.as_slice()[..words]);
                if spare > 0 {
                    out[full] &= (1 << spare) - 1;
                }
                let may_end = self.may_end()?;
                for &eos in self.vocabulary.eos() {
                    set(out, eos, may_end);
                }
            }
            Phase::Grammar | Phase::Ended => {
                out.fill(0);
                for &eos in self.vocabulary.eos() {
                    set(out, eos, true);
                }
            }
        }
        Ok(())
    }

    /// Takes the token that was produced.
    ///
    /// # Errors
    /// [`MatchError::Rejected`] and [`MatchError::OutOfRange`] leave the state as it was;
    /// [`MatchError::Fault`].
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        if self.step(token)? {
            Ok(())
        } else {
            Err(MatchError::Rejected { token, position: self.history.len() })
        }
    }

    /// Takes tokens that were produced earlier, to rebuild the state of a sequence that was
    /// preempted or restored. Stops at the first error.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn replay(&mut self, tokens: &[u32]) -> Result<(), MatchError> {
        tokens.iter().try_for_each(|&token| self.accept(token))
    }

    /// How many of these tokens could be accepted one after the other. Changes nothing.
    ///
    /// # Errors
    /// [`MatchError::Fault`]. A token outside the vocabulary only ends the count.
    pub fn validate(&mut self, tokens: &[u32]) -> Result<usize, MatchError> {
        self.check_fault()?;
        let mut taken = 0;
        for &token in tokens {
            match self.step(token) {
                Ok(true) => taken += 1,
                Ok(false) | Err(MatchError::OutOfRange { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        self.rollback(taken)?;
        Ok(taken)
    }

    /// Masks for one verification pass: row 0 of `out` is the mask of the next token, row `i`
    /// that of the token after the first `i` drafts. Rows after a draft that the grammar refuses
    /// are filled with ones: the row before gives that draft no probability, so they are not
    /// reached. Returns how many drafts the grammar accepts. Changes nothing.
    ///
    /// # Errors
    /// [`MatchError::MaskSize`] unless `out` holds `drafts.len() + 1` masks;
    /// [`MatchError::Fault`].
    pub fn masks(&mut self, drafts: &[u32], out: &mut [u32]) -> Result<usize, MatchError> {
        let words = self.vocabulary.mask_words();
        let want = words * (drafts.len() + 1);
        if out.len() != want {
            return Err(MatchError::MaskSize { got: out.len(), want });
        }
        let mut rows = out.chunks_exact_mut(words);
        let mut taken = 0;
        if let Some(row) = rows.next() {
            self.mask(row)?;
        }
        for (&draft, row) in drafts.iter().zip(rows.by_ref()) {
            match self.step(draft) {
                Ok(true) => taken += 1,
                Ok(false) | Err(MatchError::OutOfRange { .. }) => {
                    row.fill(u32::MAX);
                    break;
                }
                Err(error) => return Err(error),
            }
            self.mask(row)?;
        }
        rows.for_each(|row| row.fill(u32::MAX));
        self.rollback(taken)?;
        Ok(taken)
    }

    /// Takes back the last `n` tokens, as if they had never been accepted.
    ///
    /// # Errors
    /// [`MatchError::Rollback`] when fewer were accepted; [`MatchError::Fault`].
    pub fn rollback(&mut self, n: usize) -> Result<(), MatchError> {
        self.check_fault()?;
        let Some(keep) = self.history.len().checked_sub(n) else {
            return Err(MatchError::Rollback { asked: n, have: self.history.len() });
        };
        if n == 0 {
            return Ok(());
        }
        // The library has seen the tokens of the grammar's phase except the one that ended it.
        let mut seen = self.history[keep..].iter().filter(|p| **p == Phase::Grammar).count();
        if self.phase == Phase::Ended {
            seen = seen.saturating_sub(1);
        }
        if seen > 0 {
            self.run(|lease| lease.run(|p| p.rollback(seen).map_err(text)))?;
        }
        self.phase = self.history[keep];
        self.history.truncate(keep);
        Ok(())
    }

    /// Tokens that spell what must come next where the grammar or the trigger leaves no choice
    /// of text. Free drafts: each is allowed after the ones before, but the model may prefer to
    /// spell the same text with other tokens. Empty where there is a choice. Changes nothing.
    ///
    /// # Errors
    /// [`MatchError::Fault`].
    pub fn forced(&mut self) -> Result<Vec<u32>, MatchError> {
        self.check_fault()?;
        match self.phase {
            Phase::Free { matched, forced: true } => {
                let tokens = self.trigger.as_ref().map_or(&[][..], |t| t.tokens());
                Ok(tokens.get(matched..).unwrap_or_default().to_vec())
            }
            Phase::Grammar if !self.parser.is_complete() => {
                // On a copy: asking for forced bytes makes the library read ahead.
                let env = self.vocabulary.env().clone();
                let tokens = self.run(|lease| {
                    lease.run(|p| Ok(env.tokenize_bytes_marker(&p.clone().force_bytes()).0))
                })?;
                let valid = self.validate(&tokens)?;
                Ok(tokens[..valid].to_vec())
            }
            _ => Ok(Vec::new()),
        }
    }

    /// A second matcher in the same state, independent of this one.
    ///
    /// # Errors
    /// [`MatchError::Fault`].
    pub fn fork(&mut self) -> Result<Self, MatchError> {
        let parser = self.run(Lease::copy)?;
        Ok(Self {
            vocabulary: self.vocabulary.clone(),
            trigger: self.trigger.clone(),
            parser,
            phase: self.phase,
            history: self.history.clone(),
            fault: None,
        })
    }

    /// Accepts the token if it is allowed and says whether it was.
    fn step(&mut self, token: u32) -> Result<bool, MatchError> {
        self.check_fault()?;
        if token as usize >= self.vocabulary.size() {
            return Err(MatchError::OutOfRange { token, vocab: self.vocabulary.size() });
        }
        let eos = self.vocabulary.eos().contains(&token);
        let next = match self.phase {
            Phase::Free { matched, forced } => {
                let refused = if forced { token != self.trigger_token(matched) } else { eos };
                if refused {
                    return Ok(false);
                }
                self.after_free(matched, forced, token)
            }
            Phase::Grammar if eos => {
                if !self.may_end()? {
                    return Ok(false);
                }
                Phase::Ended
            }
            Phase::Grammar => {
                if self.parser.is_complete() {
                    return Ok(false);
                }
                if !self.run(|lease| lease.accept(token))? {
                    return Ok(false);
                }
                Phase::Grammar
            }
            Phase::Ended if eos => Phase::Ended,
            Phase::Ended => return Ok(false),
        };
        self.history.push(self.phase);
        self.phase = next;
        Ok(true)
    }

    fn after_free(&self, matched: usize, forced: bool, token: u32) -> Phase {
        let Some(trigger) = &self.trigger else {
            return Phase::Grammar;
        };
        let matched = trigger.advance(matched, token);
        if matched == trigger.tokens().len() {
            Phase::Grammar
        } else {
            Phase::Free { matched, forced: forced || trigger.bound() == Some(token) }
        }
    }

    fn trigger_token(&self, matched: usize) -> u32 {
        self.trigger.as_ref().map_or(0, |t| t.tokens()[matched])
    }

    /// Whether the grammar's text may end here.
    fn may_end(&mut self) -> Result<bool, MatchError> {
        if self.parser.is_complete() {
            return Ok(true);
        }
        self.run(|lease| lease.run(|p| Ok(p.is_accepting())))
    }

    fn check_fault(&self) -> Result<(), MatchError> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// Calls the library; a failure is this matcher's last word.
    fn run<T>(&mut self, f: impl FnOnce(&mut Lease) -> Result<T, String>) -> Result<T, MatchError> {
        self.check_fault()?;
        f(&mut self.parser).map_err(|reason| {
            let fault = MatchError::Fault { position: self.history.len(), reason };
            self.fault = Some(fault.clone());
            fault
        })
    }
}

fn set(mask: &mut [u32], token: u32, allowed: bool) {
    let (word, bit) = (token as usize / 32, token % 32);
    if allowed {
        mask[word] |= 1 << bit;
    } else {
        mask[word] &= !(1 << bit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{Compiler, CompilerLimits, GrammarSpec};

    /// A panic in the library ends the sequence that it happened in, and no other one.
    #[test]
    fn a_panic_ends_one_sequence() {
        let bytes: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).chain([vec![]]).collect();
        let vocabulary = GrammarVocabulary::new(&bytes, &[], &[256]).unwrap();
        let compiler = Compiler::new(vocabulary.clone(), CompilerLimits::default());
        let grammar = compiler.compile(GrammarSpec::Regex("a*b".into())).unwrap();
        let mut doomed = grammar.matcher(None).unwrap();
        let mut neighbour = doomed.fork().unwrap();
        doomed.accept(b'a'.into()).unwrap();
        let fault = doomed
            .run(|lease| lease.run(|p| p.parser.test_trigger_lexer_error().map_err(text)))
            .unwrap_err();
        assert_eq!(
            fault,
            MatchError::Fault { position: 1, reason: "panic: synthetic error".into() }
        );
        let mut mask = vec![0; vocabulary.mask_words()];
        assert_eq!(doomed.mask(&mut mask), Err(fault.clone()));
        assert_eq!(doomed.accept(b'b'.into()), Err(fault.clone()));
        assert_eq!(doomed.rollback(1), Err(fault.clone()));
        assert_eq!(doomed.fault(), Some(&fault));
        neighbour.accept(b'a'.into()).unwrap();
        neighbour.mask(&mut mask).unwrap();
        assert_eq!(grammar.matcher(None).unwrap().validate(&[b'b'.into()]), Ok(1));
    }
}
