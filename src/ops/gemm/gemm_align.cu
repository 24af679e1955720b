// ops/gemm/gemm_align.cu: operands whose rows have any alignment, copied to rows at multiples of 16 bytes, for TMA. Moves bytes; knows no format.
//
//   from  ... | x x x x | x x x x | x x . .      A thread writes 16 bytes: two aligned words of 16 that hold them, shifted. The word
//   to        [ x x x x   x x x x   x x 0 0 ]    that its neighbour reads as well is in the L1 cache.
//
// Bytes beyond a row's last are 0.
//
// Benchmark: "odd ..." in tests/bench/h200.csv, and tests/bench/notes.md.
//
// Launch: grid (blocks, 2, 1), any number of blocks, block y does side y; block 256.
// te:baseline
#include "device/base.cuh"
#include "ops/gemm/kargs.h"
#include "ops/gemm/shift.cuh"

extern "C" __global__ void __launch_bounds__(256) te_gemm_align(const __grid_constant__ te__gemm_align_kargs a) {
    te_follow();
    const te__gemm_align_side &s = a.side[blockIdx.y];
    te_u32 per_row = (te_u32)(s.ld_out / 16), all = (te_u32)s.rows * per_row; // 32 bits: the plan has seen to it
    const te_u8 *end = s.from + (s.rows - 1) * s.ld + s.bytes;
#pragma unroll 2
    for (te_u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256) {
        te_u32 r = at / per_row;
        te_i64 row = r, col = (te_i64)(at - r * per_row) * 16;
        int n = s.bytes - col < 16 ? (int)(s.bytes - col) : 16;
        *(uint4 *)(s.out + row * s.ld_out + col) = te_load_part(s.from + row * s.ld + col, 8 * n, end);
    }
}
