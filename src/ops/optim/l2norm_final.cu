// ops/optim/l2norm_final.cu: computes the norm of all gradients from the tensors' sums of squares. From the norm it
// computes the clip factor and found_inf.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/kargs.h"

extern "C" __global__ void __launch_bounds__(1024) te_l2norm_final(const __grid_constant__ te__l2norm_final_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float sum = 0.0f;
    for (int t = threadIdx.x; t < a.tensors; t += 1024) {
        float square = a.tensor_sum[t];
        if (a.per_tensor) a.per_tensor[t] = __fsqrt_rn(square);
        sum += square;
    }
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    float norm = __fsqrt_rn(sum), clip = __fdiv_rn(a.max_norm, __fadd_rn(norm, 1e-6f));
    *a.norm = norm;
    if (a.found_inf && !(norm <= TE_FLT_MAX)) *a.found_inf = 1.0f;
    if (a.clip) *a.clip = clip > 1.0f ? 1.0f : clip; // a comparison, since fminf would lose a NaN
}
