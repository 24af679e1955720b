// ops/nvfp4/nvfp4_amax.cu: finds amaxes for NVFP4, in one read of x. It raises `row` to the largest |x| of the tensor
// or of each row. It raises `col` to the largest |x'| of the tensor or of each column, where x' is x after the
// transform for the column-wise copy, if there is one. NaN is ignored, infinity is kept.
//
//            128 columns: 4 a lane
//          +-----------------------+
//    16    |  a piece: one warp    |     each thread holds 16 rows of its four columns: whole groups of the transform
//   rows   +-----------------------+
//
// For amaxes of the tensor, the block that ends last reduces the maxima of all blocks. Amaxes of single rows and
// columns are set to 0 by nvfp4_amax_zero and then raised by atomic maxima, which give the same bits in any order. Most
// warps find that the amax is larger already, and need no atomic.
//
// Benchmark: "nvfp4 amaxes plain and transformed" in tests/bench/h200.csv.
//
// With GROUPS each piece belongs to one group of rows. The amaxes of groups are raised like those of single rows.
//
// Launch: block 256; at most as many blocks as run at the same time. Each block loops over groups of eight neighbouring
// pieces. Any size and any alignment are allowed.
//
// te:baseline
// te:row X_DT=3 RHT=0 PER_ROW=0 PER_COL=0
// te:row X_DT=3 RHT=1 PER_ROW=0 PER_COL=0
// te:row X_DT=3 RHT=2 PER_ROW=0 PER_COL=0
// te:row X_DT=3 RHT=0 PER_ROW=1 PER_COL=0
// te:row X_DT=3 RHT=0 PER_ROW=1 PER_COL=1
// te:row X_DT=3 RHT=1 PER_ROW=1 PER_COL=1
// te:row X_DT=1 RHT=0 PER_ROW=0 PER_COL=0
// te:row X_DT=1 RHT=1 PER_ROW=0 PER_COL=0
// te:row X_DT=3 RHT=0|1 PER_ROW=0 PER_COL=0 GROUPS=1
#include "device/vector.cuh"
#include "ops/nvfp4/nvfp4.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define RHT a.rht
#define PER_ROW a.per_row
#define PER_COL a.per_col
#define GROUPS (a.groups != nullptr)
#elif !defined(GROUPS)
#define GROUPS 0
#endif

TE_DEV void te_nvfp4_raise(float *amax, float v) {
    if (v > *(volatile float *)amax) te_atomic_amax(amax, v);
}

extern "C" __global__ void __launch_bounds__(256, 3) te_nvfp4_amax(const __grid_constant__ te__nvfp4_amax_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    if (a.noop && *a.noop == 1.0f) return;
    float of_row = 0.0f, of_col = 0.0f;
#pragma unroll 1
    for (te_i64 first = (te_i64)blockIdx.x * 8; first < a.pieces; first += (te_i64)gridDim.x * 8) {
        te_i64 piece = first + (threadIdx.x >> 5);
        te_i64 down = a.pieces >> 32 ? piece / a.across : (te_i64)((te_u32)piece / a.across);
        te_i64 row = down * 16, col = (piece - down * a.across) * 128 + (threadIdx.x & 31) * 4;
        te_raw<TE_ANY, 4> w[16];
        if (a.vector && row + 16 <= a.m && col + 4 <= a.n && piece < a.pieces) {
#pragma unroll
            for (int r = 0; r < 16; r++) w[r] = te_raw_ask<4>(a.x, (row + r) * a.n + col, X_DT);
        } else {
#pragma unroll
            for (int r = 0; r < 16; r++)
                w[r] = te_raw_ask_part<4>(a.x, (row + r) * a.n + col, X_DT,
                                          row + r < a.m && piece < a.pieces ? a.n - col : 0);
        }
        if (PER_ROW || !RHT || a.row) {
#pragma unroll
            for (int r = 0; r < 16; r++) {
                float largest = 0.0f;
#pragma unroll
                for (int k = 0; k < 4; k++) largest = fmaxf(largest, fabsf(te_raw_value(w[r], k, X_DT)));
                of_row = fmaxf(of_row, largest);
                if (PER_ROW) { // non-negative floats have the order of their bits
                    te_u32 all = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
                    if ((threadIdx.x & 31) == 0 && row + r < a.m && piece < a.pieces)
                        te_nvfp4_raise(a.row + row + r, __uint_as_float(all));
                }
            }
        }
        if (RHT || PER_COL) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float v[16];
#pragma unroll
                for (int r = 0; r < 16; r++) v[r] = te_raw_value(w[r], k, X_DT);
                te_nvfp4_transform(v, RHT, X_DT);
                float largest = te_nvfp4_largest(v);
                of_col = fmaxf(of_col, largest);
                if (PER_COL && col + k < a.n && piece < a.pieces) te_nvfp4_raise(a.col + col + k, largest);
            }
        }
        if (GROUPS) {
            float most_row = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(of_row)));
            float most_col = RHT ? __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(of_col))) : most_row;
            int group = piece < a.pieces ? a.groups[row] : -1;
            if ((threadIdx.x & 31) == 0 && group >= 0 && group < a.count) {
                if (a.row) te_nvfp4_raise(a.row + group, most_row);
                if (a.col) te_nvfp4_raise(a.col + group, most_col);
            }
            of_row = of_col = 0.0f;
        }
    }
    bool one_row = a.row && !PER_ROW && !GROUPS, one_col = a.col && !PER_COL && !GROUPS;
    if (!RHT) of_col = of_row;
    if (one_row) {
        of_row = te_block_max(of_row, scratch);
        if (threadIdx.x == 0) a.row_part[blockIdx.x] = of_row;
    }
    if (one_col) {
        of_col = te_block_max(of_col, scratch);
        if (threadIdx.x == 0) a.col_part[blockIdx.x] = of_col;
    }
    if (!(one_row || one_col) || !te_last_block(a.counter)) return;
    of_row = of_col = 0.0f;
    for (int b = threadIdx.x; b < gridDim.x; b += 256) {
        if (one_row) of_row = fmaxf(of_row, __ldcg(a.row_part + b));
        if (one_col) of_col = fmaxf(of_col, __ldcg(a.col_part + b));
    }
    of_row = te_block_max(of_row, scratch);
    of_col = te_block_max(of_col, scratch);
    if (threadIdx.x != 0) return;
    if (one_row && (!a.keep || of_row > *a.row)) *a.row = of_row;
    if (one_col && (!a.keep || of_col > *a.col)) *a.col = of_col;
}
