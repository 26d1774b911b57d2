// Products with weights in stored form: out = x w^T.
//
// One accumulation order for every number of rows. K is cut into chunks whose length depends on K
// alone. Inside a chunk, tensor cores add 16 products at a time, k ascending by slabs of 64: the
// step s of a slab (0 to 3) takes, from lane t of four, values 16 t + 4 s to 16 t + 4 s + 3, so that
// a lane reads 16 adjacent values of a row. Chunk sums are added in ascending order. Two kernels
// follow that order: `few` (a warp a chunk) and `tile` (rows of x through shared memory; chunks in
// turn, or one a block and a sum behind it).
//
// Weights are the 16 rows of the tensor core's first operand, rows of x the 8 columns of its second.
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

// ---- few rows of x: one block for 16 weight rows and 8 MT rows of x, a warp a chunk ----

// Floats from one row of partial sums to the next: no two lanes meet in a bank.
#define FEW_STRIDE 20

template <int FORMAT, int MT, bool WIDE>
__device__ void few(const bf16* x, const Weight& w, const Shape& s, void* out) {
    // Slabs on their way to registers.
    const int AHEAD = FORMAT == BF16 ? 2 : 4;
    __shared__ float partial[CHUNKS * 8 * MT * FEW_STRIDE];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 tiles = (s.n + 15) / 16;
    u32 group = blockIdx.x / tiles, n0 = blockIdx.x % tiles * 16, m0 = blockIdx.y * 8 * MT;

    // Rows beyond the last read the last; what comes of them is not stored.
    u32 row0 = group * s.n + n0, scale_row0 = (row0 + w.row0) >> w.shift;
    u32 row_a = min(g, s.n - 1 - n0), row_b = min(g + 8, s.n - 1 - n0);
    const u8* values = w.data + row0 * w.row_stride;
    const u8* scales = w.scale + scale_row0 * w.scale_stride;
    u32 a_at = row_a * (u32)w.row_stride, b_at = row_b * (u32)w.row_stride;
    u32 a_scale = (((row0 + row_a + w.row0) >> w.shift) - scale_row0) * (u32)w.scale_stride;
    u32 b_scale = (((row0 + row_b + w.row0) >> w.shift) - scale_row0) * (u32)w.scale_stride;
    x += ((u64)m0 * s.groups + group) * s.k;
    u32 x_at = g * s.groups * s.k, x_step = 8 * s.groups * s.k;

    u32 first = warp * s.chunk, last = min(first + s.chunk, slabs_end(s));
    float sums[MT][4] = {};
    Raw<FORMAT> a[AHEAD], b[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        u32 at = first + i * SLAB;
        if (at < last) {
            load(a[i], values + a_at, scales + a_scale, at + 16 * t);
            load(b[i], values + b_at, scales + b_scale, at + 16 * t);
        }
    }
    for (u32 base = first; base < last; base += AHEAD * SLAB) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            u32 at = base + i * SLAB;
            if (at >= last) {
                break;
            }
            u32 a_pairs[2][4], b_pairs[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                expand(a[i], half, a_pairs[half]);
                expand(b[i], half, b_pairs[half]);
            }
            u32 next = at + AHEAD * SLAB;
            if (next < last) {
                load(a[i], values + a_at, scales + a_scale, next + 16 * t);
                load(b[i], values + b_at, scales + b_scale, next + 16 * t);
            }
#pragma unroll
            for (int j = 0; j < MT; ++j) {
                const bf16* row = m0 + 8 * j + g < s.m ? x + (x_at + j * x_step) : nullptr;
                u32 x_pairs[8];
                load_x<WIDE>(row, at + 16 * t, s.k, x_pairs);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const u32(&low)[4] = a_pairs[step / 2], (&high)[4] = b_pairs[step / 2];
                    int p = step % 2 * 2;
                    u32 w_pairs[4] = {low[p], high[p], low[p + 1], high[p + 1]};
                    mma(sums[j], w_pairs, x_pairs[2 * step], x_pairs[2 * step + 1]);
                }
            }
        }
    }

    float* mine = partial + warp * 8 * MT * FEW_STRIDE;
#pragma unroll
    for (int j = 0; j < MT; ++j) {
        u32 row = 8 * j + 2 * t;
        mine[row * FEW_STRIDE + g] = sums[j][0];
        mine[(row + 1) * FEW_STRIDE + g] = sums[j][1];
        mine[row * FEW_STRIDE + g + 8] = sums[j][2];
        mine[(row + 1) * FEW_STRIDE + g + 8] = sums[j][3];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 * MT * 16; i += blockDim.x) {
        u32 row = i / 16, column = i % 16;
        float sum = 0.0f;
        for (u32 c = 0; c < s.chunks; ++c) {
            sum = __fadd_rn(sum, partial[(c * 8 * MT + row) * FEW_STRIDE + column]);
        }
        if (m0 + row < s.m && n0 + column < s.n) {
            u64 at = ((u64)(m0 + row) * s.groups + group) * s.n + n0 + column;
            store(s, out, at, sum);
        }
    }
}

#define FEW(NAME, FORMAT, MT, WIDE, BLOCKS)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * CHUNKS, BLOCKS) linear_few_##NAME(PARAMS) {  \
        few<FORMAT, MT, WIDE>(x, WEIGHT, SHAPE, out);                                              \
    }

FEW(bf16_1, BF16, 1, true, 3)
FEW(bf16_odd, BF16, 1, false, 2)
FEW(fp8_1, FP8, 1, true, 3)
FEW(fp8_odd, FP8, 1, false, 2)
FEW(fp4_1, FP4, 1, true, 3)
FEW(fp4_odd, FP4, 1, false, 2)

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

// ---- f32 weights: one block for R rows of x and R weight rows, warps for chunks in turn ----

// Most chunks of an f32 row: there are more of them, as a lane has fewer values in flight.
#define F32_CHUNKS 32

// Lane l multiplies columns 4 l to 4 l + 3 of every 128 of a chunk, ascending; lanes are added by
// the tree of warp_sum, chunks ascending.
template <int R>
__device__ void plain(const bf16* x, const Weight& w, const Shape& s, void* out) {
    __shared__ float partial[F32_CHUNKS][R * R];
    u32 lane = threadIdx.x % 32;
    u32 tiles = (s.n + R - 1) / R;
    u32 group = blockIdx.x / tiles, n0 = blockIdx.x % tiles * R, m0 = blockIdx.y * R;
    const float* w_rows[R];
    const bf16* x_rows[R];
#pragma unroll
    for (int i = 0; i < R; ++i) {
        u64 r = group * s.n + min(n0 + i, s.n - 1);
        w_rows[i] = (const float*)(w.data + r * w.row_stride);
        u64 row = min(m0 + i, s.m - 1);
        x_rows[i] = x + (row * s.groups + group) * s.k;
    }
    for (u32 chunk = threadIdx.x / 32; chunk < s.chunks; chunk += blockDim.x / 32) {
        float sums[R][R] = {};
        u32 first = chunk * s.chunk, last = min(first + s.chunk, slabs_end(s));
#pragma unroll 4
        for (u32 at = first + 4 * lane; at < last; at += 128) {
            float4 a[R];
#pragma unroll
            for (int i = 0; i < R; ++i) {
                a[i] = __ldg((const float4*)(w_rows[i] + at));
            }
#pragma unroll
            for (int i = 0; i < R; ++i) {
                float b[4];
                if (s.k % 4 == 0) {
                    uint2 pairs = make_uint2(0, 0);
                    if (at < s.k) {
                        pairs = __ldg((const uint2*)(x_rows[i] + at));
                    }
                    b[0] = low(pairs.x), b[1] = high(pairs.x);
                    b[2] = low(pairs.y), b[3] = high(pairs.y);
                } else {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        b[c] = at + c < s.k ? widen(x_rows[i][at + c]) : 0.0f;
                    }
                }
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    sums[i][j] = __fmaf_rn(a[j].x, b[0], sums[i][j]);
                    sums[i][j] = __fmaf_rn(a[j].y, b[1], sums[i][j]);
                    sums[i][j] = __fmaf_rn(a[j].z, b[2], sums[i][j]);
                    sums[i][j] = __fmaf_rn(a[j].w, b[3], sums[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < R * R; ++i) {
            float sum = warp_sum(sums[i / R][i % R]);
            if (lane == 0) {
                partial[chunk][i] = sum;
            }
        }
    }
    __syncthreads();
    u32 i = threadIdx.x;
    if (i < R * R && m0 + i / R < s.m && n0 + i % R < s.n) {
        float sum = 0.0f;
        for (u32 c = 0; c < s.chunks; ++c) {
            sum = __fadd_rn(sum, partial[c][i]);
        }
        store(s, out, ((u64)(m0 + i / R) * s.groups + group) * s.n + n0 + i % R, sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * F32_CHUNKS) linear_f32_1(PARAMS) {
    plain<1>(x, WEIGHT, SHAPE, out);
}

extern "C" __global__ void __launch_bounds__(256) linear_f32_4(PARAMS) {
    plain<4>(x, WEIGHT, SHAPE, out);
}
