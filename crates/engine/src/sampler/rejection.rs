//! The rejection scheme: a draft is accepted with the chance `min(1, p / q)`, where `p` is the
//! model's and `q` the draft stages' probability of it, and a rejected one is replaced by a token
//! drawn from `max(p - q, 0)` (Leviathan et al., "Fast inference from transformers via speculative
//! decoding", 2023; Chen et al., "Accelerating large language model decoding with speculative
//! sampling", 2023). The tokens are distributed as without drafts, but which ones come out depends
//! on how many are drafted and verified.
//!
//! Draft, test and replacement at one position draw from noise of their own, so that none of them
//! knows of the others.

use deepinfer_device::cpu::philox::{philox, token_noise};
use deepinfer_device::ops::SampleRow;

/// Added to the seed for the noise of drafts, of tests and of replacements.
const DRAFT: u64 = 1_000_000_007;
const TEST: u64 = 2 * DRAFT;
const REPLACEMENT: u64 = 3 * DRAFT;

/// How draft `index` of a block is drawn, where the token itself would be drawn by `row`. Each
/// block has other noise, also at the same position: whether a draft was verified may have depended
/// on it.
pub fn draft_row(row: SampleRow, index: usize) -> SampleRow {
    let sample = row.sample.wrapping_add((index as u32 + 1) << 16);
    SampleRow { seed: row.seed.wrapping_add(DRAFT), sample, ..row }
}

/// What `token` was drawn from if there was no choice, over a vocabulary of `vocab` tokens, as
/// natural logarithms of probabilities.
pub fn certain(vocab: usize, token: u32) -> Vec<f32> {
    let mut logprobs = vec![f32::NEG_INFINITY; vocab];
    if let Some(logprob) = logprobs.get_mut(token as usize) {
        *logprob = 0.0;
    }
    logprobs
}

/// The token at a position for which `draft` was drawn from `q`, and which the model draws from `p`
/// by `row`: the draft, if it is accepted, else another one. `p` and `q` are natural logarithms of
/// probabilities over the vocabulary.
pub fn verify(p: &[f32], q: &[f32], draft: u32, row: &SampleRow) -> u32 {
    verify_by(p, q, draft, row, |p, q| (p - q).exp())
}

/// The same with any rule for the chance of acceptance.
fn verify_by(
    p: &[f32],
    q: &[f32],
    draft: u32,
    row: &SampleRow,
    chance: impl Fn(f64, f64) -> f64,
) -> u32 {
    let seed = row.seed.wrapping_add(TEST);
    let [high, low, _, _] = philox(seed, [row.position, 0, row.sample, 0]);
    // In the middle of one of 2^53 steps: never 0 or 1.
    let word = (u64::from(high) << 32 | u64::from(low)) >> 11;
    let uniform = (word as f64 + 0.5) / (1u64 << 53) as f64;
    let at = draft as usize;
    if uniform < chance(f64::from(p[at]), f64::from(q[at])) {
        return draft;
    }
    let rest = |token: usize| (f64::from(p[token]).exp() - f64::from(q[token]).exp()).ln();
    // Where nothing is left, p and q are the same but for rounding.
    noisy_best(p.len(), row, rest)
        .or_else(|| noisy_best(p.len(), row, |token| f64::from(p[token])))
        .unwrap_or(draft)
}

/// Draws a token with a probability proportional to `e^x`; NaN and negative infinity are none.
fn noisy_best(vocab: usize, row: &SampleRow, x: impl Fn(usize) -> f64) -> Option<u32> {
    let seed = row.seed.wrapping_add(REPLACEMENT);
    let mut best = None;
    for token in 0..vocab {
        let x = x(token);
        if x.is_nan() || x == f64::NEG_INFINITY {
            continue;
        }
        let x = x + f64::from(token_noise(seed, row.position, token as u32, row.sample));
        if best.is_none_or(|(most, _)| x > most) {
            best = Some((x, token as u32));
        }
    }
    best.map(|(_, token)| token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer_device::Device;
    use deepinfer_device::cpu::Cpu;
    use deepinfer_device::cpu::sample::processed_logprobs;

    const VOCAB: usize = 6;
    const TEXTS: u64 = 30_000;

    /// Logits that depend on the token before.
    fn logits(before: u32, of_model: bool) -> [f32; VOCAB] {
        let mut x = before * 7 + u32::from(of_model) * 3 + 1;
        std::array::from_fn(|_| {
            x = x.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            (x >> 16) as f32 / 65_536.0 * 3.0
        })
    }

    fn draw(cpu: &Cpu, logits: &[f32], row: &SampleRow) -> u32 {
        let mut buffer = cpu.alloc::<f32>(VOCAB).expect("small");
        cpu.upload(logits, &mut buffer, 0).expect("fits");
        let mut token = cpu.alloc::<u32>(1).expect("small");
        cpu.sample(&buffer, VOCAB, &[*row], &mut token).expect("is drawn");
        let mut found = [0];
        cpu.download(&token, 0, &mut found).expect("is there");
        found[0]
    }

    fn row(seed: u64, position: u32) -> SampleRow {
        let row = SampleRow::greedy();
        SampleRow { seed, position, temperature: 0.9, top_p: 0.9, ..row }
    }

    /// Two tokens, of blocks of two drafts.
    fn text(cpu: &Cpu, seed: u64, chance: impl Fn(f64, f64) -> f64 + Copy) -> (u32, u32) {
        let (mut before, mut tokens) = (0, Vec::new());
        let mut drafts = Vec::new();
        for i in 0..2 {
            let row = row(seed, i);
            let x = logits(before, false);
            let of_draft = draft_row(row, i as usize);
            before = draw(cpu, &x, &of_draft);
            drafts.push((before, processed_logprobs(&x, &of_draft)));
        }
        before = 0;
        for (i, (draft, q)) in drafts.iter().enumerate() {
            let row = row(seed, i as u32);
            let p = processed_logprobs(&logits(before, true), &row);
            let token = verify_by(&p, q, *draft, &row, chance);
            tokens.push(token);
            before = token;
            if token != *draft {
                break;
            }
        }
        if tokens.len() < 2 {
            // A step of its own, without drafts.
            tokens.push(draw(cpu, &logits(before, true), &row(seed, 1)));
        }
        (tokens[0], tokens[1])
    }

    /// Distance of what `chance` gives from the model's own distribution, in units of its standard
    /// deviation, and how many kinds of text are possible.
    fn distance(chance: impl Fn(f64, f64) -> f64 + Copy) -> (f64, usize) {
        let cpu = Cpu::new(Some(1)).expect("starts");
        let mut counts = [[0u32; VOCAB]; VOCAB];
        for seed in 0..TEXTS {
            let (a, b) = text(&cpu, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), chance);
            counts[a as usize][b as usize] += 1;
        }
        let first = processed_logprobs(&logits(0, true), &row(0, 0));
        let (mut chi, mut kinds) = (0.0, 0);
        for a in 0..VOCAB {
            let second = processed_logprobs(&logits(a as u32, true), &row(0, 1));
            for b in 0..VOCAB {
                let expected = TEXTS as f64 * f64::from(first[a] + second[b]).exp();
                if expected > 0.0 {
                    chi += (f64::from(counts[a][b]) - expected).powi(2) / expected;
                    kinds += 1;
                } else if counts[a][b] > 0 {
                    chi = f64::INFINITY;
                }
            }
        }
        let freedom = kinds as f64 - 1.0;
        ((chi - freedom) / (2.0 * freedom).sqrt(), kinds)
    }

    #[test]
    fn texts_are_distributed_as_without_drafts() {
        let (found, kinds) = distance(|p, q| (p - q).exp());
        assert!(kinds >= 12, "{kinds} kinds");
        assert!(found < 4.0, "chi-square is {found} standard deviations from its mean");
    }

    #[test]
    fn wrong_rules_are_found() {
        // Accepting always, never (without which the replacement is not the model's), by the
        // inverse, and a little too often.
        type Rule = fn(f64, f64) -> f64;
        let rules: [Rule; 4] =
            [|_, _| 1.0, |_, _| 0.0, |p, q| (q - p).exp(), |p, q| 1.2 * (p - q).exp()];
        for (i, rule) in rules.into_iter().enumerate() {
            let (found, _) = distance(rule);
            assert!(found > 10.0, "rule {i}: {found}");
        }
    }

    #[test]
    fn equal_distributions_accept() {
        let p = [0.25f32.ln(); 4];
        for seed in 0..100 {
            assert_eq!(verify(&p, &p, 2, &row(seed, 5)), 2);
        }
        // A draft that was not drawn is accepted as often as the model produces it, and what
        // replaces it is another token.
        let p = [0.75f32.ln(), 0.25f32.ln(), f32::NEG_INFINITY];
        let q = certain(3, 0);
        let found: Vec<u32> = (0..400).map(|seed| verify(&p, &q, 0, &row(seed, 5))).collect();
        let count = |token| found.iter().filter(|&&t| t == token).count();
        assert!(count(0).abs_diff(300) < 40 && count(0) + count(1) == 400, "{}", count(0));
        // A draft that the model never produces.
        let p = [f32::NEG_INFINITY, 0.0];
        assert_eq!(verify(&p, &[0.0, f32::NEG_INFINITY], 0, &row(1, 1)), 1);
    }
}
