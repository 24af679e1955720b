// ops/moe/grouped_column_sum.cu: out [groups, n] = the column sums of x [m, n] over the rows of each group.
//
// A block has 32 columns of one group. Its 8 warps take the rows in turn, and the warps' sums are added in order.
//
// Launch: block 256; grid: groups * n / 32 rounded up.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256)
    te_grouped_column_sum(const __grid_constant__ te__grouped_column_sum_kargs a) {
    te_follow();
    __shared__ float part[8][32];
    te_i64 tiles = te_div_up(a.n, 32), group = blockIdx.x / tiles, begin = 0, end = 0;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 col = blockIdx.x % tiles * 32 + lane;
    TE_LOOP
    for (te_i64 g = 0; g <= group; g++) {
        te_i64 size = te_load_index(a.sizes, g, a.sizes_dt);
        begin = end;
        end += size < 0 ? 0 : size < a.m - begin ? size : a.m - begin;
    }
    float sum = 0.0f;
    if (col < a.n) {
        TE_UNROLL(4)
        for (te_i64 row = begin + warp; row < end; row += 8) sum += te_get(a.x, row * a.n + col, a.x_dt);
    }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= a.n) return;
    TE_LOOP
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    te_put(a.out, group * a.n + col, a.out_dt, sum);
}
