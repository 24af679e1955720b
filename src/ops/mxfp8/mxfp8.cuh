// ops/mxfp8/mxfp8.cuh: who has what in a block's tile of 128 x 128: both casts divide it alike. Knows lanes; must not know formats.
//
//      128 columns                     a warp's 32 x 32                      lane l has
//   +----+----+----+----+             8 columns each, 4 lanes side by side     columns 8 (l % 4) .. + 7
//   | w0 | w1 | w2 | w3 |           +-----+-----+-----+-----+                  of rows 4 (l / 4) .. + 3,
//   +----+----+----+----+  128      |  0  |  1  |  2  |  3  |  4 rows          the scale of row l,
//   | w4 | w5 | w6 | w7 |  rows     +-----+-----+-----+-----+                  the scale of column 8 (l % 4) + l / 4
//   +----+----+----+----+           |  4  |  5  |  6  |  7  |
//   :    :    :    :    :           :     :     :     :     :
//
// A warp has whole groups along both directions: no maximum leaves it, and every 8-byte access of codes fills whole sectors.
#pragma once
#include "device/base.cuh"

#define TE_MX_ALL 0xffffffffu

struct te_mx_place {
    te_u32 tile_m, tile_n;    // of the block
    int lane, warp_m, warp_n; // of the thread
    int row, col;             // its first element, within the tile
    int scale_row, scale_col; // the row and the column whose scales are its own
};

// Grid: tiles along n; tiles along m in y and, since there may be more than y can count, in z. What is the same for the whole block so
// stays in uniform registers; a division would take it out of them.
TE_DEV te_mx_place te_mx_place_of_thread() {
    te_mx_place p;
    p.tile_m = blockIdx.z * gridDim.y + blockIdx.y, p.tile_n = blockIdx.x;
    p.lane = threadIdx.x & 31, p.warp_m = threadIdx.x >> 7, p.warp_n = threadIdx.x >> 5 & 3;
    p.row = p.warp_m * 32 + (p.lane >> 2) * 4, p.scale_row = p.warp_m * 32 + p.lane;
    p.col = p.warp_n * 32 + (p.lane & 3) * 8, p.scale_col = p.col + (p.lane >> 2);
    return p;
}
// Of `size` rows or columns, those from the tile's first on: 0 to 128.
TE_DEV int te_mx_left(te_i64 size, te_u32 tile) {
    te_i64 left = size - (te_i64)tile * 128;
    return left > 128 ? 128 : left < 0 ? 0 : (int)left;
}
// The thread's first element in an array of rows of ld elements.
TE_DEV te_i64 te_mx_offset(const te_mx_place &p, te_i64 ld) { return ((te_i64)p.tile_m * 128 + p.row) * ld + (te_i64)p.tile_n * 128 + p.col; }

// The maximum over the tile's row `lane`, from each lane's maxima of its own four rows. Every step hands over the half that the other
// lane will finish: three exchanges in place of eight.
TE_DEV float te_mx_row_max(const float v[4], int lane) {
    bool up = lane & 2;
    float a = fmaxf(up ? v[2] : v[0], __shfl_xor_sync(TE_MX_ALL, up ? v[0] : v[2], 2));
    float b = fmaxf(up ? v[3] : v[1], __shfl_xor_sync(TE_MX_ALL, up ? v[1] : v[3], 2));
    up = lane & 1;
    return fmaxf(up ? b : a, __shfl_xor_sync(TE_MX_ALL, up ? a : b, 1));
}
// The same over column 8 (lane % 4) + lane / 4, from the maxima of each lane's eight columns: seven exchanges.
TE_DEV float te_mx_col_max(const float v[8], int lane) {
    float a[4], b[2];
    bool up = lane & 16;
#pragma unroll
    for (int k = 0; k < 4; k++) a[k] = fmaxf(up ? v[k + 4] : v[k], __shfl_xor_sync(TE_MX_ALL, up ? v[k] : v[k + 4], 16));
    up = lane & 8;
#pragma unroll
    for (int k = 0; k < 2; k++) b[k] = fmaxf(up ? a[k + 2] : a[k], __shfl_xor_sync(TE_MX_ALL, up ? a[k] : a[k + 2], 8));
    up = lane & 4;
    return fmaxf(up ? b[1] : b[0], __shfl_xor_sync(TE_MX_ALL, up ? b[0] : b[1], 4));
}
// Back again: what belongs to the thread's own rows and columns, from the lanes that have it.
TE_DEV void te_mx_spread_rows(float f, int lane, float out[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) out[r] = __shfl_sync(TE_MX_ALL, f, (lane & 28) | r);
}
TE_DEV void te_mx_spread_cols(float f, int lane, float out[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = __shfl_sync(TE_MX_ALL, f, (lane & 3) | k << 2);
}
