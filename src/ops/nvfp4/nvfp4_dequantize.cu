// ops/nvfp4/nvfp4_dequantize.cu: computes y [m, n] = q * d * amax / (6 F), where d is the block's scale and F is
// code_max. q is the row-wise copy, or the column-wise copy, whose transform is undone.
//
//   row-wise: a tile has 32 rows of 256 columns, and each of the 8 warps has every eighth row
//
//   column-wise:
//            64 columns
//          +------------+   a thread decodes one block of 16 of a column;
//    64    |     y      |   the tile passes through shared memory in f32, 65 floats a row;
//   rows   +------------+   a thread stores eight neighbours in each of two rows
//
// Benchmark: "dequantize nvfp4" in tests/bench/h200.csv.
//
// Launch: block 256; grid: one block a tile, consecutive along a row of tiles. Any size and any alignment are allowed.
//
// te:baseline
// te:row Y_DT=3 COLUMNWISE=0 RHT=0
// te:row Y_DT=3 COLUMNWISE=1 RHT=0
// te:row Y_DT=3 COLUMNWISE=1 RHT=1
// te:row Y_DT=1 COLUMNWISE=0 RHT=0
#include "device/vector.cuh"
#include "ops/nvfp4/nvfp4.cuh"
#ifndef Y_DT
#define Y_DT a.y_dt
#define COLUMNWISE a.columnwise
#define RHT a.rht
#endif

// Returns the index of the amax of row `row`: the row's group if there are groups, `line` if each row or column has an
// amax, otherwise 0. A row of no group gets 0.
TE_DEV te_i64 te_nvfp4_amax_of(const te__nvfp4_dequantize_kargs &a, te_i64 row, te_i64 line) {
    int group = a.group_of && row < a.m ? a.group_of[row] : 0;
    return a.group_of ? (group > 0 && group < a.count ? group : 0) : a.per_row ? line : 0;
}

#define TE_COLUMNS 65 // floats of a row of the tile
#define TE_Y_SIZE (Y_DT == TE_F32 ? 4 : 2)

// Loads 4 N bytes of codes from q. Only the first `left` bytes exist, and the others become 0. If `vector` is true, all
// 4 N bytes must exist, and q must be aligned to 4 N bytes.
template <int N> TE_DEV void te_nvfp4_codes(const te_u8 *q, te_i64 left, bool vector, te_u32 w[N]) {
    if (vector && N == 2) {
        uint2 u = *(const uint2 *)q;
        w[0] = u.x, w[N - 1] = u.y;
    } else if (vector) {
        w[0] = *(const te_u32 *)q;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) w[i] = 0;
#pragma unroll
        for (int b = 0; b < 4 * N; b++)
            if (b < left) w[b >> 2] |= (te_u32)q[b] << (8 * (b & 3));
    }
}
// Decodes eight codes and multiplies them by `step`. Two tables of eight bytes give the upper and lower byte of a
// magnitude in bf16.
TE_DEV void te_nvfp4_decode8(te_u32 w, float step, float v[8]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        te_u32 codes = w >> (16 * h), pick = codes & 0x7777u;
        te_u32 upper = __byte_perm(0x3f3f3f00u, 0x40404040u, pick), lower = __byte_perm(0xc0800000u, 0xc0804000u, pick);
        te_u32 pair[2] = {__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362)};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            te_u32 c = codes >> (8 * k), signs = (c & 8u) << 12 | (c & 0x80u) << 24, both = pair[k] | signs;
            v[4 * h + 2 * k] = __fmul_rn(__uint_as_float(both << 16), step);
            v[4 * h + 2 * k + 1] = __fmul_rn(__uint_as_float(both & 0xffff0000u), step);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    te_nvfp4_dequantize(const __grid_constant__ te__nvfp4_dequantize_kargs a) {
    te_follow();
    te_i64 bytes = (a.ld + 1) >> 1;
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    if (!COLUMNWISE) {
        te_i64 row = (te_i64)tile_m * 32 + (threadIdx.x >> 5), col = (te_i64)tile_n * 256 + (threadIdx.x & 31) * 8,
               left = bytes - (col >> 1);
        const te_u8 *q = a.q + row * bytes + (col >> 1);
        // rows that have codes
        int rows = left <= 0 || col >> 4 >= a.groups || row >= a.m ? 0 : a.m - row > 24 ? 4 : (int)(a.m - row + 7) / 8;
        te_u32 w[4] = {};
        te_u8 scale[4] = {};
        float amax[4] = {*a.amax, *a.amax, *a.amax, *a.amax};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (r >= rows) continue;
            te_nvfp4_codes<1>(q + 8 * r * bytes, left, a.vector_q, w + r);
            scale[r] = a.scale[te__nvfp4_scale_at(row + 8 * r, col >> 4, a.groups, a.swizzled)];
            if (a.per_row || a.group_of) amax[r] = a.amax[te_nvfp4_amax_of(a, row + 8 * r, row + 8 * r)];
        }
        te_u8 *y = (te_u8 *)a.y + (row * a.n + col) * TE_Y_SIZE;
        bool whole = a.vector_y && col + 8 <= a.n;
        float most = te__mul_f32(a.code_max, 6.0f), one_over_most = te__rcp_f32(most);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float v[8], d, none;
            if (row + 8 * r >= a.m) break;
            te_fp8x2_to_f32(scale[r], TE_F8E4M3, &d, &none);
            te_nvfp4_decode8(w[r], te__nvfp4_decode_factor(d, amax[r], most, one_over_most), v);
            if (whole) te_store8(y + 8 * r * a.n * TE_Y_SIZE, 0, Y_DT, v);
            else te_store_part(a.y, (row + 8 * r) * a.n + col, Y_DT, a.n - col, false, v);
        }
        return;
    }
    __shared__ float tile[64 * TE_COLUMNS];
    te_i64 first_row = (te_i64)tile_m * 64, first_col = (te_i64)tile_n * 64;
    int line = threadIdx.x >> 2, block = threadIdx.x & 3;
    te_i64 i = first_col + line, j = (first_row >> 4) + block, left = bytes - 8 * j;
    float v[16];
    if (i < a.n && left > 0 && j < a.groups) {
        te_u32 w[2];
        te_nvfp4_codes<2>(a.q + i * bytes + 8 * j, left, a.vector_q, w);
        float step = te__nvfp4_decode_step(a.scale[te__nvfp4_scale_at(i, j, a.groups, a.swizzled)],
                                           a.amax[te_nvfp4_amax_of(a, 16 * j, i)], a.code_max);
        te_nvfp4_decode8(w[0], step, v);
        te_nvfp4_decode8(w[1], step, v + 8);
    } else {
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = 0.0f;
    }
    if (RHT) {
        te__nvfp4_hadamard(v);
        if (RHT == 1) te__nvfp4_flip(v, TE__NVFP4_SIGNS);
#pragma unroll
        for (int k = 0; k < 16; k++)
            if (v[k] != v[k]) v[k] = __uint_as_float(0x7fffffffu); // a NaN has no sign
    }
#pragma unroll
    for (int k = 0; k < 16; k++) tile[(16 * block + k) * TE_COLUMNS + line] = v[k];
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int r = pass * 32 + (threadIdx.x >> 3), c = (threadIdx.x & 7) * 8;
        if (first_row + r < a.m)
            te_store_part(a.y, (first_row + r) * a.n + first_col + c, Y_DT, a.n - first_col - c, a.vector_y,
                          tile + r * TE_COLUMNS + c);
    }
}
