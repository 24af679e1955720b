// ops/mxfp8/mxfp8_dequantize.cu: computes y [m, n] = f32(q) * 2^(e - 127), rounded once to y's format. q [m, ld] has
// the codes, and e the scales.
//
// mxfp8.cuh shows the tile of a block. A lane reads the scales of its own rows or columns.
//
// Benchmark: "dequantize mxfp8 columnwise" in tests/bench/h200.csv.
//
// Launch: block 256; grid: x counts tiles along n, y and z count tiles along m. Any size and any alignment is allowed.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=2
// te:row Q_DT=4 Y_DT=1
#include "device/vector.cuh"
#include "ops/mxfp8/kargs.h"
#include "ops/mxfp8/mxfp8.cuh"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256)
    te_mxfp8_dequantize(const __grid_constant__ te__mxfp8_dequantize_kargs a) {
    te_follow();
    te_mx_place p;
    int rows = te_mx_left(a.m, p.row, 4), cols = te_mx_left(a.n, p.col, 8);
    if (rows == 0 || cols == 0) return;
    const te_u8 *q = (const te_u8 *)a.q + p.row * a.ld + p.col;
    bool whole = a.vector && rows == 4 && cols == 8;
    uint2 code[4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (whole) {
            code[r] = *(const uint2 *)(q + r * a.ld);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (r < rows && k < cols) (k < 4 ? code[r].x : code[r].y) |= (te_u32)q[r * a.ld + k] << (8 * (k & 3));
        }
    }
    // The scales are padded to a multiple of 128 rows (columns if columnwise), so each row and column of the thread has
    // a scale in memory. Scales of neighbouring rows (columns) are `step` bytes apart.
    te_i64 lines_m = te_div_up(a.m, 128) * 128, lines_n = te_div_up(a.n, 128) * 128, first, step = 16;
    if (a.columnwise) first = te_mx_scale_at(p.col, p.row / 32, lines_n, lines_m / 32, true, a.swizzled);
    else first = te_mx_scale_at(p.row, p.col / 32, lines_m, lines_n / 32, false, a.swizzled);
    if (!a.swizzled) step = a.columnwise ? 1 : lines_n / 32;
    te_u32 e[8] = {};
    if (step == 1 && ((te_u64)a.scale & 7) == 0) { // plain scales of eight neighbouring columns
        uint2 u = *(const uint2 *)(a.scale + first);
#pragma unroll
        for (int i = 0; i < 8; i++) e[i] = (i < 4 ? u.x : u.y) >> (8 * (i & 3));
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < 4 || a.columnwise) e[i] = a.scale[first + i * step];
    }
    float factor[8]; // columnwise: for the thread's eight columns; otherwise factor[0 .. 3] are for its four rows
#pragma unroll
    for (int i = 0; i < 8; i++) factor[i] = te__e8m0_to_f32((te_u8)e[i]);

    te_i64 at = p.row * a.n + p.col;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float v[8];
#pragma unroll
        for (int h = 0; h < 4; h++)
            te_fp8x2_to_f32((h < 2 ? code[r].x : code[r].y) >> (16 * (h & 1)), Q_DT, v + 2 * h, v + 2 * h + 1);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], a.columnwise ? factor[k] : factor[r]);
        if (whole) {
            te_store8(a.y, at + r * a.n, Y_DT, v);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (r < rows && k < cols) te_store(a.y, at + r * a.n + k, Y_DT, v[k]);
        }
    }
}
