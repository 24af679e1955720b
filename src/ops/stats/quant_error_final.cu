// ops/stats/quant_error_final.cu: reduces the partial results of all blocks to one. The sums are in double. The order
// of additions depends only on the indices of the blocks.
//
// Launch: one block of 256 threads. Without partial results it writes zeros.
//
// te:baseline
#include "device/base.cuh"
#include "ops/stats/kargs.h"

extern "C" __global__ void __launch_bounds__(256)
    te_quant_error_final(const __grid_constant__ te__quant_error_kargs a) {
    te_follow();
    __shared__ double sum[4][256];
    __shared__ te_u64 count[TE__STATS_COUNTS][256];
    __shared__ float scratch[32];
    int t = threadIdx.x;
    double s[4] = {};
    te_u64 n[TE__STATS_COUNTS] = {};
    float largest = 0.0f;
    for (te_i64 i = t; i < a.partials; i += 256) {
        te__quant_error_partial p = a.partial[i];
        s[0] += p.xx, s[1] += p.yy, s[2] += p.xy, s[3] += p.dd, largest = fmaxf(largest, p.largest);
#pragma unroll
        for (int c = 0; c < TE__STATS_COUNTS; c++) n[c] += p.count[c];
    }
    largest = te_block_max(largest, scratch);
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k][t] = s[k];
#pragma unroll
    for (int c = 0; c < TE__STATS_COUNTS; c++) count[c][t] = n[c];
    for (int d = 128; d; d >>= 1) {
        __syncthreads();
        if (t >= d) continue;
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k][t] += sum[k][t + d];
#pragma unroll
        for (int c = 0; c < TE__STATS_COUNTS; c++) count[c][t] += count[c][t + d];
    }
    if (t != 0) return;
    a.counts[0] = a.n;
    for (int c = 0; c < TE__STATS_COUNTS; c++) a.counts[1 + c] = (te_i64)count[c][0];
    for (int k = 0; k < 4; k++) a.sums[k] = (float)sum[k][0];
    a.sums[4] = largest;
}
