// Rotary position embedding of adjacent pairs, in place. One thread a pair.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rope(bf16* x, const float* angles, u32 heads, u32 head_dim, u32 rope_dims, float sign, u64 count) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    u32 half_dims = rope_dims / 2;
    u32 pair = i % half_dims;
    u64 head = i / half_dims;
    u64 row = head / heads;
    const float* angle = angles + row * rope_dims + 2 * pair;
    float cosine = angle[0], sine = angle[1] * sign;
    bf16* at = x + head * head_dim + (head_dim - rope_dims) + 2 * pair;
    float a = widen(at[0]), b = widen(at[1]);
    at[0] = narrow(__fmaf_rn(a, cosine, -__fmul_rn(b, sine)));
    at[1] = narrow(__fmaf_rn(a, sine, __fmul_rn(b, cosine)));
}
