// ops/norm/norm_amax.cu: runs after norm_fwd, which has left the largest |y| in `amax`. Writes it to y_amax, rounded to
// the format of y. Sets `amax` to 0 for the next call.
//
// Launch: one block of 32 threads.
//
// te:baseline
#include "device/base.cuh"
#include "ops/norm/kargs.h"

extern "C" __global__ void __launch_bounds__(32) te_norm_amax(const __grid_constant__ te__norm_amax_kargs a) {
    te_follow();
    if (threadIdx.x != 0) return;
    float largest = *a.amax;
    if (a.y_dt == TE_BF16) largest = te_bf16_to_f32(te_f32_to_bf16(largest));
    if (a.y_dt == TE_F16) largest = te_f16_to_f32(te_f32_to_f16(largest));
    *a.y_amax = largest;
    *a.amax = 0.0f;
}
