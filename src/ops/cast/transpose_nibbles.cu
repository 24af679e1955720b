// ops/cast/transpose_nibbles.cu: transposes 4-bit elements. The even element is in a byte's low half. lds and ldd count
// bytes: src is [m, 2 lds] and dst is [n, 2 ldd]. Columns of dst from m on become 0.
//
//            64 columns (tx: 8 each, 4 bytes)
//          +----------------------------------+
//          | ty: 8 rows                       |  ->  registers: two rows of a column become one byte
//          +----------------------------------+  ->  te_transpose_bytes: eight rows of a column become one word
//            256 rows                            ->  dst, 16 bytes a store
//
// A block has two tiles, adjacent along the row. Both are loaded before the first is transposed.
//
// Benchmark: "transpose e2m1" in tests/bench/h200.csv.
//
// Launch: block 256; grid: one block for each pair of tiles, in row-major order. Any size and alignment are allowed.
//
// te:baseline
#include "ops/cast/kargs.h"
#include "device/transpose.cuh"

// Loads eight columns of each of a thread's eight rows.
TE_DEV void te_nibbles_ask(const te__transpose_nibbles_kargs &a, te_i64 row, te_i64 byte, te_u32 w[8]) {
    const te_u8 *src = (const te_u8 *)a.src + row * a.lds + byte;
    if (a.vector_src && byte + 4 <= a.lds && row + 8 <= a.m) {
#pragma unroll
        for (int r = 0; r < 8; r++) w[r] = *(const te_u32 *)(src + r * a.lds);
    } else {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            w[r] = 0;
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (row + r < a.m && byte + b < a.lds) w[r] |= (te_u32)src[r * a.lds + b] << (8 * b);
        }
    }
}
TE_DEV void te_nibbles_put(te_u32 *tile, const te_u32 w[8]) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        te_u32 in[4], out[4]; // in: byte k is column 2k + odd of two rows
#pragma unroll
        for (int i = 0; i < 4; i++) {
            te_u32 even_row = w[2 * i], odd_row = w[2 * i + 1];
            in[i] = odd ? (even_row >> 4 & 0x0f0f0f0fu) | (odd_row & 0xf0f0f0f0u)
                        : (even_row & 0x0f0f0f0fu) | (odd_row << 4 & 0xf0f0f0f0u);
        }
        te_transpose_bytes(in, out);
#pragma unroll
        for (int k = 0; k < 4; k++) te_tile_put(tile, threadIdx.x & 7, threadIdx.x >> 3, 2 * k + odd, out[k]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    te_transpose_nibbles(const __grid_constant__ te__transpose_nibbles_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[2][TE_TILE_COLUMNS * TE_TILE_WORDS];
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_col = (te_i64)tile_n * 128, row = (te_i64)tile_m * 256 + (threadIdx.x >> 3) * 8;
    te_u32 w[2][8];
#pragma unroll
    for (int i = 0; i < 2; i++) te_nibbles_ask(a, row, first_col / 2 + 32 * i + (threadIdx.x & 7) * 4, w[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) te_nibbles_put(tile[i], w[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
        te_tile_store(tile[i], a.dst, a.ldd, (te_i64)tile_m * 128, first_col + 64 * i, a.n, 1, a.vector_dst);
}
