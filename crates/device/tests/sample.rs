//! From logits to a token.

mod common;

use common::*;
use deepinfer_device::Device;
use deepinfer_device::cpu::math::exp;
use deepinfer_device::cpu::philox::token_noise;
use deepinfer_device::cpu::sample::{processed_logprobs, raw_logprobs};
use deepinfer_device::ops::{ABSENT, BiasEntry, PenaltyRow, SampleRow, TokenCount};
use proptest::prelude::*;

/// A row that samples from everything.
fn plain(position: u32) -> SampleRow {
    SampleRow {
        seed: 0x0123_4567_89ab_cdef,
        position,
        sample: 0,
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
    }
}

fn sampled<D: Device>(device: &D, logits: &[f32], rows: &[SampleRow]) -> Vec<u32> {
    let mut tokens = output(device, rows.len());
    let vocab = logits.len() / rows.len();
    device.sample(&buffer(device, logits), vocab, rows, &mut tokens).expect("runs");
    read(device, &tokens)
}

/// Probabilities after the filters, by sorting, in f64. Masses are the documented integers.
fn probabilities(logits: &[f32], row: &SampleRow) -> Vec<f64> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let x = |id: usize| (logits[id] - top) / row.temperature;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("numbers").then(a.cmp(b)));
    let mass = |id: usize| (f64::from(exp(x(id))) * 2f64.powi(40)).floor();
    let total: f64 = order.iter().map(|id| mass(*id)).sum();
    let mut before = 0.0;
    let mut kept = vec![0.0; logits.len()];
    for (place, id) in order.iter().copied().enumerate() {
        let by_count = row.top_k == 0 || place < row.top_k as usize;
        let by_mass = row.top_p >= 1.0 || before <= f64::from(row.top_p) * total;
        let by_ratio = exp(x(id)) >= row.min_p.min(1.0);
        if by_count && by_mass && by_ratio && logits[id] > f32::NEG_INFINITY {
            kept[id] = f64::from(x(id)).exp();
        }
        before += mass(id);
    }
    let sum: f64 = kept.iter().sum();
    kept.iter().map(|p| p / sum).collect()
}

fn greedy_takes_the_largest<D: Device>(device: &D) -> Vec<u32> {
    let greedy = SampleRow { temperature: 0.0, top_k: 1, top_p: 0.1, ..plain(3) };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let cases: [([f32; 4], u32); 7] = [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -0.0, -1.0], 0),
        ([-inf, -5.0, -inf, nan], 1),
        ([nan, inf, inf, 0.0], 1),
        ([-inf, -inf, -inf, -inf], ABSENT),
        ([nan, nan, -inf, nan], ABSENT),
        ([f32::MIN, f32::MIN, -inf, -inf], 0),
    ];
    let logits: Vec<f32> = cases.iter().flat_map(|(logits, _)| *logits).collect();
    let got = sampled(device, &logits, &[greedy; 7]);
    assert_eq!(got, cases.map(|(_, want)| want));
    // Impossible tokens stay impossible with noise.
    let rows: Vec<SampleRow> = (0..7).map(plain).collect();
    let noisy = sampled(device, &logits, &rows);
    assert!(noisy[2] == 1 && matches!(noisy[3], 1 | 2) && noisy[4..6] == [ABSENT; 2]);
    assert!(matches!(noisy[6], 0 | 1));
    [got, noisy].concat()
}

fn draws_follow_the_distribution<D: Device>(device: &D) -> Vec<u32> {
    let logits = Random::new(11).normals(24, 1.5);
    let filters = [
        SampleRow { temperature: 1.3, ..plain(0) },
        SampleRow { top_k: 7, ..plain(0) },
        SampleRow { top_p: 0.8, temperature: 0.7, ..plain(0) },
        SampleRow { min_p: 0.05, sample: 3, ..plain(0) },
        SampleRow { top_k: 9, top_p: 0.9, min_p: 0.02, seed: 5, ..plain(0) },
    ];
    let draws = 6_000;
    let mut all = Vec::new();
    for filter in filters {
        let want = probabilities(&logits, &filter);
        let rows: Vec<SampleRow> =
            (0..draws).map(|position| SampleRow { position, ..filter }).collect();
        let tokens = sampled(device, &logits.repeat(rows.len()), &rows);
        let mut counts = vec![0u32; logits.len()];
        tokens.iter().for_each(|token| counts[*token as usize] += 1);
        let mut chi_square = 0.0;
        let mut kinds = 0.0;
        for (count, p) in counts.iter().zip(&want) {
            assert!(*p > 0.0 || *count == 0, "a dropped token was drawn");
            let expected = p * f64::from(draws);
            if expected > 0.0 {
                chi_square += (f64::from(*count) - expected).powi(2) / expected.max(1.0);
                kinds += 1.0;
            }
        }
        let degrees: f64 = kinds - 1.0;
        let limit = degrees + 5.0 * (2.0 * degrees).sqrt();
        assert!(chi_square < limit, "chi square {chi_square} for {degrees} degrees");
        all.extend(tokens);
    }
    all
}

fn rare_tokens_are_drawn_as_often_as_they_should<D: Device>(device: &D) {
    // 2,000 tokens of probability about 5e-7 each beside one of nearly 1, in 20,000 draws.
    let vocab = 2001;
    let mut logits = vec![0.0f32; vocab];
    logits[0] = 14.5;
    let draws = 20_000u32;
    let mut rare = 0;
    for first in (0..draws).step_by(500) {
        let rows: Vec<SampleRow> = (first..first + 500).map(plain).collect();
        let tokens = sampled(device, &logits.repeat(500), &rows);
        rare += tokens.iter().filter(|token| **token != 0).count();
    }
    let each = (-14.5f64).exp();
    let expected = f64::from(draws) * 2000.0 * each / (1.0 + 2000.0 * each);
    assert!((rare as f64 - expected).abs() < 5.0 * expected.sqrt(), "{rare}, not {expected}");
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let vocab = 100;
    let mut random = Random::new(12);
    let logits = random.normals(512 * vocab, 3.0);
    let rows: Vec<SampleRow> = (0..512)
        .map(|i| SampleRow {
            seed: u64::from(random.word()) << 32 | u64::from(random.word()),
            temperature: [0.0, 0.5, 1.0, 2.0][i % 4],
            top_k: random.below(20) as u32,
            top_p: [1.0, 0.9, 0.3][i % 3],
            min_p: [0.0, 0.1][i / 2 % 2],
            ..plain(random.below(100) as u32)
        })
        .collect();
    let tokens = same_in_any_batch(512, |r| sampled(device, rows_of(&logits, vocab, &r), &rows[r]));
    let reversed_logits: Vec<f32> = logits.chunks_exact(vocab).rev().flatten().copied().collect();
    let reversed_rows: Vec<SampleRow> = rows.iter().rev().copied().collect();
    let mut reversed = sampled(device, &reversed_logits, &reversed_rows);
    reversed.reverse();
    assert_eq!(tokens, reversed);
    tokens
}

fn penalties_bias_and_masks<D: Device>(device: &D) -> Vec<u32> {
    let vocab = 40;
    let mut logits = vec![1.0f32; 3 * vocab];
    logits[vocab + 2] = -2.0;
    let guarded = [&logits[..], &[f32::POISON; 67]].concat();
    let mut on_device = buffer(device, &guarded);
    let off = PenaltyRow { repetition: 1.0, presence: 0.0, frequency: 0.0 };
    let on = PenaltyRow { repetition: 2.0, presence: 0.5, frequency: 0.25 };
    let counts = [
        TokenCount { row: 0, token: 1, generated: 3, prompt: 1 },
        TokenCount { row: 1, token: 1, generated: 3, prompt: 0 },
        TokenCount { row: 1, token: 2, generated: 1, prompt: 0 },
        TokenCount { row: 1, token: 3, generated: 0, prompt: 2 },
    ];
    device.penalize(&mut on_device, vocab, &[off, on, on], &counts).expect("runs");
    let entries = [
        BiasEntry { row: 0, token: 39, bias: 5.0 },
        BiasEntry { row: 0, token: 39, bias: -1.0 },
        BiasEntry { row: 2, token: 0, bias: f32::NEG_INFINITY },
    ];
    device.add_bias(&mut on_device, vocab, &entries).expect("runs");
    // Row 2 may produce tokens 0, 31, 32 and 39 only; bits behind the vocabulary do not count.
    let mask = [1 | 1 << 31, 1 | 1 << 7 | 1 << 8];
    device.mask_logits(&mut on_device, vocab, &[2], &mask).expect("runs");
    let got = read(device, &on_device);
    let mut want = logits;
    want[vocab + 1] = 1.0 / 2.0 - 0.75 - 0.5;
    want[vocab + 2] = -4.0 - 0.25 - 0.5;
    want[vocab + 3] = 0.5;
    want[39] = 5.0;
    for token in 0..vocab {
        if ![31, 32, 39].contains(&token) {
            want[2 * vocab + token] = f32::NEG_INFINITY;
        }
    }
    assert_eq!(got, want);
    bits(&got)
}

#[test]
fn choice() {
    for_each_device!(greedy_takes_the_largest);
    for_each_device!(rows_do_not_see_each_other);
}

#[test]
fn distribution() {
    for_each_device!(draws_follow_the_distribution);
    // Bits are compared above; this one takes many draws.
    if let Some((_, cpu)) = cpus().last() {
        rare_tokens_are_drawn_as_often_as_they_should(cpu);
    }
}

#[test]
fn processing() {
    for_each_device!(penalties_bias_and_masks);
}

#[test]
fn logprobs_of_everything_and_of_survivors() {
    let logits = [2.0, f32::NEG_INFINITY, 1.0, 1.0, -30.0];
    let sum = 1.0 + 2.0 * (-1f64).exp() + (-32f64).exp();
    let want = [0.0, f64::NEG_INFINITY, -1.0, -1.0, -32.0].map(|x| x - sum.ln());
    let check = |got: &[f32], want: &[f64]| {
        for (got, want) in got.iter().zip(want) {
            let equal = f64::from(*got) == *want;
            assert!(equal || (f64::from(*got) - want).abs() < 1e-6, "{got}, not {want}");
        }
    };
    check(&raw_logprobs(&logits), &want);
    let greedy = SampleRow { temperature: 0.0, top_k: 1, ..plain(0) };
    check(&processed_logprobs(&logits, &greedy), &want);
    // Two of three survive; the lower id of equal ones is first in order.
    let row = SampleRow { temperature: 0.5, top_k: 2, ..plain(0) };
    let sum = 1.0 + (-2f64).exp();
    let none = f64::NEG_INFINITY;
    check(&processed_logprobs(&logits, &row), &[-sum.ln(), none, -2.0 - sum.ln(), none, none]);
    assert!(raw_logprobs(&[f32::NEG_INFINITY; 3]).iter().all(|x| *x == f32::NEG_INFINITY));
}

/// Few distinct logits, so that cuts fall into ties; signed zeros among them.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        8 => (-6i8..=6).prop_map(|x| f32::from(x) / 2.0),
        1 => Just(-0.0f32),
        1 => Just(f32::NEG_INFINITY),
        2 => -8.0f32..8.0,
    ];
    prop::collection::vec(value, 1..80)
}

fn row() -> impl Strategy<Value = SampleRow> {
    let filters = (0.05f32..3.0, prop_oneof![Just(1.0f32), 0.0f32..1.0], 0u32..30);
    let ratio = prop_oneof![Just(0.0f32), 0.0f32..1.1];
    (any::<u64>(), any::<u32>(), 0u32..4, filters, ratio).prop_map(
        |(seed, position, sample, (temperature, top_p, top_k), min_p)| SampleRow {
            seed,
            position,
            sample,
            temperature,
            top_p,
            top_k,
            min_p,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_token_is_the_noisy_best_of_the_survivors(logits in logits(), row in row()) {
        prop_assume!(logits.iter().any(|x| *x > f32::NEG_INFINITY));
        let want = probabilities(&logits, &row);
        let logprobs = processed_logprobs(&logits, &row);
        for (logprob, p) in logprobs.iter().zip(&want) {
            prop_assert_eq!(*logprob > f32::NEG_INFINITY, *p > 0.0, "{:?} {:?}", &logprobs, &want);
            prop_assert!(*p == 0.0 || (f64::from(*logprob) - p.ln()).abs() < 1e-5 * (1.0 + p.ln().abs()));
        }
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let noisy = |id: u32| {
            let x = (logits[id as usize] - top) / row.temperature;
            x + token_noise(row.seed, row.position, id, row.sample)
        };
        let survivors = (0..logits.len() as u32).filter(|id| want[*id as usize] > 0.0);
        let best = survivors.reduce(|a, b| if noisy(b) > noisy(a) { b } else { a });
        let cpus = cpus();
        let got = sampled(&cpus[cpus.len() - 1].1, &logits, &[row]);
        prop_assert_eq!(Some(got[0]), best);
    }
}
