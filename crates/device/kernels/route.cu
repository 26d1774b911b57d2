// Choice of experts: a block a row. All of its warps compute affinities, and the first one chooses.
#include "cache.cuh"

constexpr int THREADS = 128;

// Dynamic shared memory: two words an expert.
extern "C" __global__ void __launch_bounds__(THREADS)
    route(const float* scores, const float* bias, const float* bias_image, const u8* image, int experts,
          int k, float scale, u32* ids, float* weights) {
    extern __shared__ float s[];
    u32* ranks = reinterpret_cast<u32*>(s + experts);
    const u64 row = blockIdx.x;
    const int lane = int(threadIdx.x);
    if (image[row] != 0 && bias_image) bias = bias_image;
    for (int e = lane; e < experts; e += THREADS) {
        s[e] = __fsqrt_rn(softplus_f32(scores[row * experts + e]));
        const float value = __fadd_rn(s[e], bias[e]);
        // NaN counts as negative infinity.
        ranks[e] = rank_of(value != value ? -infinity() : value);
    }
    __syncthreads();
    if (lane >= 32) return;
    // The best of the lane's experts. A rank of 0 marks those taken before; none has it by itself.
    auto best_of_lane = [&] {
        u32 rank = 0, id = ABSENT;
#pragma unroll 4
        for (int e = lane; e < experts; e += 32) {
            if (ranks[e] > rank) {
                rank = ranks[e];
                id = e;
            }
        }
        return make_uint2(rank, id);
    };
    ids += row * k;
    weights += row * k;
    uint2 own = best_of_lane();
    float sum = 0.0f;
    for (int slot = 0; slot < k; slot++) {
        const u32 rank = __reduce_max_sync(~0u, own.x);
        const u32 id = __reduce_min_sync(~0u, own.x == rank ? own.y : ABSENT);
        sum = __fadd_rn(sum, s[id]);
        if (own.y == id) {
            ids[slot] = id;
            weights[slot] = s[id];
            ranks[id] = 0;
            own = best_of_lane();
        }
        __syncwarp();
    }
    for (int slot = lane; slot < k; slot += 32) {
        weights[slot] = __fmul_rn(__fdiv_rn(weights[slot], __fadd_rn(sum, 1e-20f)), scale);
    }
}
