// ops/cast/scale_from_amax.cu: scale = fp8_max / max(amax, epsilon), with TransformerEngine's corners; see te__scale_of in op.c, whose bits
// these are.
//
// Launch: block 256, grid: n / 256 up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/cast/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_scale_from_amax(const __grid_constant__ te__scale_from_amax_kargs a) {
    te_i64 i = (te_i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    float amax = a.amax[i], scale = 1.0f;
    if (amax < a.epsilon) amax = a.epsilon;
    if (amax != 0.0f && fabsf(amax) <= TE_FLT_MAX) { // false for NaN
        scale = __fdiv_rn(a.fp8_max, amax);
        if (scale == TE_INF) scale = TE_FLT_MAX;
        if (a.power_of_two) scale = __int_as_float(__float_as_int(scale) & (int)0xff800000u);
    }
    a.scale[i] = scale;
    if (a.scale_inv) a.scale_inv[i] = __frcp_rn(scale);
}
