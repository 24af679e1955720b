// ops/cast/amax_zero.cu: amax = 0, unless the noop flag is up.
//
// Launch: one block of 32.
//
// te:baseline
#include "device/base.cuh"
#include "ops/cast/kargs.h"

extern "C" __global__ void te_amax_zero(const __grid_constant__ te__amax_kargs a) {
    if (threadIdx.x == 0 && !(a.noop && *a.noop == 1.0f)) *a.amax = 0.0f;
}
