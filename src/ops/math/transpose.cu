// ops/math/transpose.cu: writes the transposes of matrices. dst [.., n, ldd] becomes the transposes of the first n
// columns of src [.., m, lds]. Columns m .. filled-1 of dst become 0.
//
//            64 columns (tx: 8 each)
//          +-------------------------+
//          | ty: 4 / size rows       |  128 / size rows   ->  transpose.cuh  ->  dst, 16 bytes a store
//          +-------------------------+
//
// `size` is the number of bytes of an element. A block has two tiles. They are adjacent along the row if size is 1, and
// along the column otherwise. Both tiles are loaded before the first is transposed.
//
// Benchmark: "transpose e4m3", "copy transposed" in tests/bench/h200.csv.
//
// Launch: block 256; the grid has one block for each pair of tiles. Pairs are consecutive along a row of tiles, and
// matrices follow one another. Any m and n are allowed. Addresses need only the alignment of an element.
//
// te:baseline
// te:row SIZE=1
// te:row SIZE=2
// te:row SIZE=4
#include "device/transpose.cuh"
#include "ops/math/kargs.h"
#ifndef SIZE
#define SIZE a.size
#endif

// Loads eight elements of `size` bytes into 2 * size words.
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
// Loads n elements, at most eight, from an address of any alignment. The rest of the eight elements become 0.
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

// Loads the elements of one thread for the tile of src that starts at row first_row and column first_col.
TE_DEV void te_transpose_ask(const te__transpose_kargs &a, const void *src, te_i64 first_row, te_i64 first_col,
                             te_u32 w[4][8]) {
    const int rows = 4 / SIZE; // rows in a word
    te_i64 row = first_row + (threadIdx.x >> 3) * rows, col = first_col + (threadIdx.x & 7) * 8, there = a.n - col;
    if (a.vector_src && there >= 8 && row + rows <= a.m) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < rows) te_transpose_load8(src, (row + r) * a.lds + col, SIZE, w[r]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < rows) te_transpose_load(src, (row + r) * a.lds + col, SIZE, row + r < a.m ? there : 0, w[r]);
    }
}
TE_DEV void te_transpose_put(te_u32 *tile, int size, const te_u32 w[4][8]) {
    int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
    if (size == 1) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            te_u32 in[4] = {w[0][h], w[1][h], w[2][h], w[3][h]}, out[4];
            te_transpose_bytes(in, out);
#pragma unroll
            for (int j = 0; j < 4; j++) te_tile_put(tile, tx, ty, 4 * h + j, out[j]);
        }
    } else if (size == 2) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            te_tile_put(tile, tx, ty, j, __byte_perm(w[0][j >> 1], w[1][j >> 1], j & 1 ? 0x7632 : 0x5410));
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) te_tile_put(tile, tx, ty, j, w[0][j]);
    }
}

extern "C" __global__ void __launch_bounds__(256) te_transpose(const __grid_constant__ te__transpose_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[2][TE_TILE_COLUMNS * TE_TILE_WORDS];
    te_u32 at = blockIdx.x;
    te_i64 from = 0, to = 0;
    if (a.dims) {
        te_u32 matrix = at / a.tiles;
        at -= matrix * a.tiles;
#pragma unroll 1
        for (int d = a.dims - 1; d >= 0; d--) {
            te_u32 rest = matrix / a.shape[d], i = matrix - rest * a.shape[d];
            from += i * a.src_stride[d], to += i * a.dst_stride[d];
            matrix = rest;
        }
    }
    const void *src = (const te_u8 *)a.src + from * SIZE;
    void *dst = (te_u8 *)a.dst + to * SIZE;
    const int down = SIZE == 1 ? 0 : 128 / SIZE, across = SIZE == 1 ? TE_TILE_COLUMNS : 0; // from one tile to the next
    te_u32 tile_m = at / a.tiles_n, tile_n = at - tile_m * a.tiles_n;
    te_i64 row = (te_i64)tile_m * (128 / SIZE + down), col = (te_i64)tile_n * (TE_TILE_COLUMNS + across);
    te_u32 w[2][4][8];
#pragma unroll
    for (int i = 0; i < 2; i++) te_transpose_ask(a, src, row + i * down, col + i * across, w[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) te_transpose_put(tile[i], SIZE, w[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
        te_tile_store_part(tile[i], dst, a.ldd, a.filled, row + i * down, col + i * across, a.n, SIZE, a.vector_dst);
}
