// Moving, storing and reading rows.
#include "cache.cuh"

// ---- moving: one warp a row, words of the size that all addresses allow ----

template <typename Word>
__device__ void copy_row(const u8* from, u8* to, u64 bytes) {
    const Word* source = (const Word*)from;
    Word* target = (Word*)to;
    for (u64 i = threadIdx.x % 32; i < bytes / sizeof(Word); i += 32) {
        target[i] = source[i];
    }
}

__device__ void copy_row(const u8* from, u8* to, u64 bytes) {
    u64 all = (u64)from | (u64)to | bytes;
    if (all % 16 == 0) {
        copy_row<uint4>(from, to, bytes);
    } else if (all % 4 == 0) {
        copy_row<u32>(from, to, bytes);
    } else {
        copy_row<u8>(from, to, bytes);
    }
}

__device__ __forceinline__ u64 warp_index() {
    return (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

// out[i] = src[indices[i]]; indices beyond the source are skipped, ABSENT among them.
extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const u8* src, u64 src_rows, u64 row_bytes, const u32* indices, u64 rows, u8* out) {
    u64 i = warp_index();
    if (i < rows && indices[i] < src_rows) {
        copy_row(src + indices[i] * row_bytes, out + i * row_bytes, row_bytes);
    }
}

// out[indices[i]] = src[i]; indices beyond the output are skipped.
extern "C" __global__ void __launch_bounds__(256)
    scatter_rows(const u8* src, u64 row_bytes, const u64* indices, u64 rows, u64 out_rows, u8* out) {
    u64 i = warp_index();
    if (i < rows && indices[i] < out_rows) {
        copy_row(src + i * row_bytes, out + indices[i] * row_bytes, row_bytes);
    }
}

// ---- storing cache rows: one warp a group of 32 values, one lane a value ----

// The scale byte of this lane's group, and its value. Lanes beyond the row hold 0.
template <int FORMAT>
__device__ __forceinline__ u32 scale_of(float x, float& scale) {
    // Magnitudes order like their bits, and NaN lies above infinity.
    u32 most = __float_as_uint(x) & 0x7fffffffu;
#pragma unroll
    for (int step = FORMAT == ROW_NVFP4X16 ? 8 : 16; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    float amax = __uint_as_float(most);
    u32 byte;
    if (FORMAT == ROW_FP8X32) {
        amax = amax < 1e-4f ? 1e-4f : amax;
        byte = ue8m0_ceil(__fdiv_rn(amax, 448.0f));
        scale = ue8m0(byte);
    } else if (FORMAT == ROW_NVFP4X16) {
        amax = amax < 0.01171875f ? 0.01171875f : amax;
        byte = e4m3_of(__fdiv_rn(amax, 6.0f));
        scale = e4m3(byte);
    } else {
        amax = amax < 7.05296610e-38f ? 7.05296610e-38f : amax;
        byte = ue8m0_ceil(__fdiv_rn(amax, 6.0f));
        scale = ue8m0(byte);
    }
    return byte;
}

template <int FORMAT>
__device__ void encode(const bf16* x, u32 width, u64 rows, u8* out) {
    u32 groups = (width + 31) / 32;
    u64 index = warp_index();
    u64 row = index / groups;
    u32 column = index % groups * 32 + threadIdx.x % 32;
    if (row >= rows) {
        return;
    }
    bool inside = column < width;
    float v = inside ? widen(x[row * width + column]) : 0.0f;
    u32 value_bytes = FORMAT == ROW_FP8X32 ? width : (width + 1) / 2;
    u32 per_group = FORMAT == ROW_NVFP4X16 ? 16 : 32;
    u8* at = out + row * (value_bytes + (width + per_group - 1) / per_group);
    float scale;
    u32 byte = scale_of<FORMAT>(v, scale);
    if (inside && column % per_group == 0) {
        at[value_bytes + column / per_group] = byte;
    }
    float scaled = __fdiv_rn(v, scale);
    if (FORMAT == ROW_FP8X32) {
        if (inside) {
            at[column] = e4m3_of(scaled);
        }
        return;
    }
    u32 code = inside ? e2m1_of(scaled) : 0;
    u32 next = __shfl_down_sync(0xffffffffu, code, 1);
    if (inside && column % 2 == 0) {
        at[column / 2] = code | next << 4;
    }
}

template <int FORMAT>
__device__ void round(bf16* x, u32 width, u64 rows) {
    u32 groups = (width + 31) / 32;
    u64 index = warp_index();
    u64 row = index / groups;
    u32 column = index % groups * 32 + threadIdx.x % 32;
    if (row >= rows) {
        return;
    }
    bool inside = column < width;
    bf16* at = x + row * width + column;
    float v = inside ? widen(*at) : 0.0f;
    float scale;
    scale_of<FORMAT>(v, scale);
    float scaled = __fdiv_rn(v, scale);
    float value = FORMAT == ROW_FP8X32 ? e4m3(e4m3_of(scaled)) : e2m1(e2m1_of(scaled));
    if (inside) {
        *at = narrow(value * scale);
    }
}

#define ROWS_OF(NAME, FORMAT)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        encode_rows_##NAME(const bf16* x, u32 width, u64 rows, u8* out) {                          \
        encode<FORMAT>(x, width, rows, out);                                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        round_rows_##NAME(bf16* x, u32 width, u64 rows) {                                          \
        round<FORMAT>(x, width, rows);                                                             \
    }

ROWS_OF(fp8, ROW_FP8X32)
ROWS_OF(nvfp4, ROW_NVFP4X16)
ROWS_OF(mxfp4, ROW_MXFP4X32)

// Rows of f32 are stored byte by byte: they may lie anywhere.
extern "C" __global__ void __launch_bounds__(256) encode_rows_f32(const bf16* x, u64 count, u8* out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < count) {
        u32 bits = (u32)x[i].bits << 16;
        for (int b = 0; b < 4; ++b) {
            out[4 * i + b] = bits >> 8 * b;
        }
    }
}

// ---- reading stored rows: a lane eight values ----

// A bit of every byte that is the fp8 code of a NaN.
__device__ __forceinline__ u32 nan_codes(u32 codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Eight columns as bf16. (decode8 takes the fp8 codes of NaN for 480.)
__device__ __forceinline__ uint4 values8(int format, const Raw8& raw) {
    uint4 values = decode8(format, raw);
    if (format != ROW_FP8X32 || raw.scale == ABSENT) return values;
    if ((nan_codes(raw.codes.x) | nan_codes(raw.codes.y)) == 0) return values;
    u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 code = (i < 4 ? raw.codes.x : raw.codes.y) >> 8 * (i % 4);
        if ((code & 0x7f) == 0x7f) pairs[i / 2] |= 0x7fffu << 16 * (i % 2);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Writes columns col .. col + 8 of a row, those inside it.
__device__ __forceinline__ void store8(bf16* row, int width, int col, const uint4& values) {
    if (width % 8 == 0) {
        *reinterpret_cast<uint4*>(row + col) = values;
        return;
    }
    const u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (col + i < width) row[col + i].bits = u16(pairs[i / 2] >> 16 * (i % 2));
    }
}

// out[i] = src[indices[i]], one warp a row; indices beyond the source are skipped, ABSENT among them.
// Where groups of eight are whole and their codes lie at whole words, a lane has a group, and two
// groups in flight; else it has a value.
template <int FORMAT, bool ODD>
__device__ __forceinline__ void decode(
    const u8* src, u64 src_rows, u64 row_bytes, int width, const u32* indices, u64 rows, bf16* out) {
    const u64 i = warp_index();
    if (i >= rows) return;
    const u32 index = __ldg(indices + i);
    if (index >= src_rows) return;
    const u8* row = src + index * row_bytes;
    out += i * width;
    const int lane = threadIdx.x & 31;
    if constexpr (ODD) {
        for (int c = lane; c < width; c += 32) out[c].bits = read_value(FORMAT, row, width, c);
    } else {
        for (int col = 8 * lane; col < width; col += 512) {
            const bool two = col + 256 < width;
            const Raw8 a = read8<false>(FORMAT, row, width, col, 16);
            Raw8 b = a;
            if (two) b = read8<false>(FORMAT, row, width, col + 256, 16);
            store8(out, width, col, values8(FORMAT, a));
            if (two) store8(out, width, col + 256, values8(FORMAT, b));
        }
    }
}

#define DECODE_ROWS(NAME, FORMAT, ODD)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        decode_rows_##NAME(const u8* src, u64 src_rows, u64 row_bytes, int width,                  \
                           const u32* indices, u64 rows, bf16* out) {                              \
        decode<FORMAT, ODD>(src, src_rows, row_bytes, width, indices, rows, out);                  \
    }

DECODE_ROWS(f32, ROW_F32, false)
DECODE_ROWS(bf16, ROW_BF16, false)
DECODE_ROWS(fp8, ROW_FP8X32, false)
DECODE_ROWS(nvfp4, ROW_NVFP4X16, false)
DECODE_ROWS(mxfp4, ROW_MXFP4X32, false)
DECODE_ROWS(f32_odd, ROW_F32, true)
DECODE_ROWS(bf16_odd, ROW_BF16, true)
DECODE_ROWS(fp8_odd, ROW_FP8X32, true)
DECODE_ROWS(nvfp4_odd, ROW_NVFP4X16, true)
DECODE_ROWS(mxfp4_odd, ROW_MXFP4X32, true)

// ---- rows of a weight matrix ----

enum { W_F32, W_BF16, W_FP8_BLOCK, W_FP8_ROW, W_FP4_ROW };

struct Table {
    const u8* data;
    u64 row_stride;
    const u8* scale;
    u64 scale_stride;
    u64 scale_row0;
    u64 rows;
    u32 cols;
    u32 format;
};

// out[i] = table[ids[i]], a thread eight columns; ids beyond the table are skipped. Rows lie at
// multiples of 16 bytes, and are padded to whole groups.
template <typename Id>
__device__ __forceinline__ void read_table(Table t, const Id* ids, u64 count, bf16* out) {
    const u32 groups = (t.cols + 7) / 8;
    const u64 item = (u64)blockIdx.x * 256 + threadIdx.x;
    const u64 i = item >> 32 ? item / groups : (u32)item / groups;
    if (i >= count) return;
    const u64 r = __ldg(ids + i);
    if (r >= t.rows) return;
    const int col = 8 * int(item - i * groups);
    const u8* row = t.data + r * t.row_stride;
    Raw8 raw;
    raw.scale = ABSENT;
    int format = ROW_BF16;
    if (t.format == W_F32) {
        const uint4 a = load16(row + 4 * col, 16), b = load16(row + 4 * col + 16, 16);
        raw.codes.x = narrow2(__uint_as_float(a.x), __uint_as_float(a.y));
        raw.codes.y = narrow2(__uint_as_float(a.z), __uint_as_float(a.w));
        raw.codes.z = narrow2(__uint_as_float(b.x), __uint_as_float(b.y));
        raw.codes.w = narrow2(__uint_as_float(b.z), __uint_as_float(b.w));
    } else if (t.format == W_BF16) {
        raw.codes = load16(row + 2 * col, 16);
    } else {
        const u64 scale_row = t.format == W_FP8_BLOCK ? (r + t.scale_row0) / 32 : r;
        raw.scale = __ldg(t.scale + scale_row * t.scale_stride + col / 32);
        if (t.format == W_FP4_ROW) {
            format = ROW_MXFP4X32;
            raw.codes.x = load4(row + col / 2, 4);
        } else {
            format = ROW_FP8X32;
            const uint2 codes = load8(row + col, 8);
            raw.codes.x = codes.x;
            raw.codes.y = codes.y;
        }
    }
    store8(out + i * t.cols, t.cols, col, values8(format, raw));
}

#define TABLE_PARAMS                                                                               \
    const u8 *data, u64 row_stride, const u8 *scale, u64 scale_stride, u64 scale_row0, u64 rows,   \
        u32 cols, u32 format
#define TABLE {data, row_stride, scale, scale_stride, scale_row0, rows, cols, format}

extern "C" __global__ void __launch_bounds__(256)
    read_table_u32(TABLE_PARAMS, const u32* ids, u64 count, bf16* out) {
    read_table<u32>(Table TABLE, ids, count, out);
}

extern "C" __global__ void __launch_bounds__(256)
    read_table_u64(TABLE_PARAMS, const u64* ids, u64 count, bf16* out) {
    read_table<u64>(Table TABLE, ids, count, out);
}
