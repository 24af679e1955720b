// device/vector.cuh: loads and stores of 4 or 8 neighbouring elements of a row, and registers in the stored format.
// This file must not depend on the operation.
//
// Elements are converted when they are used. Until then, packed 16-bit elements take half as many registers as f32.
// The conversion costs one instruction per element.
#pragma once
#include "device/base.cuh"

#define TE_ANY (-1) // the format is known at run time

template <int FORMAT> constexpr int te_size = FORMAT == TE_F32 ? 4 : 2; // bytes of an element

// N neighbouring elements in format FORMAT. With TE_ANY, 16-bit formats use only the first half of the words, and 8-bit
// formats the first quarter.
template <int FORMAT, int N = 8> struct te_raw {
    enum { words = FORMAT == TE_F16 || FORMAT == TE_BF16 ? N / 2 : N };
    te_u32 w[words];
};

// ---- the format at run time -----------------------------------------------------------------------------------------
// p + i must be aligned to the number of bytes that are read or written, but at most to 16.

template <int N> TE_DEV te_raw<TE_ANY, N> te_raw_ask(const void *p, te_i64 i, int dt) {
    te_raw<TE_ANY, N> b;
    if (dt == TE_F32) {
        const uint4 *q = (const uint4 *)((const float *)p + i);
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            uint4 u = q[k / 4];
            b.w[k] = u.x, b.w[k + 1] = u.y, b.w[k + 2] = u.z, b.w[k + 3] = u.w;
        }
    } else if (N == 8 && (dt == TE_BF16 || dt == TE_F16)) {
        uint4 u = *(const uint4 *)((const te_u16 *)p + i);
        b.w[0] = u.x, b.w[1] = u.y, b.w[2] = u.z, b.w[3] = u.w;
    } else if (N == 8 || dt == TE_BF16 || dt == TE_F16) {
        uint2 u = *(const uint2 *)((const te_u8 *)p + (N == 8 ? i : 2 * i));
        b.w[0] = u.x, b.w[1] = u.y;
    } else {
        b.w[0] = *(const te_u32 *)((const te_u8 *)p + i);
    }
    return b;
}
// Like te_raw_ask, for f32 and 16-bit formats and for any alignment. Only the first n elements are loaded; the others
// become 0.
template <int N> TE_DEV te_raw<TE_ANY, N> te_raw_ask_part(const void *p, te_i64 i, int dt, te_i64 n) {
    te_raw<TE_ANY, N> b = {};
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (k >= n) break;
        if (dt == TE_F32) b.w[k] = ((const te_u32 *)p)[i + k];
        else b.w[k >> 1] |= (te_u32)((const te_u16 *)p)[i + k] << (16 * (k & 1));
    }
    return b;
}
// Returns element k, for f32 or a 16-bit format.
template <int N> TE_DEV float te_raw_value(const te_raw<TE_ANY, N> &b, int k, int dt) {
    if (dt == TE_F32) return __uint_as_float(b.w[k]);
    te_u16 h = (te_u16)(b.w[k >> 1] >> (16 * (k & 1)));
    return dt == TE_BF16 ? te_bf16_to_f32(h) : te_f16_to_f32(h);
}
template <int N> TE_DEV void te_raw_values(const te_raw<TE_ANY, N> &b, int dt, float out[N]) {
    if (dt == TE_F32) {
#pragma unroll
        for (int k = 0; k < N; k++) out[k] = __uint_as_float(b.w[k]);
    } else if (dt == TE_BF16 || dt == TE_F16) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            te_u16 h = (te_u16)(b.w[k >> 1] >> (16 * (k & 1)));
            out[k] = dt == TE_BF16 ? te_bf16_to_f32(h) : te_f16_to_f32(h);
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) out[k] = te_fp8_to_f32((te_u8)(b.w[k >> 2] >> (8 * (k & 3))), dt);
    }
}
template <int N> TE_DEV void te_load_n(const void *p, te_i64 i, int dt, float out[N]) {
    te_raw_values<N>(te_raw_ask<N>(p, i, dt), dt, out);
}
template <int N> TE_DEV void te_store_n(void *p, te_i64 i, int dt, const float in[N]) {
    te_u32 w[N / 2];
    if (dt == TE_F32) {
        float4 *q = (float4 *)((float *)p + i);
#pragma unroll
        for (int k = 0; k < N; k += 4) q[k / 4] = make_float4(in[k], in[k + 1], in[k + 2], in[k + 3]);
    } else if (dt == TE_BF16 || dt == TE_F16) {
#pragma unroll
        for (int k = 0; k < N / 2; k++) w[k] = te_f32x2_to_half(in[2 * k], in[2 * k + 1], dt);
        if (N == 8) *(uint4 *)((te_u16 *)p + i) = make_uint4(w[0], w[1], w[N / 2 - 2], w[N / 2 - 1]);
        else *(uint2 *)((te_u16 *)p + i) = make_uint2(w[0], w[1]);
    } else {
#pragma unroll
        for (int k = 0; k < N / 4; k++)
            w[k] = te_f32x2_to_fp8(in[4 * k], in[4 * k + 1], dt) |
                   (te_u32)te_f32x2_to_fp8(in[4 * k + 2], in[4 * k + 3], dt) << 16;
        if (N == 8) *(uint2 *)((te_u8 *)p + i) = make_uint2(w[0], w[1]);
        else *(te_u32 *)((te_u8 *)p + i) = w[0];
    }
}
TE_DEV void te_load8(const void *p, te_i64 i, int dt, float out[8]) { te_load_n<8>(p, i, dt, out); }
TE_DEV void te_store8(void *p, te_i64 i, int dt, const float in[8]) { te_store_n<8>(p, i, dt, in); }
// Stores the first n of eight numbers. `vector`: p + i is aligned as te_store8 requires. With UNROLL 1 the code is
// smaller.
template <int UNROLL = 8>
TE_DEV void te_store_part(void *p, te_i64 i, int dt, te_i64 n, bool vector, const float v[8]) {
    if (UNROLL > 1 && vector && n >= 8) return te_store8(p, i, dt, v);
#pragma unroll UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) te_store(p, i + k, dt, v[k]);
}

// ---- the format in the type -----------------------------------------------------------------------------------------

template <int FORMAT> TE_DEV te_raw<FORMAT> te_raw_zero() {
    te_raw<FORMAT> r;
#pragma unroll
    for (int j = 0; j < te_raw<FORMAT>::words; j++) r.w[j] = 0;
    return r;
}
// Loads eight elements of format dt. FORMAT is dt, or TE_F32. With TE_F32 the load converts to f32.
template <int FORMAT> TE_DEV te_raw<FORMAT> te_raw_load(const void *p, te_i64 i, int dt) {
    te_raw<FORMAT> r;
    if constexpr (FORMAT != TE_F32) {
        uint4 u = *(const uint4 *)((const te_u16 *)p + i);
        r.w[0] = u.x, r.w[1] = u.y, r.w[2] = u.z, r.w[3] = u.w;
    } else {
        float v[8];
        te_load8(p, i, dt, v);
#pragma unroll
        for (int k = 0; k < 8; k++) r.w[k] = __float_as_uint(v[k]);
    }
    return r;
}
// Like te_raw_load, for any alignment. Only the first n elements are loaded; the others become 0.
template <int FORMAT> TE_DEV te_raw<FORMAT> te_raw_load_part(const void *p, te_i64 i, int dt, te_i64 n) {
    te_raw<FORMAT> r = te_raw_zero<FORMAT>();
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= n) break;
        if constexpr (FORMAT != TE_F32) r.w[k >> 1] |= (te_u32)((const te_u16 *)p)[i + k] << (16 * (k & 1));
        else r.w[k] = __float_as_uint(te_load(p, i + k, dt));
    }
    return r;
}
// The way in which 16 bytes are loaded:
//   CONSTANT   Nothing writes the bytes while the kernel runs, so the compiler may move the load up.
//   ONCE       Like CONSTANT. The bytes are read only once, so they are not kept in the L1 cache.
//   HERE       The load stays here. Otherwise the compiler moves all loads of a loop to its start and spills.
enum te_load_hint { TE_LOAD_CONSTANT, TE_LOAD_ONCE, TE_LOAD_HERE };
#define TE__LOAD16(kind, w, at)                                                                               \
    kind ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"((w)[0]), "=r"((w)[1]), "=r"((w)[2]), "=r"((w)[3]) : "l"(at)
template <te_load_hint HINT> TE_DEV void te_load16(te_u32 *w, const void *at) {
    if constexpr (HINT == TE_LOAD_CONSTANT) asm(TE__LOAD16("ld.global.nc", w, at));
    else if constexpr (HINT == TE_LOAD_ONCE) asm(TE__LOAD16("ld.global.L1::no_allocate", w, at));
    else asm volatile(TE__LOAD16("ld.global", w, at) : "memory");
}
// Loads eight elements, starting with element i. p + i must be aligned to 16 bytes.
template <int FORMAT, te_load_hint HINT> TE_DEV te_raw<FORMAT> te_raw_load_hinted(const void *p, te_i64 i) {
    te_raw<FORMAT> r;
    const char *q = (const char *)p + i * te_size<FORMAT>;
#pragma unroll
    for (int k = 0; k < te_raw<FORMAT>::words; k += 4) te_load16<HINT>(r.w + k, q + 4 * k);
    return r;
}
// Returns element j. After unrolling, j must be a compile-time constant.
template <int FORMAT> TE_DEV float te_raw_get(const te_raw<FORMAT> &r, int j) {
    if constexpr (FORMAT == TE_F32) return __int_as_float((int)r.w[j]);
    if constexpr (FORMAT == TE_BF16)
        return __int_as_float((int)(j & 1 ? r.w[j >> 1] & 0xffff0000u : r.w[j >> 1] << 16));
    return te_f16_to_f32((te_u16)(r.w[j >> 1] >> (16 * (j & 1))));
}
// Call this function between two passes over r. The compiler then unpacks the elements in each pass. Elements that stay
// unpacked would take twice the registers.
template <int FORMAT, int N> TE_DEV void te_raw_seal(te_raw<FORMAT> (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < te_raw<FORMAT>::words; j++) asm volatile("" : "+r"(r[i].w[j]));
}

// Keeps the compiler from moving earlier loads down past this call. So all these loads start before the first loaded
// value is used.
TE_DEV void te_loads_go_first() { asm volatile("" ::: "memory"); }

// ---- maxima ---------------------------------------------------------------------------------------------------------

// Returns the maxima of the lower and of the upper 16-bit values of a and b. If one value is NaN, returns the other
// one.
TE_DEV te_u32 te_half2_max(te_u32 a, te_u32 b, int dt) {
    te_u32 c;
    if (dt == TE_BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
// Returns the largest |v[i]| of eight values; ignores NaN.
TE_DEV float te_largest8(const float v[8]) {
    float m[4];
#pragma unroll
    for (int j = 0; j < 4; j++) m[j] = fmaxf(fabsf(v[j]), fabsf(v[j + 4]));
    return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
}
