// ops/math/column_sum.cu: partial [chunks, n] of the sums over the rows of x [m, n].
//
//            256 columns: lane l has columns 8l .. 8l+7
//          +--------------------------------------------+
//   chunk  | warp w adds rows w, w + 8, w + 16 ...       |   then the eight warps are added in order
//          +--------------------------------------------+
//
// One H200, 2026-11-21, te_bench column: 16384x4096 bf16, 0.68 of copy.
//
// Launch: block 256, grid: column_blocks * chunks, column block fastest. `vector`: te_load8 may read whole groups.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
#include "device/base.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_column_sum(const __grid_constant__ te__column_sum_kargs a) {
    __shared__ float part[8][256];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_u32 chunk = blockIdx.x / a.column_blocks;
    te_i64 first = (te_i64)(blockIdx.x - chunk * a.column_blocks) * 256, col = first + lane * 8;
    te_i64 begin = chunk * a.chunk, end = begin + a.chunk < a.m ? begin + a.chunk : a.m;
    float sum[8] = {};
    if (a.vector && col + 8 <= a.n) {
#pragma unroll 4
        for (te_i64 row = begin + warp; row < end; row += 8) {
            float v[8];
            te_load8(a.x, row * a.n + col, X_DT, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    } else {
        for (te_i64 row = begin + warp; row < end; row += 8)
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (col + k < a.n) sum[k] += te_load(a.x, row * a.n + col + k, X_DT);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) part[warp][k * 32 + lane] = sum[k]; // not lane * 8 + k: that would be one bank for four lanes
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) total += part[w][(threadIdx.x & 7) * 32 + (threadIdx.x >> 3)];
    if (first + threadIdx.x < a.n) a.partial[chunk * a.n + first + threadIdx.x] = total;
}
