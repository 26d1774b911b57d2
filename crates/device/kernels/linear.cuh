// Products with weights in stored form: out = x w^T.
//
// One accumulation order for every number of rows. K is cut into chunks whose length depends on K
// alone. Inside a chunk, tensor cores add 16 products at a time, k ascending by slabs of 64: the
// step s of a slab (0 to 3) takes, from lane t of four, values 16 t + 4 s to 16 t + 4 s + 3, so that
// a lane reads 16 adjacent values of a row. Chunk sums are added in ascending order. Kernels of
// two files follow that order: linear.cu (a warp a chunk) and tile.cu (rows of x through shared memory;
// chunks in turn, or one a block and a sum behind it).
//
// Weights are the 16 rows of the tensor core's first operand, rows of x the 8 columns of its second.
#pragma once
#include "common.cuh"

// Rows of weights are padded to slabs of 64 values with zeros; rows start at multiples of 16 bytes.
#define SLAB 64
// Most chunks.
#define CHUNKS 8

enum { BF16, FP8, FP4 };

struct Weight {
    const u8* data;
    u64 row_stride;
    const u8* scale;
    u64 scale_stride;
    // The scale row of row r is (r + row0) >> shift.
    u32 row0;
    u32 shift;
};

struct Shape {
    // Rows of x and out, weight rows of a group, values in a row, values in a row of x (all groups),
    // values in a row of out.
    u32 m, n, k, groups;
    u32 chunk, chunks;
    float factor;
    u32 to_f32;
};

#define PARAMS                                                                                     \
    const bf16 *__restrict__ x, const u8 *__restrict__ data, u64 row_stride,                       \
        const u8 *__restrict__ scale, u64 scale_stride, u32 row0, u32 shift, u32 m, u32 n, u32 k,  \
        u32 groups, u32 chunk, u32 chunks, float factor, u32 to_f32, void *__restrict__ out
#define WEIGHT Weight{data, row_stride, scale, scale_stride, row0, shift}
#define SHAPE Shape{m, n, k, groups, chunk, chunks, factor, to_f32}

__device__ __forceinline__ u32 slabs_end(const Shape& s) {
    return (s.k + SLAB - 1) / SLAB * SLAB;
}

// ---- 16 adjacent values of a row ----

// Codes as they are stored.
template <int FORMAT>
struct Raw {
    static const int WORDS = FORMAT == BF16 ? 8 : FORMAT == FP8 ? 4 : 2;
    u32 words[WORDS];
    u32 scale;
};

// 16 bytes; with AHEAD, the cache reads the 256 bytes around them.
template <bool AHEAD>
__device__ __forceinline__ uint4 load_words(const u8* at) {
    uint4 v;
    if (AHEAD) {
        asm("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
            : "l"(at));
    } else {
        v = __ldg((const uint4*)at);
    }
    return v;
}

// Columns `column` to `column + 15`, a multiple of 16, of a row.
template <int FORMAT, bool AHEAD = false>
__device__ __forceinline__ void load(Raw<FORMAT>& raw, const u8* row, const u8* scales, u32 column) {
    if (FORMAT == BF16) {
        const uint4* at = (const uint4*)(row + column * 2);
        uint4 a = __ldg(at), b = __ldg(at + 1);
        raw.words[0] = a.x, raw.words[1] = a.y, raw.words[2] = a.z, raw.words[3] = a.w;
        raw.words[Raw<FORMAT>::WORDS - 4] = b.x, raw.words[Raw<FORMAT>::WORDS - 3] = b.y;
        raw.words[Raw<FORMAT>::WORDS - 2] = b.z, raw.words[Raw<FORMAT>::WORDS - 1] = b.w;
    } else if (FORMAT == FP8) {
        uint4 a = load_words<AHEAD>(row + column);
        raw.words[0] = a.x, raw.words[1] = a.y;
        raw.words[Raw<FORMAT>::WORDS - 2] = a.z, raw.words[Raw<FORMAT>::WORDS - 1] = a.w;
        raw.scale = __ldg(scales + column / 32);
    } else {
        uint2 a = __ldg((const uint2*)(row + column / 2));
        raw.words[0] = a.x, raw.words[1] = a.y;
        raw.scale = __ldg(scales + column / 32);
    }
}

// The first or the last eight of them as four pairs of bf16: two for each step.
template <int FORMAT>
__device__ __forceinline__ void expand(const Raw<FORMAT>& raw, int half, u32 (&pairs)[4]) {
    const int WORDS = Raw<FORMAT>::WORDS;
    if (FORMAT == BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = raw.words[(4 * half + i) % WORDS];
        }
        return;
    }
    if (FORMAT == FP8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            e4m3x4(raw.words[(2 * half + i) % WORDS], pairs[2 * i], pairs[2 * i + 1]);
        }
    } else {
        e2m1x8(raw.words[half], pairs);
    }
    u32 factor = FORMAT == FP8 ? e4m3_factor(raw.scale) : e2m1_factor(raw.scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = mul2(pairs[i], factor);
    }
}

// 16 values of a row of x as pairs; zeros from `k` on, and without a row. WIDE: k is a multiple of 8.
template <bool WIDE>
__device__ __forceinline__ void load_x(const bf16* row, u32 column, u32 k, u32 (&pairs)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        pairs[i] = 0;
    }
    if (row == nullptr) {
        return;
    }
    if (WIDE || k % 8 == 0) {
        const uint4* at = (const uint4*)(row + column);
        if (column + 8 <= k) {
            uint4 a = __ldg(at);
            pairs[0] = a.x, pairs[1] = a.y, pairs[2] = a.z, pairs[3] = a.w;
        }
        if (column + 16 <= k) {
            uint4 a = __ldg(at + 1);
            pairs[4] = a.x, pairs[5] = a.y, pairs[6] = a.z, pairs[7] = a.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (column + i < k) {
                pairs[i / 2] |= (u32)row[column + i].bits << i % 2 * 16;
            }
        }
    }
}

__device__ __forceinline__ void store(const Shape& s, void* out, u64 at, float value) {
    value = __fmul_rn(value, s.factor);
    if (s.to_f32) {
        ((float*)out)[at] = value;
    } else {
        ((bf16*)out)[at] = narrow(value);
    }
}

