// Products with the weights of many experts, where few pairs meet at one; sorting pairs, and adding up
// what comes of them. See experts.cuh.
#include "experts.cuh"

// A warp reads a slab when it has multiplied the one before: while it waits, the many other warps that
// there is room for multiply theirs.
template <int FORMAT, bool UP>
__device__ __forceinline__ void few(const Args& a, u32 block) {
    __shared__ float sums[QUARTERS][2][4][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    Tile tile;
    if (!find_tile(a, block, FEW, tile)) return;

    const int first = int(blockIdx.x) * (UP ? 16 : 32) + g;
    int row[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = first + (UP ? 0 : i / 2 * 16) + i % 2 * 8;
        row[i / 2][i % 2] = a.first_feature + min(r, a.features - 1);
    }
    const bf16* x = a.x + u64(pair_of(a, tile, min(g, tile.count - 1)) / a.divisor) * a.cols;

    const int slabs = (a.cols + SLAB - 1) / SLAB;
    const int quarter = (slabs + QUARTERS - 1) / QUARTERS;
    const int end = min(slabs, (warp + 1) * quarter);
    Slab<FORMAT> codes;
    uint4 v[4];
    auto read = [&](int slab) {
        const int col = slab * SLAB + t * 32;
        const bool there = slab < end && col < a.cols;
        if (there) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Weights& w = UP && i >= 2 ? a.second : a.first;
                codes.codes[i / 2][i % 2] = read_codes<FORMAT>(w, tile.expert, row[i / 2][i % 2], col);
            }
        } else {
            codes.clear();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (there) v[i] = *reinterpret_cast<const uint4*>(x + col + i * 8);
        }
    };
    float sum[2][4] = {};
    read(warp * quarter);
#pragma unroll 1
    for (int slab = warp * quarter; slab < end; slab++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w[2][2][4];
            unpack<FORMAT>(codes, i, w);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(sum[m], w[m][0], v[i].x, v[i].y);
                mma(sum[m], w[m][1], v[i].z, v[i].w);
            }
        }
        read(slab + 1);
    }

#pragma unroll
    for (int i = 0; i < 8; i++) sums[warp][i / 4][i % 4][lane] = sum[i / 4][i % 4];
    __syncthreads();
    // Thread (warp, lane) finishes value `warp` of the four that `lane` has.
    const int i = t * 2 + warp % 2;
    if (i >= tile.count) return;
    float total[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        total[m] = sums[0][m][warp][lane];
#pragma unroll
        for (int q = 1; q < QUARTERS; q++) total[m] = __fadd_rn(total[m], sums[q][m][warp][lane]);
    }
    const u64 pair = pair_of(a, tile, i);
    const int f = first + warp / 2 * 8;
    if (UP) {
        if (f < a.features) a.h[pair * a.features + f] = activation(total[0], total[1], a.limit);
    } else {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (f + m * 16 < a.features) a.y[pair * a.features + f + m * 16] = total[m];
        }
    }
}

// BLOCKS: how many a multiprocessor has room for.
#define PRODUCTS(HALF, UP, NAME, FORMAT, BLOCKS)                                                       \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, BLOCKS)                                  \
        experts_##HALF##_few_##NAME(const __grid_constant__ Args a) { few<FORMAT, UP>(a, blockIdx.y); }
PRODUCTS(up, true, fp4, FP4, 5)
PRODUCTS(up, true, fp8, FP8, 5)
PRODUCTS(up, true, bf16, BF16, 2)
PRODUCTS(down, false, fp4, FP4, 5)
PRODUCTS(down, false, fp8, FP8, 5)
PRODUCTS(down, false, bf16, BF16, 2)

// Routed experts in fp4 and the shared one in fp8 in one launch: the last block of the second axis
// has the shared expert.
struct Both {
    SLOT Args routed;
    SLOT Args shared;
};

template <bool UP>
__device__ __forceinline__ void few_of_both(const Both& b) {
    // The two may differ in width.
    if (blockIdx.y + 1 < gridDim.y) {
        if (int(blockIdx.x) * (UP ? 16 : 32) < b.routed.features) few<FP4, UP>(b.routed, blockIdx.y);
    } else if (int(blockIdx.x) * (UP ? 16 : 32) < b.shared.features) {
        few<FP8, UP>(b.shared, 0);
    }
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 5)
    experts_up_both(const __grid_constant__ Both b) { few_of_both<true>(b); }
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 5)
    experts_down_both(const __grid_constant__ Both b) { few_of_both<false>(b); }

// Sorts pairs by expert, and cuts each expert's into as few tiles of up to `width` as hold them, equal
// but for a multiple of 8. One block; dynamic shared memory for two words an expert. The order inside
// an expert does not matter.
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
            const u32 each = own == 0 ? 0 : ((count + own - 1) / own + 7) / 8 * 8;
            for (u32 i = 0; i < own; i++) {
                u32* tile = tiles + 1 + 3 * (tile_sum - own + i);
                tile[0] = e;
                tile[1] = pair_sum - count + i * each;
                tile[2] = min(each, count - i * each);
            }
        }
        pairs_before = all_pairs;
        tiles_before = all_tiles;
        __syncthreads();
    }
    if (threadIdx.x == 0) tiles[0] = tiles_before;
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) order[atomicAdd(&next[ids[p]], 1u)] = p;
}

// out = sum over the slots of weight * y, slots ascending, then the shared expert's y: `width` columns
// of rows of `hidden`. `y` holds the pairs of `rows` rows, then the shared expert's rows.
extern "C" __global__ void __launch_bounds__(256)
    experts_combine(const float* y, const float* weights, int k, int rows, int width, int hidden, bf16* out) {
    const u64 row = blockIdx.y;
    const int col = int(blockIdx.x * blockDim.x + threadIdx.x) * 2;
    if (col >= width) return;
    float2 sum = make_float2(0.0f, 0.0f);
    for (int slot = 0; slot < k; slot++) {
        const u64 pair = row * k + slot;
        const float w = __ldg(weights + pair);
        const float2 v = *reinterpret_cast<const float2*>(y + pair * width + col);
        sum.x = __fmaf_rn(w, v.x, sum.x);
        sum.y = __fmaf_rn(w, v.y, sum.y);
    }
    const float2 v = *reinterpret_cast<const float2*>(y + (u64(rows) * k + row) * width + col);
    *reinterpret_cast<u32*>(out + row * hidden + col) = narrow2(__fadd_rn(sum.x, v.x), __fadd_rn(sum.y, v.y));
}
