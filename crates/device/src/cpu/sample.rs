//! From logits to a token: penalties, bias, masks, filters, noise.

use crate::cpu::Cpu;
use crate::cpu::best::{entry, index_of, rank};
use crate::cpu::dispatch::{LANES, by_isa};
use crate::cpu::isa::Isa;
use crate::cpu::math::{exp, log};
use crate::cpu::philox::token_noise;
use crate::ops::{ABSENT, BiasEntry, PenaltyRow, SampleRow, TokenCount};

/// Probability masses are sums of integers: weights relative to the best token's, times 2^40,
/// rounded down. So the order of a sum does not matter.
const MASS: f32 = (1u64 << 40) as f32;

pub(crate) fn penalize(
    logits: &mut [f32],
    vocab: usize,
    penalties: &[PenaltyRow],
    counts: &[TokenCount],
) {
    for count in counts {
        let penalty = &penalties[count.row as usize];
        let x = &mut logits[count.row as usize * vocab..][..vocab][count.token as usize];
        if count.generated > 0 || count.prompt > 0 {
            *x = if *x > 0.0 { *x / penalty.repetition } else { *x * penalty.repetition };
        }
        if count.generated > 0 {
            *x -= penalty.frequency * count.generated as f32;
            *x -= penalty.presence;
        }
    }
}

pub(crate) fn add_bias(logits: &mut [f32], vocab: usize, entries: &[BiasEntry]) {
    for entry in entries {
        logits[entry.row as usize * vocab..][..vocab][entry.token as usize] += entry.bias;
    }
}

pub(crate) fn mask_logits(logits: &mut [f32], vocab: usize, mask_rows: &[u32], mask: &[u32]) {
    let words = vocab.div_ceil(32);
    for (row, mask) in mask_rows.iter().zip(mask.chunks_exact(words)) {
        let logits = &mut logits[*row as usize * vocab..][..vocab];
        for (logits, word) in logits.chunks_mut(32).zip(mask) {
            for (bit, x) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
    }
}

pub(crate) fn sample(
    cpu: &Cpu,
    logits: &[f32],
    vocab: usize,
    rows: &[SampleRow],
    tokens: &mut [u32],
) {
    cpu.for_rows(tokens, 1, rows.len(), 100 * vocab, |first, tokens| {
        let mut survivors = Survivors::default();
        for (i, token) in tokens.iter_mut().enumerate() {
            let row = &rows[first + i];
            let logits = &logits[(first + i) * vocab..][..vocab];
            *token = choose(cpu.isa(), logits, row, &mut survivors);
        }
    });
}

fn choose(isa: Isa, logits: &[f32], row: &SampleRow, survivors: &mut Survivors) -> u32 {
    if is_greedy(row) {
        return best(isa, logits).unwrap_or(ABSENT);
    }
    if !survivors.find(isa, logits, row) {
        return ABSENT;
    }
    let mut best = 0;
    noisy_best(isa, &survivors.x, row, &mut best);
    index_of(best)
}

/// Whether the largest logit is taken without noise.
fn is_greedy(row: &SampleRow) -> bool {
    row.temperature <= 0.0 || row.temperature.is_nan()
}

/// The largest logit with the lowest id; none if no token is possible.
fn best(isa: Isa, logits: &[f32]) -> Option<u32> {
    let mut found = None;
    largest(isa, logits, &mut found);
    found
}

by_isa! {
    fn largest(logits: &[f32], found: &mut Option<u32>) {
        let mut tops = [0u32; LANES];
        let (blocks, rest) = logits.as_chunks::<LANES>();
        for block in blocks {
            for l in 0..LANES {
                tops[l] = rank(block[l]).max(tops[l]);
            }
        }
        let top = rest.iter().map(|x| rank(*x)).chain(tops).max().unwrap_or(0);
        if top <= rank(f32::NEG_INFINITY) {
            return;
        }
        for (block, logits) in logits.chunks(4 * LANES).enumerate() {
            if logits.iter().fold(false, |any, x| any | (rank(*x) == top)) {
                let at = logits.iter().position(|x| rank(*x) == top);
                *found = at.map(|at| (4 * LANES * block + at) as u32);
                return;
            }
        }
    }
}

/// The tokens of a row that may be drawn.
#[derive(Default)]
struct Survivors {
    /// `(logit - largest) / temperature`; negative infinity for tokens that were dropped.
    x: Vec<f32>,
    /// `e^x` before anything was dropped.
    weight: Vec<f32>,
    ranks: Vec<u32>,
}

impl Survivors {
    /// Applies temperature, top-k, top-p and min-p. False if no token is possible.
    fn find(&mut self, isa: Isa, logits: &[f32], row: &SampleRow) -> bool {
        let Some(best) = best(isa, logits) else { return false };
        let top = logits[best as usize];
        self.x.resize(logits.len(), 0.0);
        scale(isa, logits, top, row.temperature, &mut self.x);
        let by_count = row.top_k > 0 && (row.top_k as usize) < logits.len();
        let by_mass = row.top_p < 1.0;
        let by_ratio = row.min_p > 0.0;
        if by_mass || by_ratio {
            self.weight.resize(logits.len(), 0.0);
            weights(isa, &self.x, &mut self.weight);
        }
        if by_count || by_mass {
            self.ranks.resize(logits.len(), 0);
            ranks(isa, logits, &mut self.ranks);
        }
        if by_count {
            let cut = Cut::find(&self.ranks, |_| 1, u64::from(row.top_k) - 1);
            cut.apply(&self.ranks, &mut self.x);
        }
        if by_mass {
            let mass = |id: usize| mass(self.weight[id]);
            let total: u64 = (0..logits.len()).map(mass).sum();
            // floor(p * total), p in steps of 2^-32; negative p counts as 0.
            let p = (row.top_p * 4_294_967_296.0) as u64;
            let limit = ((u128::from(p) * u128::from(total)) >> 32) as u64;
            Cut::find(&self.ranks, mass, limit).apply(&self.ranks, &mut self.x);
        }
        if by_ratio {
            let least = row.min_p.min(1.0);
            for (x, weight) in self.x.iter_mut().zip(&self.weight) {
                if *weight < least {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        true
    }
}

by_isa! {
    fn scale(logits: &[f32], top: f32, temperature: f32, out: &mut [f32]) {
        for (out, logit) in out.iter_mut().zip(logits) {
            // Also where both are infinite.
            let x = if *logit == top { 0.0 } else { (*logit - top) / temperature };
            *out = if x <= 0.0 { x } else { f32::NEG_INFINITY };
        }
    }
}

/// The mass of a token of relative weight up to 1.
#[inline(always)]
fn mass(weight: f32) -> u64 {
    (weight * MASS) as u64
}

by_isa! {
    fn ranks(logits: &[f32], out: &mut [u32]) {
        for (out, logit) in out.iter_mut().zip(logits) {
            *out = rank(*logit);
        }
    }
}

by_isa! {
    fn weights(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = exp(*x);
        }
    }
}

by_isa! {
    /// The largest `x + noise`, the lower id on ties, as an entry.
    fn noisy_best(x: &[f32], row: &SampleRow, best: &mut u64) {
        for (block, x) in x.chunks(LANES).enumerate() {
            if x.iter().all(|x| *x == f32::NEG_INFINITY) {
                continue;
            }
            let first = block * LANES;
            // A loop of its own, so that all lanes draw at once.
            let mut noise = [0.0f32; LANES];
            for l in 0..LANES {
                noise[l] = token_noise(row.seed, row.position, (first + l) as u32, row.sample);
            }
            for (l, x) in x.iter().enumerate() {
                *best = entry(rank(*x + noise[l]), first + l).max(*best);
            }
        }
    }
}

/// Where the order (logit descending, id ascending) is cut: tokens of a higher rank survive, and
/// the first `ties` of those with this rank.
struct Cut {
    rank: u32,
    ties: u64,
}

impl Cut {
    /// Keeps the tokens whose preceding mass does not exceed `limit`. Equal ranks have equal masses.
    fn find(ranks: &[u32], mass: impl Fn(usize) -> u64, limit: u64) -> Self {
        // Radix descent: the bucket in which the limit is exceeded, eleven bits at a time. Only the
        // first descent reads all tokens.
        let mut buckets = vec![0u64; 2048];
        let mut inside: Vec<u32> = Vec::new();
        let (mut prefix, mut before) = (0u32, 0u64);
        for (shift, bits) in [(21, 11), (10, 11), (0, 10)] {
            buckets.fill(0);
            let digit = |rank: u32| (rank >> shift & ((1 << bits) - 1)) as usize;
            if shift == 21 {
                for (id, rank) in ranks.iter().enumerate() {
                    buckets[digit(*rank)] += mass(id);
                }
            } else {
                for id in &inside {
                    buckets[digit(ranks[*id as usize])] += mass(*id as usize);
                }
            }
            let mut found = (1usize << bits) - 1;
            while before + buckets[found] <= limit {
                before += buckets[found];
                if found == 0 {
                    // Nothing exceeds the limit: all survive.
                    return Self { rank: 0, ties: u64::MAX };
                }
                found -= 1;
            }
            if shift == 21 {
                let ids = ranks.iter().enumerate().filter(|(_, rank)| digit(**rank) == found);
                inside.extend(ids.map(|(id, _)| id as u32));
            } else {
                inside.retain(|id| digit(ranks[*id as usize]) == found);
            }
            prefix = prefix << bits | found as u32;
        }
        let each = inside.first().map_or(1, |id| mass(*id as usize)).max(1);
        Self { rank: prefix, ties: (limit - before) / each + 1 }
    }

    fn apply(&self, ranks: &[u32], x: &mut [f32]) {
        let mut ties = 0;
        for (x, rank) in x.iter_mut().zip(ranks) {
            let tie = *rank == self.rank;
            if *rank < self.rank || (tie && ties >= self.ties) {
                *x = f32::NEG_INFINITY;
            }
            ties += u64::from(tie);
        }
    }
}

/// Log-probabilities of the distribution that [`crate::Device::sample`] draws from: log-softmax of
/// `logit / T` over the survivors of the filters, negative infinity for the others. At temperature
/// 0 it is that of the unfiltered row at temperature 1. `logits` is processed as for sampling.
pub fn processed_logprobs(logits: &[f32], row: &SampleRow) -> Vec<f32> {
    if is_greedy(row) {
        return raw_logprobs(logits);
    }
    let mut survivors = Survivors::default();
    if !survivors.find(Isa::detect(), logits, row) {
        return vec![f32::NEG_INFINITY; logits.len()];
    }
    normalize(survivors.x)
}

/// Log-softmax of a whole row.
pub fn raw_logprobs(logits: &[f32]) -> Vec<f32> {
    let isa = Isa::detect();
    let Some(best) = best(isa, logits) else { return vec![f32::NEG_INFINITY; logits.len()] };
    let mut x = vec![0.0; logits.len()];
    scale(isa, logits, logits[best as usize], 1.0, &mut x);
    normalize(x)
}

/// Subtracts the logarithm of the sum of exponentials of numbers of which the largest is 0.
fn normalize(mut x: Vec<f32>) -> Vec<f32> {
    let sum: f64 = x.iter().map(|x| f64::from(exp(*x))).sum();
    let log_sum = log(sum as f32);
    x.iter_mut().for_each(|x| *x -= log_sum);
    x
}
