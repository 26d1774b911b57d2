//! The form of an output: which tokens its grammar allows.

use super::SlotText;
use crate::grammar::{Grammar, MatchError, Matcher, Trigger};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

/// Where an output is in its grammar. After a fault it allows nothing any more: its request must
/// end.
pub struct SlotForm {
    matcher: Result<Matcher, MatchError>,
}

impl SlotForm {
    /// The beginning of an output.
    pub fn new(grammar: &Grammar, trigger: Option<&Trigger>) -> Self {
        Self { matcher: grammar.matcher(trigger.cloned().map(Arc::new)) }
    }

    /// Why it cannot go on.
    pub fn fault(&self) -> Option<&MatchError> {
        self.matcher.as_ref().err()
    }

    /// Takes the token that was chosen.
    pub fn accept(&mut self, token: u32) {
        self.with(|matcher| matcher.accept(token));
    }

    /// How many of `drafts` the grammar allows one after the other.
    pub fn allowed(&mut self, drafts: &[u32]) -> usize {
        self.with(|matcher| matcher.validate(drafts)).unwrap_or(0)
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Matcher) -> Result<T, MatchError>) -> Option<T> {
        match f(self.matcher.as_mut().ok()?) {
            Ok(value) => Some(value),
            Err(error) => {
                self.matcher = Err(error);
                None
            }
        }
    }
}

/// The masks of one sequence's rows in a step.
pub struct FormMasks {
    /// Place of the sequence in the plan.
    pub sequence: usize,
    /// Its slot.
    pub slot: u32,
    form: SlotForm,
    drafts: Vec<u32>,
    /// Tokens that must not come so early, by row.
    early: Vec<Vec<u32>>,
    words: usize,
    masks: Vec<u32>,
    computed: bool,
}

impl FormMasks {
    /// The masks to compute for `text` and the rows after `drafts`; takes the form out of `text`
    /// until [`FormMasks::give_back`]. `None` if the text is free.
    pub fn new(sequence: usize, slot: u32, text: &mut SlotText, drafts: &[u32]) -> Option<Self> {
        let form = text.form().take()?;
        let early = (0..=drafts.len()).map(|i| text.too_early(i).to_vec()).collect();
        let (words, drafts) = (text.mask_words(), drafts.to_vec());
        let (masks, computed) = (Vec::new(), false);
        Some(Self { sequence, slot, form, drafts, early, words, masks, computed })
    }

    fn compute(&mut self) {
        self.computed = true;
        let rows = self.drafts.len() + 1;
        let mut masks = vec![0; rows * self.words];
        let (form, drafts) = (&mut self.form, &self.drafts);
        if form.with(|matcher| matcher.masks(drafts, &mut masks)).is_none() {
            return;
        }
        for (mask, early) in masks.chunks_exact_mut(self.words).zip(&self.early) {
            forbid(mask, early);
        }
        self.masks = masks;
    }

    /// Puts the form back into its text.
    pub fn give_back(self, text: &mut SlotText) -> RowMasks {
        *text.form() = Some(self.form);
        RowMasks { words: self.words, masks: self.masks }
    }
}

/// The masks of a sequence's rows.
#[derive(Clone, Debug, Default)]
pub struct RowMasks {
    words: usize,
    masks: Vec<u32>,
}

impl RowMasks {
    /// The mask after so many drafts, if there is one.
    pub fn row(&self, drafts: usize) -> Option<&[u32]> {
        self.masks.get(drafts * self.words..(drafts + 1) * self.words).filter(|m| !m.is_empty())
    }
}

/// Takes `tokens` out of a mask, unless nothing would be left.
fn forbid(mask: &mut [u32], tokens: &[u32]) {
    if tokens.is_empty() {
        return;
    }
    let whole = mask.to_vec();
    for &token in tokens {
        mask[token as usize / 32] &= !(1 << (token % 32));
    }
    if mask.iter().all(|&word| word == 0) {
        mask.copy_from_slice(&whole);
    }
}

/// Computes masks on threads of their own while `work` runs.
pub fn beside<T>(jobs: &mut [FormMasks], work: impl FnOnce() -> T) -> T {
    if jobs.is_empty() {
        return work();
    }
    // The other half is left to whoever drives the device.
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).div_ceil(2);
    let share = jobs.len().div_ceil(threads);
    let result = thread::scope(|scope| {
        for part in jobs.chunks_mut(share) {
            let compute = move || part.iter_mut().for_each(FormMasks::compute);
            // Where no thread can start, they are computed afterwards.
            let _ = thread::Builder::new().name("masks".into()).spawn_scoped(scope, compute);
        }
        work()
    });
    jobs.iter_mut().filter(|job| !job.computed).for_each(FormMasks::compute);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_leaves_nothing_gives_way() {
        let mut mask = [0b110, 1];
        forbid(&mut mask, &[1, 32]);
        assert_eq!(mask, [0b100, 0]);
        forbid(&mut mask, &[2]);
        assert_eq!(mask, [0b100, 0]);
    }
}
