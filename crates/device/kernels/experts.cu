// Mixture of experts: products with the weights of many experts, in stored form.
//
// A block computes 32 output features (16 of w1 with the same 16 of w3; or 32 of w2) for up to 8 or
// 64 pairs of a row and an expert. Its four warps take a quarter of the columns each, in slabs of
// 128, and their sums are added in order. Weights are the first factor of the matrix instruction, so
// a pair is a column of it and its sums do not depend on the pairs beside it.
//
// In a slab a thread has 32 columns of a weight row and takes 8 at a time: two steps of the product.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = 4;
constexpr int SLAB = 128;

#define SLOT alignas(8)

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
    SLOT Weights first;   // w1, or w2
    SLOT Weights second;  // w3
    SLOT const bf16* x;    // [rows, cols], or [pairs, cols]
    SLOT bf16* h;          // [pairs, features]
    SLOT float* y;        // [pairs, features]
    SLOT const u32* order;  // pairs by expert; null: pairs as they come, one expert
    SLOT const u32* tiles;  // their number, then expert, first place in `order` and count of each
    SLOT int pairs;         // where `order` is null
    SLOT int divisor;       // pair / divisor is a pair's row of x
    SLOT int features;
    SLOT int cols;
    SLOT float limit;
};

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

// Columns 8i .. 8i + 8 of the 32, as bf16.
template <int FORMAT>
__device__ __forceinline__ void expand(const Codes<FORMAT>& codes, u32 factor, int i, u32 (&pairs)[4]) {
    if (FORMAT == BF16) {
        const uint4& v = codes.words[FORMAT == BF16 ? i : 0];
        pairs[0] = v.x;
        pairs[1] = v.y;
        pairs[2] = v.z;
        pairs[3] = v.w;
        return;
    }
    const uint4& v = codes.words[FORMAT == FP8 ? i / 2 : 0];
    if (FORMAT == FP4) {
        e2m1x8(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w, pairs);
    } else {
        e4m3x4(i % 2 ? v.z : v.x, pairs[0], pairs[1]);
        e4m3x4(i % 2 ? v.w : v.y, pairs[2], pairs[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = mul2(pairs[j], factor);
}

template <int FORMAT, int GROUPS, bool UP>
__device__ __forceinline__ void product(const Args& a) {
    constexpr int WIDTH = 8 * GROUPS;
    __shared__ float sums[WARPS][2][GROUPS][4][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;

    u32 expert = 0, from = blockIdx.y * WIDTH;
    int count = min(WIDTH, a.pairs - int(from));
    if (a.order) {
        if (blockIdx.y >= a.tiles[0]) return;
        const u32* tile = a.tiles + 1 + 3 * blockIdx.y;
        expert = tile[0];
        from = tile[1];
        count = int(tile[2]);
    }
    auto pair_of = [&](int i) { return a.order ? a.order[from + i] : from + i; };
    const int groups = (count + 7) / 8;

    // The rows of this thread's weights, and its pairs' activations.
    int row[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = UP ? int(blockIdx.x) * 16 + half * 8 + g : int(blockIdx.x) * 32 + m * 16 + half * 8 + g;
            row[m][half] = min(r, a.features - 1);
        }
    }
    const bf16* x[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        const u32 pair = pair_of(min(n * 8 + g, count - 1));
        x[n] = a.x + u64(pair / a.divisor) * a.cols;
    }

    float sum[2][GROUPS][4] = {};
    const int slabs = (a.cols + SLAB - 1) / SLAB;
    const int quarter = (slabs + WARPS - 1) / WARPS;
    const int end = min(slabs, (warp + 1) * quarter);

    Codes<FORMAT> next[2][2];
    auto read = [&](int slab) {
        const int col = slab * SLAB + t * 32;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Weights& w = UP && m == 1 ? a.second : a.first;
                if (slab < end && col < a.cols) {
                    next[m][half] = read_codes<FORMAT>(w, expert, row[m][half], col);
                } else {
#pragma unroll
                    for (auto& word : next[m][half].words) word = make_uint4(0, 0, 0, 0);
                    next[m][half].scale = 0;
                }
            }
        }
    };
    read(warp * quarter);
#pragma unroll 1
    for (int slab = warp * quarter; slab < end; slab++) {
        Codes<FORMAT> codes[2][2];
        u32 scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                codes[m][half] = next[m][half];
                scale[m][half] = factor<FORMAT>(codes[m][half].scale);
            }
        }
        read(slab + 1);
        const int col = slab * SLAB + t * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    expand<FORMAT>(codes[m][half], scale[m][half], i, w[m][half]);
                }
            }
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                if (GROUPS > 1 && n >= groups) break;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (col < a.cols) v = *reinterpret_cast<const uint4*>(x[n] + col + i * 8);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(sum[m][n], {w[m][0][0], w[m][1][0], w[m][0][1], w[m][1][1]}, v.x, v.y);
                    mma(sum[m][n], {w[m][0][2], w[m][1][2], w[m][0][3], w[m][1][3]}, v.z, v.w);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][m][n][i][lane] = sum[m][n][i];
        }
    }
    __syncthreads();
    // Thread (warp, lane) finishes value `warp` of the four that `lane` has of each group.
    const int feature = g + warp / 2 * 8;
    for (int n = 0; n < groups; n++) {
        const int i = n * 8 + t * 2 + warp % 2;
        if (i >= count) continue;
        float total[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            total[m] = sums[0][m][n][warp][lane];
#pragma unroll
            for (int from = 1; from < WARPS; from++) {
                total[m] = __fadd_rn(total[m], sums[from][m][n][warp][lane]);
            }
        }
        const u64 pair = pair_of(i);
        if (UP) {
            const int f = int(blockIdx.x) * 16 + feature;
            if (f >= a.features) continue;
            // NaN is not clamped away.
            float gate = total[0] > a.limit ? a.limit : total[0];
            float up = total[1] > a.limit ? a.limit : total[1];
            up = up < -a.limit ? -a.limit : up;
            a.h[pair * a.features + f] = narrow(__fmul_rn(silu_f32(gate), up));
        } else {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int f = int(blockIdx.x) * 32 + m * 16 + feature;
                if (f < a.features) a.y[pair * a.features + f] = total[m];
            }
        }
    }
}

#define PRODUCT(NAME, FORMAT, GROUPS, UP, BLOCKS)                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Args a) { \
        product<FORMAT, GROUPS, UP>(a);                                                 \
    }
// FEW: blocks of the first kernels that a multiprocessor has room for.
#define PRODUCTS(NAME, FORMAT, FEW)                         \
    PRODUCT(experts_up_##NAME##_8, FORMAT, 1, true, FEW)    \
    PRODUCT(experts_up_##NAME##_64, FORMAT, 8, true, 2)     \
    PRODUCT(experts_down_##NAME##_8, FORMAT, 1, false, FEW) \
    PRODUCT(experts_down_##NAME##_64, FORMAT, 8, false, 2)
PRODUCTS(fp4, FP4, 4)
PRODUCTS(fp8, FP8, 4)
PRODUCTS(bf16, BF16, 2)

// Sorts pairs by expert, and cuts each expert's into tiles of up to `width`. One block; dynamic
// shared memory for two words an expert. The order inside an expert does not matter.
extern "C" __global__ void __launch_bounds__(1024)
    experts_order(const u32* ids, int pairs, int experts, int width, u32* order, u32* tiles) {
    extern __shared__ u32 counts[];
    u32* next = counts + experts;
    __shared__ u32 pair_totals[32], tile_totals[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(&counts[ids[p]], 1u);
    __syncthreads();
    u32 pairs_before = 0, tiles_before = 0;
    for (int base = 0; base < experts; base += blockDim.x) {
        const int e = base + threadIdx.x;
        const u32 count = e < experts ? counts[e] : 0;
        const u32 own = (count + width - 1) / width;
        u32 pair_sum = count, tile_sum = own;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            u32 p = __shfl_up_sync(~0u, pair_sum, by), q = __shfl_up_sync(~0u, tile_sum, by);
            if (lane >= by) {
                pair_sum += p;
                tile_sum += q;
            }
        }
        if (lane == 31) {
            pair_totals[warp] = pair_sum;
            tile_totals[warp] = tile_sum;
        }
        __syncthreads();
        u32 all_pairs = pairs_before, all_tiles = tiles_before;
        for (int w = 0; w < int(blockDim.x / 32); w++) {
            if (w == warp) {
                pair_sum += all_pairs;
                tile_sum += all_tiles;
            }
            all_pairs += pair_totals[w];
            all_tiles += tile_totals[w];
        }
        if (e < experts) {
            next[e] = pair_sum - count;
            for (u32 i = 0; i < own; i++) {
                u32* tile = tiles + 1 + 3 * (tile_sum - own + i);
                tile[0] = e;
                tile[1] = pair_sum - count + i * width;
                tile[2] = min(u32(width), count - i * width);
            }
        }
        pairs_before = all_pairs;
        tiles_before = all_tiles;
        __syncthreads();
    }
    if (threadIdx.x == 0) tiles[0] = tiles_before;
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) order[atomicAdd(&next[ids[p]], 1u)] = p;
}

// out = sum over the slots of weight * y, slots ascending, then the shared expert's y. `y` holds the
// pairs of `rows` rows, then the shared expert's rows.
extern "C" __global__ void __launch_bounds__(256)
    experts_combine(const float* y, const float* weights, int k, int rows, int hidden, bf16* out) {
    const u64 row = blockIdx.y;
    const int col = int(blockIdx.x * blockDim.x + threadIdx.x) * 2;
    if (col >= hidden) return;
    float2 sum = make_float2(0.0f, 0.0f);
    for (int slot = 0; slot < k; slot++) {
        const u64 pair = row * k + slot;
        const float w = __ldg(weights + pair);
        const float2 v = *reinterpret_cast<const float2*>(y + pair * hidden + col);
        sum.x = __fmaf_rn(w, v.x, sum.x);
        sum.y = __fmaf_rn(w, v.y, sum.y);
    }
    const float2 v = *reinterpret_cast<const float2*>(y + (u64(rows) * k + row) * hidden + col);
    *reinterpret_cast<u32*>(out + row * hidden + col) = narrow2(__fadd_rn(sum.x, v.x), __fadd_rn(sum.y, v.y));
}
