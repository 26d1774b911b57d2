//! Drafts of known chances, for tests and measurements.

use deepinfer_device::splitmix;

/// Stands in for the draft stages' choice: knows how texts go on, and proposes that with given
/// chances. The stages still run, so that steps take the time that they take. For the rejection
/// scheme a proposed token counts as one that was drawn from nothing else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KnownDrafts {
    /// Prompts, and how they go on.
    pub texts: Vec<(Vec<u32>, Vec<u32>)>,
    /// Chances that each draft of a block is right, given that the ones before are; they are told
    /// as confidences. Each block takes one of these profiles.
    pub profiles: Vec<Vec<f32>>,
    /// Key of the choices.
    pub seed: u64,
    /// Size of the vocabulary.
    pub vocab: u32,
}

impl KnownDrafts {
    /// Up to `most` tokens after `text`, whose first `prompt_len` tokens are its prompt, and their
    /// confidences; fewer where the text ends or a profile does, none where no text goes on like
    /// this.
    pub fn propose(&self, text: &[u32], prompt_len: usize, most: usize) -> (Vec<u32>, Vec<f32>) {
        let (prompt, output) = text.split_at(prompt_len);
        let known = self.texts.iter().find(|(p, o)| p == prompt && o.starts_with(output));
        let Some(rest) = known.map(|(_, o)| &o[output.len()..]) else { return Default::default() };
        let mut state =
            text.iter().fold(splitmix::next(self.seed), |h, &t| splitmix::next(h ^ u64::from(t)));
        let mut uniform = || {
            state = splitmix::next(state);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        let pick = (uniform() * self.profiles.len() as f32) as usize;
        let Some(profile) = self.profiles.get(pick) else { return Default::default() };
        let drafts = rest.iter().zip(profile).take(most).map(|(&right, &chance)| {
            let token = if uniform() < chance { right } else { (right + 1) % self.vocab };
            (token, chance)
        });
        drafts.unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(profiles: Vec<Vec<f32>>) -> KnownDrafts {
        KnownDrafts { texts: vec![(vec![0], (1..2000).collect())], profiles, seed: 1, vocab: 4000 }
    }

    #[test]
    fn certain_drafts_are_certain() {
        let known = known(vec![vec![1.0, 1.0, 0.0]]);
        assert_eq!(known.propose(&[0, 1], 1, 5), (vec![2, 3, 5], vec![1.0, 1.0, 0.0]));
        assert_eq!(known.propose(&[0, 1], 1, 2), (vec![2, 3], vec![1.0, 1.0]));
        assert_eq!(known.propose(&[7], 1, 5), Default::default());
        assert_eq!(known.propose(&[0, 1], 2, 5), Default::default(), "another prompt");
    }

    #[test]
    fn chances_are_kept() {
        let known = known(vec![vec![0.7, 0.7], vec![0.1, 0.1]]);
        let text: Vec<u32> = (0..1990).collect();
        let (mut hits, mut wanted) = (0, 0.0);
        for len in 1..1990 {
            let (drafts, chances) = known.propose(&text[..len], 1, 2);
            hits += usize::from(drafts[0] == len as u32);
            wanted += chances[0];
        }
        assert!((hits as f32 - wanted).abs() < 80.0, "{hits} of {wanted}");
        assert!((wanted / 1989.0 - 0.4).abs() < 0.03, "both profiles occur: {wanted}");
    }
}
