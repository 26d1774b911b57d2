// What a card can do: reading memory, multiplying on tensor cores, starting a kernel.
#include "common.cuh"

// Reads `count` words of 16 bytes; four loads of a thread are under way at a time.
extern "C" __global__ void __launch_bounds__(256)
    limit_read(const uint4* words, u64 count, u32* out) {
    const u64 step = (u64)gridDim.x * 256;
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    uint4 sum = {0, 0, 0, 0};
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = words[i + j * step];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum.x ^= v[j].x, sum.y ^= v[j].y, sum.z ^= v[j].z, sum.w ^= v[j].w;
        }
    }
    for (; i < count; i += step) {
        const uint4 v = words[i];
        sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
    }
    // Not so for the words that are there, which the compiler does not know.
    if ((sum.x & sum.y & sum.z & sum.w) == 0x5eed5eedu) *out = sum.x;
}

// Eight independent sums a warp, `times` products of 16 x 16 and 16 x 8 added to each.
extern "C" __global__ void __launch_bounds__(256) limit_multiply(u32 times, float* out) {
    float sums[8][4] = {};
    // Numbers from 1 to 2, different in each lane.
    const u32 x = 0x3f803f80u | (threadIdx.x * 0x00110023u & 0x007f007fu);
    const u32 a[4] = {x, x ^ 0x00050003u, x ^ 0x00090011u, x ^ 0x00070021u};
    for (u32 t = 0; t < times; t++) {
#pragma unroll
        for (int i = 0; i < 8; i++) mma(sums[i], a, x ^ 0x00410013u, x ^ 0x80238055u);
    }
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    // As above.
    if (all == 0.123f) *out = all;
}

extern "C" __global__ void limit_nothing() {}
