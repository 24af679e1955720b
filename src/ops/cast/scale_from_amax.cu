// ops/cast/scale_from_amax.cu: scale = fp8_max / max(amax, epsilon). An amax of 0, infinity or NaN is handled as in
// TransformerEngine (base/scaling.h).
//
// Launch: block 256; grid: n / 256 rounded up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/cast/kargs.h"

extern "C" __global__ void __launch_bounds__(256)
    te_scale_from_amax(const __grid_constant__ te__scale_from_amax_kargs a) {
    te_follow();
    te_i64 i = (te_i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    float scale = te__block_scale(a.amax[i], a.fp8_max, a.epsilon, TE_FLT_MAX, a.power_of_two);
    a.scale[i] = scale;
    if (a.scale_inv) a.scale_inv[i] = __frcp_rn(scale);
}
