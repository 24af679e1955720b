// ops/math/column_sum_final.cu: out [n] = (accumulate ? out : 0) + the sum over the chunks of partial [chunks, n].
//
// Launch: block 256: 32 columns by 8 warps; warp w adds chunks w, w + 8 ..., then the warps are added in order. Grid: n / 32 up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/math/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_column_sum_final(const __grid_constant__ te__column_sum_kargs a) {
    __shared__ float part[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 col = (te_i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (col < a.n) {
#pragma unroll 8
        for (te_i64 c = warp; c < a.chunks; c += 8) sum += a.partial[c * a.n + col];
    }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= a.n) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    if (a.accumulate) sum += te_load(a.out, col, a.out_dt);
    te_store(a.out, col, a.out_dt, sum);
}
