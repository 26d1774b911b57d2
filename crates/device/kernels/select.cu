// Choice of compressed rows by index score, and of candidate blocks.
//
// Scores are written as integers that sort as they do (`rank_of`), for as many queries at a time as
// the scratch has room for. The best are then found exactly: a radix descent gives the rank of the
// k-th, and how many of that rank belong to the best; the rows are collected in ascending order, so
// lower rows win. Long lists are cut into segments whose best are the list of a second round.
#include "cache.cuh"

constexpr int TILE = 256;     // keys of a block
constexpr int GROUP = 16;     // queries of a block
constexpr int HEADS = 32;     // heads that are staged at a time
constexpr int SEGMENT = 16384;
constexpr int THREADS = 256;
constexpr int SORTERS = 1024;

struct Args {
    SLOT const bf16* q;          // [rows, heads, width]
    SLOT const float* weights;  // [rows, heads]
    SLOT const u32* sequence;
    SLOT const u32* position;
    SLOT Paged keys;
    SLOT const u32* blocks;  // [rows, block_count] where rows are chosen within blocks, else null
    SLOT u32* counts;        // [rows]: rows within blocks
    SLOT u32* ranks;         // [rows of the pass, stride]
    SLOT u64 stride;
    SLOT u32* maxima;  // [rows of the pass, maxima_stride]: largest ranks of blocks
    SLOT u64 maxima_stride;
    SLOT int first_row;  // of the pass
    SLOT int rows;       // of the pass
    SLOT int heads;
    SLOT int width;
    SLOT int ratio;
    SLOT int block_size;
    SLOT int block_count;
    SLOT int aligned;  // rows of q are aligned to 16 bytes
    // What is chosen from.
    SLOT u32* out;          // [rows, k]
    SLOT u32* found_ranks;  // [rows of the pass, segments, k]: the best of each segment
    SLOT u32* found;        // the same: their rows
    SLOT int k;
    SLOT int segments;    // that there is room for
    SLOT int of_maxima;   // blocks are chosen, by their maxima
    SLOT int second;      // second round
};

// Keys that a query is scored against.
__device__ __forceinline__ u32 list_length(const Args& a, u32 row) {
    return a.blocks ? a.counts[row] : visible_rows(a.position[row], u32(a.ratio));
}

// The compressed row at place `i` of that list.
__device__ __forceinline__ u32 list_row(const Args& a, u32 row, u32 i) {
    if (!a.blocks) return i;
    u32 block = __ldg(a.blocks + u64(row) * a.block_count + i / a.block_size);
    return block * a.block_size + i % a.block_size;
}

// Rows in the candidate blocks of each query: a warp a query.
extern "C" __global__ void select_counts(const __grid_constant__ Args a) {
    const int row = int(blockIdx.x) * int(blockDim.x / 32) + int(threadIdx.x / 32);
    if (row >= a.rows) return;
    const int lane = threadIdx.x & 31;
    const u32* blocks = a.blocks + u64(row) * a.block_count;
    u32 count = 0;
#pragma unroll 8
    for (int i = lane; i < a.block_count; i += 32) count += blocks[i] != ABSENT;
    count = __reduce_add_sync(~0u, count);
    if (lane > 0) return;
    u32 n = 0;
    if (count > 0) {
        u32 visible = visible_rows(a.position[row], u32(a.ratio));
        u64 last = u64(blocks[count - 1]) * a.block_size;
        u32 rest = last < visible ? u32(visible - last) : 0;
        n = (count - 1) * a.block_size + min(rest, u32(a.block_size));
    }
    a.counts[row] = n;
}

// Weighted sums over heads, two of a thread at a time, for a key and the one 8 behind it.
__device__ __forceinline__ void add_heads(float (&sum)[2], const float (&dot)[4], const float (&w)[2]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        // NaN stays.
        float d = dot[j] < 0.0f ? 0.0f : dot[j];
        sum[j / 2] = __fmaf_rn(d, w[j % 2], sum[j / 2]);
    }
}

// Of the four threads that have a key.
__device__ __forceinline__ u32 rank_of_sum(float total) {
    total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
    total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
    return rank_of(total);
}

// A warp has 32 keys in registers, and goes over the queries of the block, whose values come through
// shared memory. RAGGED: rows of q and keys of any width, else of a multiple of 8.
template <bool RAGGED>
__device__ __forceinline__ void scores(const Args& a) {
    // [stage][head][16 pieces of 8 columns], a row's pieces in an order without bank conflicts.
    __shared__ __align__(16) u8 staged[2][HEADS * 256];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int steps = (a.width + 31) / 32;
    const int end = min(a.rows, (int(blockIdx.y) + 1) * GROUP);
    // Step s of 32 columns, thread t's 8 of them: piece 4s + t of a row. Two rows that one
    // instruction reads together lie in different halves of the banks.
    auto place = [](int row, int piece) { return row * 256 + (piece ^ (row & 1) << 2) * 16; };
    auto bring = [&](int stage, u32 row, int first_head) {
        const int heads = min(HEADS, a.heads - first_head);
#pragma unroll 1
        for (int i = threadIdx.x; i < HEADS * 16; i += THREADS) {
            const int head = i / 16, piece = i % 16, col = piece * 8;
            u8* to = staged[stage] + place(head, piece);
            const bool there = head < heads && col < a.width;
            const bf16* from = a.q + (u64(row) * a.heads + first_head + (there ? head : 0)) * a.width;
            if (RAGGED) {
                *reinterpret_cast<uint4*>(to) =
                    there ? act8(from, a.width, col, a.aligned) : make_uint4(0, 0, 0, 0);
            } else {
                copy_async(to, from + (there ? col : 0), there);
            }
        }
        copy_commit();
    };
    int first = int(blockIdx.y) * GROUP;
    while (first < end) {
        // Queries of one sequence share the keys, unless each has a list of its own.
        const u32 sequence = a.sequence[a.first_row + first];
        u32 longest = list_length(a, a.first_row + first);
        int to = first + 1;
        while (!a.blocks && to < end && a.sequence[a.first_row + to] == sequence) {
            longest = max(longest, list_length(a, a.first_row + to));
            to++;
        }
        for (u32 tile = blockIdx.x; u64(tile) * TILE < longest; tile += gridDim.x) {
            const u32 at = tile * TILE + warp * 32;
            // Queries in front that see none of these keys are passed over.
            int from = first;
            while (from + 1 < to && list_length(a, a.first_row + from) <= tile * TILE) from++;
            // Columns are taken 32 at a time; a thread's 8 of them are two steps of the product.
            uint4 key[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 i = at + m * 16 + half * 8 + g;
                    const u8* address = nullptr;
                    if (i < longest) {
                        address = paged_row(a.keys, sequence, list_row(a, a.first_row + first, i));
                    }
                    Raw8 raw[4];
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        raw[s].codes = make_uint4(0, 0, 0, 0);
                        raw[s].scale = ABSENT;
                        const int col = s * 32 + t * 8;
                        if (address && col < a.width) {
                            raw[s] = read8<true>(a.keys.format, address, a.width, col, a.keys.align);
                        }
                    }
#pragma unroll
                    for (int s = 0; s < 4; s++) key[m][half][s] = decode8(a.keys.format, raw[s]);
                }
            }
            // Everybody has done with what was staged.
            __syncthreads();
            const int parts = (a.heads + HEADS - 1) / HEADS, count = (to - from) * parts;
            bring(0, a.first_row + from, 0);
            float sum[2][2] = {};
            for (int i = 0; i < count; i++) {
                copy_wait();
                __syncthreads();
                if (i + 1 < count) bring((i + 1) & 1, a.first_row + from + (i + 1) / parts, (i + 1) % parts * HEADS);
                const u32 r = from + i / parts, row = a.first_row + r;
                const int first_head = i % parts * HEADS;
                const u32 length = list_length(a, row);
                if (at >= length) continue;
                const u8* q = staged[i & 1];
                const int heads = min(HEADS, a.heads - first_head);
#pragma unroll 1
                for (int head = 0; head < heads; head += 8) {
                    float dot[2][4] = {};
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        if (s >= steps) break;
                        const uint4 x = *reinterpret_cast<const uint4*>(q + head * 256 + place(g, s * 4 + t));
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            const uint4 low = key[m][0][s], high = key[m][1][s];
                            mma(dot[m], {low.x, high.x, low.y, high.y}, x.x, x.y);
                            mma(dot[m], {low.z, high.z, low.w, high.w}, x.z, x.w);
                        }
                    }
                    float w[2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int h = head + t * 2 + j;
                        w[j] = h < heads ? __ldg(a.weights + u64(row) * a.heads + first_head + h) : 0.0f;
                    }
#pragma unroll
                    for (int m = 0; m < 2; m++) add_heads(sum[m], dot[m], w);
                }
                if (first_head + HEADS < a.heads) continue;
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 rank = rank_of_sum(sum[m][half]);
                        sum[m][half] = 0.0f;
                        const u32 i = at + m * 16 + half * 8 + g;
                        if (t == 0 && i < length) a.ranks[u64(r) * a.stride + i] = rank;
                    }
                }
            }
        }
        first = to;
    }
}

// ---- one query at a time, mxfp4 keys ----

constexpr int ONE_WIDTH = 128;
constexpr int ONE_BYTES = ONE_WIDTH / 2 + ONE_WIDTH / 32;  // of a key
constexpr int ONE_KEYS = 32;                               // of a warp at a time
constexpr int ONE_STAGES = 2;

__device__ __forceinline__ void copy_word_async(void* shared, const void* from) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The scores of one query, up to HEADS heads of ONE_WIDTH, in the order of `scores`. Its values stay in
// shared memory. Warps go over the keys 32 at a time: what is stored comes to shared memory in the
// background, two steps ahead of the product, and where it lies is looked up three steps ahead.
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_scores_one(const __grid_constant__ Args a) {
    __shared__ __align__(16) u8 q[HEADS * ONE_WIDTH * 2];
    __shared__ __align__(16) u8 staged[THREADS / 32][ONE_STAGES][ONE_KEYS * ONE_BYTES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const u32 row = a.first_row + blockIdx.y, sequence = a.sequence[row], length = list_length(a, row);
    const u32 step = gridDim.x * (THREADS / 32) * ONE_KEYS;
    u32 at = (blockIdx.x * (THREADS / 32) + warp) * ONE_KEYS;
    if (blockIdx.x * (THREADS / 32) * ONE_KEYS >= length) return;

    auto place = [](int head, int piece) { return head * 256 + (piece ^ (head & 1) << 2) * 16; };
    for (int i = threadIdx.x; i < HEADS * 16; i += THREADS) {
        const int head = i / 16, piece = i % 16;
        const bool there = head < a.heads;
        copy_async(q + place(head, piece), a.q + (u64(row) * a.heads + (there ? head : 0)) * ONE_WIDTH + piece * 8, there);
    }
    copy_commit();
    float w[HEADS / 8][2];
#pragma unroll
    for (int i = 0; i < HEADS / 4; i++) {
        const int h = i / 2 * 8 + t * 2 + i % 2;
        w[i / 2][i % 2] = h < a.heads ? __ldg(a.weights + u64(row) * a.heads + h) : 0.0f;
    }

    // Where this lane's key of a step lies; beyond the end, where the last one does.
    auto find = [&](u64 from) { return paged_row(a.keys, sequence, list_row(a, row, u32(min(from + lane, u64(length - 1))))); };
    auto bring = [&](int stage, u64 from, const u8* key) {
        if (from < length) {
            u8* to = staged[warp][stage];
            const u64 own = u64(key), first = __shfl_sync(~0u, own, 0);
            // Keys that follow each other are copied as one piece.
            if (__all_sync(~0u, own == first + lane * ONE_BYTES && first % 16 == 0)) {
#pragma unroll
                for (int i = 0; i < ONE_KEYS * ONE_BYTES / 16; i += 32) {
                    if (i + lane < ONE_KEYS * ONE_BYTES / 16) {
                        copy_async(to + (i + lane) * 16, reinterpret_cast<const u8*>(first) + (i + lane) * 16, true);
                    }
                }
            } else {
#pragma unroll 1
                for (int i = lane; i < ONE_KEYS * ONE_BYTES / 4; i += 32) {
                    const u64 from_key = __shfl_sync(~0u, own, i / (ONE_BYTES / 4));
                    copy_word_async(to + i * 4, reinterpret_cast<const u8*>(from_key) + i % (ONE_BYTES / 4) * 4);
                }
            }
        }
        copy_commit();
    };
    const u8* key = find(at);
#pragma unroll
    for (int i = 0; i < ONE_STAGES; i++) {
        bring(i, u64(at) + u64(i) * step, key);
        key = find(u64(at) + u64(i + 1) * step);
    }
    // The query's values are there.
    asm volatile("cp.async.wait_group %0;" ::"n"(ONE_STAGES) : "memory");
    __syncthreads();
    int stage = 0;
    for (; at < length; at += step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(ONE_STAGES - 1) : "memory");
        __syncwarp();
        uint4 keys[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* codes = staged[warp][stage] + (i / 2 * 16 + i % 2 * 8 + g) * ONE_BYTES;
            const u32 scales = *reinterpret_cast<const u32*>(codes + ONE_WIDTH / 2);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                Raw8 raw;
                raw.codes = make_uint4(*reinterpret_cast<const u32*>(codes + s * 16 + t * 4), 0, 0, 0);
                raw.scale = scales >> 8 * s & 255;
                keys[i / 2][i % 2][s] = decode8(ROW_MXFP4X32, raw);
            }
        }
        // All lanes have read the stage.
        __syncwarp();
        bring(stage, u64(at) + u64(ONE_STAGES) * step, key);
        key = find(u64(at) + u64(ONE_STAGES + 1) * step);
        stage ^= 1;
        float sum[2][2] = {};
#pragma unroll
        for (int i = 0; i < HEADS / 8; i++) {
            if (i * 8 >= a.heads) break;
            float dot[2][4] = {};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const uint4 x = *reinterpret_cast<const uint4*>(q + i * 8 * 256 + place(g, s * 4 + t));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const uint4 low = keys[m][0][s], high = keys[m][1][s];
                    mma(dot[m], {low.x, high.x, low.y, high.y}, x.x, x.y);
                    mma(dot[m], {low.z, high.z, low.w, high.w}, x.z, x.w);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++) add_heads(sum[m], dot[m], w[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 to = at + i / 2 * 16 + i % 2 * 8 + g;
            const u32 rank = rank_of_sum(sum[i / 2][i % 2]);
            if (t == 0 && to < length) a.ranks[blockIdx.y * a.stride + to] = rank;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select_scores(const __grid_constant__ Args a) {
    scores<false>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_scores_ragged(const __grid_constant__ Args a) {
    scores<true>(a);
}

// The largest rank of each block of rows; that of the last visible row comes before all others.
extern "C" __global__ void select_maxima(const __grid_constant__ Args a) {
    const u32 visible = visible_rows(a.position[a.first_row + blockIdx.y], u32(a.ratio));
    const u32 blocks = (visible + a.block_size - 1) / a.block_size;
    const u32* ranks = a.ranks + blockIdx.y * a.stride;
    for (u32 b = blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += gridDim.x * blockDim.x) {
        u32 best = 0;
        const u32 from = b * a.block_size, to = min(visible, from + a.block_size);
        for (u32 i = from; i < to; i++) best = max(best, ranks[i]);
        a.maxima[blockIdx.y * a.maxima_stride + b] = b + 1 == blocks ? ~0u : best;
    }
}

constexpr int WARPS = SORTERS / 32;
constexpr int BUCKETS = 2048;
constexpr int COPIES = 4;  // of the counts, for lanes that meet in a bucket

// The sum of `x` over the warps before this one; `x` is the same in all lanes of a warp, and `totals` has
// a place for each warp.
__device__ __forceinline__ u32 sum_before(u32 x, u32* totals) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) totals[warp] = x;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
}

// The k best of a list of ranks, ascending; `emit(place, i)` takes what is found. Warps have parts of the
// list in order.
template <typename Emit>
__device__ __forceinline__ void best_of(u32 n, u32 k, const u32* ranks, Emit emit) {
    constexpr int BATCH = 16;  // ranks that a thread reads at a time
    __shared__ u32 counts[BUCKETS][COPIES];
    __shared__ u32 totals[3][WARPS];
    __shared__ u32 found_bucket, found_before;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 part = ((n + WARPS - 1) / WARPS + 31) / 32 * 32;
    const u32 from = min(n, warp * part), to = min(n, from + part);
    u32 own[BATCH];
    auto read = [&](u32 base) {
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const u32 i = base + j * 32 + lane;
            own[j] = i < to ? ranks[i] : 0;
        }
    };
    // If they are all, they are read once.
    const bool once = part <= BATCH * 32;
    if (once) read(from);
    // Calls f(i, there, rank) for the lane's places of the part, all lanes at once.
    auto each = [&](auto f) {
        for (u32 base = from; base < to; base += BATCH * 32) {
            if (!once) read(base);
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const u32 at = base + j * 32;
                if (at < to) f(at + lane, at + lane < to, own[j]);
            }
        }
    };
    u32 cut = 0, ties = n;  // all
    if (n > k) {
        u32 prefix = 0, left = k;
        for (int round = 0; round < 3; round++) {
            const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
            const int bits = round == 2 ? 10 : 11;
            for (int i = threadIdx.x; i < BUCKETS; i += SORTERS) {
                *reinterpret_cast<uint4*>(counts[i]) = make_uint4(0, 0, 0, 0);
            }
            __syncthreads();
            each([&](u32, bool there, u32 r) {
                if (there && (round == 0 || r >> (shift + bits) == prefix)) {
                    atomicAdd(&counts[r >> shift & ((1u << bits) - 1)][lane % COPIES], 1u);
                }
            });
            __syncthreads();
            // From the top: the bucket in which the k-th lies.
            constexpr int EACH = BUCKETS / SORTERS;
            const int top = BUCKETS - 1 - EACH * int(threadIdx.x);
            u32 count[EACH], sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const uint4 c = *reinterpret_cast<const uint4*>(counts[top - i]);
                count[i] = c.x + c.y + c.z + c.w;
                sum += count[i];
            }
            u32 before = sum;
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                const u32 other = __shfl_up_sync(~0u, before, by);
                if (lane >= by) before += other;
            }
            before += sum_before(__shfl_sync(~0u, before, 31), totals[0]) - sum;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (before < left && left <= before + count[i]) {
                    found_bucket = top - i;
                    found_before = before;
                }
                before += count[i];
            }
            __syncthreads();
            prefix = prefix << bits | found_bucket;
            left -= found_before;
        }
        cut = prefix;
        ties = left;
    }
    u32 greater = 0, same = 0;
    each([&](u32, bool there, u32 r) {
        greater += __popc(__ballot_sync(~0u, there && r > cut));
        same += __popc(__ballot_sync(~0u, there && r == cut));
    });
    greater = sum_before(greater, totals[1]);
    same = sum_before(same, totals[2]);
    each([&](u32 i, bool there, u32 r) {
        const bool is_above = there && r > cut, is_same = there && r == cut;
        const u32 above_mask = __ballot_sync(~0u, is_above), same_mask = __ballot_sync(~0u, is_same);
        const u32 below = (1u << lane) - 1;
        const u32 same_before = same + __popc(same_mask & below);
        if (is_above || (is_same && same_before < ties)) {
            emit(greater + __popc(above_mask & below) + min(same_before, ties), i);
        }
        greater += __popc(above_mask);
        same += __popc(same_mask);
    });
}

// First round: a block a segment of a query's list. A list of one segment is finished here.
// Second round: a block a query with more segments.
extern "C" __global__ void __launch_bounds__(SORTERS, 1) select_best(const __grid_constant__ Args a) {
    const u32 r = blockIdx.y, row = a.first_row + r, k = a.k;
    u32 n = list_length(a, row);
    if (a.of_maxima) n = (n + a.block_size - 1) / a.block_size;
    const u32 kept = min(k, u32(SEGMENT));  // of a whole segment
    const u64 list = u64(r) * a.segments * kept;
    const bool whole = n <= SEGMENT;
    const u32 from = blockIdx.x * SEGMENT;
    if (a.second ? whole : from >= max(n, 1u)) return;

    const u32* ranks = a.of_maxima ? a.maxima + r * a.maxima_stride : a.ranks + r * a.stride;
    ranks = a.second ? a.found_ranks + list : ranks + from;
    const u32 length = a.second ? n / SEGMENT * kept + min(k, n % SEGMENT) : min(n - from, u32(SEGMENT));
    u32* out = a.out + u64(row) * k;
    auto emit = [&](u32 at, u32 i) {
        const u32 index = a.second ? a.found[list + i] : a.of_maxima ? from + i : list_row(a, row, from + i);
        if (a.second || whole) {
            out[at] = index;
        } else {
            const u64 to = list + u64(blockIdx.x) * kept + at;
            a.found_ranks[to] = ranks[i];
            a.found[to] = index;
        }
    };
    best_of(length, k, ranks, emit);
    if (a.second || whole) {
        for (u32 i = min(length, k) + threadIdx.x; i < k; i += SORTERS) out[i] = ABSENT;
    }
}
