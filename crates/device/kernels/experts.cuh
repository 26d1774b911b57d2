// Mixture of experts: products with the weights of many experts, in stored form.
//
// One order of sums for all kernels. Columns are cut into slabs of 128 and slabs into four quarters;
// a quarter's sum runs over its slabs in order, and the quarters' sums are added in order. In a slab a
// thread has 32 columns of a weight row and takes 8 at a time: two steps of the product. Weights are
// the first factor of the matrix instruction, so a pair of a row and an expert is a column of it, and
// its sums do not depend on the pairs beside it.
//
// `few` is for up to 8 pairs: a block computes 32 output features (16 of w1 with the same 16 of w3; or
// 32 of w2), a quarter in each of its warps. `many` is for up to 64 pairs: a block computes 128
// features, a warp 32 of them for all pairs; codes and activations come to shared memory in the
// background, slabs ahead of the product. Codes become bf16 in registers.
#pragma once
#include "cache.cuh"

constexpr int SLAB = 128;
constexpr int QUARTERS = 4;
constexpr int FEW = 8;
constexpr int FEW_THREADS = 32 * QUARTERS;
constexpr int MANY = 64;
constexpr int MANY_THREADS = 128;
constexpr int MANY_ROWS = 128;  // weight rows of a block

enum { FP4, FP8, BF16 };

// One projection of all experts.
struct Weights {
    SLOT const u8* data;
    SLOT u64 expert_stride;
    SLOT u64 row_stride;
    SLOT const u8* scale;
    SLOT u64 scale_expert_stride;
    SLOT u64 scale_stride;
    SLOT int scale_row0;
    SLOT int scale_rows;  // weight rows that share a scale: 1 or 32
};

struct Args {
    SLOT Weights first;     // w1, or w2
    SLOT Weights second;    // w3
    SLOT const bf16* x;     // rows of `cols`
    SLOT bf16* h;           // [pairs, features]
    SLOT float* y;          // [pairs, features]
    SLOT const u32* order;  // pairs by expert, with `tiles`
    SLOT const u32* tiles;  // their number, then expert, first place in `order` and count of each
    SLOT const u32* ids;    // without `order`: the expert of each pair, a block a pair; null: one expert
    SLOT int pairs;
    SLOT int divisor;        // pair / divisor is a pair's row of x
    SLOT int first_feature;  // of the weights
    SLOT int features;
    SLOT int cols;
    SLOT float limit;
};

// The pairs of a block.
struct Tile {
    u32 expert, from;
    int count;
};

// False if there are none.
__device__ __forceinline__ bool find_tile(const Args& a, u32 block, int width, Tile& tile) {
    if (a.order) {
        if (block >= a.tiles[0]) return false;
        const u32* at = a.tiles + 1 + 3 * block;
        tile = {at[0], at[1], int(at[2])};
    } else if (a.ids) {
        tile = {a.ids[block], block, 1};
    } else {
        tile = {0, block * width, min(width, a.pairs - int(block) * width)};
    }
    return true;
}

__device__ __forceinline__ u32 pair_of(const Args& a, const Tile& tile, int i) {
    return a.order ? a.order[tile.from + i] : tile.from + i;
}

template <int FORMAT>
struct Codes {
    uint4 words[FORMAT == FP4 ? 1 : FORMAT == FP8 ? 2 : 4];
    u32 scale;
};

// A thread's 32 columns of a weight row.
template <int FORMAT>
__device__ __forceinline__ Codes<FORMAT> read_codes(const Weights& w, u32 expert, int row, int col) {
    constexpr int BYTES = FORMAT == FP4 ? 16 : FORMAT == FP8 ? 32 : 64;
    Codes<FORMAT> codes;
    const u8* at = w.data + expert * w.expert_stride + u64(row) * w.row_stride + col / 32 * BYTES;
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) codes.words[i] = __ldcs(reinterpret_cast<const uint4*>(at) + i);
    codes.scale = 0;
    if (FORMAT != BF16) {
        const u64 scale_row = w.scale_rows == 1 ? row : (row + w.scale_row0) / 32;
        codes.scale = __ldg(w.scale + expert * w.scale_expert_stride + scale_row * w.scale_stride + col / 32);
    }
    return codes;
}

// What puts a pair of codes right. The host has seen to it that it is a number.
template <int FORMAT>
__device__ __forceinline__ u32 factor(u32 scale) {
    return FORMAT == BF16 ? 0 : FORMAT == FP4 ? e2m1_factor(scale) : e4m3_factor(scale);
}

// Columns 8i .. 8i + 8 of the 32, as bf16, from the word that holds them.
template <int FORMAT>
__device__ __forceinline__ void expand(const uint4& v, u32 factor, int i, u32 (&pairs)[4]) {
    if (FORMAT == BF16) {
        pairs[0] = v.x;
        pairs[1] = v.y;
        pairs[2] = v.z;
        pairs[3] = v.w;
        return;
    }
    if (FORMAT == FP4) {
        e2m1x8(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w, pairs);
    } else {
        e4m3x4(i % 2 ? v.z : v.x, pairs[0], pairs[1]);
        e4m3x4(i % 2 ? v.w : v.y, pairs[2], pairs[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = mul2(pairs[j], factor);
}

// The word of a thread's 32 columns that holds columns 8i .. 8i + 8.
template <int FORMAT>
__device__ __forceinline__ int word_of(int i) {
    return FORMAT == BF16 ? i : FORMAT == FP8 ? i / 2 : 0;
}

// The same columns of two weight rows: two steps of the product's first factor.
__device__ __forceinline__ void factors_of(const u32 (&low)[4], const u32 (&high)[4], u32 (&a)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        a[step][0] = low[2 * step];
        a[step][1] = high[2 * step];
        a[step][2] = low[2 * step + 1];
        a[step][3] = high[2 * step + 1];
    }
}

// A thread's 32 columns of a slab, of weight rows g and g + 8 of two groups of 16.
template <int FORMAT>
struct Slab {
    Codes<FORMAT> codes[2][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (auto& word : codes[i / 2][i % 2].words) word = make_uint4(0, 0, 0, 0);
            codes[i / 2][i % 2].scale = 0;
        }
    }
};

// Columns 8i .. 8i + 8 of the 32: two steps of the product's first factor for each group.
template <int FORMAT>
__device__ __forceinline__ void unpack(const Slab<FORMAT>& slab, int i, u32 (&a)[2][2][4]) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        u32 low[4], high[4];
        const Codes<FORMAT>(&two)[2] = slab.codes[m];
        const int word = word_of<FORMAT>(i);
        expand<FORMAT>(two[0].words[word], factor<FORMAT>(two[0].scale), i, low);
        expand<FORMAT>(two[1].words[word], factor<FORMAT>(two[1].scale), i, high);
        factors_of(low, high, a[m]);
    }
}

// silu(min(gate, limit)) * clamp(up, -limit, limit); NaN is not clamped away.
__device__ __forceinline__ bf16 activation(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return narrow(__fmul_rn(silu_f32(gate), up));
}
