// Attention over selected rows, the window and the sink.
//
// A block holds 16 or 64 heads of one query and walks its keys in pieces of 64. A piece is decoded
// to bf16 in chunks of 256 columns: once for the scores, and once more for the sums, where the last
// chunk is still there. A piece's sums are complete before they are merged with those of the pieces
// before it, so one block that walks all pieces and a block a piece with `attend_merge` behind them
// give the same bits. Scores are in units of log2.
#include "cache.cuh"

constexpr int PIECE = 64;
constexpr int CHUNK = 256;
constexpr int THREADS = 256;
constexpr float LOG2_E = 1.44269504f;

struct Args {
    SLOT const bf16* q;       // [rows, heads, dim]
    SLOT const float* sink;  // [heads]
    SLOT bf16* out;           // [rows, heads, dim]
    SLOT const u32* sequence;
    SLOT const u32* window_from;
    SLOT const u32* window_to;
    SLOT const u32* fresh_from;
    SLOT const u32* first_row;
    SLOT const u32* slot;
    SLOT const u32* indices;  // [rows, k]
    SLOT Paged selected;
    SLOT const u8* ring;
    SLOT const u8* fresh;
    SLOT u64 window_bytes;
    SLOT float* partial;  // [rows, pieces, heads, dim]
    SLOT float2* seen;    // [rows, pieces, heads]: largest score, sum of exponentials
    SLOT float scale;     // with the factor log2(e)
    SLOT int heads;
    SLOT int dim;
    SLOT int k;
    SLOT int ring_len;
    SLOT int window_format;
    SLOT int window_align;
    SLOT int pieces;  // of a row at most; 0: one block walks all
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a head has seen so far, and one piece more.
struct Merge {
    float top, sum, old_factor, new_factor;
};

__device__ __forceinline__ Merge merge(float top, float sum, float piece_top, float piece_sum) {
    Merge m;
    m.top = fmaxf(top, piece_top);
    m.old_factor = exp2_fast(__fsub_rn(top, m.top));
    m.new_factor = exp2_fast(__fsub_rn(piece_top, m.top));
    m.sum = __fmaf_rn(piece_sum, m.new_factor, __fmul_rn(sum, m.old_factor));
    return m;
}

__device__ __forceinline__ float merge_value(float old_value, float piece, float old_factor, float new_factor) {
    return __fmaf_rn(piece, new_factor, __fmul_rn(old_value, old_factor));
}

// Takes the sink in: the factor of the sums, and the total to divide by.
__device__ __forceinline__ float2 finish(float top, float sum, float sink) {
    float score = __fmul_rn(sink, LOG2_E);
    float both = fmaxf(top, score);
    float old_factor = exp2_fast(__fsub_rn(top, both));
    return make_float2(old_factor, __fmaf_rn(sum, old_factor, exp2_fast(__fsub_rn(score, both))));
}

// Selected rows and all keys of a query. All threads of the block must call.
__device__ __forceinline__ int2 count_keys(const Args& a, u32 row) {
    int selected = 0;
    for (int base = 0; base < a.k; base += int(blockDim.x)) {
        int i = base + int(threadIdx.x);
        bool there = i < a.k && __ldg(a.indices + u64(row) * a.k + i) != ABSENT;
        selected += __syncthreads_count(there);
    }
    u32 from = a.window_from[row], to = a.window_to[row];
    return make_int2(selected, selected + int(to > from ? to - from : 0));
}

__device__ __forceinline__ const u8* key_address(const Args& a, u32 row, u32 sequence, int selected, int key) {
    if (key < selected) return paged_row(a.selected, sequence, __ldg(a.indices + u64(row) * a.k + key));
    u32 position = a.window_from[row] + u32(key - selected);
    u32 fresh_from = a.fresh_from[sequence];
    if (position < fresh_from) {
        u64 at = u64(a.slot[sequence]) * a.ring_len + position % u32(a.ring_len);
        return a.ring + at * a.window_bytes;
    }
    return a.fresh + (u64(a.first_row[sequence]) + (position - fresh_from)) * a.window_bytes;
}

// Where 16 bytes lie in a row of 512: rows that one instruction reads fall into different banks,
// whether it reads 8 rows at one place or 2 rows at 4.
__device__ __forceinline__ int swizzle(int row, int unit) { return (unit ^ ((row >> 1 & 3) | (row & 1) << 2)) * 16; }

template <int TILES, int CHUNKS>
__device__ __forceinline__ void attend(const Args& a) {
    constexpr int HEADS = 16 * TILES;
    constexpr int WARP_TILES = TILES == 4 ? 2 : 1;       // head tiles of a warp
    constexpr int WARP_GROUPS = TILES == 4 ? 2 : 1;      // groups of 8 keys of a warp
    constexpr int COLUMN_GROUPS = TILES == 4 ? 4 : 2;    // groups of 16 columns of a warp
    constexpr int GROUPS = PIECE / 8;
    constexpr int LOADS = TILES == 4 ? 2 : 4;            // rows that a warp reads at once

    __shared__ __align__(16) u8 tile[PIECE * CHUNK * 2];
    __shared__ __align__(16) u8 weights[HEADS * PIECE * 2];
    __shared__ const u8* address[PIECE];
    __shared__ float group_top[HEADS][GROUPS];
    __shared__ float group_sum[HEADS][GROUPS];
    __shared__ float2 factors[HEADS];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int first_tile = TILES == 4 ? (warp & 1) * 2 : 0;
    const int part = TILES == 4 ? warp >> 1 : warp;
    const u32 row = blockIdx.y;
    const int first_head = int(blockIdx.x) * HEADS;
    const u32 sequence = a.sequence[row];
    const int2 keys = count_keys(a, row);
    const int pieces = (keys.y + PIECE - 1) / PIECE;
    const bool split = a.pieces > 0;
    const int from = split ? int(blockIdx.z) : 0;
    const int to = split ? from + 1 : pieces;
    if (split && from >= pieces) return;

    float out[CHUNKS][COLUMN_GROUPS][WARP_TILES][2][4] = {};
    float top = -infinity(), sum = 0.0f;  // of head threadIdx.x

    for (int piece = from; piece < to; piece++) {
        const int first_key = piece * PIECE;
        const int count = min(PIECE, keys.y - first_key);
        if (threadIdx.x < PIECE) {
            bool there = int(threadIdx.x) < count;
            address[threadIdx.x] =
                there ? key_address(a, row, sequence, keys.x, first_key + int(threadIdx.x)) : nullptr;
        }
        __syncthreads();

        auto stage = [&](int chunk) {
            const int col = chunk * CHUNK + lane * 8;
#pragma unroll
            for (int first = 0; first < PIECE / 8; first += LOADS) {
                Raw8 raw[LOADS];
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    int key = warp + 8 * (first + i);
                    raw[i].codes = make_uint4(0, 0, 0, 0);
                    raw[i].scale = ABSENT;
                    if (key < count && col < a.dim) {
                        bool chosen = first_key + key < keys.x;
                        raw[i] = read8<false>(chosen ? a.selected.format : a.window_format, address[key],
                                              a.dim, col, chosen ? a.selected.align : a.window_align);
                    }
                }
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    int key = warp + 8 * (first + i);
                    int format = first_key + key < keys.x ? a.selected.format : a.window_format;
                    *reinterpret_cast<uint4*>(tile + key * 512 + swizzle(key, lane)) = decode8(format, raw[i]);
                }
            }
        };

        // Scores: columns are taken 32 at a time; a thread's 8 of them are two steps of the product.
        float score[WARP_TILES][WARP_GROUPS][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (chunk > 0) __syncthreads();
            stage(chunk);
            __syncthreads();
            const int steps = min(CHUNK, a.dim - chunk * CHUNK + 31) / 32;
#pragma unroll 2
            for (int step = 0; step < steps; step++) {
                const int col = chunk * CHUNK + step * 32 + t * 8;
                uint4 key[WARP_GROUPS];
#pragma unroll
                for (int n = 0; n < WARP_GROUPS; n++) {
                    int r = (part * WARP_GROUPS + n) * 8 + g;
                    key[n] = *reinterpret_cast<const uint4*>(tile + r * 512 + swizzle(r, step * 4 + t));
                }
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) {
                    const int head = first_head + (first_tile + m) * 16 + g;
                    const bf16* q = a.q + (u64(row) * a.heads + head) * a.dim + col;
                    uint4 x = make_uint4(0, 0, 0, 0), y = x;
                    if (head < a.heads && col < a.dim) x = __ldg(reinterpret_cast<const uint4*>(q));
                    if (head + 8 < a.heads && col < a.dim) {
                        y = __ldg(reinterpret_cast<const uint4*>(q + 8 * a.dim));
                    }
#pragma unroll
                    for (int n = 0; n < WARP_GROUPS; n++) {
                        mma(score[m][n], {x.x, y.x, x.y, y.y}, key[n].x, key[n].y);
                        mma(score[m][n], {x.z, y.z, x.w, y.w}, key[n].z, key[n].w);
                    }
                }
            }
        }

        // Largest scores, in groups of 8 keys, then of the piece.
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) {
            const int head = (first_tile + m) * 16 + g;
#pragma unroll
            for (int n = 0; n < WARP_GROUPS; n++) {
                const int group = part * WARP_GROUPS + n;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    bool there = group * 8 + t * 2 + (i & 1) < count;
                    score[m][n][i] = there ? __fmul_rn(score[m][n][i], a.scale) : -infinity();
                }
                float low = fmaxf(score[m][n][0], score[m][n][1]);
                float high = fmaxf(score[m][n][2], score[m][n][3]);
                low = fmaxf(low, __shfl_xor_sync(~0u, low, 1));
                high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
                low = fmaxf(low, __shfl_xor_sync(~0u, low, 2));
                high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
                if (t == 0) {
                    group_top[head][group] = low;
                    group_top[head + 8][group] = high;
                }
            }
        }
        __syncthreads();
        auto piece_top = [&](int head) {
            float best = group_top[head][0];
#pragma unroll
            for (int i = 1; i < GROUPS; i++) best = fmaxf(best, group_top[head][i]);
            return best;
        };
        // Weights as bf16; their sums are of the rounded ones.
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int head = (first_tile + m) * 16 + half * 8 + g;
                const float best = piece_top(head);
#pragma unroll
                for (int n = 0; n < WARP_GROUPS; n++) {
                    const int group = part * WARP_GROUPS + n;
                    u32 pair = narrow2(exp2_fast(__fsub_rn(score[m][n][2 * half], best)),
                                         exp2_fast(__fsub_rn(score[m][n][2 * half + 1], best)));
                    *reinterpret_cast<u32*>(weights + head * 128 + (group ^ (head & 7)) * 16 + t * 4) = pair;
                    float total = __fadd_rn(low(pair), high(pair));
                    total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
                    total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
                    if (t == 0) group_sum[head][group] = total;
                }
            }
        }
        __syncthreads();
        if (threadIdx.x < HEADS) {
            const int head = threadIdx.x;
            float piece_sum = group_sum[head][0];
#pragma unroll
            for (int i = 1; i < GROUPS; i++) piece_sum = __fadd_rn(piece_sum, group_sum[head][i]);
            const float best = piece_top(head);
            if (split) {
                if (first_head + head < a.heads) {
                    a.seen[(u64(row) * a.pieces + piece) * a.heads + first_head + head] =
                        make_float2(best, piece_sum);
                }
            } else {
                Merge m = merge(top, sum, best, piece_sum);
                top = m.top;
                sum = m.sum;
                factors[head] = make_float2(m.old_factor, m.new_factor);
            }
        }
        if (!split) __syncthreads();

        // Sums of weighted values.
        u32 w[PIECE / 16][WARP_TILES][4];
#pragma unroll
        for (int step = 0; step < PIECE / 16; step++) {
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) {
                const int head = (first_tile + m) * 16 + (lane & 15);
                load_matrices(w[step][m], weights + head * 128 + ((step * 2 + (lane >> 4)) ^ (head & 7)) * 16);
            }
        }
#pragma unroll
        for (int back = 0; back < CHUNKS; back++) {
            const int chunk = CHUNKS - 1 - back;
            if (back > 0) {
                __syncthreads();
                stage(chunk);
                __syncthreads();
            }
#pragma unroll
            for (int c = 0; c < COLUMN_GROUPS; c++) {
                const int unit = (part * COLUMN_GROUPS + c) * 2;
                const int col = chunk * CHUNK + unit * 8;
                if (col >= a.dim) continue;
                float piece_out[WARP_TILES][2][4] = {};
#pragma unroll
                for (int step = 0; step < PIECE / 16; step++) {
                    const int key = step * 16 + (lane & 15);
                    u32 v[4];
                    load_transposed(v, tile + key * 512 + swizzle(key, unit + (lane >> 4)));
#pragma unroll
                    for (int m = 0; m < WARP_TILES; m++) {
                        mma(piece_out[m][0], w[step][m], v[0], v[1]);
                        mma(piece_out[m][1], w[step][m], v[2], v[3]);
                    }
                }
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) {
                    const int head = (first_tile + m) * 16 + g;
                    if (split) {
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            float* to = a.partial +
                                        ((u64(row) * a.pieces + piece) * a.heads + first_head + head) * a.dim +
                                        col + n * 8 + t * 2;
                            float(&x)[4] = piece_out[m][n];
                            if (first_head + head < a.heads) {
                                *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
                            }
                            if (first_head + head + 8 < a.heads) {
                                *reinterpret_cast<float2*>(to + 8 * a.dim) = make_float2(x[2], x[3]);
                            }
                        }
                    } else {
                        const float2 low = factors[head], high = factors[head + 8];
#pragma unroll
                        for (int n = 0; n < 2; n++) {
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                float2 f = i < 2 ? low : high;
                                float& o = out[chunk][c][m][n][i];
                                o = merge_value(o, piece_out[m][n][i], f.x, f.y);
                            }
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
    if (split) return;

    if (threadIdx.x < HEADS) {
        const int head = first_head + int(threadIdx.x);
        factors[threadIdx.x] = finish(top, sum, head < a.heads ? a.sink[head] : 0.0f);
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int c = 0; c < COLUMN_GROUPS; c++) {
            const int col = chunk * CHUNK + (part * COLUMN_GROUPS + c) * 16 + t * 2;
            if (col >= a.dim) continue;
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int head = (first_tile + m) * 16 + half * 8 + g;
                    const float2 f = factors[head];
                    if (first_head + head >= a.heads) continue;
                    bf16* to = a.out + (u64(row) * a.heads + first_head + head) * a.dim + col;
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float(&x)[4] = out[chunk][c][m][n];
                        float low = __fdiv_rn(__fmul_rn(x[2 * half], f.x), f.y);
                        float high = __fdiv_rn(__fmul_rn(x[2 * half + 1], f.x), f.y);
                        *reinterpret_cast<u32*>(to + n * 8) = narrow2(low, high);
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_16_narrow(const __grid_constant__ Args a) {
    attend<1, 1>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_16(const __grid_constant__ Args a) {
    attend<1, 2>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_64(const __grid_constant__ Args a) {
    attend<4, 2>(a);
}

// The pieces of a head in order, then the sink: a block of `dim` values.
extern "C" __global__ void __launch_bounds__(THREADS) attend_merge(const __grid_constant__ Args a) {
    const u32 head = blockIdx.x, row = blockIdx.y;
    const int2 keys = count_keys(a, row);
    const int pieces = (keys.y + PIECE - 1) / PIECE;
    const u64 first = u64(row) * a.pieces;
    for (int col = int(threadIdx.x) * 2; col < a.dim; col += 2 * int(blockDim.x)) {
        float top = -infinity(), sum = 0.0f;
        float2 x = make_float2(0.0f, 0.0f);
        for (int piece = 0; piece < pieces; piece++) {
            const u64 at = (first + piece) * a.heads + head;
            const float2 seen = a.seen[at];
            const float2 value = *reinterpret_cast<const float2*>(a.partial + at * a.dim + col);
            Merge m = merge(top, sum, seen.x, seen.y);
            x.x = merge_value(x.x, value.x, m.old_factor, m.new_factor);
            x.y = merge_value(x.y, value.y, m.old_factor, m.new_factor);
            top = m.top;
            sum = m.sum;
        }
        const float2 f = finish(top, sum, a.sink[head]);
        *reinterpret_cast<u32*>(a.out + (u64(row) * a.heads + head) * a.dim + col) =
            narrow2(__fdiv_rn(__fmul_rn(x.x, f.x), f.y), __fdiv_rn(__fmul_rn(x.y, f.x), f.y));
    }
}
