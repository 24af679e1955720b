// ops/gemm/gemm_prepare.cu: copies operands that the GEMM kernels cannot read in place. There are two kinds of copies:
//
//   bytes   Rows of any alignment become rows at multiples of 16 bytes, for TMA.
//   codes   MXFP8 or NVFP4 codes times their scales become bf16. The product is exact (decode.cuh).
//
//   from  ... | x x x x | x x x x | x x . .
//   to        [ x x x x   x x x x   x x 0 0 ]
//
// A thread takes 16 neighbouring bytes or codes of a row at a time.
//
// The 16 codes of a thread share one scale, since a scaling group has 32 codes (MXFP8) or 16 codes (NVFP4) of a row. In
// MXFP8's column-wise copy each of the 16 codes has its own scale. The output is K-major or MN-major like the operand.
//
// Memory bandwidth is the limit: 2 bytes for each byte that is moved, 3 for each fp8 code, 2.5 for each fp4 code.
//
// Benchmark: "odd ...", "gemm mxfp8", "gemm nvfp4" in tests/bench/h200.csv, and tests/bench/notes.md.
//
// Options: DECODED (1: the operands are codes with scales; 0: bytes; left out: each operand is what its `side` says).
//
// Launch: block 256, grid (any number of blocks, 2). Blocks with y = i copy the operand side[i]. Rows of the output
// start at multiples of 16 elements.
// te:baseline
// te:row DECODED=0|1
#include "ops/gemm/decode.cuh"
#include "ops/gemm/kargs.h"
#include "ops/gemm/shift.cuh"

#ifndef DECODED
#define DECODED (s.scale != 0) /* general row: known at run time */
#define AT_ONCE 1
#else
#define AT_ONCE (DECODED ? 1 : 2)
#endif

// Loads sixteen codes of `bits` bits each. Only n of them exist; the rest become 0.
TE_DEV uint4 te_decode_load(const te_u8 *from, int bits, int n, const te_u8 *end) {
    if (n < 16 || ((te_u64)from & (2 * bits - 1)) != 0) return te_load_part(from, n * bits, end);
    if (bits == 8) return *(const uint4 *)from;
    uint2 u = *(const uint2 *)from;
    return make_uint4(u.x, u.y, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256) te_gemm_prepare(const __grid_constant__ te__gemm_prepare_kargs a) {
    te_follow();
    const te__gemm_prepare_side &s = a.side[blockIdx.y];
    const int bits = DECODED && s.dt == TE_F4E2M1 ? 4 : 8; // of a byte or code
    const te_u8 *end = s.from + (((s.rows - 1) * s.ld + s.columns) * bits + 7) / 8;
    te_u32 per_row = (te_u32)(s.ld_out / 16), all = (te_u32)s.rows * per_row; // 32 bits suffice: te__gemm_fits_prepare
#pragma unroll AT_ONCE
    for (te_u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256) {
        te_u32 row = at / per_row;
        te_i64 col = (te_i64)(at - row * per_row) * 16;
        int n = s.columns - col < 16 ? (int)(s.columns - col) : 16;
        const te_u8 *from = s.from + (row * s.ld + col) * bits / 8;
        if (!DECODED) {
            *(uint4 *)(s.out + row * s.ld_out + col) = te_load_part(from, 8 * n, end);
            continue;
        }
        // The scales are loaded before the codes. In the other order, a thread would wait for its codes where
        // these branches end.
        te_u32 scales[4], out[8];
        if (s.down) { // scales exist for columns up to a multiple of 128
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (i % 4 == 0) scales[i / 4] = 0;
                scales[i / 4] |= (te_u32)s.scale[te__group_scale_at(a.swizzled, 1, s.ld_scale, col + i, row >> 5)]
                                 << (8 * (i % 4));
            }
        } else {
            te_u32 e = s.scale[te__group_scale_at(a.swizzled, 0, s.ld_scale, row, bits == 4 ? col >> 4 : col >> 5)];
            scales[0] = scales[1] = scales[2] = scales[3] = e * 0x01010101u;
        }
        uint4 u = te_decode_load(from, bits, n, end);
        te_u32 w[4] = {u.x, u.y, u.z, u.w};
        if (bits == 4) {
            te_u32 scale = te_decode_fp4_scale((te_u8)scales[0]);
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = te_decode_fp4x2(w[i / 4], i % 4, scale);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                out[i] = te_decode_fp8x2(w[i / 2], i % 2, s.dt, scales[i / 2] >> (16 * (i % 2)));
        }
        uint4 *to = (uint4 *)(s.out + (row * s.ld_out + col) * 2);
        to[0] = make_uint4(out[0], out[1], out[2], out[3]);
        to[1] = make_uint4(out[4], out[5], out[6], out[7]);
    }
}
