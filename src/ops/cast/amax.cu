// ops/cast/amax.cu: amax = max(amax, max |x|), NaN ignored, infinity kept. amax_zero clears it first where it should not be kept.
//
// Launch: block 256, grid: blocks of 8192 elements; one atomic a block, and the order of a maximum is nobody's business. `vector`: x
// aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
#include "device/base.cuh"
#include "ops/cast/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_amax(const __grid_constant__ te__amax_kargs a) {
    __shared__ float scratch[32];
    te_i64 first = (te_i64)blockIdx.x * 8192 + threadIdx.x * 8;
    float v[4][8] = {}, largest = 0.0f;
    if (a.vector && first + 6144 + 8 <= a.n) {
#pragma unroll
        for (int r = 0; r < 4; r++) te_load8(a.x, first + r * 2048, X_DT, v[r]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (first + r * 2048 + k < a.n) v[r][k] = te_load(a.x, first + r * 2048 + k, X_DT);
    }
    if (a.noop && *a.noop == 1.0f) return;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[r][k]));
    largest = te_block_max(largest, scratch);
    if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
}
