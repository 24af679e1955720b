// ops/math/sum_final.cu: out = scale * the sum of the partial sums. The order of the additions depends on the indices
// of the partial sums alone.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "device/base.cuh"
#include "ops/math/kargs.h"

extern "C" __global__ void __launch_bounds__(1024) te_sum_final(const __grid_constant__ te__sum_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float sum = 0.0f;
    for (te_i64 i = threadIdx.x; i < a.partials; i += 1024) sum += a.partial[i];
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x == 0) *a.out = sum * a.scale;
}
