// The n-gram memory: the gated update of the streams. A block has one stream of one row.
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    engram_update(bf16* streams, const bf16* kv, const float* weight, const u8* image, int count, int hidden,
                  float eps) {
    const u64 row = blockIdx.x;
    const u32 s = blockIdx.y;
    if (image[row] != 0) return;
    bf16* stream = streams + (row * count + s) * hidden;
    const bf16* key = kv + (row * (count + 1) + s) * hidden;
    const bf16* value = kv + (row * (count + 1) + count) * hidden;
    weight += u64(s) * hidden;
    float product = 0.0f, stream_square = 0.0f, key_square = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += THREADS) {
        const float x = widen(stream[c]), k = widen(key[c]);
        product = __fmaf_rn(__fmul_rn(x, weight[c]), k, product);
        stream_square = __fmaf_rn(x, x, stream_square);
        key_square = __fmaf_rn(k, k, key_square);
    }
    __shared__ float partial[3][THREADS / 32];
    product = block_sum(product, partial[0]);
    stream_square = block_sum(stream_square, partial[1]);
    key_square = block_sum(key_square, partial[2]);
    auto inverse_rms = [&](float square) {
        return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, float(hidden)), eps)));
    };
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(hidden)));
    const float dot = __fmul_rn(__fmul_rn(__fmul_rn(product, inverse_rms(stream_square)), inverse_rms(key_square)), scale);
    const float size = fabsf(dot);
    const float root = __fsqrt_rn(size < 1e-6f ? 1e-6f : size);
    // The sign of 0 is 0.
    const float gate = sigmoid_f32(dot == 0.0f ? 0.0f : copysignf(root, dot));
    for (int c = threadIdx.x; c < hidden; c += THREADS) {
        stream[c] = narrow(__fmaf_rn(gate, widen(value[c]), widen(stream[c])));
    }
}
