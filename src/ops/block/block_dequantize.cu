// ops/block/block_dequantize.cu: decodes the row-wise copy q [m, ld]. It computes y [m, n] = f32(q) * scale_inv, and
// rounds the product to y's format.
//
//   1-D blocks   element (i, j) has scale_inv[j / 128][i]
//   2-D blocks   element (i, j) has scale_inv[i / 128][j / 128]
//
// Benchmark: "dequantize 1x128 blocks" in tests/bench/h200.csv.
//
// Launch: block 256. Each block handles 1024 groups of eight columns. Each thread handles four of them, 256 apart. Any
// size and any alignment are allowed.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=1
#include "ops/block/block.cuh"
#include "ops/block/kargs.h"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#endif

TE_DEV te_i64 te_scale_at(const te__block_dequantize_kargs &a, te_i64 row, te_i64 col) {
    return a.two_dimensional ? (row >> 7) * a.ld_scale + (col >> 7) : (col >> 7) * a.ld_scale + row;
}

extern "C" __global__ void __launch_bounds__(256)
    te_block_dequantize(const __grid_constant__ te__block_dequantize_kargs a) {
    te_follow();
    te_i64 per_row = te_div_up(a.n, 8), groups = a.m * per_row, first = (te_i64)blockIdx.x * 1024 + threadIdx.x;
    te_i64 row[4], col[4];
    uint2 code[4];
    float scale[4];
    bool whole = a.vector_q && a.vector_y;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        te_i64 g = first + r * 256;
        row[r] = groups >> 31 ? g / per_row : (te_i64)((te_u32)g / (te_u32)per_row);
        col[r] = (g - row[r] * per_row) * 8;
        whole = whole && g < groups && col[r] + 8 <= a.n;
    }
    if (whole) { // all loads are issued before the first code is used
#pragma unroll
        for (int r = 0; r < 4; r++) {
            code[r] = *(const uint2 *)((const te_u8 *)a.q + row[r] * a.ld + col[r]);
            scale[r] = a.scale_inv[te_scale_at(a, row[r], col[r])];
        }
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (row[r] >= a.m) break;
            code[r] = te_codes_part(a.q, row[r] * a.ld + col[r], a.n - col[r]);
            scale[r] = a.scale_inv[te_scale_at(a, row[r], col[r])];
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float v[8];
        if (row[r] >= a.m) break;
        te_fp8x8_to_f32(code[r].x, code[r].y, Q_DT, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], scale[r]);
        te_store_part(a.y, row[r] * a.n + col[r], Y_DT, a.n - col[r], whole, v);
    }
}
