//! AVX-512.
//!
//! Every `unsafe` below rests on one promise of the caller: the processor has the instruction set,
//! and there is memory for what is read and written. Loads and stores are unaligned.

use super::avx2::tree8;
use super::scales::scaled_e2m1;
use super::simd::{Bf16, Decode, EXPANDED, F32, MAX_MR, Simd, tile};
use crate::cpu::lanes::LANES;
use crate::formats::{e2m1, e4m3};
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl Simd for Avx512 {
    type V = __m512;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn fma(x: Self::V, y: Self::V, acc: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(x, y, acc) }
    }

    #[inline(always)]
    unsafe fn tree(v: Self::V) -> f32 {
        // SAFETY: see above.
        unsafe { tree8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))) }
    }

    #[inline(always)]
    unsafe fn mul(x: Self::V, y: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(x, y) }
    }

    #[inline(always)]
    unsafe fn halves(a: f32, b: f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(a), _mm512_set1_ps(b)) }
    }

    #[inline(always)]
    unsafe fn trees(acc: *const f32, stride: usize) -> [f32; LANES] {
        // SAFETY: see above.
        unsafe { trees_avx512(acc, stride) }
    }

    const MR: usize = 6;
    const NR: usize = 4;

    unsafe fn tile(
        count: usize,
        x: &[*const f32; MAX_MR],
        w: *const f32,
        steps: usize,
        first: bool,
        acc: *mut f32,
    ) {
        // SAFETY: see above.
        unsafe { tile_avx512(count, x, w, steps, first, acc) }
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
unsafe fn tile_avx512(
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
            1 => tile::<Avx512, 1, 4>(x, w, steps, first, acc),
            2 => tile::<Avx512, 2, 4>(x, w, steps, first, acc),
            3 => tile::<Avx512, 3, 4>(x, w, steps, first, acc),
            4 => tile::<Avx512, 4, 4>(x, w, steps, first, acc),
            5 => tile::<Avx512, 5, 4>(x, w, steps, first, acc),
            _ => tile::<Avx512, 6, 4>(x, w, steps, first, acc),
        }
    }
}

/// Four vectors at each of `acc`, `acc + stride`, ...: the sums of all 16, every step for all of them.
#[target_feature(enable = "avx512f")]
unsafe fn trees_avx512(acc: *const f32, stride: usize) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: see above.
    unsafe {
        // Vector `4 i + b` in place `i + 4 b`, so that the sums come out in order.
        let mut v = [_mm512_setzero_ps(); LANES];
        for p in 0..LANES {
            v[p] = _mm512_loadu_ps(acc.add(p % 4 * stride + p / 4 * LANES));
        }
        // Lanes 8 apart: each result has 8 lanes of two vectors.
        for i in 0..8 {
            let (a, b) = (v[2 * i], v[2 * i + 1]);
            let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
            v[i] = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
        }
        // 4 apart: 4 lanes of four vectors.
        for i in 0..4 {
            let (a, b) = (v[2 * i], v[2 * i + 1]);
            let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
            v[i] = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
        }
        // 2 apart.
        for i in 0..2 {
            let (a, b) = (_mm512_castps_pd(v[2 * i]), _mm512_castps_pd(v[2 * i + 1]));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            v[i] = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        let low = _mm512_shuffle_ps::<0b10_00_10_00>(v[0], v[1]);
        let sums = _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_01_11_01>(v[0], v[1]));
        _mm512_storeu_ps(out.as_mut_ptr(), sums);
    }
    out
}

impl Decode<Avx512, 1> for F32 {
    const BYTES: usize = 64;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, _: *const u8) -> [__m512; 1] {
        // SAFETY: see above.
        unsafe { [Avx512::load(codes.cast())] }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [__m512; 1] {
        // SAFETY: see above.
        unsafe { [Avx512::load(codes.cast())] }
    }
}

impl Decode<Avx512, 1> for Bf16 {
    const BYTES: usize = 32;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, _: *const u8) -> [__m512; 1] {
        // SAFETY: see above.
        unsafe { Decode::<Avx512, 1>::codes(self, codes) }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [__m512; 1] {
        // SAFETY: see above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(codes.cast()));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))]
        }
    }
}

/// E2M1 with AVX-512: a table of 16 values for each scale, looked up by nibbles.
#[derive(Clone, Copy)]
pub(super) struct Fp4Avx512 {
    values: __m512,
    shifts: __m512i,
}

impl Fp4Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new() -> Self {
        // SAFETY: see above.
        unsafe {
            let values = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
            let shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
            Self { values, shifts }
        }
    }

    #[inline(always)]
    unsafe fn look_up(self, codes: *const u8, values: __m512) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe {
            // Lane 4 * i + d sees nibble i of dword d, then nibble i + 4.
            let all = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.cast()));
            let low = _mm512_srlv_epi32(all, self.shifts);
            let high = _mm512_srli_epi32::<16>(low);
            [_mm512_permutexvar_ps(low, values), _mm512_permutexvar_ps(high, values)]
        }
    }
}

impl Decode<Avx512, 2> for Fp4Avx512 {
    const BYTES: usize = 16;
    const SCALES: usize = 1;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const u8) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, _mm512_load_ps(scaled_e2m1(*scale).as_ptr())) }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, self.values) }
    }
}

/// E4M3 with AVX-512 VBMI: two tables of 128 bytes give the halves of the bf16 of a magnitude.
#[derive(Clone, Copy)]
pub(super) struct Fp8Vbmi {
    low: [__m512i; 2],
    high: [__m512i; 2],
}

static BF16_LOW: [u8; 128] = bf16_bytes(0);
static BF16_HIGH: [u8; 128] = bf16_bytes(8);

/// A byte of the bf16 of every magnitude.
const fn bf16_bytes(shift: u32) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut code = 0;
    while code < 128 {
        bytes[code] = (e4m3::VALUES[code].to_bits() >> 16 >> shift) as u8;
        code += 1;
    }
    bytes
}

impl Fp8Vbmi {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new() -> Self {
        // SAFETY: see above; both halves of the tables are 64 bytes.
        unsafe {
            let (low, high) = (BF16_LOW.as_ptr(), BF16_HIGH.as_ptr());
            Self {
                low: [_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(low.add(64).cast())],
                high: [_mm512_loadu_si512(high.cast()), _mm512_loadu_si512(high.add(64).cast())],
            }
        }
    }
}

impl Decode<Avx512, 4> for Fp8Vbmi {
    const BYTES: usize = 64;
    const SCALES: usize = EXPANDED;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const u8) -> [__m512; 4] {
        // SAFETY: see above.
        unsafe {
            let scale = _mm512_loadu_ps(scale.cast());
            let [a, b, c, d] = self.codes(codes);
            [
                _mm512_mul_ps(a, scale),
                _mm512_mul_ps(b, scale),
                _mm512_mul_ps(c, scale),
                _mm512_mul_ps(d, scale),
            ]
        }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [__m512; 4] {
        // SAFETY: see above.
        unsafe {
            let codes = _mm512_loadu_si512(codes.cast());
            // Indices use the low 7 bits of a code; its sign bit joins the high byte.
            let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
            let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
            let sign = _mm512_set1_epi8(i8::MIN);
            let high = _mm512_ternarylogic_epi32::<0xF8>(high, codes, sign);
            let odd = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
            let first = _mm512_unpacklo_epi8(low, high);
            let second = _mm512_unpackhi_epi8(low, high);
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
                _mm512_castsi512_ps(_mm512_and_si512(first, odd)),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
                _mm512_castsi512_ps(_mm512_and_si512(second, odd)),
            ]
        }
    }
}
