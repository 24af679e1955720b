// ops/nvfp4/nvfp4_dequantize.cu: y [m, n] = q * d * amax / (6 F), from the row-wise or the column-wise copy, whose transform is taken back.
//
//            64 columns
//          +------------+   a thread decodes one block of 16: of a row, or (columnwise) of a column;
//    64    |     y      |   the tile passes through shared memory in f32, 65 floats a row;
//   rows   +------------+   a thread stores eight neighbours of a row, twice
//
// One H200, 2026-11-21, te_bench "dequantize nvfp4": 16384x4096 to bf16 0.56 of copy.
//
// Launch: block 256, grid: tiles, those of a row of tiles next to each other. Any size, any alignment.
//
// te:baseline
// te:row Y_DT=3 COLUMNWISE=0 RHT=0
// te:row Y_DT=3 COLUMNWISE=1 RHT=0
// te:row Y_DT=3 COLUMNWISE=1 RHT=1
// te:row Y_DT=1 COLUMNWISE=0 RHT=0
#include "ops/nvfp4/nvfp4.cuh"
#ifndef Y_DT
#define Y_DT a.y_dt
#define COLUMNWISE a.columnwise
#define RHT a.rht
#endif

#define TE_COLUMNS 65 // floats of a row of the tile

extern "C" __global__ void __launch_bounds__(256) te_nvfp4_dequantize(const __grid_constant__ te__nvfp4_dequantize_kargs a) {
    te_follow();
    __shared__ float tile[64 * TE_COLUMNS];
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * 64, first_col = (te_i64)tile_n * 64;
    int line = threadIdx.x >> 2, block = threadIdx.x & 3; // a row and a block of it, or a column
    te_i64 i = (COLUMNWISE ? first_col : first_row) + line, j = ((COLUMNWISE ? first_row : first_col) >> 4) + block;
    te_i64 bytes = (a.ld + 1) >> 1, left = bytes - 8 * j;
    float v[16];
    if (i < (COLUMNWISE ? a.n : a.m) && left > 0 && j < a.groups) {
        const te_u8 *q = a.q + i * bytes + 8 * j;
        te_u32 w[2] = {0, 0};
        if (a.vector_q) { // 8 bytes of a row are there or not
            uint2 u = *(const uint2 *)q;
            w[0] = u.x, w[1] = u.y;
        } else {
#pragma unroll
            for (int b = 0; b < 8; b++)
                if (b < left) w[b >> 2] |= (te_u32)q[b] << (8 * (b & 3));
        }
        float step = te__nvfp4_decode_step(a.scale[te__nvfp4_scale_at(i, j, a.groups, a.swizzled)], a.amax[a.per_row ? i : 0], a.code_max);
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = __fmul_rn(te__e2m1_to_f32((te_u8)(w[k >> 3] >> (4 * (k & 7)) & 15u)), step);
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
    for (int k = 0; k < 16; k++) tile[COLUMNWISE ? (16 * block + k) * TE_COLUMNS + line : line * TE_COLUMNS + 16 * block + k] = v[k];
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int r = pass * 32 + (threadIdx.x >> 3), c = (threadIdx.x & 7) * 8;
        te_i64 row = first_row + r, col = first_col + c;
        if (row >= a.m) continue;
        float y[8];
#pragma unroll
        for (int k = 0; k < 8; k++) y[k] = tile[r * TE_COLUMNS + c + k];
        if (a.vector_y && col + 8 <= a.n) {
            te_store8(a.y, row * a.n + col, Y_DT, y);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (col + k < a.n) te_store(a.y, row * a.n + col + k, Y_DT, y[k]);
        }
    }
}
