// ops/gemm/gemv.cuh: the end of gemv_k and gemv_mn, which adds up the sums of the warps and stores D.
#pragma once
#include "ops/gemm/epilogue.cuh"

// Adds up the sums of all warps in order, applies the epilogue, and stores the results of OF_X lines of the long
// operand, from line `first` on. `scale` is the factor of all of D. A line is a row of A or
// a column of B. Split s writes to D from row s * m on. WARPS and SHORT_A are options of the kernel.
template <int OF_X, int FEW, int LINES>
TE_DEV void te_gemv_finish(const te__gemm_kargs &a, float scale, const float (&sums)[WARPS][FEW][LINES],
                           te_i64 first) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FEW * OF_X; i += 32 * WARPS) {
        int at = i + threadIdx.x;
        int line = at % OF_X, other = at / OF_X;
        if (other >= (SHORT_A ? a.m : a.n) || first + line >= (SHORT_A ? a.n : a.m)) continue;
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += sums[w][other][line];
        te_i64 row = (SHORT_A ? other : first + line) + blockIdx.y * a.m, column = SHORT_A ? first + line : other;
        te_gemm_finish(a, scale, row, column, all);
    }
}
