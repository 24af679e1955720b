// ops/gemm/gemv_codes.cuh: the units of k in which gemv_k and gemv_joint read two operands, and their products on
// tensor cores. gemv_k.cu says which lane has which values. The options A_DT, B_DT, SHORT_A, SCALES, ONE, and EIGHTS or
// FOURS are the kernel's.
#pragma once
#include "ops/gemm/decode.cuh"

#define X_DT (SHORT_A ? B_DT : A_DT)
#define Y_DT (SHORT_A ? A_DT : B_DT)
#define FP8 (A_DT == 4 || A_DT == 5)
static_assert(A_DT != 1 && B_DT != 1, "no f32");
#define BITS (SCALES == 2 ? 4 : FP8 ? 8 : 16)
#define UNIT (128 / BITS)      // elements in 16 bytes, which a lane loads at a time
#define UNITS 2                // of a lane in a turn
#define TURN (4 * UNITS * UNIT) // elements of k in a turn: 128 bytes
#define CHUNKS (UNIT / 8)      // a chunk is eight elements, two products of a lane
#ifndef ONE
#define ONE 0 // whether Y has one line
#endif
// Products of gemv_integers.cuh. The tensor cores of sm_103 are slow with integers.
#define INTEGERS (ONE && SCALES == 2 && __CUDA_ARCH__ != 1030)
#ifdef FOURS
#define HALVES 1 // columns of a product: 1: two halves, of two groups; 0: eight lines of Y
#define SETS FOURS
#define SET 4
#else
#define HALVES 0
#define SETS EIGHTS
#define SET 8 // lines of Y in a product
#endif
#define EXCHANGED (SCALES == 1 && !HALVES)

// Decodes chunk c of the unit u into four words, each two values of k. `scales`: two E4M3 scales, with NVFP4.
template <int DT> TE_DEV void te_gemv_decode(uint4 u, int c, te_u32 scales, te_u32 out[4]) {
    const te_u32 w[4] = {u.x, u.y, u.z, u.w};
    if (BITS == 4) {
        te_u32 two = te_fp8x2_to_f16(scales, 0, TE_F8E4M3);
        te_decode_fp4x8(w[c], __byte_perm(two, 0, c < 2 ? 0x1010 : 0x3232), out);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = BITS == 16 ? w[i] : te_fp8x2_to_f16(w[(2 * c + (i >> 1)) & 3], i & 1, DT);
    }
}
// Adds to `sum` the products of a chunk of two lines of X and of one line of Y.
TE_DEV void te_gemv_multiply(float sum[4], const te_u32 x[4], const te_u32 x8[4], const te_u32 y[4]) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        const te_u32 of_x[4] = {x[h], x8[h], x[h + 1], x8[h + 1]}, of_y[2] = {y[h], y[h + 1]};
        if (A_DT == 3) te_mma_bf16(sum, of_x, of_y);
        else te_mma_f16(sum, of_x, of_y);
    }
}
// Exchanges halves of a unit between lanes t and t + 2. The first 32 of the quad's 64 codes are then in the first
// chunks of its lanes, and the other 32 in the second chunks.
TE_DEV uint4 te_gemv_exchange(uint4 u, int t) {
    const bool upper = t > 1;
    const te_u32 x = __shfl_xor_sync(0xffffffffu, upper ? u.x : u.z, 2),
                 y = __shfl_xor_sync(0xffffffffu, upper ? u.y : u.w, 2);
    return upper ? make_uint4(x, y, u.z, u.w) : make_uint4(u.x, u.y, x, y);
}
