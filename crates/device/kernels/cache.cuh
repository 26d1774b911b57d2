// What kernels over caches and choices share: rows of caches as bf16, shared memory's matrices, the
// order of scores.
#pragma once

#include "common.cuh"

// Arguments are structs whose members take eight bytes each, as the host passes them.
#define SLOT alignas(8)

// Stored forms of cache rows; the numbers are those of the host.
enum RowFormat : int { ROW_F32 = 0, ROW_BF16 = 1, ROW_FP8X32 = 2, ROW_NVFP4X16 = 3, ROW_MXFP4X32 = 4 };

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ u32 both(u32 half) { return half * 0x00010001u; }

// ---- stored codes ----

// UE8M0 as bf16: 2^(b - 127), 255 is NaN.
__device__ __forceinline__ u32 ue8m0_bf16(u32 byte) {
    const u32 bits = byte == 0 ? 0x0040u : byte << 7;
    return byte == 255 ? 0x7fffu : bits;
}

// E4M3 as bf16.
__device__ __forceinline__ u32 e4m3_bf16(u32 code) {
    const u32 value = mul2((code & 0x7f) << 4 | (code & 0x80) << 8, 0x7b80u);  // * 2^120
    return (code & 0x7f) == 0x7f ? 0x7fffu : value & 0xffffu;
}

// Little-endian words at `p`, which is a multiple of `align` bytes away from an aligned address.
__device__ __forceinline__ u32 load4(const u8* p, int align) {
    if (align >= 4) return __ldg(reinterpret_cast<const u32*>(p));
    return u32(__ldg(p)) | u32(__ldg(p + 1)) << 8 | u32(__ldg(p + 2)) << 16 | u32(__ldg(p + 3)) << 24;
}

__device__ __forceinline__ uint2 load8(const u8* p, int align) {
    if (align >= 8) return __ldg(reinterpret_cast<const uint2*>(p));
    return make_uint2(load4(p, align), load4(p + 4, align));
}

__device__ __forceinline__ uint4 load16(const u8* p, int align) {
    if (align >= 16) return __ldg(reinterpret_cast<const uint4*>(p));
    uint2 a = load8(p, align), b = load8(p + 8, align);
    return make_uint4(a.x, a.y, b.x, b.y);
}

// The value at column c of a cache row, as bf16.
__device__ __forceinline__ u32 read_value(int format, const u8* row, int width, int c) {
    if (format == ROW_F32) return narrow(__uint_as_float(load4(row + 4 * c, 1))).bits;
    if (format == ROW_BF16) return row[2 * c] | u32(row[2 * c + 1]) << 8;
    if (format == ROW_FP8X32) return mul2(e4m3_bf16(row[c]), ue8m0_bf16(row[width + c / 32])) & 0xffffu;
    const u8* scales = row + (width + 1) / 2;
    const u32 value = narrow(e2m1(row[c / 2] >> (c % 2 * 4))).bits;
    const u32 scale = format == ROW_NVFP4X16 ? e4m3_bf16(scales[c / 16]) : ue8m0_bf16(scales[c / 32]);
    return mul2(value, scale) & 0xffffu;
}

// Columns col .. col + 8 of a cache row, as read from memory: the codes and the scale.
struct Raw8 {
    uint4 codes;
    u32 scale;
};

// `col` is a multiple of 8. Where RAGGED, columns from `width` on read as 0; else there are none.
template <bool RAGGED>
__device__ __forceinline__ Raw8 read8(int format, const u8* row, int width, int col, int align) {
    Raw8 raw;
    raw.codes = make_uint4(0, 0, 0, 0);
    raw.scale = ABSENT;
    if (RAGGED && col + 8 > width) {
        u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (col + i < width) {
                pairs[i / 2] |= read_value(format, row, width, col + i) << (i % 2 * 16);
            }
        }
        raw.codes = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return raw;
    }
    if (format == ROW_FP8X32) {
        uint2 codes = load8(row + col, align);
        raw.codes.x = codes.x;
        raw.codes.y = codes.y;
        raw.scale = __ldg(row + width + col / 32);
    } else if (format == ROW_NVFP4X16) {
        raw.codes.x = load4(row + col / 2, align);
        raw.scale = __ldg(row + (width + 1) / 2 + col / 16);
    } else if (format == ROW_MXFP4X32) {
        raw.codes.x = load4(row + col / 2, align);
        raw.scale = __ldg(row + (width + 1) / 2 + col / 32);
    } else if (format == ROW_BF16) {
        raw.codes = load16(row + 2 * col, align);
    } else {
        uint4 a = load16(row + 4 * col, align), b = load16(row + 4 * col + 16, align);
        raw.codes.x = narrow2(__uint_as_float(a.x), __uint_as_float(a.y));
        raw.codes.y = narrow2(__uint_as_float(a.z), __uint_as_float(a.w));
        raw.codes.z = narrow2(__uint_as_float(b.x), __uint_as_float(b.y));
        raw.codes.w = narrow2(__uint_as_float(b.z), __uint_as_float(b.w));
    }
    return raw;
}

// The eight columns as bf16, in order.
__device__ __forceinline__ uint4 decode8(int format, const Raw8& raw) {
    if (format <= ROW_BF16 || raw.scale == ABSENT) return raw.codes;
    u32 p[4];
    if (format == ROW_FP8X32) {
        e4m3x4(raw.codes.x, p[0], p[1]);
        e4m3x4(raw.codes.y, p[2], p[3]);
    } else {
        e2m1x8(raw.codes.x, p);
    }
    // First the power of two that the codes' bits lack, which no scale can then put out of range.
    const u32 lift = format == ROW_FP8X32 ? 0x7b807b80u : 0x7e807e80u;
    const u32 scale = both(format == ROW_NVFP4X16 ? e4m3_bf16(raw.scale) : ue8m0_bf16(raw.scale));
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = mul2(mul2(p[i], lift), scale);
    return make_uint4(p[0], p[1], p[2], p[3]);
}

// Columns col .. col + 8 of a row of activations; columns from `width` on read as 0.
__device__ __forceinline__ uint4 act8(const bf16* row, int width, int col, bool aligned) {
    if (aligned && col + 8 <= width) return __ldg(reinterpret_cast<const uint4*>(row + col));
    u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (col + i < width) pairs[i / 2] |= u32(row[col + i].bits) << (i % 2 * 16);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// ---- matrices in shared memory ----

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* shared) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], const void* shared) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

// Copies 16 bytes to shared memory in the background; zeros where `there` is false.
__device__ __forceinline__ void copy_async(void* shared, const void* from, bool there) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies but those of the last commit.
__device__ __forceinline__ void copy_wait_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Waits for this thread's copies.
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- order ----

// A score as an integer that sorts as the score does: zeros are equal, NaN lies below everything.
__device__ __forceinline__ u32 rank_of(float score) {
    u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));
    u32 rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    return score != score ? 0 : rank;
}

// A ranked index; larger is better, and of equal ranks the lower index.
__device__ __forceinline__ u64 entry_of(u32 rank, u32 index) { return u64(rank) << 32 | u32(~index); }
__device__ __forceinline__ u32 index_of(u64 entry) { return ~u32(entry); }

// ---- where rows lie ----

struct Paged {
    SLOT const u8* cache;
    SLOT const u32* pages;  // [sequences, max_pages]
    SLOT u64 row_bytes;
    SLOT int max_pages;
    SLOT int rows_per_page;
    SLOT int format;
    SLOT int align;  // bytes that row addresses are a multiple of: 1, 2, 4, 8 or 16
};

__device__ __forceinline__ const u8* paged_row(const Paged& keys, u32 sequence, u32 index) {
    u32 page = __ldg(keys.pages + u64(sequence) * keys.max_pages + index / keys.rows_per_page);
    return keys.cache + (u64(page) * keys.rows_per_page + index % keys.rows_per_page) * keys.row_bytes;
}

// Compressed rows that a query at `position` sees.
__device__ __forceinline__ u32 visible_rows(u32 position, u32 ratio) {
    return u32((u64(position) + 1) / ratio);
}
