// From logits to a token: penalties, bias, masks, filters, noise.
#include "cache.cuh"

constexpr int THREADS = 256;   // of the blocks that share a row
constexpr int LAST = 1024;     // of the block that finishes it
constexpr int BUCKETS = 2048;  // of a row's logits, by their distance from the largest
constexpr int LISTED = 4096;   // undecided tokens that are listed

struct PenaltyRow {
    float repetition, presence, frequency;
};

struct TokenCount {
    u32 row, token, generated, prompt;
};

struct BiasEntry {
    u32 row, token;
    float bias;
};

extern "C" __global__ void __launch_bounds__(256)
    penalize(float* logits, int vocab, const PenaltyRow* penalties, const TokenCount* counts, int n) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const TokenCount count = counts[i];
    const PenaltyRow penalty = penalties[count.row];
    float* at = logits + u64(count.row) * vocab + count.token;
    float x = *at;
    if (count.generated > 0 || count.prompt > 0) {
        x = x > 0.0f ? __fdiv_rn(x, penalty.repetition) : __fmul_rn(x, penalty.repetition);
    }
    if (count.generated > 0) {
        x = __fsub_rn(x, __fmul_rn(penalty.frequency, float(count.generated)));
        x = __fsub_rn(x, penalty.presence);
    }
    *at = x;
}

// The first entry of a logit adds it and all later ones of the same logit, in order; `later[i]` is
// the next entry of the same logit, and `first[i]` tells the first ones.
extern "C" __global__ void __launch_bounds__(256)
    add_bias(float* logits, int vocab, const BiasEntry* entries, const u32* later, const u32* first, int n) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    u32 at = first[i];
    float* logit = logits + u64(entries[at].row) * vocab + entries[at].token;
    float x = *logit;
    for (; at != ABSENT; at = later[at]) x = __fadd_rn(x, entries[at].bias);
    *logit = x;
}

extern "C" __global__ void __launch_bounds__(256)
    mask_logits(float* logits, int vocab, const u32* mask_rows, const u32* mask) {
    const int token = int(blockIdx.y * blockDim.x + threadIdx.x);
    if (token >= vocab) return;
    const u32 words = (u32(vocab) + 31) / 32;
    if ((mask[u64(blockIdx.x) * words + token / 32] >> (token % 32) & 1) == 0) {
        logits[u64(mask_rows[blockIdx.x]) * vocab + token] = -infinity();
    }
}

// How a row is sampled.
struct Row {
    u64 seed;
    u64 mass;  // kept probability in steps of 2^-32
    u32 position;
    u32 sample;
    u32 top_k;    // 0: all
    u32 by_mass;  // whether `mass` counts
    float temperature;  // 0: the largest logit
    float least;        // least weight; 0: off
};

// How the tokens of a row are decided on. Filters cut the order (logit descending, id ascending):
// buckets before the edge survive, those behind it do not, and tokens of the edge are undecided.
struct Edge {
    u64 before[2];  // number and mass of the tokens before the edge
    u64 limit[2];   // tokens survive whose predecessors' number and mass do not exceed it
    u32 bucket;     // BUCKETS: all survive
    u32 cuts;       // bit 0: the number is exceeded in this bucket; bit 1: the mass
};

__device__ __forceinline__ bool is_drawn(const Row& row) { return row.temperature > 0.0f; }
__device__ __forceinline__ bool by_count(const Row& row, int vocab) {
    return row.top_k > 0 && row.top_k < u32(vocab);
}

// Four 32-bit words under a key: Philox4x32-10.
__device__ __forceinline__ uint4 philox(u64 key, uint4 c) {
    u32 k0 = u32(key), k1 = u32(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = u64(c.x) * 0xd2511f53u, b = u64(c.z) * 0xcd9e8d57u;
        c = make_uint4(u32(b >> 32) ^ c.y ^ k0, u32(b), u32(a >> 32) ^ c.w ^ k1, u32(a));
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c;
}

__device__ __forceinline__ uint4 token_words(const Row& row, u32 token) {
    return philox(row.seed, make_uint4(row.position, token, row.sample, 0));
}

__device__ __forceinline__ float noise_of(const uint4& words) {
    const bool upper = words.x >= 0x80000000u;
    const u32 near = upper ? ~words.x : words.x;
    const float fraction = __fmul_rn(__fadd_rn(__uint2float_rn(words.y >> 8), 0.5f), 1.0f / 16777216.0f);
    const float v = __fmul_rn(__fadd_rn(__uint2float_rn(near), fraction), 1.0f / 4294967296.0f);
    const float exponential = upper ? -log_f32(v) : -log1p_f32(-v);
    return -log_f32(exponential);
}

// Whether the sum of `x` and the noise of `words` surely stays below `bound`: with u the first word
// over 2^32, the noise is at most -ln(u), and a hundredth more covers all rounding. `bound` is at least
// what the largest logit reaches, so the error of an `x` far below it does not count.
__device__ __forceinline__ bool falls_short(const uint4& words, float x, float bound) {
    float most;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(most) : "f"(__fmaf_rn(x - bound, 1.44269504f, 32.015f)));
    return __uint2float_rn(words.x) > most;
}

// (logit - largest) / temperature; negative infinity for what cannot be drawn.
__device__ __forceinline__ float scaled(float logit, float top, float temperature) {
    const float x = logit == top ? 0.0f : __fdiv_rn(__fsub_rn(logit, top), temperature);
    return x <= 0.0f ? x : -infinity();
}

// A token's mass: its weight relative to the best token's times 2^40, rounded down.
__device__ __forceinline__ u64 mass_of(float logit, float top, float temperature) {
    return __float2ull_rz(__fmul_rn(exp_f32(scaled(logit, top, temperature)), 1099511627776.0f));
}

// A logit's bucket: the larger the logit, the lower. 256 buckets for every doubling of the distance
// plus 1; all from a distance of 255 on, infinities and NaN share the last one.
__device__ __forceinline__ u32 bucket_of(float logit, float top) {
    const float distance = logit == top ? 0.0f : __fsub_rn(top, logit);
    return min((__float_as_uint(__fadd_rn(distance, 1.0f)) - 0x3f800000u) >> 15, u32(BUCKETS - 1));
}

// Logits of tokens i .. i + 4; NaN, which nothing chooses, behind the last. `i` is a multiple of 4.
__device__ __forceinline__ float4 four_logits(const float* logits, int vocab, int i) {
    const float none = __uint_as_float(0x7fffffffu);
    if (vocab % 4 == 0) {
        // Then every row starts at a multiple of 16 bytes.
        return i < vocab ? __ldg(reinterpret_cast<const float4*>(logits + i)) : make_float4(none, none, none, none);
    }
    float4 x;
    x.x = i < vocab ? __ldg(logits + i) : none;
    x.y = i + 1 < vocab ? __ldg(logits + i + 1) : none;
    x.z = i + 2 < vocab ? __ldg(logits + i + 2) : none;
    x.w = i + 3 < vocab ? __ldg(logits + i + 3) : none;
    return x;
}

__device__ __forceinline__ u64 warp_max(u64 x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(~0u, x, by));
    return x;
}

// The largest of a block of N threads, in every thread.
template <int N>
__device__ __forceinline__ u64 block_max(u64 x) {
    __shared__ u64 totals[N / 32];
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) totals[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(totals[threadIdx.x % (N / 32)]);
}

// Sums up to each of N threads, inclusive, and the sum over all.
template <int N>
__device__ __forceinline__ u64 running_sum(u64 x, u64* all) {
    __shared__ u64 totals[N / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u64 other = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x += other;
    }
    __syncthreads();
    if (lane == 31) totals[warp] = x;
    __syncthreads();
    u64 before = 0, sum = 0;
    for (int w = 0; w < N / 32; w++) {
        if (w < warp) before += totals[w];
        sum += totals[w];
    }
    *all = sum;
    return x + before;
}

// ---- several blocks a row: blockIdx.x is the row, blockIdx.y the slice of its tokens ----
// A thread has four tokens at a time.

// The best token of every slice. With `counts`, rows have filters, and their buckets are cleared.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_best(const float* logits, int vocab, u64* best, u32* counts, u64* masses, u32* listed) {
    const u64 row = blockIdx.x;
    const int first = int(blockIdx.y * THREADS + threadIdx.x), step = int(gridDim.y * THREADS);
    logits += row * vocab;
    u32 rank = 0, token = 0;
#pragma unroll 4
    for (int i = 4 * first; i < vocab; i += 4 * step) {
        const float4 x = four_logits(logits, vocab, i);
        const u32 a = rank_of(x.x), b = rank_of(x.y), c = rank_of(x.z), d = rank_of(x.w);
        const u32 most = max(max(a, b), max(c, d));
        if (most > rank) {
            rank = most;
            token = i + (a == most ? 0 : b == most ? 1 : c == most ? 2 : 3);
        }
    }
    const u64 own = block_max<THREADS>(entry_of(rank, token));
    if (threadIdx.x == 0) best[row * gridDim.y + blockIdx.y] = own;
    if (counts) {
        for (int i = first; i < BUCKETS; i += step) {
            counts[row * BUCKETS + i] = 0;
            masses[row * BUCKETS + i] = 0;
        }
        if (first == 0) listed[row] = 0;
    }
}

// A row's best token.
struct Top {
    float logit;
    u32 token;  // ABSENT: no token is possible
};

// In every thread, from the bests of the slices.
__device__ __forceinline__ Top top_of(const u64* best, int slices) {
    u64 own = 0;
    for (int i = int(threadIdx.x & 31); i < slices; i += 32) own = max(own, best[i]);
    own = warp_max(own);
    const u32 rank = u32(own >> 32);
    const float logit = __uint_as_float(rank >> 31 ? rank ^ 0x80000000u : ~rank);
    return {logit, rank > rank_of(-infinity()) ? index_of(own) : ABSENT};
}

// Adds to a number of 64 bits in two words of shared memory.
__device__ __forceinline__ void add_wide(u32* low, u32* high, u64 x) {
    const u32 part = u32(x), sum = atomicAdd(low, part) + part;
    const u32 rest = u32(x >> 32) + (sum < part);
    if (rest > 0) atomicAdd(high, rest);
}

// How many tokens each bucket has, and their mass: as far as the row's filters ask for it. Tokens
// of the last bucket are not counted.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_buckets(const float* logits, int vocab, const Row* rows, const u64* best, u32* counts, u64* masses) {
    __shared__ u32 count[BUCKETS], low[BUCKETS], high[BUCKETS];
    const Row row = rows[blockIdx.x];
    const bool counted = by_count(row, vocab), weighed = row.by_mass != 0;
    if (!is_drawn(row) || !(counted || weighed)) return;
    const Top top = top_of(best + u64(blockIdx.x) * gridDim.y, gridDim.y);
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
        count[i] = low[i] = high[i] = 0;
    }
    __syncthreads();
    logits += u64(blockIdx.x) * vocab;
    const int step = int(4 * gridDim.y * THREADS);
    for (int i = int(4 * (blockIdx.y * THREADS + threadIdx.x)); i < vocab; i += step) {
        const float4 four = four_logits(logits, vocab, i);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 bucket = bucket_of(x[j], top.logit);
            if (counted && bucket < BUCKETS - 1) atomicAdd(&count[bucket], 1u);
            if (weighed) {
                const u64 own = mass_of(x[j], top.logit, row.temperature);
                if (own > 0) add_wide(&low[bucket], &high[bucket], own);
            }
        }
    }
    __syncthreads();
    counts += u64(blockIdx.x) * BUCKETS;
    masses += u64(blockIdx.x) * BUCKETS;
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
        if (count[i] > 0) atomicAdd(&counts[i], count[i]);
        const u64 mass = u64(high[i]) << 32 | low[i];
        if (mass > 0) atomicAdd(&masses[i], mass);
    }
}

// The bucket in which the sum over buckets exceeds the limit, the last one if none does before it,
// and the sum over those before. `limit_of` makes the limit from the sum over all.
template <typename Number, typename Limit>
__device__ __forceinline__ u32 find_bucket(const Number* buckets, u64* before, u64* limit, Limit limit_of) {
    constexpr int EACH = BUCKETS / THREADS;
    __shared__ u32 found;
    __shared__ u64 found_before;
    u64 own[EACH], sum = 0, all;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        own[i] = buckets[EACH * threadIdx.x + i];
        sum += own[i];
    }
    const u64 to = running_sum<THREADS>(sum, &all);
    *limit = limit_of(all);
    if (threadIdx.x == 0) {
        found = BUCKETS - 1;
        found_before = all - buckets[BUCKETS - 1];
    }
    __syncthreads();
    u64 from = to - sum;
    if (from <= *limit && to > *limit) {
        int i = 0;
        while (i < EACH - 1 && from + own[i] <= *limit) from += own[i++];
        found = EACH * threadIdx.x + i;
        found_before = from;
    }
    __syncthreads();
    *before = found_before;
    return found;
}

__device__ __forceinline__ Edge find_edge(const Row& row, int vocab, const u32* counts, const u64* masses) {
    Edge edge;
    u32 bucket[2] = {BUCKETS, BUCKETS};
    if (by_count(row, vocab)) {
        bucket[0] = find_bucket(counts, &edge.before[0], &edge.limit[0], [&](u64) { return u64(row.top_k) - 1; });
    }
    if (row.by_mass) {
        bucket[1] = find_bucket(masses, &edge.before[1], &edge.limit[1], [&](u64 all) {
            return __umul64hi(row.mass, all) << 32 | row.mass * all >> 32;
        });
    }
    edge.bucket = min(bucket[0], bucket[1]);
    edge.cuts = edge.bucket == BUCKETS ? 0 : (bucket[0] == edge.bucket) | (bucket[1] == edge.bucket) << 1;
    return edge;
}

// The entry of a token with noise; 0 if it may not be drawn.
__device__ __forceinline__ u64 drawn(const Row& row, float top, float logit, u32 token, const uint4& words) {
    const float x = scaled(logit, top, row.temperature);
    if (x == -infinity() || (row.least > 0.0f && exp_f32(x) < row.least)) return 0;
    return entry_of(rank_of(__fadd_rn(x, noise_of(words))), token);
}

// The noisy best of every slice of a row that is not greedy, among the tokens that surely survive.
// Undecided ones are listed, as far as there is room.
extern "C" __global__ void __launch_bounds__(THREADS, 5)
    sample_draw(const float* logits, int vocab, const Row* rows, const u64* best, const u32* counts,
                const u64* masses, Edge* edges, u32* listed, u32* list, u64* noisy) {
    const Row row = rows[blockIdx.x];
    const Top top = top_of(best + u64(blockIdx.x) * gridDim.y, gridDim.y);
    if (top.token == ABSENT || !is_drawn(row)) return;
    u32 edge = BUCKETS;
    if (by_count(row, vocab) || row.by_mass) {
        const Edge found = find_edge(row, vocab, counts + u64(blockIdx.x) * BUCKETS, masses + u64(blockIdx.x) * BUCKETS);
        edge = found.bucket;
        if (blockIdx.y == 0 && threadIdx.x == 0) edges[blockIdx.x] = found;
    }
    logits += u64(blockIdx.x) * vocab;
    list += u64(blockIdx.x) * LISTED;
    // The best token always survives. No other needs a look that cannot beat the best so far.
    u64 own = entry_of(rank_of(noise_of(token_words(row, top.token))), top.token);
    float bound = noise_of(token_words(row, top.token));
    const float inverse = __fdiv_rn(1.0f, row.temperature);
    const int step = int(4 * gridDim.y * THREADS), lane = int(threadIdx.x & 31);
    for (int base = int(4 * (blockIdx.y * THREADS + threadIdx.x - lane)); base < vocab; base += step) {
        const float4 four = four_logits(logits, vocab, base + 4 * lane);
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            const int i = base + 4 * lane + j;
            const float logit = j < 2 ? j == 0 ? four.x : four.y : j == 2 ? four.z : four.w;
            bool look = i < vocab;
            if (look && edge < BUCKETS) {
                const u32 bucket = bucket_of(logit, top.logit);
                look = bucket < edge;
                if (bucket == edge) {
                    const u32 place = atomicAdd(&listed[blockIdx.x], 1u);
                    if (place < LISTED) list[place] = i;
                }
            }
            uint4 words;
            if (look) {
                words = token_words(row, i);
                look = !falls_short(words, (logit - top.logit) * inverse, bound);
            }
            if (look) own = max(own, drawn(row, top.logit, logit, i, words));
            if (__any_sync(~0u, look)) {
                const u32 rank = __reduce_max_sync(~0u, u32(own >> 32));
                bound = __uint_as_float(rank >> 31 ? rank ^ 0x80000000u : ~rank);
            }
        }
    }
    own = block_max<THREADS>(own);
    if (threadIdx.x == 0) noisy[u64(blockIdx.x) * gridDim.y + blockIdx.y] = own;
}

// ---- one block a row ----

// Tokens survive whose predecessors' weight does not exceed `limit`: the entry of the last of them; a
// radix descent over undecided tokens, which `each_token` visits, from the top. All threads of the
// block call it. `weight` may differ between ranks only.
template <typename Tokens, typename Weight>
__device__ __forceinline__ u64 find_cut(
    int vocab, u64 before, u64 limit, u64* buckets, Tokens each_token, Weight weight) {
    __shared__ u32 found_bucket;
    __shared__ u64 found_before, found_total;
    u64 prefix = 0;
    for (int shift = 53, bits = 11;;) {
        for (int i = threadIdx.x; i < 2048; i += LAST) buckets[i] = 0;
        if (threadIdx.x == 0) found_bucket = ABSENT;
        __syncthreads();
        each_token([&](u32 token, float logit) {
            const u64 entry = entry_of(rank_of(logit), token);
            if (shift == 53 || entry >> (shift + bits) == prefix) {
                const u64 own = weight(logit);
                if (own > 0) atomicAdd(&buckets[u32(entry >> shift) & ((1u << bits) - 1)], own);
            }
        });
        __syncthreads();
        const int top = 2047 - 2 * int(threadIdx.x);
        const u64 own = buckets[top] + buckets[top - 1];
        u64 all;
        const u64 to = before + running_sum<LAST>(own, &all);
        const u64 from = to - own;
        if (from <= limit && to > limit) {
            const bool second = from + buckets[top] <= limit;
            found_bucket = second ? top - 1 : top;
            found_before = second ? from + buckets[top] : from;
            found_total = buckets[second ? top - 1 : top];
        }
        __syncthreads();
        // Nothing exceeds the limit: all survive.
        if (found_bucket == ABSENT) return 0;
        prefix = prefix << bits | found_bucket;
        before = found_before;
        const u64 total = found_total;
        __syncthreads();
        // The rank is known, as the highest bit of an id is 0. All tokens of that rank weigh the same.
        if (shift == 31) {
            const u32 rank = u32(prefix >> 1);
            const float logit = __uint_as_float(rank >> 31 ? rank ^ 0x80000000u : ~rank);
            if (before + total - weight(logit) <= limit) return u64(rank) << 32;
            if (vocab <= 1 << 20) {
                prefix = prefix << 11 | 0x7ff;
                shift = 20;
            }
        }
        if (shift == 0) return prefix;
        bits = min(shift, 11);
        shift -= bits;
    }
}

// The token of each row: decides on undecided tokens, draws their noise, and takes the best.
extern "C" __global__ void __launch_bounds__(LAST, 1)
    sample_finish(const float* logits, int vocab, const Row* rows, int slices, const u64* best, const Edge* edges,
                  const u32* listed, const u32* list, const u64* noisy, u32* tokens) {
    __shared__ u64 buckets[2048];
    const u64 at = blockIdx.x;
    const Top top = top_of(best + at * slices, slices);
    const Row row = rows ? rows[at] : Row{};
    if (top.token == ABSENT || !is_drawn(row)) {
        if (threadIdx.x == 0) tokens[at] = top.token;
        return;
    }
    u64 own = 0;
    for (int i = int(threadIdx.x); i < slices; i += LAST) own = max(own, noisy[at * slices + i]);
    if (by_count(row, vocab) || row.by_mass) {
        const Edge edge = edges[at];
        logits += at * vocab;
        list += at * LISTED;
        const u32 undecided = listed[at];
        // Where the list has overflowed, all tokens are visited.
        auto each_token = [&](auto visit) {
            const u32 count = undecided <= LISTED ? undecided : vocab;
            for (u32 i = threadIdx.x; i < count; i += LAST) {
                const u32 token = undecided <= LISTED ? list[i] : i;
                const float logit = __ldg(logits + token);
                if (bucket_of(logit, top.logit) == edge.bucket) visit(token, logit);
            }
        };
        u64 cut[2] = {0, 0};
        if (edge.cuts & 1) {
            auto one = [](float) { return 1ull; };
            cut[0] = find_cut(vocab, edge.before[0], edge.limit[0], buckets, each_token, one);
        }
        if (edge.cuts & 2) {
            auto mass = [&](float logit) { return mass_of(logit, top.logit, row.temperature); };
            cut[1] = find_cut(vocab, edge.before[1], edge.limit[1], buckets, each_token, mass);
        }
        each_token([&](u32 token, float logit) {
            const u64 entry = entry_of(rank_of(logit), token);
            if (entry >= cut[0] && entry >= cut[1]) {
                own = max(own, drawn(row, top.logit, logit, token, token_words(row, token)));
            }
        });
    }
    own = block_max<LAST>(own);
    if (threadIdx.x == 0) tokens[at] = index_of(own);
}
