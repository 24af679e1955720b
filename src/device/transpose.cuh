// device/transpose.cuh: transposes the bytes of a tile through shared memory, with writes of 4 bytes and reads of 16
// bytes. This file must not depend on the meaning of the bytes.
//
// A tile has 64 columns. In shared memory, a column is 32 words of 4 bytes. Each word holds elements of neighbouring
// rows. So a tile has 128 rows of 8-bit, 64 rows of 16-bit or 32 rows of 32-bit elements.
//
//   writing    Thread t has tx = t % 8 and ty = t / 8. It writes word ty of each of the columns 8 tx to 8 tx + 7.
//   reading    A thread reads 16 bytes: words 4 c to 4 c + 3 of one column, with c < 8. In the transpose they are 16
//              neighbouring bytes.
//
// Word w of column j is stored at index w ^ (4 * (j / 8 % 8)) of the column, to avoid bank conflicts. In a write, the
// 32 lanes (8 values of tx, 4 values of ty) use 32 banks. In a read, 8 lanes read the 128 bytes of one column.
#pragma once
#include "device/base.cuh"

#define TE_TILE_COLUMNS 64
#define TE_TILE_WORDS 32

// Transposes 4 x 4 bytes: out[j] holds byte j of every row.
TE_DEV void te_transpose_bytes(const te_u32 row[4], te_u32 out[4]) {
    // bytes 0 and 1, rows interleaved
    te_u32 a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
    te_u32 c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
    out[0] = __byte_perm(a, b, 0x5410), out[1] = __byte_perm(a, b, 0x7632);
    out[2] = __byte_perm(c, d, 0x5410), out[3] = __byte_perm(c, d, 0x7632);
}

// Writes one word of thread (tx, ty). The word belongs to column 8 tx + j of the tile; j is 0 to 7.
TE_DEV void te_tile_put(te_u32 *tile, int tx, int ty, int j, te_u32 word) {
    tile[(tx * 8 + j) * TE_TILE_WORDS + (ty ^ (tx * 4))] = word;
}
TE_DEV uint4 te_tile_get(const te_u32 *tile, int column, int chunk) {
    return *(const uint4 *)(tile + column * TE_TILE_WORDS + 4 * (chunk ^ (column >> 3)));
}

// Returns the words 2 * pair and 2 * pair + 1 of a column.
TE_DEV uint2 te_tile_get2(const te_u32 *tile, int column, int pair) {
    return *(const uint2 *)(tile + column * TE_TILE_WORDS + 4 * (pair >> 1 ^ column >> 3) + 2 * (pair & 1));
}

// Writes the finished tile to dst. Element (i, j) of the tile goes to index (first_col + j) * ld + first_row + i,
// unless first_row + i >= rows or first_col + j >= cols. An element has `size` bytes.
// `vector` means that dst allows stores of 16 bytes.
// 256 threads, numbered t, call this function. They must meet at a barrier before.
TE_DEV void te_tile_store_part(const te_u32 *tile, void *dst, te_i64 ld, te_i64 rows, te_i64 first_row,
                               te_i64 first_col, te_i64 cols, int size, bool vector, int t = threadIdx.x) {
    int per_chunk = 16 / size;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int column = pass * 32 + (t >> 3), chunk = t & 7;
        te_i64 row = first_row + chunk * per_chunk, left = rows - row;
        if (first_col + column >= cols || left <= 0) continue;
        uint4 u = te_tile_get(tile, column, chunk);
        te_u8 *to = (te_u8 *)dst + ((first_col + column) * ld + row) * size;
        te_u32 w[4] = {u.x, u.y, u.z, u.w};
        if (vector && left >= per_chunk) {
            *(uint4 *)to = u;
        } else if (size == 4) { // one by one: rows of dst may start anywhere
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k < left) ((te_u32 *)to)[k] = w[k];
        } else if (size == 2) {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (k < left) ((te_u16 *)to)[k] = (te_u16)(w[k >> 1] >> (16 * (k & 1)));
        } else {
#pragma unroll
            for (int k = 0; k < 16; k++)
                if (k < left) to[k] = (te_u8)(w[k >> 2] >> (8 * (k & 3)));
        }
    }
}
// Calls te_tile_store_part with `rows` = `ld`.
TE_DEV void te_tile_store(const te_u32 *tile, void *dst, te_i64 ld, te_i64 first_row, te_i64 first_col, te_i64 cols,
                          int size, bool vector, int t = threadIdx.x) {
    te_tile_store_part(tile, dst, ld, ld, first_row, first_col, cols, size, vector, t);
}

// ---- sums of a tile's columns ---------------------------------------------------------------------------------------

// Adds the 2n elements of `v` of one lane to those of another lane. The numbers of the two lanes differ only in the bit
// `lane_bit`. Each lane stores n of the sums in v[0] to v[n - 1]. The lane with the bit stores the upper n sums, the
// other lane the lower n.
template <int n> TE_DEV void te_tile_add_halves(float *v, int lane_bit) {
    bool upper = threadIdx.x & lane_bit;
#pragma unroll
    for (int i = 0; i < n; i++) {
        float other = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + n], lane_bit);
        v[i] = (upper ? v[i + n] : v[i]) + other;
    }
}
// Writes the column sums of the tile to `to`, for columns below `cols`. `v` has this thread's eight column sums. `sums`
// is 8 x 64 floats of shared memory.
TE_DEV void te_tile_column_sums(float v[8], float *sums, float *to, te_i64 cols) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_tile_add_halves<4>(v, 16);
    te_tile_add_halves<2>(v, 8);
    int column = (lane & 7) * 8 + (lane >> 4) * 4 + (lane >> 3 & 1) * 2;
    *(float2 *)(sums + warp * TE_TILE_COLUMNS + column) = make_float2(v[0], v[1]);
    __syncthreads();
    if (threadIdx.x < TE_TILE_COLUMNS && threadIdx.x < cols) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) sum += sums[w * TE_TILE_COLUMNS + threadIdx.x];
        to[threadIdx.x] = sum;
    }
    __syncthreads();
}
