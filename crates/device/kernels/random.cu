// Random weights and cache rows, made in place. A byte is a function of a key and of its place; the
// CPU makes the same ones (src/random.rs).
#include "common.cuh"

// The number that word `index` is made of: SplitMix64 as a function of a counter.
__device__ __forceinline__ u64 random_word(u64 key, u64 index) {
    u64 z = key + index * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

struct Codes {
    u64 row;
    u64 codes;
    u32 keep;
    u32 set;
    u32 least;
    u32 spread;
};

// A byte of a row: a code in its first `codes` bytes, else a scale.
__device__ __forceinline__ u32 random_byte(u64 random, u64 column, const Codes& c) {
    u32 byte = random & 0xff;
    return column < c.codes ? (byte & c.keep) | c.set : c.least + (byte & c.spread);
}

// `count` bytes. They follow each other, but for gaps after every `line` bytes: lines start `stride`
// bytes apart. Rows of codes and scales do not end with lines. A thread makes a word.
extern "C" __global__ void __launch_bounds__(256) random_bytes(
    u8* out, u64 count, u64 line, u64 stride, u64 key, u64 row, u64 codes, u32 keep, u32 set,
    u32 least, u32 spread) {
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    u64 place = 8 * index;
    if (place >= count) {
        return;
    }
    const Codes c = {row, codes, keep, set, least, spread};
    u64 random = random_word(key, index);
    u64 column = place % row;
    u64 word = 0;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        word |= (u64)random_byte(random >> 8 * b, column, c) << 8 * b;
        column = column + 1 == row ? 0 : column + 1;
    }
    u64 at = place / line;
    u64 in_line = place % line;
    u8* to = out + at * stride + in_line;
    if (in_line + 8 <= line && place + 8 <= count && (u64)to % 8 == 0) {
        *(u64*)to = word;
        return;
    }
    for (int b = 0; b < 8 && place + b < count; ++b) {
        out[at * stride + in_line] = word >> 8 * b;
        if (++in_line == line) {
            in_line = 0;
            ++at;
        }
    }
}

// `count` numbers `mean + spread * u`, u from -1 to 1, in lines of `line` numbers that start `stride`
// numbers apart.
template <typename Number, int PER_WORD>
__device__ __forceinline__ void random_numbers(
    Number* out, u64 count, u64 line, u64 stride, u64 key, float mean, float spread) {
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    u64 random = random_word(key, index);
    for (int i = 0; i < PER_WORD; ++i) {
        u64 place = PER_WORD * index + i;
        if (place >= count) {
            return;
        }
        Number& to = out[place / line * stride + place % line];
        if constexpr (PER_WORD == 4) {
            float unit = (float)(short)(random >> 16 * i) * (1.0f / 32768.0f);
            to = narrow(__fadd_rn(mean, __fmul_rn(spread, unit)));
        } else {
            float unit = __int2float_rn((int)(random >> 32 * i)) * (1.0f / 2147483648.0f);
            to = __fadd_rn(mean, __fmul_rn(spread, unit));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) random_bf16(
    bf16* out, u64 count, u64 line, u64 stride, u64 key, float mean, float spread) {
    random_numbers<bf16, 4>(out, count, line, stride, key, mean, spread);
}

extern "C" __global__ void __launch_bounds__(256) random_f32(
    float* out, u64 count, u64 line, u64 stride, u64 key, float mean, float spread) {
    random_numbers<float, 2>(out, count, line, stride, key, mean, spread);
}
