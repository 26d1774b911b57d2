//! What one sequence's parameters mean for a row of its logits.

use super::{NEUTRAL, SlotForm};
use crate::grammar::MatchError;
use crate::request::SamplingParams;
use crate::work::Opening;
use deepinfer_device::ops::{ABSENT, BiasEntry, PenaltyRow, SampleRow, TokenCount};
use std::collections::HashMap;
use std::sync::Arc;

/// A sequence's text and parameters, as far as the choice of tokens depends on them.
pub struct SlotText {
    params: Arc<SamplingParams>,
    seed: u64,
    sample: u32,
    prompt_len: usize,
    tokens: Vec<u32>,
    vocab: usize,
    /// Whether the token that ends thinking has been produced.
    thought: bool,
    /// Where the output is in its form, if it must have one.
    form: Option<SlotForm>,
    /// Occurrences in output and prompt, kept if penalties are on.
    counts: HashMap<u32, (u32, u32)>,
    /// Bits of the allowed tokens.
    mask: Option<Vec<u32>>,
    /// Forbidden until enough tokens have been produced.
    ends: Vec<u32>,
    never: Option<u32>,
}

impl SlotText {
    /// Takes over what the scheduler knows. `ends` end a text, and `never` is never produced.
    pub fn new(opening: Opening, vocab: usize, ends: &[u32], never: Option<u32>) -> Self {
        let params = opening.params;
        let mask = (!params.allowed_tokens.is_empty()).then(|| {
            let mut bits = vec![0u32; vocab.div_ceil(32)];
            for &token in &params.allowed_tokens {
                bits[token as usize / 32] |= 1 << (token % 32);
            }
            bits
        });
        let mut forbidden = params.stop_tokens.clone();
        if !params.ignore_eos {
            forbidden.extend_from_slice(ends);
        }
        forbidden.sort_unstable();
        forbidden.dedup();
        let trigger = params.constraint.as_ref().and_then(|c| c.trigger.as_ref());
        let form = opening.grammar.map(|grammar| SlotForm::new(&grammar, trigger));
        let mut text = Self {
            params,
            seed: opening.seed,
            sample: opening.sample,
            prompt_len: opening.prompt_len,
            tokens: Vec::new(),
            vocab,
            thought: false,
            form,
            counts: HashMap::new(),
            mask,
            ends: forbidden,
            never,
        };
        opening.tokens.into_iter().for_each(|token| text.push(token));
        text
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether no token was allowed at some point: nothing after it counts.
    pub fn is_dead(&self) -> bool {
        self.tokens.len() > self.prompt_len && self.tokens.last() == Some(&ABSENT)
    }

    /// Whether the newest token is one that ends the text.
    pub fn ended(&self) -> bool {
        self.tokens.len() > self.prompt_len
            && self.tokens.last().is_some_and(|token| self.ends.contains(token))
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Where the output is in its form. Taken out while masks are computed on another thread.
    pub fn form(&mut self) -> &mut Option<SlotForm> {
        &mut self.form
    }

    /// Why the form cannot be enforced any further, if it cannot.
    pub fn fault(&self) -> Option<&MatchError> {
        self.form.as_ref().and_then(SlotForm::fault)
    }

    /// Tokens that must not be produced after the text and `drafts` drafts, because they end it.
    pub fn too_early(&self, drafts: usize) -> &[u32] {
        match self.tokens.len() - self.prompt_len + drafts < self.params.min_tokens {
            true => &self.ends,
            false => &[],
        }
    }

    /// Adds a token. [`ABSENT`] stands where none was allowed: it only takes up its position, for
    /// a step that was planned before this was known.
    pub fn push(&mut self, token: u32) {
        if token == ABSENT {
            self.tokens.push(token);
            return;
        }
        if self.tokens.len() >= self.prompt_len {
            self.thought |= self.params.thinking_budget.is_some_and(|b| b.end == token);
            if let Some(form) = &mut self.form {
                form.accept(token);
            }
        }
        if self.params.has_penalties() {
            let counts = self.counts.entry(token).or_default();
            match self.tokens.len() < self.prompt_len {
                true => counts.1 += 1,
                false => counts.0 += 1,
            }
        }
        self.tokens.push(token);
    }

    pub(super) fn penalties(&self) -> PenaltyRow {
        let p = &self.params;
        PenaltyRow {
            repetition: p.repetition_penalty,
            presence: p.presence_penalty,
            frequency: p.frequency_penalty,
        }
    }

    /// Lists the tokens of the text and `drafts`. Returns whether there are penalties.
    pub(super) fn count(&self, row: u32, drafts: &[u32], out: &mut Vec<TokenCount>) -> bool {
        if self.penalties() == NEUTRAL {
            return false;
        }
        let first = out.len();
        let counts = self.counts.iter().map(|(&token, &(generated, prompt))| {
            let more = drafts.iter().filter(|&&d| d == token).count() as u32;
            TokenCount { row, token, generated: generated + more, prompt }
        });
        out.extend(counts);
        for (i, &token) in drafts.iter().enumerate() {
            if !self.counts.contains_key(&token) && !drafts[..i].contains(&token) {
                let generated = drafts.iter().filter(|&&d| d == token).count() as u32;
                out.push(TokenCount { row, token, generated, prompt: 0 });
            }
        }
        out[first..].sort_unstable_by_key(|c| c.token);
        true
    }

    /// Lists additions to the logits after the text and `drafts`.
    pub(super) fn bias(&self, row: u32, drafts: &[u32], out: &mut Vec<BiasEntry>) {
        let p = &self.params;
        out.extend(p.logit_bias.iter().map(|&(token, bias)| BiasEntry { row, token, bias }));
        let mut forbid = |token| out.push(BiasEntry { row, token, bias: f32::NEG_INFINITY });
        self.never.iter().for_each(|&token| forbid(token));
        // A form knows when the text must end, and takes this rule in where it can.
        if self.form.is_none() {
            self.too_early(drafts.len()).iter().for_each(|&token| forbid(token));
        }
        for word in &p.bad_words {
            let Some((&last, head)) = word.split_last() else { continue };
            if ends_with(&self.tokens, drafts, head) {
                forbid(last);
            }
        }
    }

    /// The token that must come after the text and `drafts`, whatever the other rules say.
    pub(super) fn forced(&self, drafts: &[u32]) -> Option<u32> {
        let p = &self.params;
        let produced = self.tokens.len() - self.prompt_len + drafts.len();
        if let Some(&token) = p.forced.get(produced) {
            return Some(token);
        }
        let budget = p.thinking_budget.filter(|_| !self.thought)?;
        (produced >= budget.tokens && !drafts.contains(&budget.end)).then_some(budget.end)
    }

    /// Words of a mask over the vocabulary.
    pub fn mask_words(&self) -> usize {
        self.vocab.div_ceil(32)
    }

    /// Bits of the allowed tokens, if not all are.
    pub(super) fn mask(&self) -> Option<&[u32]> {
        self.mask.as_deref()
    }

    /// How the token after the text and `drafts` drafts is chosen.
    pub(super) fn sample_row(&self, drafts: usize) -> SampleRow {
        let p = &self.params;
        SampleRow {
            seed: self.seed,
            position: (self.tokens.len() + drafts) as u32,
            sample: self.sample,
            temperature: p.temperature,
            top_p: p.top_p,
            top_k: p.top_k,
            min_p: p.min_p,
        }
    }
}

/// Whether `text`, then `more`, ends with `end`.
fn ends_with(text: &[u32], more: &[u32], end: &[u32]) -> bool {
    if end.len() <= more.len() {
        return more.ends_with(end);
    }
    let (before, after) = end.split_at(end.len() - more.len());
    after == more && text.ends_with(before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ThinkingBudget;

    fn text(params: SamplingParams) -> SlotText {
        let opening = Opening {
            slot: 0,
            params: Arc::new(params),
            seed: 7,
            sample: 2,
            grammar: None,
            tokens: vec![1, 2, 2, 5],
            prompt_len: 3,
        };
        SlotText::new(opening, 40, &[9], None)
    }

    #[test]
    fn drafts_count_as_output() {
        let slot = text(SamplingParams { presence_penalty: 1.0, ..Default::default() });
        let mut counts = Vec::new();
        assert!(slot.count(3, &[5, 6, 6], &mut counts));
        let found: Vec<_> = counts.iter().map(|c| (c.token, c.generated, c.prompt)).collect();
        assert_eq!(found, vec![(1, 0, 1), (2, 0, 2), (5, 2, 0), (6, 2, 0)]);
        assert!(!text(SamplingParams::default()).count(0, &[5], &mut counts));
    }

    #[test]
    fn forbidden_tokens_follow_the_text() {
        let params = SamplingParams {
            min_tokens: 3,
            bad_words: vec![vec![7], vec![5, 6, 8], vec![2, 5, 4]],
            stop_tokens: vec![3],
            ..Default::default()
        };
        let slot = text(params);
        let forbidden = |drafts: &[u32]| {
            let mut bias = Vec::new();
            slot.bias(0, drafts, &mut bias);
            let mut tokens: Vec<u32> = bias.iter().map(|b| b.token).collect();
            tokens.sort_unstable();
            tokens
        };
        assert_eq!(forbidden(&[]), vec![3, 4, 7, 9]);
        assert_eq!(forbidden(&[6]), vec![3, 7, 8, 9]);
        assert_eq!(forbidden(&[6, 1]), vec![7]);
    }

    #[test]
    fn positions_count_drafts() {
        let slot = text(SamplingParams::default());
        assert_eq!(slot.sample_row(0).position, 4);
        assert_eq!(slot.sample_row(2).position, 6);
    }

    #[test]
    fn a_budget_and_a_given_continuation_force_tokens() {
        let budget = |tokens| Some(ThinkingBudget { tokens, end: 9 });
        let slot = text(SamplingParams { thinking_budget: budget(2), ..Default::default() });
        assert_eq!(slot.forced(&[]), None);
        assert_eq!(slot.forced(&[3]), Some(9));
        // A draft that was forced ends the thinking, and so does one that the model wrote.
        assert_eq!(slot.forced(&[3, 9]), None);
        assert_eq!(slot.forced(&[9]), None);
        assert_eq!(slot.forced(&[9, 3, 3]), None);
        let mut slot = text(SamplingParams { thinking_budget: budget(0), ..Default::default() });
        assert_eq!(slot.forced(&[]), Some(9));
        slot.push(9);
        assert_eq!(slot.forced(&[]), None);

        let params = SamplingParams { forced: vec![5, 6, 7], ..Default::default() };
        let slot = text(params);
        assert_eq!(
            [slot.forced(&[]), slot.forced(&[6]), slot.forced(&[6, 7])],
            [Some(6), Some(7), None]
        );
        let mut rows = crate::sampler::Rows::new();
        rows.push(&slot, &[], None);
        assert_eq!((rows.mask_rows.as_slice(), rows.mask.as_slice()), (&[0][..], &[1 << 6, 0][..]));
    }

    #[test]
    fn forms_and_allowed_tokens_hold_together() {
        let slot = text(SamplingParams { allowed_tokens: vec![0, 33], ..Default::default() });
        let mut rows = crate::sampler::Rows::new();
        rows.push(&slot, &[], Some(&[3, 1]));
        rows.push(&slot, &[], None);
        assert_eq!(rows.mask, [1, 0, 1, 2]);
        assert_eq!(rows.mask_rows, [0, 1]);
    }

    #[test]
    fn allowed_tokens_become_bits() {
        let slot = text(SamplingParams { allowed_tokens: vec![0, 33], ..Default::default() });
        assert_eq!(slot.mask(), Some([1, 2].as_slice()));
    }
}
