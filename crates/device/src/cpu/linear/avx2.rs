//! AVX2.
//!
//! Every `unsafe` below rests on one promise of the caller: the processor has the instruction set,
//! and there is memory for what is read and written. Loads and stores are unaligned.

use super::scales::scaled_e2m1;
use super::simd::{Bf16, Decode, EXPANDED, F32, MAX_MR, Simd, tile};
use crate::formats::{e2m1, e4m3};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C: lanes 0 to 7, and 8 to 15.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

impl Simd for Avx2 {
    type V = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn fma(x: Self::V, y: Self::V, acc: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(x[0], y[0], acc[0]), _mm256_fmadd_ps(x[1], y[1], acc[1])] }
    }

    #[inline(always)]
    unsafe fn tree(v: Self::V) -> f32 {
        // SAFETY: see above.
        unsafe { tree8(_mm256_add_ps(v[0], v[1])) }
    }

    #[inline(always)]
    unsafe fn mul(x: Self::V, y: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(x[0], y[0]), _mm256_mul_ps(x[1], y[1])] }
    }

    #[inline(always)]
    unsafe fn halves(a: f32, b: f32) -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(a), _mm256_set1_ps(b)] }
    }

    const MR: usize = 3;
    const NR: usize = 2;

    unsafe fn tile(
        count: usize,
        x: &[*const f32; MAX_MR],
        w: *const f32,
        steps: usize,
        first: bool,
        acc: *mut f32,
    ) {
        // SAFETY: see above.
        unsafe { tile_avx2(count, x, w, steps, first, acc) }
    }
}

#[inline(always)]
pub(super) unsafe fn tree8(v: __m256) -> f32 {
    // SAFETY: see above.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2(
    count: usize,
    x: &[*const f32; MAX_MR],
    w: *const f32,
    steps: usize,
    first: bool,
    acc: *mut f32,
) {
    // SAFETY: see above.
    unsafe {
        match count {
            1 => tile::<Avx2, 1, 2>(x, w, steps, first, acc),
            2 => tile::<Avx2, 2, 2>(x, w, steps, first, acc),
            _ => tile::<Avx2, 3, 2>(x, w, steps, first, acc),
        }
    }
}

impl Decode<Avx2, 1> for F32 {
    const BYTES: usize = 64;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, _: *const u8) -> [[__m256; 2]; 1] {
        // SAFETY: see above.
        unsafe { [Avx2::load(codes.cast())] }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [[__m256; 2]; 1] {
        // SAFETY: see above.
        unsafe { [Avx2::load(codes.cast())] }
    }
}

impl Decode<Avx2, 1> for Bf16 {
    const BYTES: usize = 32;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, _: *const u8) -> [[__m256; 2]; 1] {
        // SAFETY: see above.
        unsafe { Decode::<Avx2, 1>::codes(self, codes) }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [[__m256; 2]; 1] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(codes.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(codes.add(16).cast()));
            [[
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]]
        }
    }
}

/// E2M1 with AVX2: a table of 8 magnitudes for each scale, and the sign moved to its place.
#[derive(Clone, Copy)]
pub(super) struct Fp4Avx2;

impl Fp4Avx2 {
    #[inline(always)]
    unsafe fn look_up(self, codes: *const u8, values: __m256) -> [[__m256; 2]; 2] {
        // SAFETY: see above.
        unsafe {
            let all = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.cast()));
            let first = _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
            let second = _mm256_srlv_epi32(all, _mm256_setr_epi32(8, 8, 8, 8, 12, 12, 12, 12));
            let (first_high, second_high) =
                (_mm256_srli_epi32::<16>(first), _mm256_srli_epi32::<16>(second));
            [
                [Self::values_of(first, values), Self::values_of(second, values)],
                [Self::values_of(first_high, values), Self::values_of(second_high, values)],
            ]
        }
    }

    /// The value of the low nibble of each lane.
    #[inline(always)]
    unsafe fn values_of(nibbles: __m256i, values: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let sign = _mm256_set1_epi32(i32::MIN);
            let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(nibbles), sign);
            let magnitude = _mm256_permutevar8x32_ps(values, nibbles);
            _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign))
        }
    }
}

impl Decode<Avx2, 2> for Fp4Avx2 {
    const BYTES: usize = 16;
    const SCALES: usize = 1;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const u8) -> [[__m256; 2]; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, _mm256_loadu_ps(scaled_e2m1(*scale).as_ptr())) }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [[__m256; 2]; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, _mm256_loadu_ps(e2m1::VALUES.as_ptr())) }
    }
}

/// E4M3 with AVX2 and F16C: a code is an f16 of a 256th of its value, but for NaN.
#[derive(Clone, Copy)]
pub(super) struct Fp8Avx2;

impl Fp8Avx2 {
    /// 32 codes: four steps of 8 lanes.
    #[inline(always)]
    unsafe fn half(codes: *const u8) -> [__m256; 4] {
        // SAFETY: see above.
        unsafe {
            let codes = _mm256_loadu_si256(codes.cast());
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7F));
            let nan = _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7F));
            if _mm256_movemask_epi8(nan) != 0 {
                return with_nan(codes);
            }
            let by_step = _mm256_setr_epi8(
                0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8,
                10, 12, 14, 9, 11, 13, 15,
            );
            let codes = _mm256_shuffle_epi8(codes, by_step);
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let codes = _mm256_permutevar8x32_epi32(codes, order);
            let zero = _mm256_setzero_si256();
            let mask = _mm256_set1_epi16(0xBF80u16 as i16);
            let even = _mm256_srai_epi16::<1>(_mm256_unpacklo_epi8(zero, codes));
            let odd = _mm256_srai_epi16::<1>(_mm256_unpackhi_epi8(zero, codes));
            let (even, odd) = (_mm256_and_si256(even, mask), _mm256_and_si256(odd, mask));
            let unit = _mm256_set1_ps(256.0);
            [
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(even)), unit),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(odd)), unit),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(even)), unit),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(odd)), unit),
            ]
        }
    }
}

/// 32 codes one by one.
#[cold]
#[target_feature(enable = "avx2")]
fn with_nan(codes: __m256i) -> [__m256; 4] {
    let mut bytes = [0u8; 32];
    // SAFETY: the array is as long as the register.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), codes) };
    let mut values = [[0.0f32; 8]; 4];
    for (c, code) in bytes.iter().enumerate() {
        values[2 * (c / 8 % 2) + c % 2][4 * (c / 16) + c / 2 % 4] = e4m3::decode(*code);
    }
    // SAFETY: the arrays are as long as the registers.
    values.map(|v| unsafe { _mm256_loadu_ps(v.as_ptr()) })
}

impl Decode<Avx2, 4> for Fp8Avx2 {
    const BYTES: usize = 64;
    const SCALES: usize = EXPANDED;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const u8) -> [[__m256; 2]; 4] {
        // SAFETY: see above.
        unsafe {
            let [low, high] = Avx2::load(scale.cast());
            let mut weights = self.codes(codes);
            for w in &mut weights {
                *w = [_mm256_mul_ps(w[0], low), _mm256_mul_ps(w[1], high)];
            }
            weights
        }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [[__m256; 2]; 4] {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (Self::half(codes), Self::half(codes.add(32)));
            [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
        }
    }
}
