// ops/math/column_sum_short.cu: out [n] = (accumulate ? out : 0) + the column sums of x [m, n]. x is f32 with at most
// some thousand rows.
//
//        32 columns
//      +-----------+
//      |  warp w adds rows w, w + 8, w + 16 ...  then the eight warps are added in order
//      +-----------+
//
// The latency of the L2 cache, which holds x, is the limit. So a thread issues 16 loads before it adds the first.
//
// Launch: grid ceil(n / 32), block 256.
//
// te:baseline
#include "device/base.cuh"
#include "ops/math/kargs.h"

extern "C" __global__ void __launch_bounds__(256)
    te_column_sum_short(const __grid_constant__ te__column_sum_short_kargs a) {
    te_follow();
    __shared__ float part[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 col = (te_i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (col < a.n)
        for (te_i64 row = warp; row < a.m; row += 128) {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = row + 8 * i < a.m ? a.x[(row + 8 * i) * a.n + col] : 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++) sum += x[i];
        }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp || col >= a.n) return;
#pragma unroll
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    if (a.accumulate) sum += te_load(a.out, col, a.out_dt);
    te_store(a.out, col, a.out_dt, sum);
}
