// Products of many rows with weights in stored form. See linear.cuh for the order of sums.
#include "linear.cuh"

// ---- many rows of x: one block for 128 weight rows and TM rows of x ----

// A warp has 32 weight rows, read from memory to registers as in `few`, a slab ahead, and all rows
// of x, which come through shared memory two slabs ahead.
#define TILE_WARPS 4
#define TILE_N (32 * TILE_WARPS)
#define STAGES 3
// Bytes of a row of a slab in shared memory: 64 values, and 16 bytes that keep lanes out of each
// other's banks.
#define ROW_BYTES 144
// Floats of a row of results in shared memory.
#define OUT_STRIDE (TILE_N + 4)

template <int TM>
union TileMemory {
    uint4 aligned;
    u8 x[STAGES][TM * ROW_BYTES];
    float out[TM * OUT_STRIDE];
};

// Copies 16 bytes to shared memory in the background; zeros if not `inside`.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    u32 bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of copies but the last.
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// k is a multiple of 8. With SPLIT, a block takes the chunk of its place along z, and writes its sums
// as they are to `out` [chunk, m, groups n] of f32.
template <int FORMAT, int TM, bool SPLIT>
__device__ void tile(const bf16* x, const Weight& w, Shape s, void* out) {
    const int COLUMNS = TM / 8;
    // Codes become bf16 half a slab at a time, and the next are read half a slab later: it takes fewer
    // registers, so that more blocks share a multiprocessor.
    const bool LATE = SPLIT && TM == 64 && FORMAT != BF16;
    __shared__ TileMemory<TM> memory;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 tiles = (s.n + TILE_N - 1) / TILE_N;
    u32 group = blockIdx.y / tiles, n0 = blockIdx.y % tiles * TILE_N, m0 = blockIdx.x * TM;

    u32 row0 = group * s.n + n0, scale_row0 = (row0 + w.row0) >> w.shift;
    const u8* values = w.data + row0 * w.row_stride;
    const u8* scales = w.scale + scale_row0 * w.scale_stride;
    u32 value_at[4], scale_at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Rows beyond the last read the last; what comes of them is not stored.
        u32 r = min(32 * warp + 8 * i + g, s.n - 1 - n0);
        value_at[i] = r * (u32)w.row_stride;
        scale_at[i] = (((row0 + r + w.row0) >> w.shift) - scale_row0) * (u32)w.scale_stride;
    }
    // Each thread copies 16 bytes of every 16th row of x.
    u32 copy_row = threadIdx.x / 8, copy_column = threadIdx.x % 8 * 8;
    x += ((u64)m0 * s.groups + group) * s.k + copy_column;

    u32 first = 0, last = slabs_end(s);
    if (SPLIT) {
        first = blockIdx.z * s.chunk;
        last = min(first + s.chunk, last);
    }
    auto copy_x = [&](u32 at, u32 stage) {
#pragma unroll
        for (int r = 0; r < TM; r += 16) {
            u32 row = copy_row + r;
            bool inside = m0 + row < s.m && at + copy_column < s.k && at < last;
            const bf16* from = x + (inside ? row * s.groups * s.k + at : 0);
            copy_async(memory.x[stage] + row * ROW_BYTES + copy_column * 2, from, inside);
        }
        commit_copies();
    };
    Raw<FORMAT> raw[4];
    auto fetch = [&](u32 at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            load<FORMAT, LATE>(raw[i], values + value_at[i], scales + scale_at[i], at + 16 * t);
        }
    };
    float sums[2][COLUMNS][4] = {}, totals[2][COLUMNS][4] = {};
    u32 chunk_end = first + s.chunk, stage = 0;
    copy_x(first, 0);
    copy_x(first + SLAB, 1);
    if (first < last) {
        fetch(first);
    }
    for (u32 at = first; at < last; at += SLAB) {
        wait_copies();
        // The slab is there for all warps, and all have done with the one that is overwritten.
        __syncthreads();
        copy_x(at + 2 * SLAB, stage == 0 ? STAGES - 1 : stage - 1);
        u32 pairs[LATE ? 1 : 2][4][4];
        if (!LATE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                expand(raw[i], 0, pairs[0][i]);
                expand(raw[i], 1, pairs[LATE ? 0 : 1][i]);
            }
            if (at + SLAB < last) {
                fetch(at + SLAB);
            }
        }
        const u8* rows = memory.x[stage] + g * ROW_BYTES + t * 32;
#pragma unroll
        for (int two = 0; two < 2; ++two) {
            if (LATE) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    expand(raw[i], two, pairs[0][i]);
                }
                if (two == 1 && at + SLAB < last) {
                    fetch(at + SLAB);
                }
            }
            const u32(&half)[4][4] = pairs[LATE ? 0 : two];
#pragma unroll
            for (int four = 0; four < COLUMNS; four += 4) {
                uint4 b[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    b[j] = *(const uint4*)(rows + 8 * (four + j) * ROW_BYTES + two * 16);
                }
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    int p = 2 * step;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        u32 a[4] = {half[2 * i][p], half[2 * i + 1][p], half[2 * i][p + 1],
                                    half[2 * i + 1][p + 1]};
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            u32 b0 = step == 0 ? b[j].x : b[j].z, b1 = step == 0 ? b[j].y : b[j].w;
                            mma(sums[i][four + j], a, b0, b1);
                        }
                    }
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if (!SPLIT && (at + SLAB == chunk_end || at + SLAB >= last)) {
            chunk_end += s.chunk;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        totals[i][j][c] = __fadd_rn(totals[i][j][c], sums[i][j][c]);
                        sums[i][j][c] = 0.0f;
                    }
                }
            }
        }
    }

    if (SPLIT) {
        out = (float*)out + (u64)blockIdx.z * s.m * s.groups * s.n;
        s.to_f32 = 1;
        s.factor = 1.0f;
    }
    // Rows of out are written whole. Copies that are still under way would write over them.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float* at = memory.out + (8 * j + 2 * t) * OUT_STRIDE + 32 * warp + 16 * i + g;
            const float(&sum)[4] = SPLIT ? sums[i][j] : totals[i][j];
            at[0] = sum[0];
            at[OUT_STRIDE] = sum[1];
            at[8] = sum[2];
            at[OUT_STRIDE + 8] = sum[3];
        }
    }
    __syncthreads();
    u32 column = n0 + lane * 4;
    for (u32 r = warp; r < TM && m0 + r < s.m; r += TILE_WARPS) {
        float4 v = *(const float4*)(memory.out + r * OUT_STRIDE + lane * 4);
        u64 at = ((u64)(m0 + r) * s.groups + group) * s.n + column;
        if (s.n % 4 == 0 && column < s.n) {
            v.x = __fmul_rn(v.x, s.factor), v.y = __fmul_rn(v.y, s.factor);
            v.z = __fmul_rn(v.z, s.factor), v.w = __fmul_rn(v.w, s.factor);
            if (s.to_f32) {
                *(float4*)((float*)out + at) = v;
            } else {
                *(uint2*)((bf16*)out + at) = make_uint2(narrow2(v.x, v.y), narrow2(v.z, v.w));
            }
        } else {
            float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (column + i < s.n) {
                    store(s, out, at + i, four[i]);
                }
            }
        }
    }
}

#define TILE(NAME, FORMAT, TM, SPLIT, BLOCKS)                                                      \
    extern "C" __global__ void __launch_bounds__(32 * TILE_WARPS, BLOCKS)                          \
        linear_##NAME##_##TM(PARAMS) {                                                             \
        tile<FORMAT, TM, SPLIT>(x, WEIGHT, SHAPE, out);                                            \
    }

TILE(tile_bf16, BF16, 32, false, 2)
TILE(tile_bf16, BF16, 64, false, 2)
TILE(tile_fp8, FP8, 32, false, 3)
TILE(tile_fp8, FP8, 64, false, 2)
TILE(tile_fp4, FP4, 32, false, 3)
TILE(tile_fp4, FP4, 64, false, 2)
TILE(split_bf16, BF16, 32, true, 3)
TILE(split_bf16, BF16, 64, true, 2)
TILE(split_fp8, FP8, 32, true, 4)
TILE(split_fp8, FP8, 64, true, 3)
TILE(split_fp4, FP4, 32, true, 4)
TILE(split_fp4, FP4, 64, true, 3)

// Adds the chunk sums of split tiles, ascending. A thread has WIDTH of `count` values, a multiple.
template <int WIDTH>
__device__ void sum_chunks(const float* partial, u32 chunks, u64 count, float factor, u32 to_f32, void* out) {
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * WIDTH;
    if (i >= count) {
        return;
    }
    float sums[WIDTH] = {};
#pragma unroll 4
    for (u32 c = 0; c < chunks; ++c) {
        float v[WIDTH];
        if (WIDTH == 4) {
            float4 four = __ldcs((const float4*)(partial + c * count + i));
            v[0] = four.x, v[1 % WIDTH] = four.y, v[2 % WIDTH] = four.z, v[3 % WIDTH] = four.w;
        } else {
            v[0] = partial[c * count + i];
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            sums[j] = __fadd_rn(sums[j], v[j]);
        }
    }
    Shape s{0, 0, 0, 0, 0, 0, factor, to_f32};
    if (WIDTH == 4 && !to_f32) {
        u32 first = narrow2(__fmul_rn(sums[0], factor), __fmul_rn(sums[1 % WIDTH], factor));
        u32 second = narrow2(__fmul_rn(sums[2 % WIDTH], factor), __fmul_rn(sums[3 % WIDTH], factor));
        *(uint2*)((bf16*)out + i) = make_uint2(first, second);
        return;
    }
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        store(s, out, i + j, sums[j]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    linear_sum_1(const float* __restrict__ partial, u32 chunks, u64 count, float factor, u32 to_f32, void* __restrict__ out) {
    sum_chunks<1>(partial, chunks, count, factor, to_f32, out);
}

extern "C" __global__ void __launch_bounds__(256)
    linear_sum_4(const float* __restrict__ partial, u32 chunks, u64 count, float factor, u32 to_f32, void* __restrict__ out) {
    sum_chunks<4>(partial, chunks, count, factor, to_f32, out);
}
