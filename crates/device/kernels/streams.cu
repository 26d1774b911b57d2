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

// The same for four rows, held in registers.
__device__ void sinkhorn4(float* m, u32 iterations, float eps) {
    u32 i = threadIdx.x % 4;
    float row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        row[j] = m[4 * i + j];
    }
    for (u32 turn = 0; turn < iterations; ++turn) {
        if (turn == 0) {
            float top = row[0];
#pragma unroll
            for (int j = 1; j < 4; ++j) {
                top = row[j] <= top ? top : row[j];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                row[j] = exp_f32(__fsub_rn(row[j], top));
            }
        }
        float sum = __fadd_rn(__fadd_rn(__fadd_rn(row[0], row[1]), row[2]), row[3]);
        sum = turn == 0 ? sum : __fadd_rn(sum, eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            row[j] = __fdiv_rn(row[j], sum);
            row[j] = turn == 0 ? __fadd_rn(row[j], eps) : row[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float column = __shfl_sync(0xffffffffu, row[j], 0);
#pragma unroll
            for (int lane = 1; lane < 4; ++lane) {
                column = __fadd_rn(column, __shfl_sync(0xffffffffu, row[j], lane));
            }
            row[j] = __fdiv_rn(row[j], __fadd_rn(column, eps));
        }
    }
    __syncwarp();
    if (threadIdx.x < 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            m[4 * i + j] = row[j];
        }
    }
    __syncwarp();
}

// Coefficients of one site from `products`, the (2 + S) * S products of each row with the site's
// function. One block a row: all threads sum the squares, one warp does the rest.
extern "C" __global__ void __launch_bounds__(256)
    streams_mix(const bf16* x, const float* products, const float* base, const float* scale, u32 streams, u32 hidden, u32 iterations, float hc_eps, float norm_eps, float* pre, float* post, float* comb) {
    __shared__ float partial[8];
    __shared__ float mix[(2 + MAX_STREAMS) * MAX_STREAMS];
    u64 row = blockIdx.x;
    u32 s = streams, width = streams * hidden, outputs = (2 + s) * s;
    x += row * width;
    float sum = sum_of_squares(x, width, partial);
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
