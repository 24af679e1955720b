// device/coded_row.cuh: a row of a KV cache in E4M3: codes, and a factor 2^e for all of them. The CPU's twin is
// te__store_coded_row.
#pragma once
#include "device/base.cuh"
#include "base/scaling.h"

// Writes the numbers x(0) .. x(n - 1) as codes, by a warp. x is called twice for each of them.
template <class X> TE_DEV void te_put_coded_row(te_u8 *codes, te_u8 *factor, int n, X x) {
    const int lane = threadIdx.x & 31;
    float top = 0.0f, by = 0.0f; // fmaxf ignores NaN, which keeps a NaN to its own element
#pragma unroll 1
    for (int c = lane, second = 0;; c += 32) { // one loop for both rounds: x may be long, and is compiled once
        if (c - lane >= n) {
            if (second) return;
            const te_u8 e = te__mxfp8_exponent(te_warp_max(top), TE__E4M3_MAX_INVERSE);
            by = te__mxfp8_multiplier(e);
            if (lane == 0) *factor = e;
            c = lane, second = 1;
        }
        if (c >= n) continue;
        const float v = x(c);
        if (second) te_store(codes, c, TE_F8E4M3, __fmul_rn(v, by));
        else top = fmaxf(top, fabsf(v));
    }
}
