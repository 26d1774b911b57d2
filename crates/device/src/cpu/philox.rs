//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011).

use crate::cpu::math::{log, log1p};

/// Streams of noise: the last word of the counter.
pub mod stream {
    /// Gumbel noise of sampled tokens, drafted or not.
    pub const SAMPLE: u32 = 0;
}

/// The four words that belong to `counter` under `key` (low word first).
#[inline(always)]
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    for _ in 0..10 {
        let a = u64::from(c0) * 0xd251_1f53;
        let b = u64::from(c2) * 0xcd9e_8d57;
        c0 = (b >> 32) as u32 ^ c1 ^ k0;
        c2 = (a >> 32) as u32 ^ c3 ^ k1;
        c1 = b as u32;
        c3 = a as u32;
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
    }
    [c0, c1, c2, c3]
}

/// Standard Gumbel noise, `-ln(-ln(u))`, from two random words.
///
/// The first word is the integer part and the upper 24 bits of the second the fraction of a number
/// in `0 .. 2^32`; `-ln(u)` is taken from the nearer end of that range, so that both tails keep
/// f32's relative precision: the noise of a token of probability 1e-12 is as exact as any other.
#[inline(always)]
pub fn gumbel(high: u32, low: u32) -> f32 {
    const SCALE: f32 = 1.0 / 4_294_967_296.0;
    let upper = high >= 0x8000_0000;
    let near = if upper { !high } else { high };
    let fraction = ((low >> 8) as f32 + 0.5) * (1.0 / 16_777_216.0);
    // At most 1/2, and above 0.
    let v = (near as f32 + fraction) * SCALE;
    // An exponential variate: -ln(1 - v) below the middle, -ln(v) above it.
    let exponential = if upper { -log(v) } else { -log1p(-v) };
    -log(exponential)
}

/// The noise of a token: key = seed, counter = (position, token, sample, [`stream::SAMPLE`]).
#[inline(always)]
pub fn token_noise(seed: u64, position: u32, token: u32, sample: u32) -> f32 {
    let [high, low, _, _] = philox(seed, [position, token, sample, stream::SAMPLE]);
    gumbel(high, low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        // Random123, kat_vectors, philox4x32 10.
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn gumbel_is_monotone_and_finite_at_the_ends() {
        assert!((gumbel(0, 0) - 39.5).abs() < 0.2, "{}", gumbel(0, 0));
        assert!((gumbel(u32::MAX, 0) + 3.67).abs() < 0.02, "{}", gumbel(u32::MAX, 0));
        for (word, u) in [(0x4000_0000u32, 0.75f64), (0x8000_0000, 0.5), (0xc000_0000, 0.25)] {
            let want = -(-u.ln()).ln();
            assert!((f64::from(gumbel(word, 0)) - want).abs() < 1e-6);
        }
        let words = (0..4096u32).map(|i| i << 20);
        assert!(words.clone().zip(words.skip(1)).all(|(a, b)| gumbel(a, 0) > gumbel(b, 0)));
    }

    #[test]
    fn gumbel_has_the_right_moments() {
        let n = 200_000;
        let noise = |i| f64::from(token_noise(7, i, 3, 0));
        let mean = (0..n).map(noise).sum::<f64>() / f64::from(n);
        let square = (0..n).map(|i| noise(i).powi(2)).sum::<f64>() / f64::from(n);
        let (want, variance) = (0.577_215_664_9, std::f64::consts::PI.powi(2) / 6.0);
        assert!((mean - want).abs() < 0.015, "{mean}");
        assert!((square - mean * mean - variance).abs() < 0.04, "{}", square - mean * mean);
    }
}
