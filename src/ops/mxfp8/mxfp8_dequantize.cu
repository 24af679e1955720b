// ops/mxfp8/mxfp8_dequantize.cu: y [m, n] = f32(q) * 2^(e - 127), rounded once to y's format; q [m, ld], either copy, either layout of scales.
//
// mxfp8.cuh has the picture. A lane reads one scale, and the warp hands them out.
//
// Launch: block 512, grid: tiles of 128 x 128, along n in x, along m in y and z. Any size, any alignment of at least an element.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=2
// te:row Q_DT=4 Y_DT=1
#include "ops/mxfp8/kargs.h"
#include "ops/mxfp8/mxfp8.cuh"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#define BLOCKS 2 /* a multiprocessor should hold: room for registers */
#else
#define BLOCKS 3
#endif

// Where the scale of a line's group stands; te__mx_scale_at of op.c says the same to the host.
TE_DEV te_i64 te_mx_scale_at(te_i64 line, te_i64 group, te_i64 lines, te_i64 groups, bool columnwise, bool swizzled) {
    if (swizzled) return (line / 128 * (groups / 4) + group / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + group % 4;
    return columnwise ? group * lines + line : line * groups + group;
}

extern "C" __global__ void __launch_bounds__(512, BLOCKS) te_mxfp8_dequantize(const __grid_constant__ te__mxfp8_dequantize_kargs a) {
    te_mx_place p = te_mx_place_of_thread();
    int rows = te_mx_left(a.m, p.tile_m), cols = te_mx_left(a.n, p.tile_n);
    if (rows == 0) return;
    const te_u8 *q = (const te_u8 *)a.q + te_mx_offset(p, a.ld);
    bool whole = a.vector && p.row + 4 <= rows && p.col + 8 <= cols;
    uint2 code[4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (whole) {
            code[r] = *(const uint2 *)(q + r * a.ld);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (p.row + r < rows && p.col + k < cols) (k < 4 ? code[r].x : code[r].y) |= (te_u32)q[r * a.ld + k] << (8 * (k & 3));
        }
    }
    // The padding of the scales covers the block's tile, whatever x covers of it.
    te_i64 tiles_m = te_div_up(a.m, 128), tiles_n = te_div_up(a.n, 128);
    float factor[8]; // of the thread's columns, or in the first four of its rows
    if (a.columnwise) {
        te_i64 at = te_mx_scale_at((te_i64)p.tile_n * 128 + p.scale_col, (te_i64)p.tile_m * 4 + p.warp_m, tiles_n * 128, tiles_m * 4, true, a.swizzled);
        te_mx_spread_cols(te__e8m0_to_f32(a.scale[at]), p.lane, factor);
    } else {
        te_i64 at = te_mx_scale_at((te_i64)p.tile_m * 128 + p.scale_row, (te_i64)p.tile_n * 4 + p.warp_n, tiles_m * 128, tiles_n * 4, false, a.swizzled);
        te_mx_spread_rows(te__e8m0_to_f32(a.scale[at]), p.lane, factor);
    }

    te_i64 at = te_mx_offset(p, a.n);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float v[8];
#pragma unroll
        for (int h = 0; h < 4; h++) te_fp8x2_to_f32((h < 2 ? code[r].x : code[r].y) >> (16 * (h & 1)), Q_DT, v + 2 * h, v + 2 * h + 1);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], a.columnwise ? factor[k] : factor[r]);
        if (whole) {
            te_store8(a.y, at + r * a.n, Y_DT, v);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (p.row + r < rows && p.col + k < cols) te_store(a.y, at + r * a.n + k, Y_DT, v[k]);
        }
    }
}
