// ops/cast/transpose.cu: dst [n, ldd] = the transpose of the first n columns of src [m, lds]; columns m .. ldd-1 of dst are 0.
//
//            64 columns (tx: 8 each)
//          +-------------------------+
//          | ty: 4 / size rows       |  ->  tile.cuh  ->  dst, 16 bytes a store
//          +-------------------------+  128 / size rows
//
// One H200, 2026-11-21, te_bench "transpose e4m3": 16384x4096 0.78 of copy.
//
// Launch: block 256, grid: tiles, those of a row of tiles next to each other. Any size, any alignment of at least an element.
//
// te:baseline
// te:row SIZE=1
// te:row SIZE=2
// te:row SIZE=4
#include "ops/cast/kargs.h"
#include "device/tile.cuh"
#ifndef SIZE
#define SIZE a.size
#endif

// Eight elements of `size` bytes: 2 * size words.
TE_DEV void te_transpose_load8(const void *p, te_i64 i, int size, te_u32 w[8]) {
    if (size == 1) {
        uint2 u = *(const uint2 *)((const te_u8 *)p + i);
        w[0] = u.x, w[1] = u.y;
    } else {
        const uint4 *q = (const uint4 *)((const te_u8 *)p + i * size);
        uint4 u = q[0];
        w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
        if (size == 4) {
            u = q[1];
            w[4] = u.x, w[5] = u.y, w[6] = u.z, w[7] = u.w;
        }
    }
}
// The same of any alignment; only n of them exist, the others are 0.
TE_DEV void te_transpose_load(const void *p, te_i64 i, int size, te_i64 n, te_u32 w[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) w[k] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= n) break;
        if (size == 1) w[k >> 2] |= (te_u32)((const te_u8 *)p)[i + k] << (8 * (k & 3));
        if (size == 2) w[k >> 1] |= (te_u32)((const te_u16 *)p)[i + k] << (16 * (k & 1));
        if (size == 4) w[k] = ((const te_u32 *)p)[i + k];
    }
}

extern "C" __global__ void __launch_bounds__(256) te_transpose(const __grid_constant__ te__transpose_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3, rows = 4 / SIZE; // rows of a word
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * (128 / SIZE), first_col = (te_i64)tile_n * TE_TILE_COLUMNS;
    te_i64 row = first_row + ty * rows, col = first_col + tx * 8, there = a.n - col;
    te_u32 w[4][8];
    if (a.vector_src && there >= 8 && row + rows <= a.m) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < rows) te_transpose_load8(a.src, (row + r) * a.lds + col, SIZE, w[r]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < rows) te_transpose_load(a.src, (row + r) * a.lds + col, SIZE, row + r < a.m ? there : 0, w[r]);
    }
    if (SIZE == 1) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            te_u32 in[4] = {w[0][h], w[1][h], w[2][h], w[3][h]}, out[4];
            te_transpose_bytes(in, out);
#pragma unroll
            for (int j = 0; j < 4; j++) te_tile_put(tile, tx, ty, 4 * h + j, out[j]);
        }
    } else if (SIZE == 2) {
#pragma unroll
        for (int j = 0; j < 8; j++) te_tile_put(tile, tx, ty, j, __byte_perm(w[0][j >> 1], w[1][j >> 1], j & 1 ? 0x7632 : 0x5410));
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) te_tile_put(tile, tx, ty, j, w[0][j]);
    }
    __syncthreads();
    te_tile_store(tile, a.dst, a.ldd, first_row, first_col, a.n, SIZE, a.vector_dst);
}
