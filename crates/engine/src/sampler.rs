//! From sampling parameters to device calls: penalties, bias, forbidden tokens, choice.
//!
//! A row of logits is processed as a function of the text before it alone. Rows after a draft are
//! processed as if the draft were accepted; if it is not, they are not used.

mod form;
mod logprobs;
pub mod rejection;
mod rules;

pub use form::{FormMasks, RowMasks, SlotForm, beside};
pub use logprobs::logprobs;
pub use rules::SlotText;

use deepinfer_device::Device;
use deepinfer_device::ops::{BiasEntry, PenaltyRow, Result, SampleRow, TokenCount};

/// What is to be done to the rows of one step before tokens are chosen.
#[derive(Default)]
pub struct Rows {
    penalties: Vec<PenaltyRow>,
    counts: Vec<TokenCount>,
    bias: Vec<BiasEntry>,
    mask_rows: Vec<u32>,
    mask: Vec<u32>,
    samples: Vec<SampleRow>,
    penalized: bool,
}

impl Rows {
    /// No rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Rows so far.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// A row whose choice nobody looks at.
    pub fn push_ignored(&mut self) {
        self.penalties.push(NEUTRAL);
        self.samples.push(SampleRow::greedy());
    }

    /// Adds a row that chooses the token after the text of `slot` and `drafts`, among those that
    /// `form` allows too, if it is given.
    pub fn push(&mut self, slot: &SlotText, drafts: &[u32], form: Option<&[u32]>) {
        let row = self.samples.len() as u32;
        self.samples.push(slot.sample_row(drafts.len()));
        if let Some(token) = slot.forced(drafts) {
            self.penalties.push(NEUTRAL);
            self.mask_rows.push(row);
            let first = self.mask.len();
            self.mask.resize(first + slot.mask_words(), 0);
            self.mask[first + token as usize / 32] = 1 << (token % 32);
            return;
        }
        self.penalties.push(slot.penalties());
        self.penalized |= slot.count(row, drafts, &mut self.counts);
        slot.bias(row, drafts, &mut self.bias);
        match (slot.mask(), form) {
            (None, None) => return,
            (Some(mask), None) | (None, Some(mask)) => self.mask.extend_from_slice(mask),
            (Some(mask), Some(form)) => {
                self.mask.extend(mask.iter().zip(form).map(|(a, b)| a & b));
            }
        }
        self.mask_rows.push(row);
    }

    /// Draws draft `index` of a block in every row, by noise of its own: see [`rejection`].
    pub fn draw_drafts(&mut self, index: usize) {
        self.samples.iter_mut().for_each(|row| *row = rejection::draft_row(*row, index));
    }

    /// How each row is drawn.
    pub fn samples(&self) -> &[SampleRow] {
        &self.samples
    }

    /// Processes `logits` `[rows, vocab]` in place and leaves the chosen tokens in `tokens`.
    pub fn choose<D: Device>(
        &self,
        device: &D,
        vocab: usize,
        logits: &mut D::Buffer<f32>,
        tokens: &mut D::Buffer<u32>,
    ) -> Result<()> {
        if self.penalized {
            device.penalize(logits, vocab, &self.penalties, &self.counts)?;
        }
        if !self.bias.is_empty() {
            device.add_bias(logits, vocab, &self.bias)?;
        }
        if !self.mask_rows.is_empty() {
            device.mask_logits(logits, vocab, &self.mask_rows, &self.mask)?;
        }
        device.sample(logits, vocab, &self.samples, tokens)
    }
}

/// No penalties.
const NEUTRAL: PenaltyRow = PenaltyRow { repetition: 1.0, presence: 0.0, frequency: 0.0 };
