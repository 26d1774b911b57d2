//! Number formats of checkpoints and caches.
//!
//! - [`e4m3`], [`e2m1`], [`ue8m0`]: single codes.
//! - [`rows`]: rows of a cache ([`RowFormat`](crate::tensor::RowFormat)).
//! - [`blocks`]: weight matrices ([`Format`](crate::tensor::Format)).

pub mod blocks;
pub mod e2m1;
pub mod e4m3;
pub mod rows;
pub mod ue8m0;

pub use blocks::{dequantize_matrix_row, encode_matrix};
pub use rows::{decode_row, encode_row, round_row};

/// The largest magnitude in `x`; NaN if `x` holds a NaN, 0 if it is empty.
fn amax(x: &[f32]) -> f32 {
    // Magnitudes order like their bits, and NaN lies above infinity.
    f32::from_bits(x.iter().map(|v| v.abs().to_bits()).max().unwrap_or(0))
}

/// `max(x, floor)` that keeps a NaN.
fn at_least(x: f32, floor: f32) -> f32 {
    if x < floor { floor } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amax_keeps_nan_and_infinity() {
        assert_eq!(amax(&[]), 0.0);
        assert_eq!(amax(&[-3.0, 2.0, -0.0]), 3.0);
        assert_eq!(amax(&[1.0, f32::NEG_INFINITY]), f32::INFINITY);
        assert!(amax(&[1.0, f32::NAN, f32::INFINITY]).is_nan());
        assert!(amax(&[-f32::NAN, 5.0]).is_nan());
        assert!(at_least(f32::NAN, 1.0).is_nan());
    }
}
