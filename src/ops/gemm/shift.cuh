// ops/gemm/shift.cuh: sixteen bytes that lie anywhere, out of the aligned ones that hold them.
#pragma once
#include "device/base.cuh"

// Bytes by .. by + 15 of lo and hi; by: 0 to 15.
TE_DEV uint4 te_shift(uint4 lo, uint4 hi, int by) {
    te_u32 w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}, out[4];
    if (by & 8) {
#pragma unroll
        for (int i = 0; i < 6; i++) w[i] = w[i + 2];
    }
    if (by & 4) {
#pragma unroll
        for (int i = 0; i < 5; i++) w[i] = w[i + 1];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __funnelshift_r(w[i], w[i + 1], 8 * (by & 3));
    return make_uint4(out[0], out[1], out[2], out[3]);
}
