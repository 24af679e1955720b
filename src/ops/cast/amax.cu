// ops/cast/amax.cu: amax = max(amax, max |x|), NaN ignored, infinity kept. amax_zero clears it first where it should not be kept. Or, for a
// reader that takes the largest itself: partial[block] = the maximum of what the block has seen.
//
//   x   | head | vector 0 | vector 1 | ...                                       | tail |
//              |<- block 0: 2048 vectors of 16 bytes ->|<- block 1 ->| ... |<- block 0 again ...
//
// Launch: block 256, grid: at most as many blocks as run at once. They stay until nothing is left, eight loads of a thread on their way at
// a time: a block that ends after each piece waits longer for its own finish than for memory. Any alignment of at least an element.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/base.cuh"
#include "ops/cast/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

TE_DEV float te_amax_word(te_u32 w, int dt, float largest) {
    if (dt == TE_F32) return fmaxf(largest, fabsf(__int_as_float((int)w)));
    te_u16 lo = (te_u16)w, hi = (te_u16)(w >> 16);
    largest = fmaxf(largest, fabsf(dt == TE_BF16 ? te_bf16_to_f32(lo) : te_f16_to_f32(lo)));
    return fmaxf(largest, fabsf(dt == TE_BF16 ? te_bf16_to_f32(hi) : te_f16_to_f32(hi)));
}

extern "C" __global__ void __launch_bounds__(256) te_amax(const __grid_constant__ te__amax_kargs a) {
    __shared__ float scratch[32];
    const int size = X_DT == TE_F32 ? 4 : 2;
    const uint4 *body = (const uint4 *)((const te_u8 *)a.x + a.head * size);
    float largest = 0.0f;
    if (a.noop && *a.noop == 1.0f) return;
    for (te_i64 i = (te_i64)blockIdx.x * 2048 + threadIdx.x; i < a.vectors; i += (te_i64)gridDim.x * 2048) {
        uint4 u[8];
#pragma unroll
        for (int r = 0; r < 8; r++) u[r] = i + r * 256 < a.vectors ? body[i + r * 256] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            largest = te_amax_word(u[r].x, X_DT, largest), largest = te_amax_word(u[r].y, X_DT, largest);
            largest = te_amax_word(u[r].z, X_DT, largest), largest = te_amax_word(u[r].w, X_DT, largest);
        }
    }
    te_i64 inside = a.vectors * (16 / size);
    if (blockIdx.x == 0 && threadIdx.x < a.n - inside) // head and tail: fewer than 16 elements
        largest = fmaxf(largest, fabsf(te_load(a.x, threadIdx.x < a.head ? threadIdx.x : inside + threadIdx.x, X_DT)));
    largest = te_block_max(largest, scratch);
    if (threadIdx.x != 0) return;
    if (a.partial) a.partial[blockIdx.x] = largest;
    else if (largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
}
