// ops/cast/amax_groups_zero.cu: sets the amaxes of all groups to 0. It runs before amax_groups.
//
// Launch: block 256, one thread for each group; grid: groups / 256 rounded up.
//
// te:baseline
#include "device/base.cuh"
#include "ops/cast/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_amax_groups_zero(const __grid_constant__ te__amax_groups_kargs a) {
    te_follow();
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.count) a.amax[i * a.stride] = 0.0f;
}
