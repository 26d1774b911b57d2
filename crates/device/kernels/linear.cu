// Products of few rows with weights in stored form, and of any number with f32 weights. See linear.cuh
// for the order of sums.
#include "linear.cuh"

// ---- few rows of x: a block for ROWS weight rows and 8 rows of x, a warp a chunk ----

// Floats from one row of partial sums to the next: no two lanes meet in a bank.
#define FEW_STRIDE 20

// 8 or 16 weight rows. A slab's codes, and values of x, are on their way to registers while AHEAD slabs
// before it are multiplied.
template <int FORMAT, int ROWS, int AHEAD, bool WIDE>
__device__ __forceinline__ void few(const bf16* x, const Weight& w, const Shape& s, void* out) {
    const bool TWO = ROWS == 16;
    __shared__ float partial[CHUNKS * 8 * FEW_STRIDE];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 tiles = (s.n + ROWS - 1) / ROWS;
    u32 group = blockIdx.x / tiles, n0 = blockIdx.x % tiles * ROWS, m0 = blockIdx.y * 8;
    u32 first = warp * s.chunk, last = min(first + s.chunk, slabs_end(s));

    // The lane's one or two weight rows. Rows beyond the last read the last; what comes of them is not
    // stored.
    u32 row0 = group * s.n + n0;
    u32 row_a = row0 + min(g, s.n - 1 - n0), row_b = row0 + min(g + 8, s.n - 1 - n0);
    u32 scale_a = (row_a + w.row0) >> w.shift, scale_b = (row_b + w.row0) >> w.shift;
    const u8* values = w.data + row_a * w.row_stride;
    const u8* scales = w.scale + scale_a * w.scale_stride;
    u32 b_at = (row_b - row_a) * (u32)w.row_stride, b_scale = (scale_b - scale_a) * (u32)w.scale_stride;
    x = m0 + g < s.m ? x + ((u64)(m0 + g) * s.groups + group) * s.k : nullptr;

    float sums[4] = {};
    Raw<FORMAT> a[AHEAD], b[TWO ? AHEAD : 1];
    u32 x_pairs[AHEAD][8];
    auto fetch = [&](int i, u32 at) {
        if (at < last) {
            load(a[i], values, scales, at + 16 * t);
            if (TWO) {
                load(b[TWO ? i : 0], values + b_at, scales + b_scale, at + 16 * t);
            }
            // In the order in which they are needed: loads come back one after the other.
            load_x<WIDE>(x, at + 16 * t, s.k, x_pairs[i]);
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        fetch(i, first + i * SLAB);
    }
    for (u32 base = first; base < last; base += AHEAD * SLAB) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            u32 at = base + i * SLAB;
            if (at >= last) {
                break;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 low[4], high[4] = {0, 0, 0, 0};
                expand(a[i], half, low);
                if (TWO) {
                    expand(b[TWO ? i : 0], half, high);
                }
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    int p = 2 * step, q = 4 * half + p;
                    u32 w_pairs[4] = {low[p], high[p], low[p + 1], high[p + 1]};
                    mma(sums, w_pairs, x_pairs[i][q], x_pairs[i][q + 1]);
                }
            }
            fetch(i, at + AHEAD * SLAB);
        }
    }

    float* mine = partial + warp * 8 * FEW_STRIDE + 2 * t * FEW_STRIDE + g;
    mine[0] = sums[0];
    mine[FEW_STRIDE] = sums[1];
    mine[8] = sums[2];
    mine[FEW_STRIDE + 8] = sums[3];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 * ROWS; i += blockDim.x) {
        u32 row = i / ROWS, column = i % ROWS;
        float sum = 0.0f;
        for (u32 c = 0; c < s.chunks; ++c) {
            sum = __fadd_rn(sum, partial[(c * 8 + row) * FEW_STRIDE + column]);
        }
        if (m0 + row < s.m && n0 + column < s.n) {
            store(s, out, ((u64)(m0 + row) * s.groups + group) * s.n + n0 + column, sum);
        }
    }
}

#define FEW(NAME, FORMAT, ROWS, AHEAD, WIDE, BLOCKS)                                               \
    extern "C" __global__ void __launch_bounds__(32 * CHUNKS, BLOCKS) linear_few_##NAME(PARAMS) {  \
        few<FORMAT, ROWS, AHEAD, WIDE>(x, WEIGHT, SHAPE, out);                                     \
    }

FEW(bf16_16, BF16, 16, 2, true, 2)
FEW(bf16_8, BF16, 8, 5, true, 2)
FEW(bf16_odd, BF16, 16, 2, false, 2)
FEW(fp8_16, FP8, 16, 2, true, 3)
FEW(fp8_8, FP8, 8, 4, true, 3)
FEW(fp8_odd, FP8, 16, 2, false, 2)
FEW(fp4_16, FP4, 16, 3, true, 3)
FEW(fp4_8, FP4, 8, 4, true, 3)
FEW(fp4_odd, FP4, 16, 2, false, 2)

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
