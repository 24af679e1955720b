// ops/gemm/gemv.cuh: GEMVs: the long operand, X, and the short one, Y, which is A with SHORT_A; and a block's end.
#pragma once
#include "ops/gemm/epilogue.cuh"
#include "ops/gemm/shift.cuh"

struct te_gemv_operand {
    const void *data;
    te_i64 lines, ld;
    const void *scales; // of blocks of k
    te_i64 ld_scales;
};
TE_DEV te_gemv_operand te_gemv_operand_of(const te__gemm_kargs &a, bool is_a) {
    if (is_a) return {a.a, a.m, a.lda, a.block_a, a.ld_block_a};
    return {a.b, a.n, a.ldb, a.block_b, a.ld_block_b};
}
TE_DEV te_gemv_operand te_gemv_x(const te__gemm_kargs &a) { return te_gemv_operand_of(a, !SHORT_A); }
TE_DEV te_gemv_operand te_gemv_y(const te__gemm_kargs &a) { return te_gemv_operand_of(a, SHORT_A); }

// Adds up the sums of all warps, in order, and finishes D: of OF_X lines of X, from `first` on, by all of Y. Split s writes to D + s m rows.
template <int OF_X, int FEW, int LINES> TE_DEV void te_gemv_finish(const te__gemm_kargs &a, const float (&sums)[WARPS][FEW][LINES], te_i64 first) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FEW * OF_X; i += 32 * WARPS) {
        int at = i + threadIdx.x;
        int line = at % OF_X, other = at / OF_X;
        if (other >= te_gemv_y(a).lines || first + line >= te_gemv_x(a).lines) continue;
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += sums[w][other][line];
        te_gemm_finish(a, te_gemm_scale(a), (SHORT_A ? other : first + line) + blockIdx.y * a.m, SHORT_A ? first + line : other, all);
    }
}
