// ops/optim/multi.cuh: many tensors in one launch: which of them a chunk belongs to, and four neighbours of one. Knows the tables' layout; must
// not know what is done with the elements.
#pragma once
#include "device/base.cuh"

// The last i with first[i] <= chunk. The table lies in the constant bank: every thread of a block reads the same entries.
TE_DEV int te_tensor_of(const te_u32 *first, int tensors, te_u32 chunk) {
    int low = 0, high = tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (first[middle] <= chunk) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Elements i .. i+3; i is a multiple of four elements of an aligned array. Raw first, so that many loads can be on their way.
template <int DT> struct te_raw4 {
    te_u32 w[DT == TE_F32 ? 4 : 2];
};
template <int DT> TE_DEV te_raw4<DT> te_raw4_load(const void *p, te_i64 i) {
    te_raw4<DT> r;
    if constexpr (DT == TE_F32) {
        uint4 u = *(const uint4 *)((const float *)p + i);
        r.w[0] = u.x, r.w[1] = u.y, r.w[2] = u.z, r.w[3] = u.w;
    } else {
        uint2 u = *(const uint2 *)((const te_u16 *)p + i);
        r.w[0] = u.x, r.w[1] = u.y;
    }
    return r;
}
template <int DT> TE_DEV float te_raw4_get(const te_raw4<DT> &r, int k) {
    if constexpr (DT == TE_F32) return __int_as_float((int)r.w[k]);
    te_u16 h = (te_u16)(r.w[k >> 1] >> (16 * (k & 1)));
    return DT == TE_BF16 ? te_bf16_to_f32(h) : te_f16_to_f32(h);
}
template <int DT> TE_DEV void te_store4(void *p, te_i64 i, const float v[4]) {
    if constexpr (DT == TE_F32) {
        *(float4 *)((float *)p + i) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        *(uint2 *)((te_u16 *)p + i) = make_uint2(te_f32x2_to_half(v[0], v[1], DT), te_f32x2_to_half(v[2], v[3], DT));
    }
}
