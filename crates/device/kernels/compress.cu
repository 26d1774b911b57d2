// Pooling of groups of tokens, and the rows that wait for their group to fill.
#include "common.cuh"

constexpr u32 PENDING = 1u << 31;

// Channel by channel: exponentials of the distance to the largest score, their sum and the weighted
// sum in order of the members, one division.
extern "C" __global__ void __launch_bounds__(256)
    pool_groups(const bf16* values, const bf16* scores, const float* pending, const u32* members, int ratio,
                int width, bf16* out) {
    const int c = int(blockIdx.y * blockDim.x + threadIdx.x);
    const u64 group = blockIdx.x;
    if (c >= width) return;
    members += group * ratio;
    auto read = [&](int j, bool score) {
        const u64 row = members[j] & ~PENDING;
        if (members[j] & PENDING) return pending[(row * 2 + score) * width + c];
        return widen((score ? scores : values)[row * width + c]);
    };
    float top = -__int_as_float(0x7f800000);
    for (int j = 0; j < ratio; j++) {
        // NaN stays: it must not pass for a score.
        const float score = read(j, true);
        top = score <= top ? top : score;
    }
    float sum = 0.0f, total = 0.0f;
    for (int j = 0; j < ratio; j++) {
        const float e = exp_f32(__fsub_rn(read(j, true), top));
        sum = __fadd_rn(sum, e);
        total = __fmaf_rn(e, read(j, false), total);
    }
    out[group * width + c] = narrow(__fdiv_rn(total, sum));
}

extern "C" __global__ void __launch_bounds__(256)
    store_pending(const bf16* values, const bf16* scores, const u64* indices, int width, float* pending) {
    const u64 index = indices[blockIdx.x];
    if (index == ~0ull) return;
    for (int c = int(threadIdx.x); c < width; c += blockDim.x) {
        const u64 at = u64(blockIdx.x) * width + c;
        pending[index * 2 * width + c] = widen(values[at]);
        pending[(index * 2 + 1) * width + c] = widen(scores[at]);
    }
}
