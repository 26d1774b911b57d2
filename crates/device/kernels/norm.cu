// Root mean square normalization. One block a row.
#include "common.cuh"

// The mean of squares is summed by 256 threads, each over every 256th value ascending, then over
// threads in the order of block_sum: a function of the width alone.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const bf16* x, const float* weight, float eps, u32 width, bf16* out) {
    __shared__ float partial[8];
    x += (u64)blockIdx.x * width;
    out += (u64)blockIdx.x * width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += 256) {
        float v = widen(x[i]);
        sum = __fmaf_rn(v, v, sum);
    }
    sum = block_sum(sum, partial);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), eps)));
    for (u32 i = threadIdx.x; i < width; i += 256) {
        out[i] = narrow(widen(x[i]) * factor * weight[i]);
    }
}
