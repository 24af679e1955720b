// ops/norm/norm_bwd_sum.cu: dgamma and dbeta: the rows of norm_bwd's partial sums, added in fixed order, rounded once.
//
//   a block has 32 columns; its 16 warps take rows w, w + 16, w + 32 .. and their sums are added in the order of w
//
// Launch: block of 512 threads, grid (ceil(n / 32), kinds); y = 0 is dgamma, y = 1 is dbeta. No partial sums (parts = 0) is a sum of 0.
//
// te:baseline
#include "device/base.cuh"
#include "ops/norm/kargs.h"

extern "C" __global__ void __launch_bounds__(512) te_norm_bwd_sum(const __grid_constant__ te__norm_bwd_sum_kargs a) {
    __shared__ float sums[16][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    void *out = blockIdx.y ? a.dbeta : a.dgamma;
    int dt = blockIdx.y ? a.dbeta_dt : a.dgamma_dt;
    te_i64 column = (te_i64)blockIdx.x * 32 + lane;
    if (!out) return;
    float sum = 0.0f;
    if (column < a.n) {
#pragma unroll 4
        for (te_i64 r = warp; r < a.parts; r += 16) sum += a.partial[(r * a.kinds + blockIdx.y) * a.n + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= a.n) return;
#pragma unroll
    for (int w = 1; w < 16; w++) sum += sums[w][lane];
    if (a.accumulate) sum += te_load(out, column, dt);
    te_store(out, column, dt, sum);
}
