// ops/block/block_dequantize_col.cu: y [m, n] = f32(q) * scale_inv, rounded once more to y's format; the column-wise copy, q [n, ld].
//
//   1-D blocks   element (i, j) of y has scale_inv[i / 128][j]
//   2-D blocks   element (i, j) of y has scale_inv[j / 128][i / 128]
//
//            64 rows of y (tx: 8 each)
//          +-------------------------+                  +------- 128 columns -------+
//   128    | ty: 4 columns of y      |  ->  tile.cuh -> | 4 x 8 a thread, decoded   |  64 rows of y
//   columns|                         |                  +---------------------------+
//          +-------------------------+
//
// One H200, 2026-11-21, te_bench dequantize: 16384x4096 bf16, 128x1: 0.71 of copy.
//
// Launch: block 256, grid: tiles of 64 rows and 128 columns of y, those of the same rows next to each other. Any size, any alignment.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=1
#include "ops/block/block.cuh"
#include "ops/block/kargs.h"
#include "device/tile.cuh"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_block_dequantize_col(const __grid_constant__ te__block_dequantize_kargs a) {
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    __shared__ __align__(16) float scale[128]; // of each column of y
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * 64, first_col = (te_i64)tile_n * 128;
    uint2 code[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        te_i64 line = first_col + ty * 4 + r, at = first_row + tx * 8, there = line < a.n ? a.m - at : 0;
        if (a.vector_q && there >= 8) code[r] = *(const uint2 *)((const te_u8 *)a.q + line * a.ld + at);
        else code[r] = te_codes_part(a.q, line * a.ld + at, there);
    }
    if (threadIdx.x < 128) {
        te_i64 col = first_col + threadIdx.x, block = first_row >> 7;
        scale[threadIdx.x] = col < a.n ? a.scale_inv[a.two_dimensional ? tile_n * a.ld_scale + block : block * a.ld_scale + col] : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        te_u32 in[4], out[4];
#pragma unroll
        for (int r = 0; r < 4; r++) in[r] = h ? code[r].y : code[r].x;
        te_transpose_bytes(in, out);
#pragma unroll
        for (int j = 0; j < 4; j++) te_tile_put(tile, tx, ty, 4 * h + j, out[j]);
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 2; pass++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Eight lanes store 128 neighbouring bytes (of 16-bit numbers). Odd lines begin with their second half: the two lines that
            // are read together then lie in different banks.
            int line = pass * 32 + ty, chunk = (h ^ (ty & 1)) * 8 + tx;
            te_i64 row = first_row + line, col = first_col + chunk * 8;
            float v[8], s[8];
            if (row >= a.m || col >= a.n) continue;
            uint2 u = te_tile_get2(tile, line, chunk);
            te_fp8x8_to_f32(u.x, u.y, Q_DT, v);
            te_load8(scale, chunk * 8, TE_F32, s);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], s[k]);
            te_store_part(a.y, row * a.n + col, Y_DT, v, a.n - col, a.vector_y);
        }
}
