// Residual streams. Elementwise kernels: one thread a channel of a row.
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

// out = sum_s pre[s] * stream[s], s ascending.
extern "C" __global__ void __launch_bounds__(256)
    streams_collapse(const bf16* x, const float* pre, u32 streams, u32 hidden, u64 count, bf16* out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    u64 row = i / hidden;
    u32 c = i % hidden;
    x += row * streams * hidden + c;
    float sum = 0.0f;
    for (u32 s = 0; s < streams; ++s) {
        sum = __fmaf_rn(pre[row * streams + s], widen(x[(u64)s * hidden]), sum);
    }
    out[i] = narrow(sum);
}

// stream[j] = post[j] * y + sum_i comb[i, j] * stream[i], i ascending, in place.
extern "C" __global__ void __launch_bounds__(256)
    streams_update(bf16* x, const bf16* y, const float* post, const float* comb, u32 streams, u32 hidden, u64 count) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    u64 row = i / hidden;
    u32 c = i % hidden;
    x += row * streams * hidden + c;
    post += row * streams;
    comb += row * streams * streams;
    float old[MAX_STREAMS];
#pragma unroll
    for (u32 s = 0; s < MAX_STREAMS; ++s) {
        old[s] = s < streams ? widen(x[(u64)s * hidden]) : 0.0f;
    }
    float added = widen(y[i]);
    for (u32 j = 0; j < streams; ++j) {
        float sum = __fmul_rn(post[j], added);
#pragma unroll
        for (u32 s = 0; s < MAX_STREAMS; ++s) {
            if (s < streams) {
                sum = __fmaf_rn(comb[s * streams + j], old[s], sum);
            }
        }
        x[(u64)j * hidden] = narrow(sum);
    }
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

// Coefficients of one site from `products`, the (2 + S) * S products of each row with the site's
// function. One block a row: all threads sum the squares (every 256th value ascending, then as
// block_sum does), one warp does the rest.
extern "C" __global__ void __launch_bounds__(256)
    streams_mix(const bf16* x, const float* products, const float* base, const float* scale, u32 streams, u32 hidden, u32 iterations, float hc_eps, float norm_eps, float* pre, float* post, float* comb) {
    __shared__ float partial[8];
    __shared__ float mix[(2 + MAX_STREAMS) * MAX_STREAMS];
    u64 row = blockIdx.x;
    u32 s = streams, width = streams * hidden, outputs = (2 + s) * s;
    x += row * width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += 256) {
        float v = widen(x[i]);
        sum = __fmaf_rn(v, v, sum);
    }
    sum = block_sum(sum, partial);
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
    sinkhorn(mix + 2 * s, s, iterations, hc_eps);
    for (u32 i = threadIdx.x; i < s * s; i += 32) {
        comb[row * s * s + i] = mix[2 * s + i];
    }
}
