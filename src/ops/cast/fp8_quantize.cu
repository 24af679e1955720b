// ops/cast/fp8_quantize.cu: q = saturate(round_to_nearest_even(f32(x) * scale)), row-wise, transposed, or both, from one read of x.
//
//            64 columns (tx: 8 each)                    transposed, through shared memory (tile.cuh)
//          +-------------------------+                  +---------------- 128 rows ----------------+
//   128    | ty: 4 rows              |   ->  row        |                                          |  64 columns  ->  col
//   rows   |    x eight columns      |                  |                                          |
//          +-------------------------+                  +------------------------------------------+
//
// Beyond the edges of x the tile holds zeros, and tiles cover `ld` columns and `ldc` rows: that is how the padding is written.
// amax = max |x| before scaling (NaN drops out of fmaxf), one atomic a block; scale_inv = 1 / scale, correctly rounded.
//
// current: amax.cu has left a maximum of each of its blocks; every block here takes the largest and makes the scale of it. Tiles then go
// from the last to the first: the end of x is what that pass has left in the cache. Where all tiles run at once, a cooperative launch does
// without that pass: blocks leave their own tile's maximum, wait for each other, and go on with x in their registers.
//
// Launch: block 256, grid: tiles, those of a row of tiles next to each other; at least one. Any size, any alignment.
//
// te:baseline
// te:row X_DT=3 Y_DT=4 CURRENT=0
// te:row X_DT=3 Y_DT=5 CURRENT=0
// te:row X_DT=2 Y_DT=4 CURRENT=0
// te:row X_DT=1 Y_DT=4 CURRENT=0
// te:row X_DT=1 Y_DT=5 CURRENT=0
// te:row X_DT=3 Y_DT=4 CURRENT=1
// te:row X_DT=3 Y_DT=5 CURRENT=1
// te:row X_DT=1 Y_DT=4 CURRENT=1
// te:row X_DT=3 Y_DT=4 CURRENT=2
// te:row X_DT=3 Y_DT=5 CURRENT=2
#include "ops/cast/kargs.h"
#include "device/tile.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define CURRENT a.current
#endif

extern "C" __global__ void __launch_bounds__(256) te_fp8_quantize(const __grid_constant__ te__fp8_quantize_kargs a) {
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    __shared__ float scratch[32];
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
    te_u32 at = CURRENT ? gridDim.x - 1 - blockIdx.x : blockIdx.x, tile_m = at / a.tiles_n, tile_n = at - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * 128, first_col = (te_i64)tile_n * TE_TILE_COLUMNS;
    te_i64 row = first_row + ty * 4, col = first_col + tx * 8;

    // The loads come first, with nothing between them: they are all on their way before the first is waited for.
    float v[4][8], largest = 0.0f, part[4], scale;
    if (CURRENT == 1) {
#pragma unroll
        for (int r = 0; r < 4; r++) part[r] = threadIdx.x + r * 256 < a.partials ? a.partial[threadIdx.x + r * 256] : 0.0f;
    }
    bool inside = row + 4 <= a.m && col + 8 <= a.n;
    if (a.vector_x && inside) {
#pragma unroll
        for (int r = 0; r < 4; r++) te_load8(a.x, (row + r) * a.n + col, X_DT, v[r]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int k = 0; k < 8; k++) v[r][k] = row + r < a.m && col + k < a.n ? te_load(a.x, (row + r) * a.n + col + k, X_DT) : 0.0f;
    }
    if (a.noop && *a.noop == 1.0f) return;
    if (CURRENT == 2) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[r][k]));
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0) a.partial[blockIdx.x] = largest;
        te_grid_wait(a.counter);
#pragma unroll
        for (int r = 0; r < 4; r++) part[r] = threadIdx.x + r * 256 < a.partials ? __ldcg(a.partial + threadIdx.x + r * 256) : 0.0f;
    }
    if (CURRENT) {
        float amax = te_block_max(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])), scratch);
        scale = te__block_scale(amax, a.fp8_max, a.epsilon, TE_FLT_MAX, a.power_of_two);
        if (a.amax && blockIdx.x == 0 && threadIdx.x == 0) *a.amax = amax;
    } else {
        scale = *a.scale;
    }
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);

    te_u32 code[4][2]; // eight columns of a row
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[r][k])), v[r][k] = __fmul_rn(v[r][k], scale);
        if (!inside) { // what lies outside x is 0 also when the scale is not a number
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (row + r >= a.m || col + k >= a.n) v[r][k] = 0.0f;
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            code[r][h] = te_f32x2_to_fp8(v[r][4 * h], v[r][4 * h + 1], Y_DT) | (te_u32)te_f32x2_to_fp8(v[r][4 * h + 2], v[r][4 * h + 3], Y_DT) << 16;
    }
    if (a.row) {
        te_u8 *q = (te_u8 *)a.row;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (row + r >= a.m) break;
            if (a.vector_row && col + 8 <= a.ld) {
                *(uint2 *)(q + (row + r) * a.ld + col) = make_uint2(code[r][0], code[r][1]);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (col + k < a.ld) q[(row + r) * a.ld + col + k] = (te_u8)(code[r][k >> 2] >> (8 * (k & 3)));
            }
        }
    }
    if (a.col) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            te_u32 in[4] = {code[0][h], code[1][h], code[2][h], code[3][h]}, out[4];
            te_transpose_bytes(in, out);
#pragma unroll
            for (int j = 0; j < 4; j++) te_tile_put(tile, tx, ty, 4 * h + j, out[j]);
        }
        __syncthreads();
        te_tile_store(tile, a.col, a.ldc, first_row, first_col, a.n, 1, a.vector_col);
    }
    if (a.amax && !CURRENT) {
        largest = te_block_max(largest, scratch);
        // Most blocks find a larger one there already, and need no atomic.
        if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
    }
}
