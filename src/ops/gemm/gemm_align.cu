// ops/gemm/gemm_align.cu: operands whose rows have any alignment, copied to rows at multiples of 16 bytes, for TMA. Moves bytes; knows no format.
//
//   from  ... | x x x x | x x x x | x x . .      A thread writes 16 bytes: two aligned words of 16 that hold them, shifted. The word
//   to        [ x x x x   x x x x   x x 0 0 ]    that its neighbour reads as well is in the L1 cache.
//
// Bytes beyond a row's last are 0. Words that reach beyond the first or last byte of the operand are read byte by byte.
//
// Benchmark: "odd ..." in tests/bench/h200.csv, and tests/bench/notes.md.
//
// Launch: grid (blocks, 1, 1), A's before B's; block 256.
// te:baseline
#include "device/base.cuh"
#include "ops/gemm/kargs.h"
#include "ops/gemm/shift.cuh"

extern "C" __global__ void __launch_bounds__(256) te_gemm_align(const __grid_constant__ te__gemm_align_kargs a) {
    te_follow();
    const te__gemm_align_side &s = a.side[blockIdx.x >= a.side[0].blocks];
    te_u32 per_row = (te_u32)(s.ld_out / 16), all = (te_u32)s.rows * per_row; // 32 bits: the plan has seen to it
    const te_u8 *end = s.from + (s.rows - 1) * s.ld + s.bytes;
#pragma unroll 2
    for (te_u32 at = (&s == a.side ? blockIdx.x : blockIdx.x - a.side[0].blocks) * 256 + threadIdx.x; at < all; at += s.blocks * 256) {
        te_u32 r = at / per_row;
        te_i64 row = r, col = (te_i64)(at - r * per_row) * 16;
        const te_u8 *from = s.from + row * s.ld + col;
        int by = (int)((te_u64)from & 15), n = s.bytes - col < 16 ? (int)(s.bytes - col) : 16;
        const te_u8 *word = from - by;
        uint4 u;
        if (n == 16 && word >= s.from && word + (by ? 32 : 16) <= end) {
            uint4 lo = *(const uint4 *)word;
            u = by ? te_shift(lo, *(const uint4 *)(word + 16), by) : lo;
        } else {
            te_u32 w[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (i < n) w[i / 4] |= (te_u32)from[i] << (8 * (i % 4));
            u = make_uint4(w[0], w[1], w[2], w[3]);
        }
        *(uint4 *)(s.out + row * s.ld_out + col) = u;
    }
}
