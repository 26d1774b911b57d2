//! The part of numpy's `default_rng` that the Engram multipliers come from.
//!
//! PCG64 (XSL-RR 128/64) seeded through `SeedSequence`, and `integers` with Lemire's method, as in
//! numpy's `_bounded_integers` and `distributions.c`.

/// `numpy.random.default_rng(seed)`.
pub struct Generator {
    state: u128,
    increment: u128,
    /// The upper half of a 64-bit draw of which the lower half was used.
    upper_half: Option<u32>,
}

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

impl Generator {
    /// A generator seeded with one integer.
    pub fn new(seed: u64) -> Self {
        let words = seed_sequence(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut generator =
            Self { state: 0, increment: wide(words[2], words[3]) << 1 | 1, upper_half: None };
        generator.step();
        generator.state = generator.state.wrapping_add(wide(words[0], words[1]));
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        if let Some(half) = self.upper_half.take() {
            return half;
        }
        let word = self.next_u64();
        self.upper_half = Some((word >> 32) as u32);
        word as u32
    }

    /// `integers(0, high, count)` for int64: numbers below `high`.
    ///
    /// # Panics
    /// If `high` is 0.
    pub fn integers(&mut self, high: u64, count: usize) -> Vec<u64> {
        assert!(high > 0, "integers need a positive bound");
        let last = high - 1;
        (0..count)
            .map(|_| match last {
                0 => 0,
                last if last < u64::from(u32::MAX) => u64::from(self.bounded_u32(last as u32)),
                last if last == u64::from(u32::MAX) => u64::from(self.next_u32()),
                u64::MAX => self.next_u64(),
                last => self.bounded_u64(last),
            })
            .collect()
    }

    fn bounded_u32(&mut self, last: u32) -> u32 {
        let count = last + 1;
        let threshold = (u32::MAX - last) % count;
        loop {
            let product = u64::from(self.next_u32()) * u64::from(count);
            if product as u32 >= threshold {
                return (product >> 32) as u32;
            }
        }
    }

    fn bounded_u64(&mut self, last: u64) -> u64 {
        let count = last + 1;
        let threshold = (u64::MAX - last) % count;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(count);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }
}

/// `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_sequence(seed: u64) -> [u64; 4] {
    const INIT_A: u32 = 0x43b0_d7e5;
    const MULT_A: u32 = 0x931e_8875;
    const INIT_B: u32 = 0x8b51_f9dd;
    const MULT_B: u32 = 0x58f3_8ded;
    const MIX_LEFT: u32 = 0xca01_f9dd;
    const MIX_RIGHT: u32 = 0x4973_f715;

    fn hash(value: u32, constant: &mut u32, multiplier: u32) -> u32 {
        let value = value ^ *constant;
        *constant = constant.wrapping_mul(multiplier);
        let value = value.wrapping_mul(*constant);
        value ^ value >> 16
    }

    let mut constant = INIT_A;
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut pool = entropy.map(|word| hash(word, &mut constant, MULT_A));
    for source in 0..4 {
        for target in 0..4 {
            if source != target {
                let hashed = hash(pool[source], &mut constant, MULT_A);
                let mixed = MIX_LEFT
                    .wrapping_mul(pool[target])
                    .wrapping_sub(MIX_RIGHT.wrapping_mul(hashed));
                pool[target] = mixed ^ mixed >> 16;
            }
        }
    }
    let mut constant = INIT_B;
    let mut words = [0u64; 4];
    for index in 0..8 {
        let word = u64::from(hash(pool[index % 4], &mut constant, MULT_B));
        words[index / 2] |= word << (32 * (index % 2));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// numpy 2.3.5: `default_rng(seed).integers(0, high, 4)`.
    #[test]
    fn equals_numpy() {
        let draw = |seed, high| Generator::new(seed).integers(high, 4);
        let high = 46_539_438_283_891;
        assert_eq!(
            draw(10_007, high),
            [38_316_048_023_122, 2_419_938_046_656, 17_979_836_159_674, 36_993_668_729_195]
        );
        assert_eq!(
            draw(140_098, high),
            [33_858_405_369_630, 25_755_403_400_457, 15_460_673_601_360, 41_309_613_242_795]
        );
    }

    /// numpy 2.4.6: a draw, then two more below 2^40 from the same generator. Bounds up to 2^32 use
    /// halves of 64-bit words.
    #[test]
    fn narrow_ranges_equal_numpy() {
        let cases: &[(u64, u64, &[u64], [u64; 2])] = &[
            (10_007, 1000, &[149, 823, 619, 51, 547], [873_989_253_452, 472_001_226_830]),
            (
                3,
                1 << 32,
                &[3_485_385_464, 367_860_371, 770_692_085, 1_017_093_381],
                [881_010_591_534, 640_093_927_902],
            ),
            (
                3,
                (1 << 32) - 1,
                &[3_485_385_463, 367_860_370, 770_692_084, 1_017_093_380],
                [881_010_591_534, 640_093_927_902],
            ),
            (
                7 * (1 << 40) + 1,
                1 << 33,
                &[6_584_255_009, 7_086_296_292, 1_572_561_931],
                [335_265_435_324, 131_743_667_112],
            ),
            (0, 7, &[5, 4, 3, 1, 2], [18_172_327_443, 894_200_084_524]),
            (
                42,
                (1 << 31) + 1,
                &[942_484_272, 1_843_824_993, 184_566_854, 1_497_586_439, 432_652_533, 202_244_314],
                [1_072_708_119_942, 836_881_952_700],
            ),
        ];
        for &(seed, high, first, then) in cases {
            let mut generator = Generator::new(seed);
            assert_eq!(generator.integers(high, first.len()), first, "{seed} {high}");
            assert_eq!(generator.integers(1 << 40, 2), then, "{seed} {high}");
        }
    }

    #[test]
    fn a_range_of_one_draws_nothing() {
        let mut generator = Generator::new(5);
        assert_eq!(generator.integers(1, 3), [0, 0, 0]);
        assert_eq!(generator.integers(1000, 2), Generator::new(5).integers(1000, 2));
    }
}
