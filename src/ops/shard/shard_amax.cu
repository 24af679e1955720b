// ops/shard/shard_amax.cu: finds the amax of each tile of a matrix, over the elements that lie in the slice. The amax
// is 0 if the slice has no element of the tile. NaN is ignored; infinity is not.
//
//            256 columns (tx: 8 each)
//          +--------------------------+
//    32    | ty: 4 rows               |    four times, one below the other,
//   rows   |                          |    for tiles of 128 x 128
//          +--------------------------+
//
// A thread block covers whole tiles. A tile of 1 x 32 is shared by 4 lanes of one warp, a tile of 32 x 1 by one lane in
// each of 8 warps, a tile of 16 x 16 by 2 lanes in each of 4 warps, and a tile of 128 x 128 by 16 lanes in each of 8
// warps. With tiles of another size a thread block covers one tile at a time.
//
// Launch: block 256. The grid has one thread block for each region as above. Blocks are numbered row by row.
// For tiles of another size the grid may have any number of thread blocks. Any alignment is allowed.
//
// te:baseline
// te:row X_DT=3 KIND=1
// te:row X_DT=3 KIND=2
// te:row X_DT=3 KIND=3
// te:row X_DT=3 KIND=4
// te:row X_DT=2 KIND=1
// te:row X_DT=2 KIND=2
// te:row X_DT=2 KIND=3
// te:row X_DT=2 KIND=4
// te:row X_DT=1 KIND=1
// te:row X_DT=1 KIND=2
// te:row X_DT=1 KIND=3
// te:row X_DT=1 KIND=4
#include "ops/shard/kargs.h"
#include "ops/shard/shard.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define KIND a.kind
#endif

TE_DEV void te_tile_each(const te__shard_amax_kargs &a, float *scratch) {
    for (te_i64 tile = blockIdx.x; tile < a.tiles_m * a.tiles_n; tile += gridDim.x) {
        te_i64 row = tile / a.tiles_n * a.tile_rows, column = tile % a.tiles_n * a.tile_columns;
        te_i64 height = a.rows - row < a.tile_rows ? a.rows - row : a.tile_rows;
        te_i64 width = a.columns - column < a.tile_columns ? a.columns - column : a.tile_columns;
        float largest = 0.0f;
        for (te_i64 e = threadIdx.x; e < height * width; e += 256) {
            te_i64 i = (row + e / width) * a.columns + column + e % width - a.start;
            if (i >= 0 && i < a.n) largest = fmaxf(largest, fabsf(te_load(a.x, i, X_DT)));
        }
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0) a.amax[tile] = largest;
    }
}

// Returns the largest v in each group of `lanes` neighbouring lanes. `lanes` is a power of two.
TE_DEV float te_lanes_max(float v, int lanes) {
    for (int d = 1; d < lanes; d *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

extern "C" __global__ void __launch_bounds__(256) te_shard_amax(const __grid_constant__ te__shard_amax_kargs a) {
    te_follow();
    __shared__ __align__(16) float part[8][256];
    if (KIND == TE__SHARD_ANY) {
        te_tile_each(a, &part[0][0]);
        return;
    }
    int t = threadIdx.x, tx = t & 31, ty = t >> 5;
    te_u32 block_m = blockIdx.x / a.blocks_n, block_n = blockIdx.x - block_m * a.blocks_n;
    te_i64 first_column = (te_i64)block_n * 256, column = first_column + tx * 8;
    te_i64 first_row = (te_i64)block_m * (KIND == TE__SHARD_128X128 ? 128 : 32);
    float largest = 0.0f, v[4][8];
    for (int s = 0; s < (KIND == TE__SHARD_128X128 ? 4 : 1); s++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            te_i64 row = first_row + s * 32 + ty * 4 + r;
            te_shard_load8(a.x, row * a.columns + column - a.start, row < a.rows ? a.n : 0, a.columns - column,
                           a.vector, X_DT, v[r]);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float m = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) v[r][k] = fmaxf(0.0f, fabsf(v[r][k])), m = fmaxf(m, v[r][k]); // a NaN becomes 0
            if (KIND == TE__SHARD_1X32) {
                te_i64 row = first_row + ty * 4 + r, group = block_n * 8LL + (tx >> 2);
                m = te_lanes_max(m, 4);
                if ((tx & 3) == 0 && row < a.rows && group < a.tiles_n) a.amax[row * a.tiles_n + group] = m;
            }
            largest = fmaxf(largest, m);
        }
    }
    if (KIND == TE__SHARD_1X32) return;
    if (KIND == TE__SHARD_32X1) {
        float4 m[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            m[h] = make_float4(fmaxf(fmaxf(v[0][4 * h], v[1][4 * h]), fmaxf(v[2][4 * h], v[3][4 * h])),
                               fmaxf(fmaxf(v[0][4 * h + 1], v[1][4 * h + 1]), fmaxf(v[2][4 * h + 1], v[3][4 * h + 1])),
                               fmaxf(fmaxf(v[0][4 * h + 2], v[1][4 * h + 2]), fmaxf(v[2][4 * h + 2], v[3][4 * h + 2])),
                               fmaxf(fmaxf(v[0][4 * h + 3], v[1][4 * h + 3]), fmaxf(v[2][4 * h + 3], v[3][4 * h + 3])));
        *(float4 *)&part[ty][tx * 8] = m[0];
        *(float4 *)&part[ty][tx * 8 + 4] = m[1];
        __syncthreads();
        float all = part[0][t];
#pragma unroll
        for (int w = 1; w < 8; w++) all = fmaxf(all, part[w][t]);
        if (first_column + t < a.columns) a.amax[block_m * a.columns + first_column + t] = all;
        return;
    }
    // A block has 2 x 16 tiles of 16 x 16, or 1 x 2 tiles of 128 x 128.
    int lanes = KIND == TE__SHARD_16X16 ? 2 : 16, across = 32 / lanes, warps = KIND == TE__SHARD_16X16 ? 4 : 8;
    part[ty][tx] = te_lanes_max(largest, lanes);
    __syncthreads();
    if (t >= across * (8 / warps)) return;
    te_i64 tile_m = (te_i64)block_m * (8 / warps) + t / across, tile_n = (te_i64)block_n * across + t % across;
    float all = 0.0f;
    for (int w = 0; w < warps; w++) all = fmaxf(all, part[t / across * warps + w][t % across * lanes]);
    if (tile_m < a.tiles_m && tile_n < a.tiles_n) a.amax[tile_m * a.tiles_n + tile_n] = all;
}
