// ops/math/sum.cu: computes partial sums of an array, one for each block.
//
//   block b      elements [b * 16384, (b + 1) * 16384)
//   thread t     its groups of eight: t, t + 256, ..., one after another; then the threads in te_block_sum's order
//
// The order of additions depends on the elements' indices alone. If there is only one block, it writes out = scale *
// sum itself. Otherwise sum_final does so.
//
// Benchmark: "sum of all" in tests/bench/h200.csv.
//
// Launch: block 256; grid: one block for each partial sum. With `vector` x is aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_sum(const __grid_constant__ te__sum_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    te_i64 begin = (te_i64)blockIdx.x * TE__SUM_CHUNK, end = begin + TE__SUM_CHUNK < a.n ? begin + TE__SUM_CHUNK : a.n;
    float sum = 0.0f;
    if (a.vector && end - begin == TE__SUM_CHUNK) {
#pragma unroll 4
        for (int g = 0; g < TE__SUM_CHUNK / 2048; g++) {
            float v[8];
            te_load8(a.x, begin + threadIdx.x * 8 + g * 2048, X_DT, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[k];
        }
    } else {
        for (te_i64 i = begin + threadIdx.x * 8; i < end; i += 2048)
            for (int k = 0; k < 8 && i + k < end; k++) sum += te_load(a.x, i + k, X_DT);
    }
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    if (a.partials == 1) *a.out = sum * a.scale;
    else a.partial[blockIdx.x] = sum;
}
