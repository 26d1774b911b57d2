// Attention over selected rows, the window and the sink.
//
// A block holds 16 or 64 heads of one query and walks its keys in pieces of 64. With 64 heads, 16 warps
// decode a piece to bf16 as a whole, in dynamic shared memory. With 16, 8 warps do so in chunks of 256
// columns: once for the scores, and once more for the sums, where the last chunk is still there. The
// next piece's rows are on their way to the cache meanwhile. A piece's sums are complete before they
// are merged with those of the pieces before it, so one block that walks all pieces and a block a piece
// with `attend_merge` behind them give the same bits. Scores are in units of log2.
#include "cache.cuh"

constexpr int PIECE = 64;
constexpr int CHUNK = 256;
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

// Where 16 bytes lie in a row of 512: rows that one instruction reads fall into different banks,
// whether it reads 8 rows at one place or 2 rows at 4.
__device__ __forceinline__ int swizzle(int row, int unit) { return (unit ^ ((row >> 1 & 3) | (row & 1) << 2)) * 16; }

struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};

// Where the window's rows of a query lie.
struct Window {
    u32 from, fresh_from;
    const u8 *ring, *fresh;
};

// EXACT rows are bf16 or f32, the others quantized.
template <int TILES, int CHUNKS, bool EXACT>
__device__ __forceinline__ void attend(const Args& a) {
    constexpr int HEADS = 16 * TILES;
    constexpr bool WHOLE = TILES == 4;  // all chunks of a piece are there at once
    constexpr int WARPS = WHOLE ? 16 : 8;
    constexpr int WARP_KEYS = PIECE / WARPS;  // rows that a warp decodes
    constexpr int GROUPS = PIECE / 8;
    // For the scores, a warp has one tile of 16 heads and so many groups of 8 keys; for the sums, so
    // many tiles and groups of 16 columns.
    constexpr int WARP_GROUPS = GROUPS * TILES / WARPS;
    constexpr int SUM_TILES = TILES == 4 ? 2 : 1;
    constexpr int COLUMN_GROUPS = CHUNK / 16 * TILES / (SUM_TILES * WARPS);
    constexpr int CHUNK_BYTES = PIECE * CHUNK * 2;

    extern __shared__ __align__(16) u8 whole[];
    __shared__ __align__(16) u8 part[WHOLE ? 16 : CHUNK_BYTES];
    u8* const tile = WHOLE ? whole : part;
    __shared__ __align__(16) u8 weights[HEADS * PIECE * 2];
    __shared__ const u8* address[2][PIECE];
    __shared__ float group_top[HEADS][GROUPS];
    __shared__ float group_sum[HEADS][GROUPS];
    __shared__ float2 factors[HEADS];
    __shared__ float2 seen[HEADS];  // of each head so far: largest score, sum of exponentials

    int lane, warp, g, t, score_tile, key_part, sum_tile, column_part;
    auto find_thread = [&] {
        // What follows from it is found again, too, rather than kept in registers.
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = int(thread & 31), warp = int(thread >> 5);
        g = lane >> 2, t = lane & 3;
        score_tile = warp % TILES, key_part = warp / TILES;
        sum_tile = TILES == 4 ? warp % 2 * 2 : 0, column_part = TILES == 4 ? warp / 2 : warp;
    };
    find_thread();
    const u32 row = blockIdx.y;
    const int first_head = int(blockIdx.x) * HEADS;
    const int dim = WHOLE ? CHUNKS * CHUNK : a.dim;
    const int2 keys = count_keys(a, row);
    const int pieces = (keys.y + PIECE - 1) / PIECE;
    const bool split = !WHOLE && a.pieces > 0;
    const int from = split ? int(blockIdx.z) : 0;
    const int to = split ? from + 1 : pieces;
    if (split && from >= pieces) return;

    // Where the rows of a piece lie, in three steps, each of which needs what the one before has
    // read: row numbers, pages, addresses. A thread has one row.
    const u32 sequence = a.sequence[row];
    auto find_window = [&] {
        Window w;
        w.from = a.window_from[row];
        w.fresh_from = a.fresh_from[sequence];
        w.ring = a.ring + u64(a.slot[sequence]) * a.ring_len * a.window_bytes;
        w.fresh = a.fresh + u64(a.first_row[sequence]) * a.window_bytes;
        return w;
    };
    const Window early = find_window();
    u32 index = 0, page = 0;
    auto find_index = [&](int piece) {
        const int key = piece * PIECE + int(threadIdx.x);
        if (threadIdx.x < PIECE && key < keys.x) index = __ldg(a.indices + u64(row) * a.k + key);
    };
    auto find_page = [&](int piece) {
        const int key = piece * PIECE + int(threadIdx.x);
        if (threadIdx.x < PIECE && key < keys.x) {
            page = __ldg(a.selected.pages + u64(sequence) * a.selected.max_pages +
                         index / a.selected.rows_per_page);
        }
    };
    auto find_address = [&](int piece, bool ahead) {
        if (threadIdx.x >= PIECE) return;
        const int key = piece * PIECE + int(threadIdx.x);
        const u8* at = nullptr;
        u32 bytes = 0;
        if (key < keys.x) {
            const u32 in_page = index % a.selected.rows_per_page;
            bytes = u32(a.selected.row_bytes);
            at = a.selected.cache + (u64(page) * a.selected.rows_per_page + in_page) * bytes;
        } else if (key < keys.y) {
            // Found again where all registers are needed.
            const Window w = WHOLE ? find_window() : early;
            const u32 position = w.from + u32(key - keys.x);
            bytes = u32(a.window_bytes);
            at = position < w.fresh_from ? w.ring + u64(position % u32(a.ring_len)) * bytes
                                         : w.fresh + u64(position - w.fresh_from) * bytes;
        }
        address[piece & 1][threadIdx.x] = at;
        if (ahead) {
            for (u32 i = 0; i < bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i));
        }
    };

    // Decodes a chunk of a piece: lane l has columns 8l .. 8l + 8 of the warp's rows.
    auto place = [&](int chunk, int key) {
        return tile + (WHOLE ? chunk * CHUNK_BYTES : 0) + key * 512 + swizzle(warp, lane);
    };
    auto stage_any = [&](int piece, int chunk) {
        constexpr int LOADS = 2;
        const int col = chunk * CHUNK + lane * 8;
        auto format_of = [&](int key) {
            return piece * PIECE + key < keys.x ? a.selected.format : a.window_format;
        };
#pragma unroll
        for (int first = 0; first < WARP_KEYS; first += LOADS) {
            Raw8 raw[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int key = warp + WARPS * (first + i);
                raw[i].codes = make_uint4(0, 0, 0, 0);
                raw[i].scale = 0;
                if (piece * PIECE + key < keys.y && col < dim) {
                    const bool selected = piece * PIECE + key < keys.x;
                    raw[i] = read8<false>(format_of(key), address[piece & 1][key], dim, col,
                                          selected ? a.selected.align : a.window_align);
                }
                if (!EXACT) raw[i].codes.z = raw[i].codes.w = 0;
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int key = warp + WARPS * (first + i);
                *reinterpret_cast<uint4*>(place(chunk, key)) = decode8(format_of(key), raw[i]);
            }
        }
    };
    // The same of a whole piece of one format, without a branch. Rows are aligned to 16 bytes.
    auto stage_whole = [&](int piece, int chunk, auto is_nvfp4) {
        constexpr bool NVFP4 = decltype(is_nvfp4)::value;
        const int col = chunk * CHUNK + lane * 8;
        constexpr int LOADS = WHOLE ? 2 : 4;
#pragma unroll
        for (int first = 0; first < WARP_KEYS; first += LOADS) {
            const u8* rows[LOADS];
            uint2 codes[LOADS];
            u32 scale[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) rows[i] = address[piece & 1][warp + WARPS * (first + i)];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                if (NVFP4) {
                    codes[i] = make_uint2(__ldg(reinterpret_cast<const u32*>(rows[i] + col / 2)), 0);
                    scale[i] = __ldg(rows[i] + dim / 2 + col / 16);
                } else {
                    codes[i] = __ldg(reinterpret_cast<const uint2*>(rows[i] + col));
                    scale[i] = __ldg(rows[i] + dim + col / 32);
                }
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                u32 p[4];
                if (NVFP4) {
                    e2m1x8(codes[i].x, p);
                } else {
                    e4m3x4(codes[i].x, p[0], p[1]);
                    e4m3x4(codes[i].y, p[2], p[3]);
                }
                const u32 lift = NVFP4 ? 0x7e807e80u : 0x7b807b80u;
                const u32 factor = both(NVFP4 ? e4m3_bf16(scale[i]) : ue8m0_bf16(scale[i]));
#pragma unroll
                for (int j = 0; j < 4; j++) p[j] = mul2(mul2(p[j], lift), factor);
                *reinterpret_cast<uint4*>(place(chunk, warp + WARPS * (first + i))) = make_uint4(p[0], p[1], p[2], p[3]);
            }
        }
    };
    const bool nvfp4 = dim % CHUNK == 0 && a.selected.format == ROW_NVFP4X16 && a.selected.align == 16;
    const bool fp8 = dim % CHUNK == 0 && a.window_format == ROW_FP8X32 && a.window_align == 16;
    auto stage = [&](int piece, int chunk) {
        if (!EXACT && nvfp4 && (piece + 1) * PIECE <= keys.x) {
            stage_whole(piece, chunk, True());
        } else if (!EXACT && fp8 && piece * PIECE >= keys.x && (piece + 1) * PIECE <= keys.y) {
            stage_whole(piece, chunk, False());
        } else {
            stage_any(piece, chunk);
        }
    };

    float out[CHUNKS][COLUMN_GROUPS][SUM_TILES][2][4] = {};
    if (threadIdx.x < HEADS) seen[threadIdx.x] = make_float2(-infinity(), 0.0f);

    // A block of 64 heads keeps its queries where its outputs will lie, in the order in which threads
    // need them: by tile and step, 16 bytes a thread for each of the two products.
    constexpr int STEPS = CHUNKS * CHUNK / 32;
    auto arranged = [&] {
        return reinterpret_cast<uint4*>(a.out + (u64(row) * a.heads + first_head) * dim) + lane;
    };
    if (WHOLE) {
        for (int i = warp; i < TILES * STEPS; i += WARPS) {
            const int head = first_head + i / STEPS * 16 + g;
            const bf16* q = a.q + (u64(row) * a.heads + head) * dim + i % STEPS * 32 + t * 8;
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(q));
            const uint4 y = __ldg(reinterpret_cast<const uint4*>(q + 8 * dim));
            arranged()[i * 64] = make_uint4(x.x, y.x, x.y, y.y);
            arranged()[i * 64 + 32] = make_uint4(x.z, y.z, x.w, y.w);
        }
    }

    find_index(from);
    find_page(from);
    find_address(from, false);
    __syncthreads();
    for (int piece = from; piece < to; piece++) {
        const int count = min(PIECE, keys.y - piece * PIECE);
        const bool more = piece + 1 < to;
        if (more) find_index(piece + 1);
        find_thread();
        // Scores: columns are taken 32 at a time; a thread's 8 of them are two steps of the product.
        float score[WARP_GROUPS][4] = {};
        if (WHOLE) {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++) stage(piece, chunk);
            __syncthreads();
            find_thread();
            const uint4* q = arranged() + score_tile * STEPS * 64;
            const u8* key_rows = tile + (key_part * WARP_GROUPS * 8 + g) * 512;
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++, q += CHUNK / 32 * 64, key_rows += CHUNK_BYTES) {
#pragma unroll 4
                for (int step = 0; step < CHUNK / 32; step++) {
                    const uint4 x = q[step * 64], y = q[step * 64 + 32];
#pragma unroll
                    for (int n = 0; n < WARP_GROUPS; n++) {
                        const u8* from = key_rows + n * (8 * 512) + (step >> 1) * 128 + swizzle(g, (step & 1) * 4 + t);
                        const uint4 key = *reinterpret_cast<const uint4*>(from);
                        mma(score[n], {x.x, x.y, x.z, x.w}, key.x, key.y);
                        mma(score[n], {y.x, y.y, y.z, y.w}, key.z, key.w);
                    }
                }
            }
        }
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS && !WHOLE; chunk++) {
            if (chunk > 0) __syncthreads();
            stage(piece, chunk);
            __syncthreads();
            const int steps = min(CHUNK, dim - chunk * CHUNK + 31) / 32;
            const int head = first_head + score_tile * 16 + g;
            const bf16* q = a.q + (u64(row) * a.heads + head) * dim + chunk * CHUNK + t * 8;
#pragma unroll 2
            for (int step = 0; step < steps; step++) {
                const bool there = chunk * CHUNK + step * 32 + t * 8 < dim;
                uint4 x = make_uint4(0, 0, 0, 0), y = x;
                if (there && head < a.heads) x = __ldg(reinterpret_cast<const uint4*>(q + step * 32));
                if (there && head + 8 < a.heads) {
                    y = __ldg(reinterpret_cast<const uint4*>(q + step * 32 + 8 * dim));
                }
#pragma unroll
                for (int n = 0; n < WARP_GROUPS; n++) {
                    const int r = (key_part * WARP_GROUPS + n) * 8 + g;
                    const uint4 key = *reinterpret_cast<const uint4*>(tile + r * 512 + (step >> 1) * 128 + swizzle(g, (step & 1) * 4 + t));
                    mma(score[n], {x.x, y.x, x.y, y.y}, key.x, key.y);
                    mma(score[n], {x.z, y.z, x.w, y.w}, key.z, key.w);
                }
            }
        }
        if (more) find_page(piece + 1);
        find_thread();

        // Largest scores, in groups of 8 keys, then of the piece.
        const int score_head = score_tile * 16 + g;
#pragma unroll
        for (int n = 0; n < WARP_GROUPS; n++) {
            const int group = key_part * WARP_GROUPS + n;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool there = group * 8 + t * 2 + (i & 1) < count;
                score[n][i] = there ? __fmul_rn(score[n][i], a.scale) : -infinity();
            }
            float low = fmaxf(score[n][0], score[n][1]);
            float high = fmaxf(score[n][2], score[n][3]);
            low = fmaxf(low, __shfl_xor_sync(~0u, low, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            low = fmaxf(low, __shfl_xor_sync(~0u, low, 2));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            if (t == 0) {
                group_top[score_head][group] = low;
                group_top[score_head + 8][group] = high;
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
        for (int half = 0; half < 2; half++) {
            const int head = score_head + half * 8;
            const float best = piece_top(head);
#pragma unroll
            for (int n = 0; n < WARP_GROUPS; n++) {
                const int group = key_part * WARP_GROUPS + n;
                u32 pair = narrow2(exp2_fast(__fsub_rn(score[n][2 * half], best)),
                                   exp2_fast(__fsub_rn(score[n][2 * half + 1], best)));
                *reinterpret_cast<u32*>(weights + head * 128 + (group ^ (head & 7)) * 16 + t * 4) = pair;
                float total = __fadd_rn(low(pair), high(pair));
                total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
                total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
                if (t == 0) group_sum[head][group] = total;
            }
        }
        if (more) find_address(piece + 1, true);
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
                Merge m = merge(seen[head].x, seen[head].y, best, piece_sum);
                seen[head] = make_float2(m.top, m.sum);
                factors[head] = make_float2(m.old_factor, m.new_factor);
            }
        }
        if (!split) __syncthreads();

        find_thread();
        // Sums of weighted values.
#pragma unroll
        for (int back = 0; back < CHUNKS; back++) {
            const int chunk = CHUNKS - 1 - back;
            if (!WHOLE && back > 0) {
                __syncthreads();
                stage(piece, chunk);
                __syncthreads();
            }
#pragma unroll
            for (int c = 0; c < COLUMN_GROUPS; c++) {
                const int unit = (column_part * COLUMN_GROUPS + c) * 2;
                const int col = chunk * CHUNK + unit * 8;
                if (col >= dim) continue;
                float piece_out[SUM_TILES][2][4] = {};
                const u8* values = tile + (WHOLE ? chunk * CHUNK_BYTES : 0) + (lane & 15) * 512 +
                                   swizzle(lane, unit + (lane >> 4));
#pragma unroll
                for (int step = 0; step < PIECE / 16; step++) {
                    u32 v[4];
                    load_transposed(v, values + step * (16 * 512));
#pragma unroll
                    for (int m = 0; m < SUM_TILES; m++) {
                        const int head = (sum_tile + m) * 16 + (lane & 15);
                        u32 w[4];
                        load_matrices(w, weights + head * 128 + ((step * 2 + (lane >> 4)) ^ (lane & 7)) * 16);
                        mma(piece_out[m][0], w, v[0], v[1]);
                        mma(piece_out[m][1], w, v[2], v[3]);
                    }
                }
#pragma unroll
                for (int m = 0; m < SUM_TILES; m++) {
                    const int head = (sum_tile + m) * 16 + g;
                    if (split) {
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            float* to = a.partial +
                                        ((u64(row) * a.pieces + piece) * a.heads + first_head + head) * dim +
                                        col + n * 8 + t * 2;
                            float(&x)[4] = piece_out[m][n];
                            if (first_head + head < a.heads) {
                                *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
                            }
                            if (first_head + head + 8 < a.heads) {
                                *reinterpret_cast<float2*>(to + 8 * dim) = make_float2(x[2], x[3]);
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

    find_thread();
    if (threadIdx.x < HEADS) {
        const int head = first_head + int(threadIdx.x);
        const float2 all = seen[threadIdx.x];
        factors[threadIdx.x] = finish(all.x, all.y, head < a.heads ? a.sink[head] : 0.0f);
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int c = 0; c < COLUMN_GROUPS; c++) {
            const int col = chunk * CHUNK + (column_part * COLUMN_GROUPS + c) * 16 + t * 2;
            if (col >= dim) continue;
#pragma unroll
            for (int m = 0; m < SUM_TILES; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int head = (sum_tile + m) * 16 + half * 8 + g;
                    const float2 f = factors[head];
                    if (first_head + head >= a.heads) continue;
                    bf16* to = a.out + (u64(row) * a.heads + first_head + head) * dim + col;
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

#define ATTEND(NAME, TILES, CHUNKS, EXACT, WARPS, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) NAME(const __grid_constant__ Args a) { \
        attend<TILES, CHUNKS, EXACT>(a);                                                              \
    }
ATTEND(attend_16_narrow, 1, 1, false, 8, 2)
ATTEND(attend_16, 1, 2, false, 8, 2)
ATTEND(attend_64, 4, 2, false, 16, 1)
ATTEND(attend_16_narrow_exact, 1, 1, true, 8, 2)
ATTEND(attend_16_exact, 1, 2, true, 8, 2)
ATTEND(attend_64_exact, 4, 2, true, 16, 1)

// The pieces of a head in order, then the sink: a block of `dim` values.
extern "C" __global__ void __launch_bounds__(256) attend_merge(const __grid_constant__ Args a) {
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
