// Products with the weights of many experts, where many pairs meet at one. See experts.cuh.
#include "experts.cuh"

// Shared memory of `many`: for each stage the pairs' activations, then the weight rows' codes.
template <int FORMAT>
struct Staged {
    static constexpr int PIECES = FORMAT == FP4 ? 4 : FORMAT == FP8 ? 8 : 16;  // of 16 bytes, of a row's codes
    static constexpr int STAGES = FORMAT == BF16 ? 2 : 3;
    static constexpr int CODES = MANY * SLAB * 2;
    static constexpr int STAGE = CODES + MANY_ROWS * PIECES * 16;
};

// Where a piece of 16 bytes of a row of activations lies: an order in which lanes that read at once meet
// no bank twice.
__device__ __forceinline__ int place(int row, int piece) {
    return row * (SLAB * 2) + (piece ^ (piece >> 3 | (row & 1) << 1)) * 16;
}

// Up to 8 GROUPS pairs.
template <int FORMAT, bool UP, int GROUPS>
__device__ __forceinline__ void many_groups(const Args& a, Tile tile, u32 (&x_at)[MANY], u8* shared) {
    typedef Staged<FORMAT> Shared;
    constexpr int PIECES = Shared::PIECES, STAGES = Shared::STAGES;
    constexpr int STEP = MANY_THREADS / PIECES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
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

#define PRODUCTS(HALF, UP, NAME, FORMAT)                                                               \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2)                                      \
        experts_##HALF##_many_##NAME(const __grid_constant__ Args a) { many<FORMAT, UP>(a); }
PRODUCTS(up, true, fp4, FP4)
PRODUCTS(up, true, fp8, FP8)
PRODUCTS(up, true, bf16, BF16)
PRODUCTS(down, false, fp4, FP4)
PRODUCTS(down, false, fp8, FP8)
PRODUCTS(down, false, bf16, BF16)
