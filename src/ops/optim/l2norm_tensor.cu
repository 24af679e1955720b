// ops/optim/l2norm_tensor.cu: computes the sum of squares of each tensor from the sums of its chunks.
//
// Launch: block 256; the grid has one block for each tensor.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_l2norm_tensor(const __grid_constant__ te__l2norm_final_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float sum = 0.0f;
    te_u32 end = a.first_chunk[blockIdx.x + 1];
    for (te_u32 c = a.first_chunk[blockIdx.x] + threadIdx.x; c < end; c += 256) sum += a.partial[c];
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x == 0) a.tensor_sum[blockIdx.x] = sum;
}
