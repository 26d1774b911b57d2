// Moving, storing and reading rows.
#include "common.cuh"

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

// ---- formats of cache rows: one warp a group of 32 values, one lane a value ----

enum { ROW_F32, ROW_BF16, ROW_FP8, ROW_NVFP4, ROW_MXFP4 };

// The scale byte of this lane's group, and its value. Lanes beyond the row hold 0.
template <int FORMAT>
__device__ __forceinline__ u32 scale_of(float x, float& scale) {
    // Magnitudes order like their bits, and NaN lies above infinity.
    u32 most = __float_as_uint(x) & 0x7fffffffu;
#pragma unroll
    for (int step = FORMAT == ROW_NVFP4 ? 8 : 16; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    float amax = __uint_as_float(most);
    u32 byte;
    if (FORMAT == ROW_FP8) {
        amax = amax < 1e-4f ? 1e-4f : amax;
        byte = ue8m0_ceil(__fdiv_rn(amax, 448.0f));
        scale = ue8m0(byte);
    } else if (FORMAT == ROW_NVFP4) {
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
    u32 value_bytes = FORMAT == ROW_FP8 ? width : (width + 1) / 2;
    u32 per_group = FORMAT == ROW_NVFP4 ? 16 : 32;
    u8* at = out + row * (value_bytes + (width + per_group - 1) / per_group);
    float scale;
    u32 byte = scale_of<FORMAT>(v, scale);
    if (inside && column % per_group == 0) {
        at[value_bytes + column / per_group] = byte;
    }
    float scaled = __fdiv_rn(v, scale);
    if (FORMAT == ROW_FP8) {
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
    float value = FORMAT == ROW_FP8 ? e4m3(e4m3_of(scaled)) : e2m1(e2m1_of(scaled));
    if (inside) {
        *at = narrow(value * scale);
    }
}

template <int FORMAT>
__device__ void decode(const u8* src, u32 width, u64 rows, bf16* out) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * width) {
        return;
    }
    u64 row = i / width;
    u32 column = i % width;
    u32 value_bytes = FORMAT == ROW_FP8 ? width : (width + 1) / 2;
    u32 per_group = FORMAT == ROW_NVFP4 ? 16 : 32;
    const u8* at = src + row * (value_bytes + (width + per_group - 1) / per_group);
    u32 byte = at[value_bytes + column / per_group];
    float scale = FORMAT == ROW_NVFP4 ? e4m3(byte) : ue8m0(byte);
    float value = FORMAT == ROW_FP8 ? e4m3(at[column]) : e2m1(at[column / 2] >> column % 2 * 4);
    out[i] = narrow(value * scale);
}

#define ROWS_OF(NAME, FORMAT)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        encode_rows_##NAME(const bf16* x, u32 width, u64 rows, u8* out) {                          \
        encode<FORMAT>(x, width, rows, out);                                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        round_rows_##NAME(bf16* x, u32 width, u64 rows) {                                          \
        round<FORMAT>(x, width, rows);                                                             \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        decode_rows_##NAME(const u8* src, u32 width, u64 rows, bf16* out) {                        \
        decode<FORMAT>(src, width, rows, out);                                                     \
    }

ROWS_OF(fp8, ROW_FP8)
ROWS_OF(nvfp4, ROW_NVFP4)
ROWS_OF(mxfp4, ROW_MXFP4)

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

extern "C" __global__ void __launch_bounds__(256) decode_rows_f32(const u8* src, u64 count, bf16* out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < count) {
        u32 bits = 0;
        for (int b = 0; b < 4; ++b) {
            bits |= (u32)src[4 * i + b] << 8 * b;
        }
        out[i] = narrow(__uint_as_float(bits));
    }
}

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

// out[i] = table[ids[i]], one warp a row; ids beyond the table are skipped.
template <typename Id>
__device__ void read_table(Table t, const Id* ids, u64 count, bf16* out) {
    u64 i = warp_index();
    if (i >= count || ids[i] >= t.rows) {
        return;
    }
    u64 r = ids[i];
    const u8* row = t.data + r * t.row_stride;
    u64 scale_row = t.format == W_FP8_BLOCK ? (r + t.scale_row0) / 32 : r;
    const u8* scales = t.scale + scale_row * t.scale_stride;
    out += i * t.cols;
    for (u32 c = threadIdx.x % 32; c < t.cols; c += 32) {
        float v;
        if (t.format == W_F32) {
            v = ((const float*)row)[c];
        } else if (t.format == W_BF16) {
            v = widen(((const bf16*)row)[c]);
        } else if (t.format == W_FP4_ROW) {
            v = e2m1(row[c / 2] >> c % 2 * 4) * ue8m0(scales[c / 32]);
        } else {
            v = e4m3(row[c]) * ue8m0(scales[c / 32]);
        }
        out[c] = narrow(v);
    }
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
