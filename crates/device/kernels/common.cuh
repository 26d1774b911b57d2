// What all kernels share: bf16, number formats, elementary functions, fixed-order sums.
//
// Everything here is compiled without fast-math: additions, products, divisions and square roots
// round as IEEE 754 says, and a product and a sum are fused only where fmaf is written.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ABSENT 0xffffffffu

// ---- bf16 ----

struct alignas(2) bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(bf16 x) {
    return __uint_as_float((u32)x.bits << 16);
}

// Nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bf16{bits};
}

// Two values in a word, the first in the low half.
__device__ __forceinline__ float low(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ u32 narrow2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Products of two pairs.
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 c;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));
    return c;
}

// ---- codes ----

// Value of a UE8M0 byte: 2^(byte - 127).
__device__ __forceinline__ float ue8m0(u32 byte) {
    u32 bits = max(byte << 23, 0x00400000u);
    return __uint_as_float(byte == 255 ? 0x7fc00000u : bits);
}

// Byte of the smallest power of two that is at least x, which is not negative.
__device__ __forceinline__ u32 ue8m0_ceil(float x) {
    u32 bits = __float_as_uint(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) {
        return 255;
    }
    if (bits <= 0x00400000u) {
        return 0;
    }
    return min((bits + 0x007fffffu) >> 23, 254u);
}

__device__ __forceinline__ float e4m3(u32 code) {
    u32 magnitude = code & 0x7f;
    // Exponent bias 7 becomes 127. Below 2^-6 the mantissa counts multiples of 2^-9: put on top of
    // 2^-6, which is taken off again.
    float normal = __uint_as_float((magnitude << 20) + (120u << 23));
    float small = __uint_as_float((magnitude << 20) + (121u << 23)) - 0.015625f;
    float value = magnitude < 8 ? small : normal;
    u32 bits = magnitude == 0x7f ? 0x7fc00000u : __float_as_uint(value);
    return __uint_as_float(bits | (code & 0x80) << 24);
}

// Nearest code, ties to even, saturating; NaN gives NaN.
__device__ __forceinline__ u32 e4m3_of(float x) {
    u32 bits = __float_as_uint(x);
    u32 sign = bits >> 24 & 0x80;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return sign | 0x7f;
    }
    float magnitude = fminf(fabsf(x), 448.0f);
    u32 code;
    if (magnitude < 0.015625f) {
        code = (u32)__float2int_rn(magnitude * 512.0f);
    } else {
        u32 m = __float_as_uint(magnitude);
        code = ((m + 0x7ffffu + (m >> 20 & 1)) >> 20) - (120u << 3);
    }
    return sign | code;
}

__device__ __forceinline__ float e2m1(u32 code) {
    u32 magnitude = code & 7;
    float normal = __uint_as_float((magnitude << 22) + (126u << 23));
    float small = __uint_as_float((magnitude << 22) + (127u << 23)) - 1.0f;
    float value = magnitude < 2 ? small : normal;
    return __uint_as_float(__float_as_uint(value) | (code & 8) << 28);
}

// Nearest code, ties to even, saturating; the sign survives; NaN gives a zero.
__device__ __forceinline__ u32 e2m1_of(float x) {
    float m = fabsf(x);
    u32 code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f)
        + (m > 5.0f);
    return (__float_as_uint(x) >> 28 & 8) | code;
}

// ---- weights in registers ----

// Four E4M3 codes times 2^-120, as two pairs of bf16; exact. (Codes of NaN read as 480.)
__device__ __forceinline__ void e4m3x4(u32 codes, u32& first, u32& second) {
    u32 a = __byte_perm(codes, 0, 0x1404);
    u32 b = __byte_perm(codes, 0, 0x3424);
    first = (a >> 4 & 0x07f007f0u) | (a & 0x80008000u);
    second = (b >> 4 & 0x07f007f0u) | (b & 0x80008000u);
}

// Eight E2M1 codes times 2^-126, as four pairs of bf16; exact.
__device__ __forceinline__ void e2m1x8(u32 codes, u32 (&pairs)[4]) {
    u32 even = codes << 4;
    u32 a = __byte_perm(even, codes, 0x4404);
    u32 b = __byte_perm(even, codes, 0x5515);
    u32 c = __byte_perm(even, codes, 0x6626);
    u32 d = __byte_perm(even, codes, 0x7737);
    pairs[0] = (a >> 6 & 0x01c001c0u) | (a & 0x80008000u);
    pairs[1] = (b >> 6 & 0x01c001c0u) | (b & 0x80008000u);
    pairs[2] = (c >> 6 & 0x01c001c0u) | (c & 0x80008000u);
    pairs[3] = (d >> 6 & 0x01c001c0u) | (d & 0x80008000u);
}

// The factor that puts a pair of such codes right: 2^120 or 2^126 times the scale.
__device__ __forceinline__ u32 e4m3_factor(u32 scale) {
    return (scale + 120) * 0x00800080u;
}

__device__ __forceinline__ u32 e2m1_factor(u32 scale) {
    return (scale + 126) * 0x00800080u;
}

// ---- tensor cores ----

// c += a b: a is 16 x 16 (row-major fragments), b 16 x 8, f32 sums.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- elementary functions ----
// The polynomials of the CPU, in the same order of operations, so the same bits.

__device__ __forceinline__ float pow2i(int n) {
    return __uint_as_float((u32)(n + 127) << 23);
}

__device__ __forceinline__ float exp_f32(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float rounded = __fmaf_rn(x, 1.44269504f, 12582912.0f);
    float n = __fsub_rn(rounded, 12582912.0f);
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = __uint_as_float(0x3ab51129u);
    p = __fmaf_rn(p, r, __uint_as_float(0x3c091d81u));
    p = __fmaf_rn(p, r, __uint_as_float(0x3d2aac7cu));
    p = __fmaf_rn(p, r, __uint_as_float(0x3e2aaa48u));
    p = __fmaf_rn(p, r, __uint_as_float(0x3efffffeu));
    p = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), p, r), 1.0f);
    int i = (int)(__float_as_uint(rounded) - __float_as_uint(12582912.0f));
    int i1 = i >> 1;
    return __fmul_rn(__fmul_rn(p, pow2i(i1)), pow2i(i - i1));
}

__device__ __forceinline__ float log_f32(float x) {
    bool tiny = x < 1.17549435e-38f;
    float scaled = tiny ? __fmul_rn(x, 16777216.0f) : x;
    float lift = tiny ? -24.0f : 0.0f;
    u32 shifted = __float_as_uint(scaled) - 0x3f3504f3u;
    float e = __fadd_rn((float)((int)shifted >> 23), lift);
    float m = __uint_as_float((shifted & 0x007fffffu) + 0x3f3504f3u);
    float f = __fsub_rn(m, 1.0f);
    float p = __uint_as_float(0x3d8da802u);
    p = __fmaf_rn(p, f, __uint_as_float(0xbdf17e99u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3df32a87u));
    p = __fmaf_rn(p, f, __uint_as_float(0xbdfda02eu));
    p = __fmaf_rn(p, f, __uint_as_float(0x3e119927u));
    p = __fmaf_rn(p, f, __uint_as_float(0xbe2ab179u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3e4cd2a6u));
    p = __fmaf_rn(p, f, __uint_as_float(0xbe7ffff7u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3eaaaaa3u));
    float f2 = __fmul_rn(f, f);
    float y = __fmaf_rn(__fmul_rn(f2, f), p, __fmul_rn(e, -2.12194440e-4f));
    y = __fmaf_rn(f2, -0.5f, y);
    y = __fmaf_rn(e, 0.693359375f, __fadd_rn(f, y));
    y = x == __uint_as_float(0x7f800000u) ? x : y;
    y = x == 0.0f ? __uint_as_float(0xff800000u) : y;
    return x >= 0.0f ? y : __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ float log1p_f32(float x) {
    float u = __fadd_rn(1.0f, x);
    float lost = __fsub_rn(x, __fsub_rn(u, 1.0f));
    float y = __fadd_rn(log_f32(u), __fdiv_rn(lost, u));
    return x == __uint_as_float(0x7f800000u) ? x : y;
}

__device__ __forceinline__ float sigmoid_f32(float x) {
    float e = exp_f32(-fabsf(x));
    return __fdiv_rn(x < 0.0f ? e : 1.0f, __fadd_rn(1.0f, e));
}

__device__ __forceinline__ float silu_f32(float x) {
    float s = sigmoid_f32(x);
    return __fmul_rn(x < -200.0f ? -200.0f : x, s);
}

__device__ __forceinline__ float softplus_f32(float x) {
    float positive = x > 0.0f ? x : 0.0f;
    return __fadd_rn(positive, log1p_f32(exp_f32(-fabsf(x))));
}

// ---- sums ----

// The sum over a warp, in every lane: a tree over lane numbers.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

// The sum over a block of whole warps, in every thread: warps ascending. `partial` holds a word for
// each warp. Two calls need a barrier in between, which the first one's end is not.
__device__ __forceinline__ float block_sum(float x, float* partial) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = partial[0];
    for (int w = 1; w < blockDim.x / 32; ++w) {
        sum = __fadd_rn(sum, partial[w]);
    }
    return sum;
}

// The sum of squares of a row, in every thread of a block of 256: every 256th value ascending, or
// every 256th group of 8 where the width is a multiple of 8, then as block_sum does. An order that
// depends on the width alone.
__device__ __forceinline__ float sum_of_squares(const bf16* x, u32 width, float* partial) {
    float sum = 0.0f;
    if (width % 8 == 0) {
        for (u32 i = threadIdx.x; i < width / 8; i += 256) {
            uint4 v = ((const uint4*)x)[i];
            u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                sum = __fmaf_rn(low(words[c]), low(words[c]), sum);
                sum = __fmaf_rn(high(words[c]), high(words[c]), sum);
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += 256) {
            sum = __fmaf_rn(widen(x[i]), widen(x[i]), sum);
        }
    }
    return block_sum(sum, partial);
}
