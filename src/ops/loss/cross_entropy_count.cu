// ops/loss/cross_entropy_count.cu: counts the targets in 0 .. v - 1 that are not ignored. The count is rounded to f32
// only at the end.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "ops/loss/kargs.h"
#include "ops/loss/loss.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    te_cross_entropy_count(const __grid_constant__ te__cross_entropy_count_kargs a) {
    te_follow();
    __shared__ te_u32 counts[32];
    te_u32 n = 0;
    for (te_i64 i = threadIdx.x; i < a.m; i += 1024)
        n += te_loss_target(a.target, i, a.target_dt, a.ignore_index, a.v) >= 0;
    n = __reduce_add_sync(0xffffffffu, n);
    if ((threadIdx.x & 31) == 0) counts[threadIdx.x >> 5] = n;
    __syncthreads();
    if (threadIdx.x < 32) {
        n = __reduce_add_sync(0xffffffffu, counts[threadIdx.x]);
        if (threadIdx.x == 0) *a.count = (float)n;
    }
}
