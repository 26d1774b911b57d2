// Residual streams.
#include "common.cuh"

#define MAX_STREAMS 8

// Every stream of a row becomes x.
extern "C" __global__ void __launch_bounds__(256)
    streams_start(const bf16* x, u32 streams, u32 hidden, u64 count, bf16* out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < count) {
        u64 row = i / ((u64)streams * hidden);
        out[i] = x[row * hidden + i % hidden];
    }
}

// WIDTH adjacent channels as f32.
template <int WIDTH>
__device__ __forceinline__ void read(const bf16* x, float (&out)[WIDTH]) {
    if (WIDTH == 1) {
        out[0] = widen(x[0]);
    } else {
        const uint4 v = *(const uint4*)x;
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            out[c] = c % 2 == 0 ? low(words[c / 2]) : high(words[c / 2]);
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void write(bf16* x, const float (&v)[WIDTH]) {
    if (WIDTH == 1) {
        x[0] = narrow(v[0]);
    } else {
        u32 words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            words[c] = narrow2(v[2 * c % WIDTH], v[(2 * c + 1) % WIDTH]);
        }
        *(uint4*)x = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// out = sum_s pre[s] * stream[s], s ascending. A thread has WIDTH channels of a row.
template <int WIDTH>
__device__ void collapse(const bf16* x, const float* pre, u32 streams, u32 hidden, u64 count, bf16* out) {
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * WIDTH;
    if (i >= count) {
        return;
    }
    u64 row = i / hidden;
    x += row * streams * hidden + i % hidden;
    float sums[WIDTH] = {};
    for (u32 s = 0; s < streams; ++s) {
        float v[WIDTH];
        read(x + (u64)s * hidden, v);
        float factor = pre[row * streams + s];
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            sums[c] = __fmaf_rn(factor, v[c], sums[c]);
        }
    }
    write(out + i, sums);
}

extern "C" __global__ void __launch_bounds__(256)
    streams_collapse_1(const bf16* x, const float* pre, u32 streams, u32 hidden, u64 count, bf16* out) {
    collapse<1>(x, pre, streams, hidden, count, out);
}

extern "C" __global__ void __launch_bounds__(256)
    streams_collapse_8(const bf16* x, const float* pre, u32 streams, u32 hidden, u64 count, bf16* out) {
    collapse<8>(x, pre, streams, hidden, count, out);
}

// Groups of 8 channels that a thread of `streams_collapse_norm` holds.
#define HELD 4

// The same, then root mean square normalization as rms_norm does it: the same bits as one after the
// other. One block a row of at most 8 * 256 * HELD channels, a multiple of 8.
extern "C" __global__ void __launch_bounds__(256, 2)
    streams_collapse_norm(const bf16* x, const float* pre, const float* weight, float eps, u32 streams, u32 hidden, bf16* out) {
    __shared__ float partial[8];
    u64 row = blockIdx.x;
    x += row * streams * hidden;
    pre += row * streams;
    out += row * hidden;
    u32 held[HELD][4];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        u32 i = threadIdx.x + 256 * j;
        if (i < hidden / 8) {
            float sums[8] = {};
#pragma unroll 4
            for (u32 s = 0; s < streams; ++s) {
                float v[8];
                read(x + s * hidden + 8 * i, v);
                float factor = pre[s];
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    sums[c] = __fmaf_rn(factor, v[c], sums[c]);
                }
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                held[j][c] = narrow2(sums[2 * c], sums[2 * c + 1]);
                sum = __fmaf_rn(low(held[j][c]), low(held[j][c]), sum);
                sum = __fmaf_rn(high(held[j][c]), high(held[j][c]), sum);
            }
        }
    }
    sum = block_sum(sum, partial);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)hidden), eps)));
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        u32 i = threadIdx.x + 256 * j;
        if (i < hidden / 8) {
            const float4* w = (const float4*)weight + 2 * i;
            float4 a = w[0], b = w[1];
            u32 v[4] = {held[j][0], held[j][1], held[j][2], held[j][3]};
            v[0] = narrow2(low(v[0]) * factor * a.x, high(v[0]) * factor * a.y);
            v[1] = narrow2(low(v[1]) * factor * a.z, high(v[1]) * factor * a.w);
            v[2] = narrow2(low(v[2]) * factor * b.x, high(v[2]) * factor * b.y);
            v[3] = narrow2(low(v[3]) * factor * b.z, high(v[3]) * factor * b.w);
            ((uint4*)out)[i] = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

// stream[j] = post[j] * y + sum_i comb[i, j] * stream[i], i ascending, in place. A thread has WIDTH
// channels of a row's streams, at most MOST.
template <int WIDTH, int MOST>
__device__ void update(bf16* x, const bf16* y, const float* post, const float* comb, u32 streams, u32 hidden, u64 count) {
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * WIDTH;
    if (i >= count) {
        return;
    }
    u64 row = i / hidden;
    x += row * streams * hidden + i % hidden;
    post += row * streams;
    comb += row * streams * streams;
    float old[MOST][WIDTH], added[WIDTH];
    read(y + i, added);
#pragma unroll
    for (u32 s = 0; s < MOST; ++s) {
        if (s < streams) {
            read(x + (u64)s * hidden, old[s]);
        }
    }
    for (u32 j = 0; j < streams; ++j) {
        float sums[WIDTH];
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            sums[c] = __fmul_rn(post[j], added[c]);
        }
#pragma unroll
        for (u32 s = 0; s < MOST; ++s) {
            if (s < streams) {
                float factor = comb[s * streams + j];
#pragma unroll
                for (int c = 0; c < WIDTH; ++c) {
                    sums[c] = __fmaf_rn(factor, old[s][c], sums[c]);
                }
            }
        }
        write(x + (u64)j * hidden, sums);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    streams_update_1(bf16* x, const bf16* y, const float* post, const float* comb, u32 streams, u32 hidden, u64 count) {
    update<1, MAX_STREAMS>(x, y, post, comb, streams, hidden, count);
}

// At most 4 streams.
extern "C" __global__ void __launch_bounds__(256)
    streams_update_8(bf16* x, const bf16* y, const float* post, const float* comb, u32 streams, u32 hidden, u64 count) {
    update<8, 4>(x, y, post, comb, streams, hidden, count);
}

// The mean over the streams, to columns of a wider row.
extern "C" __global__ void __launch_bounds__(256)
    streams_mean(const bf16* x, u32 streams, u32 hidden, u64 count, bf16* out, u64 out_width, u64 column) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    u64 row = i / hidden;
    u32 c = i % hidden;
    x += row * streams * hidden + c;
    float sum = widen(x[0]);
    for (u32 s = 1; s < streams; ++s) {
        sum = __fadd_rn(sum, widen(x[(u64)s * hidden]));
    }
    out[row * out_width + column + c] = narrow(__fdiv_rn(sum, (float)streams));
}

// Makes a matrix of logits nearly doubly stochastic; one warp, lane i owning row i, then column i.
// Sums are taken in ascending order.
__device__ void sinkhorn(float* m, u32 n, u32 iterations, float eps) {
    u32 i = threadIdx.x;
    for (u32 turn = 0; turn < iterations; ++turn) {
        if (i < n) {
            float* row = m + i * n;
            float sum = 0.0f;
            if (turn == 0) {
                float top = row[0];
                for (u32 j = 1; j < n; ++j) {
                    top = row[j] <= top ? top : row[j];
                }
                for (u32 j = 0; j < n; ++j) {
                    row[j] = exp_f32(__fsub_rn(row[j], top));
                    sum = __fadd_rn(sum, row[j]);
                }
                for (u32 j = 0; j < n; ++j) {
                    row[j] = __fadd_rn(__fdiv_rn(row[j], sum), eps);
                }
            } else {
                for (u32 j = 0; j < n; ++j) {
                    sum = __fadd_rn(sum, row[j]);
                }
                sum = __fadd_rn(sum, eps);
                for (u32 j = 0; j < n; ++j) {
                    row[j] = __fdiv_rn(row[j], sum);
                }
            }
        }
        __syncwarp();
        if (i < n) {
            float sum = 0.0f;
            for (u32 j = 0; j < n; ++j) {
                sum = __fadd_rn(sum, m[j * n + i]);
            }
            sum = __fadd_rn(sum, eps);
            for (u32 j = 0; j < n; ++j) {
                m[j * n + i] = __fdiv_rn(m[j * n + i], sum);
            }
        }
        __syncwarp();
    }
}

// The same for four rows: a lane of each half warp has one element.
__device__ void sinkhorn4(float* m, u32 iterations, float eps) {
    u32 i = threadIdx.x % 16 / 4, j = threadIdx.x % 4;
    float x = m[4 * i + j];
    for (u32 turn = 0; turn < iterations; ++turn) {
        float row[4], column[4];
        if (turn == 0) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                row[k] = __shfl_sync(0xffffffffu, x, 4 * i + k);
            }
            float top = row[0];
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                top = row[k] <= top ? top : row[k];
            }
            x = exp_f32(__fsub_rn(x, top));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            row[k] = __shfl_sync(0xffffffffu, x, 4 * i + k);
        }
        float sum = __fadd_rn(__fadd_rn(__fadd_rn(row[0], row[1]), row[2]), row[3]);
        x = __fdiv_rn(x, turn == 0 ? sum : __fadd_rn(sum, eps));
        x = turn == 0 ? __fadd_rn(x, eps) : x;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            column[k] = __shfl_sync(0xffffffffu, x, 4 * k + j);
        }
        sum = __fadd_rn(__fadd_rn(__fadd_rn(column[0], column[1]), column[2]), column[3]);
        x = __fdiv_rn(x, __fadd_rn(sum, eps));
    }
    __syncwarp();
    if (threadIdx.x < 16) {
        m[4 * i + j] = x;
    }
    __syncwarp();
}

// Threads that share the squares of a row; a block has as many, or each of its threads does the work of
// several.
#define SQUARES 1024

// The sum of squares of a row, in every thread: every SQUARES-th value ascending, or every SQUARES-th
// group of 8 where the width is a multiple of 8; then a tree over the lanes, then warps ascending.
// `partial` has SQUARES / 32 words.
__device__ __forceinline__ float sum_of_all_squares(const bf16* x, u32 width, float* partial) {
    for (u32 thread = threadIdx.x; thread < SQUARES; thread += blockDim.x) {
        float sum = 0.0f;
        if (width % 8 == 0) {
#pragma unroll 4
            for (u32 i = thread; i < width / 8; i += SQUARES) {
                uint4 v = ((const uint4*)x)[i];
                u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sum = __fmaf_rn(low(words[c]), low(words[c]), sum);
                    sum = __fmaf_rn(high(words[c]), high(words[c]), sum);
                }
            }
        } else {
            for (u32 i = thread; i < width; i += SQUARES) {
                sum = __fmaf_rn(widen(x[i]), widen(x[i]), sum);
            }
        }
        sum = warp_sum(sum);
        if (thread % 32 == 0) {
            partial[thread / 32] = sum;
        }
    }
    __syncthreads();
    float sum = partial[0];
    for (u32 w = 1; w < SQUARES / 32; ++w) {
        sum = __fadd_rn(sum, partial[w]);
    }
    return sum;
}

// Coefficients of one site from `products`, the (2 + S) * S products of each row with the site's
// function. One block a row: all threads sum the squares, one warp does the rest.
extern "C" __global__ void __launch_bounds__(SQUARES)
    streams_mix(const bf16* x, const float* products, const float* base, const float* scale, u32 streams, u32 hidden, u32 iterations, float hc_eps, float norm_eps, float* pre, float* post, float* comb) {
    __shared__ float partial[SQUARES / 32];
    __shared__ float mix[(2 + MAX_STREAMS) * MAX_STREAMS];
    u64 row = blockIdx.x;
    u32 s = streams, width = streams * hidden, outputs = (2 + s) * s;
    x += row * width;
    float sum = sum_of_all_squares(x, width, partial);
    if (threadIdx.x >= 32) {
        return;
    }
    float mean = __fdiv_rn(sum, (float)width);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, norm_eps)));
    products += row * outputs;
    for (u32 i = threadIdx.x; i < outputs; i += 32) {
        u32 kind = i < s ? 0 : i < 2 * s ? 1 : 2;
        float v = __fmaf_rn(__fmul_rn(products[i], factor), scale[kind], base[i]);
        if (kind == 0) {
            pre[row * s + i] = __fadd_rn(sigmoid_f32(v), hc_eps);
        } else if (kind == 1) {
            post[row * s + i - s] = __fmul_rn(2.0f, sigmoid_f32(v));
        } else {
            mix[i] = v;
        }
    }
    __syncwarp();
    if (s == 4) {
        sinkhorn4(mix + 2 * s, iterations, hc_eps);
    } else {
        sinkhorn(mix + 2 * s, s, iterations, hc_eps);
    }
    for (u32 i = threadIdx.x; i < s * s; i += 32) {
        comb[row * s * s + i] = mix[2 * s + i];
    }
}
