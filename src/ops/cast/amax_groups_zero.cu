// ops/cast/amax_groups_zero.cu: before amax_groups: the amaxes of all groups = 0.
//
// Launch: block 256, a thread a group; grid: groups / 256 up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/cast/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_amax_groups_zero(const __grid_constant__ te__amax_groups_kargs a) {
    te_follow();
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.count) a.amax[i * a.stride] = 0.0f;
}
