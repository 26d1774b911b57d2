// Root mean square normalization. One block a row.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const bf16* x, const float* weight, float eps, u32 width, bf16* out) {
    __shared__ float partial[8];
    x += (u64)blockIdx.x * width;
    out += (u64)blockIdx.x * width;
    float sum = sum_of_squares(x, width, partial);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), eps)));
    if (width % 8 == 0) {
        for (u32 i = threadIdx.x; i < width / 8; i += 256) {
            uint4 v = ((const uint4*)x)[i];
            const float4* w = (const float4*)weight + 2 * i;
            float4 a = w[0], b = w[1];
            v.x = narrow2(low(v.x) * factor * a.x, high(v.x) * factor * a.y);
            v.y = narrow2(low(v.y) * factor * a.z, high(v.y) * factor * a.w);
            v.z = narrow2(low(v.z) * factor * b.x, high(v.z) * factor * b.y);
            v.w = narrow2(low(v.w) * factor * b.z, high(v.w) * factor * b.w);
            ((uint4*)out)[i] = v;
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += 256) {
            out[i] = narrow(widen(x[i]) * factor * weight[i]);
        }
    }
}
