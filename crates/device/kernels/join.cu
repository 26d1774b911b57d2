// Joining rows, and adding them.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    concat(const bf16* a, int a_width, const bf16* b, int b_width, bf16* out) {
    const u64 row = blockIdx.x;
    const int width = a_width + b_width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        out[row * width + c] = c < a_width ? a[row * a_width + c] : b[row * b_width + c - a_width];
    }
}

// A thread a column: rows ascending, since several may go to one row of the output.
extern "C" __global__ void __launch_bounds__(256)
    add_rows_f32(const float* x, int width, int rows, float* out, const u32* out_rows) {
    const int c = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= width) return;
    for (int row = 0; row < rows; row++) {
        const u32 to = out_rows[row];
        if (to == ABSENT) continue;
        float* at = out + u64(to) * width + c;
        *at = __fadd_rn(*at, x[u64(row) * width + c]);
    }
}
