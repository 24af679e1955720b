// ops/act/act_bias.cu: dbias [n] = the sum over the tiles of act_bwd_tile of partial [tiles, n], or that added to it.
//
// Launch: block 256: 32 columns by 8 warps; warp w adds tiles w, w + 8 ..., then the warps are added in order. Grid: n / 32 up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/act/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_act_bias(const __grid_constant__ te__act_bias_kargs a) {
    te_follow();
    __shared__ float part[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 col = (te_i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (col < a.n) {
#pragma unroll 8
        for (te_i64 t = warp; t < a.tiles; t += 8) sum += a.partial[t * a.n + col];
    }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= a.n) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    if (a.accumulate) sum += te_load(a.dbias, col, a.dbias_dt);
    te_store(a.dbias, col, a.dbias_dt, sum);
}
