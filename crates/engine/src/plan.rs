//! What one step of the model is to do: a plain description, written by the scheduler and read by
//! the model. It decides everything; the model decides nothing.

/// Stands for a token at image positions, here and in [`PlanSequence::context`]. The image token of
/// the vocabulary is a token like any other: a model may produce it, and it is no image then.
pub const IMAGE: u32 = u32::MAX;

/// Rows of one sequence in a step: consecutive positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanSequence {
    /// Slot of the sequence's rings and pending rows.
    pub slot: u32,
    /// Pages of the sequence, by position; they cover at least the positions before
    /// `start + tokens.len()`.
    pub pages: Vec<u32>,
    /// Absolute position of the first row.
    pub start: u32,
    /// One token id a row; [`IMAGE`] for rows that take their embedding from `embeddings`.
    pub tokens: Vec<u32>,
    /// Token ids of the positions before `start`, as many as the longest n-gram looks back (fewer
    /// at the beginning of a sequence); the last one is at `start - 1`.
    pub context: Vec<u32>,
    /// Embeddings of image rows, in row order: `[image rows, hidden]`.
    pub embeddings: Vec<f32>,
    /// Rows at this position and later run the decoder layers; earlier ones stop at the boundary.
    pub decoder_from: u32,
    /// Decoder windows reach back to this position at most: earlier ring rows were never written.
    pub decoder_window_from: u32,
    /// Rows at this position and later come out as if every row ran every layer. Of earlier ones,
    /// a decoder layer runs those that these depend on: see [`PlanSequence::rows_from`]. With 0,
    /// every layer runs them all.
    pub complete_from: u32,
    /// Rows (counted from `start`) whose logits are wanted; they must run the decoder. Ascending.
    pub outputs: Vec<u32>,
}

impl PlanSequence {
    /// One past the last position of this step.
    pub fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }

    /// How many rows go on into the decoder layers.
    pub fn kept_rows(&self) -> usize {
        (self.end() - self.decoder_from.clamp(self.start, self.end())) as usize
    }

    /// First position whose row a decoder layer runs, and how far windows reach back in it. `above`
    /// counts the decoder layers from this one to the last: each of them reads its keys through a
    /// window of `window` positions, so as many times `window - 1` rows before `complete_from`
    /// matter.
    pub fn rows_from(&self, above: u32, window: u32) -> (u32, u32) {
        let reach = above.saturating_mul(window.saturating_sub(1));
        match self.complete_from.saturating_sub(reach) {
            from if from > self.decoder_from => (from, from),
            _ => (self.decoder_from, self.decoder_window_from),
        }
    }
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Each sequence at most once.
    pub sequences: Vec<PlanSequence>,
}

impl StepPlan {
    /// Rows of all sequences.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// Rows whose logits are wanted; their logits come out in this order.
    pub fn outputs(&self) -> usize {
        self.sequences.iter().map(|s| s.outputs.len()).sum()
    }
}

/// One sequence of a draft step: propose tokens that follow `token` at `position`.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftSequence {
    /// Slot of the sequence's rings.
    pub slot: u32,
    /// The newest token of the sequence; it has not been run.
    pub token: u32,
    /// Its absolute position. The rings hold the draft rows of the positions before it.
    pub position: u32,
    /// Earliest position whose draft rows are in the ring.
    pub window_from: u32,
}
