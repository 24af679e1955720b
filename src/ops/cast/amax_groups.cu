// ops/cast/amax_groups.cu: raises amax[g] to the largest |x| in the rows of group g of x [m, n]. NaN is ignored,
// infinity is kept.
//
// A warp handles one row at a time. It raises the amax of the row's group by an atomic maximum, which gives the same
// bits in any order. Most warps find that amax[g] is already larger, and need no atomic. Rows with group numbers
// outside 0 .. count - 1 are skipped.
//
// Launch: block 256, and any number of blocks; each warp goes on until no row is left. Any size is allowed, and any
// alignment of at least one element.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/cast/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_amax_groups(const __grid_constant__ te__amax_groups_kargs a) {
    te_follow();
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5); row < a.m; row += (te_i64)gridDim.x * 8) {
        int group = a.groups[row];
        if (group < 0 || group >= a.count) continue;
        float largest = 0.0f;
#pragma unroll 1
        for (te_i64 col = lane * 8; col < a.n; col += 256) {
            if (a.vector && col + 8 <= a.n) {
                float v[8];
                te_load8(a.x, row * a.n + col, X_DT, v);
#pragma unroll
                for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[k]));
            } else {
#pragma unroll 1
                for (te_i64 c = col; c < a.n && c < col + 8; c++)
                    largest = fmaxf(largest, fabsf(te_load(a.x, row * a.n + c, X_DT)));
            }
        }
        // non-negative floats have the order of their bits
        te_u32 all = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
        float *to = a.amax + group * a.stride;
        if (lane == 0 && __uint_as_float(all) > *(volatile float *)to) te_atomic_amax(to, __uint_as_float(all));
    }
}
