// ops/norm/norm.cuh: eight neighbours of a row as they lie in memory. Knows formats; nothing of norms' formulas.
//
// A row waits in registers between the passes over it. Sixteen-bit formats stay packed there: half the registers, and
// unpacking costs one instruction an element.
#pragma once
#include "device/base.cuh"

template <int DT> struct te_raw8 {
    te_u32 w[DT == TE_F32 ? 8 : 4];
};

// p + i is aligned to 16 bytes.
template <int DT> TE_DEV te_raw8<DT> te_raw8_load(const void *p, te_i64 i) {
    te_raw8<DT> r;
    const uint4 *q = (const uint4 *)((const char *)p + i * (DT == TE_F32 ? 4 : 2));
    uint4 u = q[0];
    r.w[0] = u.x, r.w[1] = u.y, r.w[2] = u.z, r.w[3] = u.w;
    if constexpr (DT == TE_F32) {
        u = q[1];
        r.w[4] = u.x, r.w[5] = u.y, r.w[6] = u.z, r.w[7] = u.w;
    }
    return r;
}
template <int DT> TE_DEV te_raw8<DT> te_raw8_zero() {
    te_raw8<DT> r;
#pragma unroll
    for (int j = 0; j < (DT == TE_F32 ? 8 : 4); j++) r.w[j] = 0;
    return r;
}
// Element j, a literal once the loop around it is unrolled.
template <int DT> TE_DEV float te_raw8_get(const te_raw8<DT> &r, int j) {
    if constexpr (DT == TE_F32) return __int_as_float((int)r.w[j]);
    if constexpr (DT == TE_BF16) return __int_as_float((int)(j & 1 ? r.w[j >> 1] & 0xffff0000u : r.w[j >> 1] << 16));
    return te_f16_to_f32((te_u16)(r.w[j >> 1] >> (16 * (j & 1))));
}
