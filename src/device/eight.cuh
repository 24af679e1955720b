// device/eight.cuh: eight neighbours of a row, kept as they lie in memory. Knows formats and where an array ends; must not know what is done
// with the elements.
#pragma once
#include "device/base.cuh"

// What is loaded above is loaded here: the compiler may not put a load off until its number is used, one latency after the other.
TE_DEV void te_loads_go_first() { asm volatile("" ::: "memory"); }

// The larger halves of two words of a 16-bit format: of a number and NaN, the number.
TE_DEV te_u32 te_half2_max(te_u32 a, te_u32 b, int dt) {
    te_u32 c;
    if (dt == TE_BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Eight elements as they lie in memory: 16-bit formats stay as they are until they are used, which halves the registers of a tile.
template <bool packed> struct te_eight {
    te_u32 w[packed ? 4 : 8];
};
template <bool packed> TE_DEV te_eight<packed> te_eight_load(const void *p, te_i64 i, int dt) {
    te_eight<packed> e;
    if constexpr (packed) {
        uint4 u = *(const uint4 *)((const te_u16 *)p + i);
        e.w[0] = u.x, e.w[1] = u.y, e.w[2] = u.z, e.w[3] = u.w;
    } else {
        float v[8];
        te_load8(p, i, dt, v);
#pragma unroll
        for (int k = 0; k < 8; k++) e.w[k] = __float_as_uint(v[k]);
    }
    return e;
}
// The same of any alignment; only n of them exist, the others are 0.
template <bool packed> TE_DEV te_eight<packed> te_eight_part(const void *p, te_i64 i, int dt, te_i64 n) {
    te_eight<packed> e;
#pragma unroll
    for (int k = 0; k < (packed ? 4 : 8); k++) e.w[k] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= n) break;
        if constexpr (packed) e.w[k >> 1] |= (te_u32)((const te_u16 *)p)[i + k] << (16 * (k & 1));
        else e.w[k] = __float_as_uint(te_load(p, i + k, dt));
    }
    return e;
}
template <bool packed> TE_DEV float te_eight_get(const te_eight<packed> &e, int k, int dt) {
    if constexpr (packed) {
        te_u16 h = (te_u16)(e.w[k >> 1] >> (16 * (k & 1)));
        return dt == TE_BF16 ? te_bf16_to_f32(h) : te_f16_to_f32(h);
    }
    return __uint_as_float(e.w[packed ? 0 : k]);
}
