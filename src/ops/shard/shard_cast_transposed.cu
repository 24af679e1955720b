// ops/shard/shard_cast_transposed.cu: writes the codes of a slice of a matrix into the transposed copy [columns, ld] of
// the matrix. There is one scale per tensor.
//
//            64 columns (tx: 8 each)                    transposed, through shared memory (transpose.cuh)
//          +-------------------------+                  +---------------- 128 rows ----------------+
//   128    | ty: 4 rows              |   ->  dst        |    elements of one column that lie in    |  64 columns
//   rows   |    x eight columns      |                  |    the slice are neighbours              |
//          +-------------------------+                  +------------------------------------------+
//
// Bytes outside the slice are not written.
//
// Launch: block 256; the grid has one block for each tile of 128 x 64 elements, beginning at matrix row 128 *
// first_tile. Any alignment is allowed.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "ops/shard/kargs.h"
#include "ops/shard/shard.cuh"
#include "device/transpose.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#endif

extern "C" __global__ void __launch_bounds__(256)
    te_shard_cast_transposed(const __grid_constant__ te__shard_cast_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    __shared__ float scratch[32];
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (a.first_tile + tile_m) * 128, first_column = (te_i64)tile_n * TE_TILE_COLUMNS;
    te_i64 row = first_row + ty * 4, column = first_column + tx * 8;
    float v[4][8], largest = 0.0f, scale = *(const float *)a.scale;
#pragma unroll
    for (int r = 0; r < 4; r++)
        te_shard_load8(a.x, (row + r) * a.columns + column - a.start, row + r < a.rows ? a.n : 0, a.columns - column,
                       a.vector, X_DT, v[r]);
    te_u32 code[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[r][k])), v[r][k] = __fmul_rn(v[r][k], scale);
#pragma unroll
        for (int h = 0; h < 2; h++)
            code[r][h] = te_f32x2_to_fp8(v[r][4 * h], v[r][4 * h + 1], a.q_dt) |
                         (te_u32)te_f32x2_to_fp8(v[r][4 * h + 2], v[r][4 * h + 3], a.q_dt) << 16;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        te_u32 in[4] = {code[0][h], code[1][h], code[2][h], code[3][h]}, out[4];
        te_transpose_bytes(in, out);
#pragma unroll
        for (int j = 0; j < 4; j++) te_tile_put(tile, tx, ty, 4 * h + j, out[j]);
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int c = pass * 32 + (threadIdx.x >> 3), chunk = threadIdx.x & 7;
        te_i64 at = first_column + c, r = first_row + chunk * 16;
        if (at >= a.columns || r >= a.rows) continue;
        uint4 u = te_tile_get(tile, c, chunk);
        te_u8 *to = (te_u8 *)a.dst + at * a.ld + r;
        // 16 elements of one column are written. The first of them is x[i]. The others follow in x in steps of
        // `columns`.
        te_i64 i = r * a.columns + at - a.start;
        if (((te_u64)to & 15) == 0 && r + 16 <= a.rows && i >= 0 && i + 15 * a.columns < a.n) {
            *(uint4 *)to = u;
        } else {
            te_u32 w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int b = 0; b < 16; b++)
                if (r + b < a.rows && i + b * a.columns >= 0 && i + b * a.columns < a.n)
                    to[b] = (te_u8)(w[b >> 2] >> (8 * (b & 3)));
        }
    }
    if (a.amax) {
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
    }
}
