// From logits to a token: penalties, bias, masks, filters, noise.
#include "cache.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;

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

// Where an order (logit descending, id ascending) is cut: ranks above survive, and those of this
// rank with an id below `ids`.
struct Cut {
    u32 rank;
    u32 ids;
};

// What survives in a row.
struct Survivors {
    float top;  // the largest logit
    u32 token;  // its lowest token, or ABSENT where nothing is possible
    Cut count;
    Cut mass;
};

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

__device__ __forceinline__ float token_noise(const Row& row, u32 token) {
    const uint4 words = philox(row.seed, make_uint4(row.position, token, row.sample, 0));
    const bool upper = words.x >= 0x80000000u;
    const u32 near = upper ? ~words.x : words.x;
    const float fraction = __fmul_rn(__fadd_rn(__uint2float_rn(words.y >> 8), 0.5f), 1.0f / 16777216.0f);
    const float v = __fmul_rn(__fadd_rn(__uint2float_rn(near), fraction), 1.0f / 4294967296.0f);
    const float exponential = upper ? -log_f32(v) : -log1p_f32(-v);
    return -log_f32(exponential);
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

__device__ __forceinline__ u64 block_max(u64 x) {
    __shared__ u64 totals[WARPS];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(~0u, x, by));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) totals[threadIdx.x / 32] = x;
    __syncthreads();
    x = totals[threadIdx.x & 31];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(~0u, x, by));
    return x;
}

// Sums up to each thread, inclusive, and the sum over all.
__device__ __forceinline__ u64 running_sum(u64 x, u64* all) {
    __shared__ u64 totals[WARPS];
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
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += totals[w];
        sum += totals[w];
    }
    *all = sum;
    return x + before;
}

// Keeps the tokens whose preceding mass does not exceed `limit`: a radix descent over ranks, from
// the top. All threads of the block call it. `weight` may differ between ranks only.
template <typename Weight>
__device__ __forceinline__ Cut find_cut(const float* logits, int vocab, u64 limit, u64* buckets, Weight weight) {
    __shared__ u32 found_bucket;
    __shared__ u64 found_before, found_total;
    u32 prefix = 0;
    u64 before = 0;
    for (int round = 0; round < 3; round++) {
        const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
        const int bits = round == 2 ? 10 : 11;
        for (int i = threadIdx.x; i < 2048; i += THREADS) buckets[i] = 0;
        if (threadIdx.x == 0) found_bucket = ABSENT;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += THREADS) {
            const float logit = logits[i];
            const u32 rank = rank_of(logit);
            if (round == 0 || rank >> (shift + bits) == prefix) {
                const u64 mass = weight(logit);
                if (mass > 0) atomicAdd(&buckets[rank >> shift & ((1u << bits) - 1)], mass);
            }
        }
        __syncthreads();
        const int top = 2047 - 2 * int(threadIdx.x);
        const u64 own = buckets[top] + buckets[top - 1];
        u64 all;
        const u64 to = before + running_sum(own, &all);
        const u64 from = to - own;
        if (from <= limit && to > limit) {
            const bool second = from + buckets[top] <= limit;
            found_bucket = second ? top - 1 : top;
            found_before = second ? from + buckets[top] : from;
            found_total = buckets[second ? top - 1 : top];
        }
        __syncthreads();
        // Nothing exceeds the limit: all survive.
        if (found_bucket == ABSENT) return {0, ABSENT};
        prefix = prefix << bits | found_bucket;
        before = found_before;
        __syncthreads();
    }
    // The mass of one token of that rank: that of its logit.
    const float logit = __uint_as_float(prefix >> 31 ? prefix ^ 0x80000000u : ~prefix);
    const u64 each = max(weight(logit), 1ull);
    const u64 ties = (limit - before) / each + 1;
    if (ties * each >= found_total) return {prefix, ABSENT};
    // The id of the first that is too many.
    __shared__ u32 first_out;
    u64 seen = 0;
    for (int base = 0; base < vocab; base += THREADS) {
        const int i = base + int(threadIdx.x);
        const bool same = i < vocab && rank_of(logits[i]) == prefix;
        u64 all;
        const u64 place = seen + running_sum(same, &all);
        if (same && place == ties + 1) first_out = i;
        seen += all;
        if (seen > ties) break;
    }
    __syncthreads();
    const u32 ids = first_out;
    __syncthreads();
    return {prefix, ids};
}

// The best token of each row, and what survives its filters: a block a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_filter(const float* logits, int vocab, const Row* rows, Survivors* survivors, u64* best) {
    __shared__ u64 buckets[2048];
    const Row row = rows[blockIdx.x];
    logits += u64(blockIdx.x) * vocab;
    u64 top_entry = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vocab; i += THREADS) top_entry = max(top_entry, entry_of(rank_of(logits[i]), i));
    top_entry = block_max(top_entry);
    Survivors found;
    const bool possible = u32(top_entry >> 32) > rank_of(-infinity());
    found.token = possible ? index_of(top_entry) : ABSENT;
    found.top = possible ? logits[found.token] : 0.0f;
    found.count = found.mass = {0, ABSENT};
    if (possible && row.temperature > 0.0f) {
        if (row.top_k > 0 && row.top_k < u32(vocab)) {
            found.count = find_cut(logits, vocab, u64(row.top_k) - 1, buckets, [](float) { return 1ull; });
        }
        if (row.by_mass) {
            auto mass = [&](float logit) { return mass_of(logit, found.top, row.temperature); };
            u64 own = 0, total;
            for (int i = threadIdx.x; i < vocab; i += THREADS) own += mass(logits[i]);
            running_sum(own, &total);
            const u64 limit = __umul64hi(row.mass, total) << 32 | row.mass * total >> 32;
            found.mass = find_cut(logits, vocab, limit, buckets, mass);
        }
    }
    if (threadIdx.x == 0) {
        survivors[blockIdx.x] = found;
        best[blockIdx.x] = 0;
    }
}

__device__ __forceinline__ bool keeps(const Cut& cut, u32 rank, u32 id) {
    return rank > cut.rank || (rank == cut.rank && id < cut.ids);
}

// The noisy best of the survivors, where a row is not greedy.
extern "C" __global__ void __launch_bounds__(256)
    sample_draw(const float* logits, int vocab, const Row* rows, const Survivors* survivors, u64* best) {
    const Row row = rows[blockIdx.x];
    const Survivors kept = survivors[blockIdx.x];
    if (kept.token == ABSENT || !(row.temperature > 0.0f)) return;
    logits += u64(blockIdx.x) * vocab;
    u64 own = 0;
    for (int i = int(blockIdx.y * blockDim.x + threadIdx.x); i < vocab; i += gridDim.y * blockDim.x) {
        const float logit = logits[i];
        const u32 rank = rank_of(logit);
        const float x = scaled(logit, kept.top, row.temperature);
        if (x == -infinity() || !keeps(kept.count, rank, i) || !keeps(kept.mass, rank, i)) continue;
        if (row.least > 0.0f && exp_f32(x) < row.least) continue;
        own = max(own, entry_of(rank_of(__fadd_rn(x, token_noise(row, i))), i));
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) own = max(own, __shfl_xor_sync(~0u, own, by));
    if ((threadIdx.x & 31) == 0 && own > 0) atomicMax(&best[blockIdx.x], own);
}

extern "C" __global__ void __launch_bounds__(256)
    sample_tokens(const Row* rows, const Survivors* survivors, const u64* best, int count, u32* tokens) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    const bool drawn = survivors[i].token != ABSENT && rows[i].temperature > 0.0f;
    tokens[i] = drawn ? index_of(best[i]) : survivors[i].token;
}
