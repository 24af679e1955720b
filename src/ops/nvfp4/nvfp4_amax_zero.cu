// ops/nvfp4/nvfp4_amax_zero.cu: sets amaxes to 0, unless the noop flag is set.
//
// Launch: block 256. The grid has one thread for each element of the longer of amax_row and amax_col, and at least one
// block.
//
// te:baseline
#include "device/base.cuh"
#include "ops/nvfp4/kargs.h"

extern "C" __global__ void te_nvfp4_amax_zero(const __grid_constant__ te__nvfp4_amax_kargs a) {
    te_follow();
    te_i64 i = (te_i64)blockIdx.x * 256 + threadIdx.x;
    if (a.noop && *a.noop == 1.0f) return;
    if (a.row && i < (a.groups ? a.count : a.per_row ? a.m : 1)) a.row[i] = 0.0f;
    if (a.col && i < (a.groups ? a.count : a.per_col ? a.n : 1)) a.col[i] = 0.0f;
}
