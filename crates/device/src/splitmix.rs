//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

/// What the state grows by from number to number.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number of a state.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The number after the state `z`.
pub fn next(z: u64) -> u64 {
    mix(z.wrapping_add(STEP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference() {
        // The first numbers of the reference implementation from the seed 1234567.
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        let numbers = [0, 1].map(|i: u64| next(1_234_567u64.wrapping_add(i.wrapping_mul(STEP))));
        assert_eq!(numbers, expected);
    }
}
