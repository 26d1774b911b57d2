//! Scales as the kernels read them, and rows that end inside a chunk.

use super::Magnitudes;
use super::simd::Simd;
use crate::cpu::lanes::{self, LANES};
use crate::formats::{e2m1, ue8m0};
use crate::tensor::{Format, StoredMatrix};
use std::ops::Range;

/// The values of the 16 codes of E2M1 times a scale, for each scale byte: half of a first cache if
/// all scales occurred, but few do.
#[repr(align(64))]
struct ScaledE2m1([[f32; LANES]; 256]);

static SCALED_E2M1: ScaledE2m1 = {
    let mut table = [[0.0; LANES]; 256];
    let mut byte = 0;
    while byte < table.len() {
        let scale = match byte {
            0 => f32::from_bits(0x0040_0000),
            255 => f32::NAN,
            _ => f32::from_bits((byte as u32) << 23),
        };
        let mut code = 0;
        while code < LANES {
            table[byte][code] = e2m1::VALUES[code] * scale;
            code += 1;
        }
        byte += 1;
    }
    ScaledE2m1(table)
};

/// The values of the codes of E2M1 times the scale that a byte stands for; starts at a cache line.
#[inline(always)]
pub(super) fn scaled_e2m1(byte: u8) -> &'static [f32; LANES] {
    &SCALED_E2M1.0[usize::from(byte)]
}

/// The scales of chunks `chunks` of row `r`: an f32 for each lane of a chunk of 64 columns, where
/// lanes 0 to 7 hold the first 32 columns. A group that the row does not reach has scale 1.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn expand<S: Simd>(
    w: &StoredMatrix,
    r: usize,
    chunks: Range<usize>,
    out: &mut [f32],
) {
    let bytes = w.row_scales(r);
    let bytes = &bytes[2 * chunks.start..bytes.len().min(2 * chunks.end)];
    for (bytes, out) in bytes.chunks(2).zip(out.as_chunks_mut::<LANES>().0) {
        let second = bytes.get(1).map_or(1.0, |byte| ue8m0::decode(*byte));
        // SAFETY: `out` is 16 values; the caller has the instruction set.
        unsafe { S::store(out.as_mut_ptr(), S::halves(ue8m0::decode(bytes[0]), second)) };
    }
}

/// Whether scales are far enough from the ends of the range for every weight to be exact.
#[inline(always)]
pub(super) fn are_moderate(bytes: &[u8]) -> bool {
    bytes.iter().fold(true, |good, byte| good & (14..=240).contains(byte))
}

/// Whether the products of values of these magnitudes and any of these scales are exact: values and
/// products are 0 or normal numbers.
#[inline(always)]
pub(super) fn are_exact(bytes: &[u8], Magnitudes { least, largest }: Magnitudes) -> bool {
    const BIAS: u32 = 127;
    let low = bytes.iter().fold(u8::MAX, |low, byte| low.min(*byte));
    let high = bytes.iter().fold(0, |high, byte| high.max(*byte));
    let [smallest, biggest] = [least, largest].map(|bits| bits >> 23);
    let normal = smallest >= 1 && biggest <= 254;
    let stay = smallest + u32::from(low) > BIAS && biggest + u32::from(high) <= 254 + BIAS;
    largest == 0 || normal && stay
}

/// `out = x * scale` in the lane order of fp8, for scales of 32 columns each that are normal
/// numbers.
///
/// # Safety
/// The processor has the instruction set; `out` is as long as `x`, which is padded to whole chunks
/// of 64.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd>(x: &[f32], scales: &[u8], out: &mut [f32]) {
    const STEPS: usize = 4;
    assert!(x.len() <= scales.len().div_ceil(2) * STEPS * LANES && x.len() == out.len());
    // SAFETY: every access lies in a chunk of x and out; the caller has the instruction set.
    unsafe {
        for (c, scales) in scales.chunks(2).enumerate().take(x.len() / (STEPS * LANES)) {
            let power = |byte: u8| f32::from_bits(u32::from(byte) << 23);
            let scale = S::halves(power(scales[0]), power(scales[scales.len() - 1]));
            for s in 0..STEPS {
                let at = (c * STEPS + s) * LANES;
                S::store(out.as_mut_ptr().add(at), S::mul(S::load(x.as_ptr().add(at)), scale));
            }
        }
    }
}

/// Room for the last, partial chunk of `R` rows, filled up with zeros.
pub(super) struct Tail<const R: usize>([[u8; 64]; R]);

impl<const R: usize> Tail<R> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([[0; 64]; R])
    }

    /// Where the last chunks of these rows start; `None` if the rows end with a whole chunk, which
    /// is `chunk_bytes` long.
    #[inline(always)]
    pub(super) fn of(
        &mut self,
        w: &StoredMatrix,
        rows: [&[u8]; R],
        chunk_bytes: usize,
    ) -> Option<[*const u8; R]> {
        let chunk = lanes::chunk(w.format);
        if w.cols.is_multiple_of(chunk) {
            return None;
        }
        let from = w.cols / chunk * chunk_bytes;
        for (bytes, row) in self.0.iter_mut().zip(rows) {
            let rest = &row[from..];
            bytes[..rest.len()].copy_from_slice(rest);
            if w.format == Format::Fp4Row32 && !w.cols.is_multiple_of(2) {
                bytes[rest.len() - 1] &= 0x0F;
            }
        }
        Some(std::array::from_fn(|r| self.0[r].as_ptr()))
    }
}
