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
// features, a warp 32 of them for all pairs. Codes and activations come to shared memory in the
// background, slabs ahead of the product; codes become bf16 in registers.
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
    Slab<FORMAT> next;
    auto read = [&](int slab) {
        const int col = slab * SLAB + t * 32;
        if (slab < end && col < a.cols) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Weights& w = UP && i >= 2 ? a.second : a.first;
                next.codes[i / 2][i % 2] = read_codes<FORMAT>(w, tile.expert, row[i / 2][i % 2], col);
            }
        } else {
            next.clear();
        }
    };
    float sum[2][4] = {};
    read(warp * quarter);
#pragma unroll 1
    for (int slab = warp * quarter; slab < end; slab++) {
        const int col = slab * SLAB + t * 32;
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (col < a.cols) v[i] = *reinterpret_cast<const uint4*>(x + col + i * 8);
        }
        const Slab<FORMAT> codes = next;
        read(slab + 1);
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

// Shared memory of `many`: for each stage the pairs' activations, then the weight rows' codes.
template <int FORMAT>
struct Staged {
    static constexpr int PIECES = FORMAT == FP4 ? 4 : FORMAT == FP8 ? 8 : 16;  // of 16 bytes, of a row's codes
    static constexpr int STAGES = FORMAT == BF16 ? 2 : 3;
    static constexpr int CODES = MANY * SLAB * 2;
    static constexpr int STAGE = CODES + MANY_ROWS * PIECES * 16;
};

// Up to 8 GROUPS pairs.
template <int FORMAT, bool UP, int GROUPS>
__device__ __forceinline__ void many_groups(const Args& a, Tile tile, u32 (&x_at)[MANY], u8* shared) {
    typedef Staged<FORMAT> Shared;
    constexpr int PIECES = Shared::PIECES, STAGES = Shared::STAGES;
    constexpr int STEP = MANY_THREADS / PIECES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    // Where a piece of 16 bytes lies: an order in which lanes that read at once meet no bank twice.
    auto place = [](int row, int piece) { return row * (SLAB * 2) + (piece ^ (piece >> 3 | (row & 1) << 1)) * 16; };
    auto place_codes = [&](int row, int piece) {
        return FORMAT == BF16  ? place(row, piece)
               : FORMAT == FP8 ? row * SLAB + (piece ^ (row & 1)) * 16
                               : row * (SLAB / 2) + piece * 16;
    };

    // Weight rows of a block: of each 32, a warp's, 16 of w1 and the same 16 of w3; or 32 of w2.
    const int block_feature = int(blockIdx.x) * (UP ? 64 : 128);
    auto second_of = [](int r) { return UP && (r & 16); };
    auto row_of = [&](int r) {
        const int f = block_feature + (UP ? (r >> 5) * 16 + (r & 15) : r);
        return u32(a.first_feature + min(f, a.features - 1));
    };

    // What this thread brings in, in pieces of 16 bytes: of every eighth pair, and of every STEPth
    // weight row; of w1 and w3 in turn, or (fp4) of one of them.
    const int x_piece = threadIdx.x % 16, x_row = threadIdx.x / 16;
    const int code_piece = threadIdx.x % PIECES, code_row = threadIdx.x / PIECES;
    const u8* first = a.first.data + tile.expert * a.first.expert_stride;
    const u8* second = a.second.data + tile.expert * a.second.expert_stride;
    if (PIECES == 4 && second_of(code_row)) first = second;
    for (int i = threadIdx.x; i < 8 * GROUPS; i += MANY_THREADS) {
        x_at[i] = pair_of(a, tile, min(i, tile.count - 1)) / a.divisor * u32(a.cols / 8);
    }
    __syncthreads();
    // The two projections have one stride. Rows beyond the last are not read.
    const u32 stride = u32(a.first.row_stride / 16);
    const int feature0 = block_feature + (UP ? code_row & 15 : code_row);
    const u32 codes_at = u32(a.first_feature + feature0) * stride + code_piece;
    const int slabs = (a.cols + SLAB - 1) / SLAB;
    const int quarter = (slabs + QUARTERS - 1) / QUARTERS;
    auto bring = [&](int slab, int stage) {
        if (slab < slabs) {
            u8* to = shared + stage * Shared::STAGE;
            const bool x_there = slab * SLAB + x_piece * 8 < a.cols;
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                const u32 at = x_at[x_row + 8 * i] + slab * 16 + x_piece;
                copy_async(to + place(x_row + 8 * i, x_piece), a.x + u64(at) * 8, x_there);
            }
            const bool codes_there = slab * SLAB + code_piece * (SLAB / PIECES) < a.cols;
#pragma unroll
            for (int i = 0; i < MANY_ROWS / STEP; i++) {
                // As features of the rows code_row + STEP i go on from the first.
                const int f = UP ? STEP * i / 32 * 16 + STEP * i % 16 : STEP * i;
                const u8* from = PIECES > 4 && second_of(STEP * i) ? second : first;
                copy_async(to + Shared::CODES + place_codes(code_row + STEP * i, code_piece),
                           from + u64(codes_at + f * stride + slab * PIECES) * 16,
                           codes_there && feature0 + f < a.features);
            }
        }
        copy_commit();
    };

    // Scales of this thread's weight rows: g and g + 8 of the warp's two groups of 16.
    const u8* scales[2] = {
        a.first.scale + tile.expert * a.first.scale_expert_stride,
        UP ? a.second.scale + tile.expert * a.second.scale_expert_stride
           : a.first.scale + tile.expert * a.first.scale_expert_stride,
    };
    u32 scale_at[2][2], next[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Weights& w = UP && i >= 2 ? a.second : a.first;
        const u32 row = row_of(warp * 32 + i * 8 + g);
        const u32 scale_row = w.scale_rows == 1 ? row : (row + w.scale_row0) / 32;
        scale_at[i / 2][i % 2] = scale_row * u32(w.scale_stride) + t;
    }
    auto read_scales = [&](int slab) {
        if (FORMAT == BF16) return;
        const bool there = slab * SLAB + t * 32 < a.cols;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            next[i / 2][i % 2] = there ? __ldg(scales[i / 2] + scale_at[i / 2][i % 2] + slab * 4) : 0;
        }
    };

    float sum[2][GROUPS][4] = {}, total[2][GROUPS][4];
#pragma unroll
    for (int i = 0; i < 8 * GROUPS; i++) {
        // Less than every zero: the first quarter's sum stays as it is.
        total[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4] = -0.0f;
    }
    int fold_at = min(quarter, slabs) - 1, stage = 0;
    read_scales(0);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) bring(i, i);
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab++) {
        if (STAGES == 2) {
            copy_wait();
        } else {
            copy_wait_but_one();
        }
        // The slab is there for all warps, and all have done with the stage that is free.
        __syncthreads();
        bring(slab + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        u32 scale[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) scale[i / 2][i % 2] = factor<FORMAT>(FORMAT == BF16 ? 0 : next[i / 2][i % 2]);
        read_scales(slab + 1);
        const u8* x = shared + stage * Shared::STAGE;
        const u8* codes = x + Shared::CODES;
        uint4 words[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i == 0 || word_of<FORMAT>(i) != word_of<FORMAT>(i - 1)) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int piece = t * (PIECES / 4) + word_of<FORMAT>(i);
                    words[j / 2][j % 2] =
                        *reinterpret_cast<const uint4*>(codes + place_codes(warp * 32 + j * 8 + g, piece));
                }
            }
            u32 w[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                u32 low[4], high[4];
                expand<FORMAT>(words[m][0], scale[m][0], i, low);
                expand<FORMAT>(words[m][1], scale[m][1], i, high);
                factors_of(low, high, w[m]);
            }
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const uint4 v = *reinterpret_cast<const uint4*>(x + place(n * 8 + g, t * 4 + i));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(sum[m][n], w[m][0], v.x, v.y);
                    mma(sum[m][n], w[m][1], v.z, v.w);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if (slab == fold_at) {
            fold_at = min(fold_at + quarter, slabs - 1);
#pragma unroll
            for (int i = 0; i < 8 * GROUPS; i++) {
                float& from = sum[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4];
                float& to = total[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4];
                to = __fadd_rn(to, from);
                from = 0.0f;
            }
        }
    }
    // Quarters without columns count as 0.
    if (quarter * (QUARTERS - 1) >= slabs) {
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++) {
            float& to = total[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4];
            to = __fadd_rn(to, 0.0f);
        }
    }

    // Read again rather than kept.
    find_tile(a, blockIdx.y, MANY, tile);
    const int feature = block_feature + warp * (UP ? 16 : 32) + g;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int p = n * 8 + t * 2 + i % 2;
            if (p >= tile.count) continue;
            const u64 pair = pair_of(a, tile, p);
            const int f = feature + i / 2 * 8;
            if (UP) {
                if (f < a.features) {
                    a.h[pair * a.features + f] = activation(total[0][n][i], total[1][n][i], a.limit);
                }
            } else {
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (f + m * 16 < a.features) a.y[pair * a.features + f + m * 16] = total[m][n][i];
                }
            }
        }
    }
}

template <int FORMAT, bool UP>
__device__ __forceinline__ void many(const Args& a) {
    extern __shared__ __align__(16) u8 staged[];
    __shared__ u32 x_at[MANY];
    Tile tile;
    if (!find_tile(a, blockIdx.y, MANY, tile)) return;
    // Each number of groups has code without branches.
    switch ((tile.count + 7) / 8) {
    case 1:
    case 2: return many_groups<FORMAT, UP, 2>(a, tile, x_at, staged);
    case 3:
    case 4: return many_groups<FORMAT, UP, 4>(a, tile, x_at, staged);
    case 5: return many_groups<FORMAT, UP, 5>(a, tile, x_at, staged);
    case 6: return many_groups<FORMAT, UP, 6>(a, tile, x_at, staged);
    case 7: return many_groups<FORMAT, UP, 7>(a, tile, x_at, staged);
    default: return many_groups<FORMAT, UP, 8>(a, tile, x_at, staged);
    }
}

// BLOCKS: how many of the first kind a multiprocessor has room for.
#define PRODUCTS(HALF, UP, NAME, FORMAT, BLOCKS)                                                       \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, BLOCKS)                                  \
        experts_##HALF##_few_##NAME(const __grid_constant__ Args a) { few<FORMAT, UP>(a, blockIdx.y); } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2)                                      \
        experts_##HALF##_many_##NAME(const __grid_constant__ Args a) { many<FORMAT, UP>(a); }
PRODUCTS(up, true, fp4, FP4, 4)
PRODUCTS(up, true, fp8, FP8, 4)
PRODUCTS(up, true, bf16, BF16, 2)
PRODUCTS(down, false, fp4, FP4, 4)
PRODUCTS(down, false, fp8, FP8, 4)
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

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 4)
    experts_up_both(const __grid_constant__ Both b) { few_of_both<true>(b); }
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 4)
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
