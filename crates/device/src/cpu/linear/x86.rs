//! x86-64 instruction sets.

use super::Rows;
use super::few::few;
use super::many::many;
use super::simd::{Decode, MAX_MR, Simd, tile};
use crate::formats::{e2m1, e4m3};
use crate::tensor::{Format, StoredMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// AVX2, FMA and F16C: lanes 0 to 7, and 8 to 15.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

// SAFETY (all methods below): the caller provides the instruction set, and memory for what is read
// and written; loads and stores are unaligned.
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
    unsafe fn fma(x: Self::V, y: Self::V, acc: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(x[0], y[0], acc[0]), _mm256_fmadd_ps(x[1], y[1], acc[1])] }
    }

    #[inline(always)]
    unsafe fn tree(v: Self::V) -> f32 {
        // SAFETY: see above.
        unsafe { tree8(_mm256_add_ps(v[0], v[1])) }
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
unsafe fn tree8(v: __m256) -> f32 {
    // SAFETY: as for `Avx2`.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

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
    unsafe fn fma(x: Self::V, y: Self::V, acc: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(x, y, acc) }
    }

    #[inline(always)]
    unsafe fn tree(v: Self::V) -> f32 {
        // SAFETY: see above.
        unsafe { tree8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))) }
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

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2(
    count: usize,
    x: &[*const f32; MAX_MR],
    w: *const f32,
    steps: usize,
    first: bool,
    acc: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match count {
            1 => tile::<Avx2, 1, 2>(x, w, steps, first, acc),
            2 => tile::<Avx2, 2, 2>(x, w, steps, first, acc),
            _ => tile::<Avx2, 3, 2>(x, w, steps, first, acc),
        }
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
    // SAFETY: the caller's promise.
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

/// f32 weights: nothing to look up.
#[derive(Clone, Copy)]
pub(super) struct F32;
/// bf16 weights.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

macro_rules! plain_formats {
    ($simd:ty, $bf16:expr) => {
        impl Decode<$simd, 1> for F32 {
            const BYTES: usize = 64;
            const SCALES: usize = 0;

            #[inline(always)]
            unsafe fn weights(self, codes: *const u8, _: *const f32) -> [<$simd as Simd>::V; 1] {
                // SAFETY: see above.
                unsafe { [<$simd>::load(codes.cast())] }
            }

            #[inline(always)]
            unsafe fn codes(self, codes: *const u8) -> [<$simd as Simd>::V; 1] {
                // SAFETY: see above.
                unsafe { [<$simd>::load(codes.cast())] }
            }
        }

        impl Decode<$simd, 1> for Bf16 {
            const BYTES: usize = 32;
            const SCALES: usize = 0;

            #[inline(always)]
            unsafe fn weights(self, codes: *const u8, _: *const f32) -> [<$simd as Simd>::V; 1] {
                // SAFETY: see above.
                unsafe { [$bf16(codes)] }
            }

            #[inline(always)]
            unsafe fn codes(self, codes: *const u8) -> [<$simd as Simd>::V; 1] {
                // SAFETY: see above.
                unsafe { [$bf16(codes)] }
            }
        }
    };
}

plain_formats!(Avx2, bf16_avx2);
plain_formats!(Avx512, bf16_avx512);

#[inline(always)]
unsafe fn bf16_avx2(codes: *const u8) -> [__m256; 2] {
    // SAFETY: as for `Avx2`.
    unsafe {
        let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(codes.cast()));
        let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(codes.add(16).cast()));
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
        ]
    }
}

#[inline(always)]
unsafe fn bf16_avx512(codes: *const u8) -> __m512 {
    // SAFETY: as for `Avx2`.
    unsafe {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(codes.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
}

/// E2M1 with AVX-512: a table of 16 values, scaled, looked up by nibbles.
#[derive(Clone, Copy)]
pub(super) struct Fp4Avx512 {
    values: __m512,
    shifts: __m512i,
}

impl Fp4Avx512 {
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: as for `Avx2`.
        unsafe {
            let values = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
            let shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
            Self { values, shifts }
        }
    }

    #[inline(always)]
    unsafe fn look_up(self, codes: *const u8, values: __m512) -> [__m512; 2] {
        // SAFETY: as for `Avx2`.
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
    unsafe fn weights(self, codes: *const u8, scale: *const f32) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, _mm512_mul_ps(self.values, _mm512_set1_ps(*scale))) }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, self.values) }
    }
}

/// E2M1 with AVX2: a table of 8 magnitudes, and the sign moved to its place.
#[derive(Clone, Copy)]
pub(super) struct Fp4Avx2;

impl Fp4Avx2 {
    #[inline(always)]
    unsafe fn look_up(self, codes: *const u8, values: __m256) -> [[__m256; 2]; 2] {
        // SAFETY: as for `Avx2`.
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
        // SAFETY: as for `Avx2`.
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
    unsafe fn weights(self, codes: *const u8, scale: *const f32) -> [[__m256; 2]; 2] {
        // SAFETY: see above.
        unsafe {
            let values = _mm256_loadu_ps(e2m1::VALUES.as_ptr());
            self.look_up(codes, _mm256_mul_ps(values, _mm256_set1_ps(*scale)))
        }
    }

    #[inline(always)]
    unsafe fn codes(self, codes: *const u8) -> [[__m256; 2]; 2] {
        // SAFETY: see above.
        unsafe { self.look_up(codes, _mm256_loadu_ps(e2m1::VALUES.as_ptr())) }
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
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: as for `Avx2`; both halves of the tables are 64 bytes.
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
    const SCALES: usize = 16;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const f32) -> [__m512; 4] {
        // SAFETY: see above.
        unsafe {
            let scale = _mm512_loadu_ps(scale);
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

/// E4M3 with AVX2 and F16C: a code is an f16 of a 256th of its value, but for NaN.
#[derive(Clone, Copy)]
pub(super) struct Fp8Avx2;

impl Fp8Avx2 {
    /// 32 codes: four steps of 8 lanes.
    #[inline(always)]
    unsafe fn half(codes: *const u8) -> [__m256; 4] {
        // SAFETY: as for `Avx2`.
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
    const SCALES: usize = 16;

    #[inline(always)]
    unsafe fn weights(self, codes: *const u8, scale: *const f32) -> [[__m256; 2]; 4] {
        // SAFETY: see above.
        unsafe {
            let [low, high] = Avx2::load(scale);
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

/// Defines the products of an instruction set: for each format, how codes are widened (in `STEPS`
/// steps a chunk), and how many stored rows a few activation rows are multiplied with at a time.
macro_rules! products {
    ($name:ident, $features:literal, $simd:ty, $few:literal,
        { $($format:pat => $decode:expr, $steps:literal;)* } $(else $other:ident)?) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(x: &Rows, w: &StoredMatrix, n: Range<usize>, out: &mut [f32]) {
            // SAFETY: the instruction set is enabled here; `Rows` are in the lane order of `w`.
            unsafe {
                match w.format {
                    $($format => {
                        let decode = $decode;
                        match x.len() {
                            0 => {}
                            1 => few::<$simd, _, $steps, 1, $few>(decode, x, w, n, out),
                            2 => few::<$simd, _, $steps, 2, $few>(decode, x, w, n, out),
                            3 | 4 => few::<$simd, _, $steps, 4, $few>(decode, x, w, n, out),
                            _ => many::<$simd, _, $steps>(decode, x, w, n, out),
                        }
                    })*
                    $(_ => $other(x, w, n, out),)?
                }
            }
        }
    };
}

products!(block_avx2, "avx2,fma,f16c", Avx2, 4, {
    Format::F32 => F32, 1;
    Format::Bf16 => Bf16, 1;
    Format::Fp8Block32 | Format::Fp8Row32 => Fp8Avx2, 4;
    Format::Fp4Row32 => Fp4Avx2, 2;
});
products!(block_avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", Avx512, 4, {
    Format::F32 => F32, 1;
    Format::Bf16 => Bf16, 1;
    Format::Fp4Row32 => Fp4Avx512::new(), 2;
} else block_avx2);
products!(block_vbmi, "avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", Avx512, 4, {
    Format::Fp8Block32 | Format::Fp8Row32 => Fp8Vbmi::new(), 4;
} else block_avx512);
