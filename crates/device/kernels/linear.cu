// Products with weights in stored form: out = x w^T.
//
// One accumulation order for every number of rows. K is cut into chunks whose length depends on K
// alone. Inside a chunk, tensor cores add 16 products at a time, k ascending by slabs of 64: the
// step s of a slab (0 to 3) takes, from lane t of four, values 16 t + 4 s to 16 t + 4 s + 3, so that
// a lane reads 16 adjacent values of a row. Chunk sums are added in ascending order. Two kernels
// follow that order: `few` (a warp a chunk, weights from memory straight to registers) and `tile`
// (64 rows of x by 128 weight rows a block, through shared memory; chunks in turn, or one a block
// and a sum behind it).
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

// Columns `column` to `column + 15`, a multiple of 16, of a row.
template <int FORMAT>
__device__ __forceinline__ void load(Raw<FORMAT>& raw, const u8* row, const u8* scales, u32 column) {
    if (FORMAT == BF16) {
        const uint4* at = (const uint4*)(row + column * 2);
        uint4 a = __ldg(at), b = __ldg(at + 1);
        raw.words[0] = a.x, raw.words[1] = a.y, raw.words[2] = a.z, raw.words[3] = a.w;
        raw.words[Raw<FORMAT>::WORDS - 4] = b.x, raw.words[Raw<FORMAT>::WORDS - 3] = b.y;
        raw.words[Raw<FORMAT>::WORDS - 2] = b.z, raw.words[Raw<FORMAT>::WORDS - 1] = b.w;
    } else if (FORMAT == FP8) {
        uint4 a = __ldg((const uint4*)(row + column));
        raw.words[0] = a.x, raw.words[1] = a.y;
        raw.words[Raw<FORMAT>::WORDS - 2] = a.z, raw.words[Raw<FORMAT>::WORDS - 1] = a.w;
        raw.scale = __ldg(scales + column / 32);
    } else {
        uint2 a = __ldg((const uint2*)(row + column / 2));
        raw.words[0] = a.x, raw.words[1] = a.y;
        raw.scale = __ldg(scales + column / 32);
    }
}

// Eight pairs of bf16: two for each step.
template <int FORMAT>
__device__ __forceinline__ void expand(const Raw<FORMAT>& raw, u32 (&pairs)[8]) {
    if (FORMAT == BF16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            pairs[i] = raw.words[i % Raw<FORMAT>::WORDS];
        }
    } else if (FORMAT == FP8) {
        u32 factor = e4m3_factor(raw.scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 first, second;
            e4m3x4(raw.words[i % Raw<FORMAT>::WORDS], first, second);
            pairs[2 * i] = mul2(first, factor);
            pairs[2 * i + 1] = mul2(second, factor);
        }
    } else {
        u32 factor = e2m1_factor(raw.scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 four[4];
            e2m1x8(raw.words[i], four);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pairs[4 * i + j] = mul2(four[j], factor);
            }
        }
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

template <int FORMAT, int MT>
__device__ void few(const bf16* x, const Weight& w, const Shape& s, void* out) {
    // Slabs on their way to registers.
    const int AHEAD = FORMAT == BF16 ? 2 : 4;
    __shared__ float partial[CHUNKS * 8 * MT * FEW_STRIDE];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 tiles = (s.n + 15) / 16;
    u32 group = blockIdx.x / tiles, n0 = blockIdx.x % tiles * 16, m0 = blockIdx.y * 8 * MT;

    // Rows beyond the last read the last; what comes of them is not stored.
    u32 row_a = group * s.n + min(n0 + g, s.n - 1), row_b = group * s.n + min(n0 + g + 8, s.n - 1);
    const u8* a_values = w.data + row_a * w.row_stride;
    const u8* b_values = w.data + row_b * w.row_stride;
    const u8* a_scales = w.scale + ((row_a + w.row0) >> w.shift) * w.scale_stride;
    const u8* b_scales = w.scale + ((row_b + w.row0) >> w.shift) * w.scale_stride;
    x += ((u64)(m0 + g) * s.groups + group) * s.k;
    u64 x_step = (u64)8 * s.groups * s.k;

    u32 first = warp * s.chunk, last = min(first + s.chunk, slabs_end(s));
    float sums[MT][4] = {};
    Raw<FORMAT> a[AHEAD], b[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        u32 at = first + i * SLAB;
        if (at < last) {
            load(a[i], a_values, a_scales, at + 16 * t);
            load(b[i], b_values, b_scales, at + 16 * t);
        }
    }
    for (u32 base = first; base < last; base += AHEAD * SLAB) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            u32 at = base + i * SLAB;
            if (at >= last) {
                break;
            }
            u32 a_pairs[8], b_pairs[8];
            expand(a[i], a_pairs);
            expand(b[i], b_pairs);
            u32 next = at + AHEAD * SLAB;
            if (next < last) {
                load(a[i], a_values, a_scales, next + 16 * t);
                load(b[i], b_values, b_scales, next + 16 * t);
            }
#pragma unroll
            for (int j = 0; j < MT; ++j) {
                const bf16* row = m0 + 8 * j + g < s.m ? x + j * x_step : nullptr;
                u32 x_pairs[8];
                load_x<false>(row, at + 16 * t, s.k, x_pairs);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    u32 w_pairs[4] = {a_pairs[2 * step], b_pairs[2 * step], a_pairs[2 * step + 1],
                                      b_pairs[2 * step + 1]};
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

#define FEW(NAME, FORMAT, MT)                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * CHUNKS, 2) linear_few_##NAME##_##MT(PARAMS) {\
        few<FORMAT, MT>(x, WEIGHT, SHAPE, out);                                                    \
    }

FEW(bf16, BF16, 1)
FEW(bf16, BF16, 2)
FEW(bf16, BF16, 4)
FEW(fp8, FP8, 1)
FEW(fp8, FP8, 2)
FEW(fp8, FP8, 4)
FEW(fp4, FP4, 1)
FEW(fp4, FP4, 2)
FEW(fp4, FP4, 4)

// ---- many rows of x: one block for 128 weight rows and 64 rows of x ----

#define TILE_N 128
#define TILE_M 64
// Bytes of a slab in shared memory: 64 pairs' halves and 16 bytes that keep lanes out of each
// other's banks.
#define ROW_BYTES 144
// Floats of a row of results in shared memory.
#define OUT_STRIDE 132

union TileMemory {
    struct {
        u8 w[TILE_N * ROW_BYTES];
        u8 x[TILE_M * ROW_BYTES];
    } in;
    float out[TILE_M * OUT_STRIDE];
};

__device__ __forceinline__ void put(u8* row, u32 piece, const u32 (&pairs)[8]) {
    uint4* at = (uint4*)(row + piece * 32);
    at[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    at[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// k is a multiple of 8. With several blocks along z each takes one chunk, and writes its sums as they are to
// `out` [chunk, m, groups n] of f32.
template <int FORMAT>
__device__ void tile(const bf16* x, const Weight& w, Shape s, void* out) {
    __shared__ TileMemory memory;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 warp_n = warp % 4 * 32, warp_m = warp / 4 * 32;
    u32 tiles = (s.n + TILE_N - 1) / TILE_N;
    u32 group = blockIdx.y / tiles, n0 = blockIdx.y % tiles * TILE_N, m0 = blockIdx.x * TILE_M;

    // Each thread brings 16 values of x and of two weight rows.
    u32 row = threadIdx.x / 4, piece = threadIdx.x % 4;
    u32 row0 = group * s.n + n0, scale_row0 = (row0 + w.row0) >> w.shift;
    const u8* values = w.data + row0 * w.row_stride;
    const u8* scales = w.scale + scale_row0 * w.scale_stride;
    u32 value_at[2], scale_at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // Rows beyond the last read the last; what comes of them is not stored.
        u32 r = min(row + 64 * i, s.n - 1 - n0);
        value_at[i] = r * (u32)w.row_stride;
        scale_at[i] = (((row0 + r + w.row0) >> w.shift) - scale_row0) * (u32)w.scale_stride;
    }
    x += ((u64)m0 * s.groups + group) * s.k;
    bool x_inside = m0 + row < s.m;
    u32 x_at = row * s.groups * s.k;

    u32 first = 0, last = slabs_end(s);
    if (gridDim.z > 1) {
        first = blockIdx.z * s.chunk;
        last = min(first + s.chunk, last);
    }
    Raw<FORMAT> raw[2];
    u32 x_pairs[8];
    auto fetch = [&](u32 at) {
        load(raw[0], values + value_at[0], scales + scale_at[0], at + 16 * piece);
        load(raw[1], values + value_at[1], scales + scale_at[1], at + 16 * piece);
        load_x<true>(x_inside ? x + x_at : nullptr, at + 16 * piece, s.k, x_pairs);
    };
    float sums[2][4][4] = {}, totals[2][4][4] = {};
    u32 chunk_end = first + s.chunk;
    if (first < last) {
        fetch(first);
    }
    for (u32 at = first; at < last; at += SLAB) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 pairs[8];
            expand(raw[i], pairs);
            put(memory.in.w + (row + 64 * i) * ROW_BYTES, piece, pairs);
        }
        put(memory.in.x + row * ROW_BYTES, piece, x_pairs);
        __syncthreads();
        if (at + SLAB < last) {
            fetch(at + SLAB);
        }
#pragma unroll
        for (int two = 0; two < 2; ++two) {
            u32 offset = t * 32 + two * 16;
            uint4 b[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                b[j] = *(const uint4*)(memory.in.x + (warp_m + 8 * j + g) * ROW_BYTES + offset);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u8* start = memory.in.w + (warp_n + 16 * i + g) * ROW_BYTES + offset;
                uint4 a = *(const uint4*)start, a8 = *(const uint4*)(start + 8 * ROW_BYTES);
                u32 even[4] = {a.x, a8.x, a.y, a8.y}, odd[4] = {a.z, a8.z, a.w, a8.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    mma(sums[i][j], even, b[j].x, b[j].y);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    mma(sums[i][j], odd, b[j].z, b[j].w);
                }
            }
        }
        if (at + SLAB == chunk_end || at + SLAB >= last) {
            chunk_end += s.chunk;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        totals[i][j][c] = __fadd_rn(totals[i][j][c], sums[i][j][c]);
                        sums[i][j][c] = 0.0f;
                    }
                }
            }
        }
    }

    if (gridDim.z > 1) {
        out = (float*)out + (u64)blockIdx.z * s.m * s.groups * s.n;
        s.to_f32 = 1;
        s.factor = 1.0f;
    }
    // Rows of out are written whole.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float* at = memory.out + (warp_m + 8 * j + 2 * t) * OUT_STRIDE + warp_n + 16 * i + g;
            at[0] = totals[i][j][0];
            at[OUT_STRIDE] = totals[i][j][1];
            at[8] = totals[i][j][2];
            at[OUT_STRIDE + 8] = totals[i][j][3];
        }
    }
    __syncthreads();
    u32 column = n0 + lane * 4;
    for (u32 r = warp; r < TILE_M && m0 + r < s.m; r += 8) {
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

#define TILE(NAME, FORMAT, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) linear_tile_##NAME(PARAMS) {         \
        tile<FORMAT>(x, WEIGHT, SHAPE, out);                                                       \
    }

TILE(bf16, BF16, 1)
TILE(fp8, FP8, 2)
TILE(fp4, FP4, 1)

// Adds the chunk sums of `tile`, ascending.
extern "C" __global__ void __launch_bounds__(256)
    linear_sum(const float* __restrict__ partial, u32 chunks, u64 count, float factor, u32 to_f32, void* __restrict__ out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    float sum = 0.0f;
    for (u32 c = 0; c < chunks; ++c) {
        sum = __fadd_rn(sum, partial[c * count + i]);
    }
    store(Shape{0, 0, 0, 0, 0, 0, factor, to_f32}, out, i, sum);
}

// ---- f32 weights: one block for R rows of x and R weight rows, a warp a chunk ----

// Lane l multiplies columns 4 l to 4 l + 3 of every 128 of a chunk, ascending; lanes are added by
// the tree of warp_sum, chunks ascending.
template <int R>
__device__ void plain(const bf16* x, const Weight& w, const Shape& s, void* out) {
    __shared__ float partial[CHUNKS][R * R];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
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
    float sums[R][R] = {};
    u32 first = warp * s.chunk, last = min(first + s.chunk, slabs_end(s));
#pragma unroll 4
    for (u32 at = first + 4 * lane; at < last; at += 128) {
        float a[R][4], b[R][4];
#pragma unroll
        for (int i = 0; i < R; ++i) {
            float4 v = __ldg((const float4*)(w_rows[i] + at));
            a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
            if (s.k % 4 == 0) {
                uint2 pairs = at < s.k ? __ldg((const uint2*)(x_rows[i] + at)) : make_uint2(0, 0);
                b[i][0] = low(pairs.x), b[i][1] = high(pairs.x);
                b[i][2] = low(pairs.y), b[i][3] = high(pairs.y);
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    b[i][c] = at + c < s.k ? widen(x_rows[i][at + c]) : 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
            for (int j = 0; j < R; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sums[i][j] = __fmaf_rn(a[j][c], b[i][c], sums[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < R * R; ++i) {
        float sum = warp_sum(sums[i / R][i % R]);
        if (lane == 0) {
            partial[warp][i] = sum;
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

extern "C" __global__ void __launch_bounds__(32 * CHUNKS) linear_f32_1(PARAMS) {
    plain<1>(x, WEIGHT, SHAPE, out);
}

extern "C" __global__ void __launch_bounds__(32 * CHUNKS) linear_f32_4(PARAMS) {
    plain<4>(x, WEIGHT, SHAPE, out);
}
