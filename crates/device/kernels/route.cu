// Choice of experts: a warp a row.
#include "cache.cuh"

// Dynamic shared memory: two words an expert and warp.
extern "C" __global__ void __launch_bounds__(128)
    route(const float* scores, const float* bias, const float* bias_image, const u8* image, int experts,
          int k, float scale, int rows, u32* ids, float* weights) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row = int(blockIdx.x) * int(blockDim.x / 32) + warp;
    if (row >= rows) return;
    float* s = shared + 2 * experts * warp;
    u32* ranks = reinterpret_cast<u32*>(s + experts);
    if (image[row] != 0 && bias_image) bias = bias_image;
    for (int e = lane; e < experts; e += 32) {
        s[e] = __fsqrt_rn(softplus_f32(scores[u64(row) * experts + e]));
        const float value = __fadd_rn(s[e], bias[e]);
        // NaN counts as negative infinity.
        ranks[e] = rank_of(value != value ? -infinity() : value);
    }
    __syncwarp();
    ids += u64(row) * k;
    weights += u64(row) * k;
    float sum = 0.0f;
    for (int slot = 0; slot < k; slot++) {
        u64 best = 0;
        for (int e = lane; e < experts; e += 32) {
            // A rank of 0 marks those taken before; none has it by itself.
            if (ranks[e] > 0) best = max(best, entry_of(ranks[e], e));
        }
#pragma unroll
        for (int by = 16; by > 0; by /= 2) best = max(best, __shfl_xor_sync(~0u, best, by));
        const u32 id = index_of(best);
        sum = __fadd_rn(sum, s[id]);
        if (lane == 0) {
            ids[slot] = id;
            weights[slot] = s[id];
            ranks[id] = 0;
        }
        __syncwarp();
    }
    for (int slot = lane; slot < k; slot += 32) {
        weights[slot] = __fmul_rn(__fdiv_rn(weights[slot], __fadd_rn(sum, 1e-20f)), scale);
    }
}
