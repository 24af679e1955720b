// ops/gemm/gemm_naive.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D, also grouped, by plain f32 FMAs. It
// takes every layout, size and alignment, and every format except MXFP8 and NVFP4. It is the reference for the
// tensor-core kernels.
//
//        64 columns
//      +-------------+
//   64 | x 0..15     |
// rows | y 0..15     |
//      +-------------+
//
// Each of 256 threads has 4 x 4 accumulators. Thread (x, y) has rows 4 y .. 4 y + 3 and columns 4 x .. 4 x + 3.
//
// The sums run over k in ascending order, so the bits depend on the operands alone. Block scales multiply the sum over
// each 128 values of k.
//
// Launch: block 256; grid: one block for each tile. If groups divide the rows, the grid has the largest possible number
// of tiles.
//
// te:baseline
#include "ops/gemm/groups.cuh"

#define TILE 64
#define SLAB 16

// Loads 64 x 16 elements of op(A), or of op(B) transposed, into to[k][row]. k_major: neighbours along k are neighbours
// in memory.
TE_DEV void te_naive_load(float to[SLAB][TILE + 4], const void *from, int dt, int k_major, te_i64 ld, te_i64 row0,
                          te_i64 rows, te_i64 k0, te_i64 ks) {
#pragma unroll
    for (int i = 0; i < TILE * SLAB / 256; i++) {
        int at = threadIdx.x + 256 * i;
        int p = k_major ? at % SLAB : at / TILE, r = k_major ? at / SLAB : at % TILE;
        te_i64 row = row0 + r, k = k0 + p;
        to[p][r] = row < rows && k < ks ? te_load(from, k_major ? row * ld + k : k * ld + row, dt) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) te_gemm_naive(const __grid_constant__ te__gemm_kargs all) {
    te_follow();
    __shared__ __align__(16) float as[SLAB][TILE + 4], bs[SLAB][TILE + 4];
    te__gemm_kargs a = all;
    te_u32 tile = blockIdx.x, tm, tn;
    if (all.groups.count && !te_group_open(all, TILE, TILE, tile, a)) return;
    te_gemm_raster(tile, (te_u32)te_div_up(a.m, TILE), (te_u32)te_div_up(a.n, TILE), tm, tn);
    te_i64 row0 = (te_i64)tm * TILE, col0 = (te_i64)tn * TILE;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float acc[4][4] = {}, total[4][4] = {}; // total: sums of the blocks of k that are done
    for (te_i64 k0 = 0; k0 < a.k; k0 += SLAB) {
        te_naive_load(as, a.a, a.a_dt, !a.a_t, a.lda, row0, a.m, k0, a.k);
        te_naive_load(bs, a.b, a.b_dt, a.b_t, a.ldb, col0, a.n, k0, a.k);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < SLAB; p++) {
            float4 u = *(const float4 *)&as[p][4 * y], v = *(const float4 *)&bs[p][4 * x];
            float r[4] = {u.x, u.y, u.z, u.w}, c[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = fmaf(r[i], c[j], acc[i][j]);
        }
        __syncthreads();
        if (a.block && ((k0 + SLAB) % 128 == 0 || k0 + SLAB >= a.k)) {
            float of_rows[4], of_columns[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { // i beyond the last row or column takes the last one's scale
                te_i64 row = row0 + 4 * y + i, col = col0 + 4 * x + i;
                of_rows[i] = te_gemm_block_scale(a.block_a, a.block == TE__GEMM_2D_1D, a.ld_block_a,
                                                 row < a.m ? row : a.m - 1, k0 >> 7);
                of_columns[i] = te_gemm_block_scale(a.block_b, a.block == TE__GEMM_1D_2D, a.ld_block_b,
                                                    col < a.n ? col : a.n - 1, k0 >> 7);
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                total[i / 4][i % 4] += acc[i / 4][i % 4] * of_rows[i / 4] * of_columns[i % 4];
                acc[i / 4][i % 4] = 0.0f;
            }
        }
    }
    float scale = te_gemm_scale(a);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            te_i64 row = row0 + 4 * y + i, col = col0 + 4 * x + j;
            if (row < a.m && col < a.n) te_gemm_finish(a, scale, row, col, total[i][j] + acc[i][j]);
        }
}
