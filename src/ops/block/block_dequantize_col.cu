// ops/block/block_dequantize_col.cu: decodes the column-wise copy q [n, ld]. It computes y [m, n] = f32(q) * scale_inv,
// and rounds the product to y's format.
//
//   1-D blocks   element (i, j) of y has scale_inv[i / 128][j]
//   2-D blocks   element (i, j) of y has scale_inv[j / 128][i / 128]
//
//            128 rows of y (tx: 16 each)
//          +-------------------------+                  +------- 128 columns -------+
//   128    | ty: 4 columns of y      |  ->  transpose.cuh -> | 8 a thread, decoded, of   |  128 rows of y
//   columns|                         |                  | every 16th row            |
//          +-------------------------+                  +---------------------------+
//
// Benchmark: "dequantize 128x1 blocks" in tests/bench/h200.csv.
//
// Launch: block 256; the grid has one block for each tile of 128 rows and 128 columns of y, in row-major order. Any
// size and any alignment are allowed.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=1
#include "ops/block/block.cuh"
#include "ops/block/kargs.h"
#include "device/transpose.cuh"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256)
    te_block_dequantize_col(const __grid_constant__ te__block_dequantize_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[2 * TE_TILE_COLUMNS * TE_TILE_WORDS]; // 64 rows of y each
    __shared__ __align__(16) float scale[128]; // of each column of y
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * 128, first_col = (te_i64)tile_n * 128;
    te_u32 code[4][4]; // 16 rows of four columns
#pragma unroll
    for (int c = 0; c < 4; c++) {
        te_i64 line = first_col + ty * 4 + c, at = first_row + tx * 16, there = line < a.n ? a.m - at : 0;
        if (a.vector_q && there >= 16) {
            uint4 u = *(const uint4 *)((const te_u8 *)a.q + line * a.ld + at);
            code[c][0] = u.x, code[c][1] = u.y, code[c][2] = u.z, code[c][3] = u.w;
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 u = te_codes_part(a.q, line * a.ld + at + 8 * h, there - 8 * h);
                code[c][2 * h] = u.x, code[c][2 * h + 1] = u.y;
            }
        }
    }
    if (threadIdx.x < 128) {
        te_i64 col = first_col + threadIdx.x;
        scale[threadIdx.x] =
            col < a.n ? a.scale_inv[a.two_dimensional ? tile_n * a.ld_scale + tile_m : tile_m * a.ld_scale + col]
                      : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 4; h++) {
        te_u32 in[4] = {code[0][h], code[1][h], code[2][h], code[3][h]}, out[4];
        te_transpose_bytes(in, out);
#pragma unroll
        for (int j = 0; j < 4; j++)
            te_tile_put(tile + (tx >> 2) * TE_TILE_COLUMNS * TE_TILE_WORDS, (tx & 3) * 2 + (h >> 1), ty,
                        4 * (h & 1) + j, out[j]);
    }
    __syncthreads();
    int chunk = threadIdx.x & 15; // chunk of eight columns
    te_i64 col = first_col + chunk * 8;
    float s[8];
    te_load8(scale, chunk * 8, TE_F32, s);
    if (col >= a.n) return;
#pragma unroll
    for (int pass = 0; pass < 8; pass++) {
        int line = pass * 16 + (threadIdx.x >> 4);
        te_i64 row = first_row + line;
        float v[8];
        if (row >= a.m) break;
        uint2 u = te_tile_get2(tile + (line >> 6) * TE_TILE_COLUMNS * TE_TILE_WORDS, line & 63, chunk);
        te_fp8x8_to_f32(u.x, u.y, Q_DT, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], s[k]);
        te_store_part(a.y, row * a.n + col, Y_DT, a.n - col, a.vector_y, v);
    }
}
