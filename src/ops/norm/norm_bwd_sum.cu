// ops/norm/norm_bwd_sum.cu: computes dgamma and dbeta from the partial sums of norm_bwd. A cooperative launch of
// norm_bwd computes dgamma and dbeta itself. Without rows (parts is 0) the sums are 0.
//
// Launch: block of 512 threads, grid (ceil(n / 32), kinds); blockIdx.y is 0 for dgamma, 1 for dbeta.
//
// te:baseline
#include "ops/norm/norm_parts.cuh"

extern "C" __global__ void __launch_bounds__(512) te_norm_bwd_sum(const __grid_constant__ te__norm_bwd_sum_kargs a) {
    te_follow();
    __shared__ float sums[512];
    te_norm_add_parts<1>(a, blockIdx.y, blockIdx.x, sums);
}
