// ops/loss/mse_sum.cu: adds the partial sums of mse_fwd in a fixed order, and divides by `count`. The loss is 0 if
// `count` is 0.
//
// Launch: one block of 1024 threads, parts <= 1024.
//
// te:baseline
#include "device/base.cuh"
#include "ops/loss/kargs.h"

extern "C" __global__ void __launch_bounds__(1024) te_mse_sum(const __grid_constant__ te__mse_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float sum = te_block_sum(threadIdx.x < a.parts ? a.partial[threadIdx.x] : 0.0f, scratch);
    if (threadIdx.x == 0) *a.loss = a.count ? sum / (float)a.count : 0.0f;
}
