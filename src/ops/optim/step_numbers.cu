// ops/optim/step_numbers.cu: counts the last step if it was skipped. Computes the bias corrections of the next step.
//
//   if `count` is set and found_inf is not 0: skipped += 1
//   found_inf = 0
//   n = step - skipped, at least 1
//   bias_correction[i] = 1 / (1 - betas[i]^n)
//
// Launch: one block of 256 threads.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_step_numbers(const __grid_constant__ te__step_numbers_kargs a) {
    te_follow();
    __shared__ float before;
    if (threadIdx.x == 0) {
        before = *a.skipped;
        if (a.found_inf) {
            if (a.count && *a.found_inf != 0.0f) *a.skipped = before += 1.0f;
            *a.found_inf = 0.0f;
        }
    }
    __syncthreads();
    if (!a.bias_correction) return;
    double n = (a.step_device ? (double)*a.step_device : a.step) - (double)before;
    if (n < 1.0) n = 1.0;
    for (int i = threadIdx.x; i < 2 * a.places; i += 256)
        a.bias_correction[i] = a.no_bias_correction ? 1.0f : (float)(1.0 / (1.0 - pow((double)a.betas[i], n)));
}
