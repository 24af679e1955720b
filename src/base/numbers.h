/* base/numbers.h: conversions of bf16, f16, e4m3, e5m2, e8m0 and e2m1 from and to f32, for the host and kernels.
 *
 * Every conversion is integer arithmetic on the bits of the f32. So compiler flags and rounding modes cannot change a
 * result, and loops vectorize. The results are those of the GPU's cvt instructions: every NaN becomes the one positive
 * NaN code of the format (f32: 0x7fffffff). */
#ifndef TE__NUMBERS_H
#define TE__NUMBERS_H

/* The types and attributes of this header. NVRTC has no <stdint.h>. If nvcc compiles te.h, functions are for host and
 * device. */
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#define TE__BOTH __device__ __forceinline__
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __CUDACC__
#define TE__BOTH static __host__ __device__ __forceinline__
#else
#define TE__BOTH static inline
#endif
#endif

TE__BOTH uint32_t te__f32_bits(float f) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
#endif
}

TE__BOTH float te__bits_f32(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
#endif
}

/* Rounds |f| to a smaller float format, to nearest, ties to even. `magnitude` is the bits of f without the sign. The
 * format has `man` mantissa bits. Its smallest normal number is 2^(min_exp - 127). Returns the code as if the exponent
 * had no upper limit: the caller must limit the code.
 *
 * The further a value lies below the normal range of the format, the further its significand (with the implicit bit) is
 * shifted right. A carry out of the mantissa increases the exponent. Subnormal numbers of f32 (below 2^-126) get an
 * implicit bit too. This does no harm, because all of them round to 0. */
TE__BOTH uint32_t te__round_small(uint32_t magnitude, int man, int min_exp) {
    int e = (int)(magnitude >> 23);
    int below = e < min_exp ? min_exp - e : 0;
    int above = e < min_exp ? 0 : e - min_exp;
    int shift = 23 - man + below;
    if (shift > 31) shift = 31;
    uint32_t m = (magnitude & 0x7fffffu) | 0x800000u;
    uint32_t half = (1u << (shift - 1)) - 1 + (m >> shift & 1u);
    return ((m + half) >> shift) + ((uint32_t)above << man);
}

/* ---- bf16: the upper half of an f32 ---- */

TE__BOTH float te__bf16_to_f32(uint16_t h) { return te__bits_f32((uint32_t)h << 16); }

TE__BOTH uint16_t te__f32_to_bf16(float f) {
    uint32_t u = te__f32_bits(f);
    uint32_t r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : r);
}

/* ---- f16: IEEE half, overflow goes to infinity ---- */

TE__BOTH float te__f16_to_f32(uint16_t h) {
    uint32_t m = h & 0x7fffu, sign = m > 0x7c00u ? 0u : (uint32_t)(h & 0x8000u) << 16;
    uint32_t normal = (m << 13) + (112u << 23);
    uint32_t special = m > 0x7c00u ? 0x7fffffffu : 0x7f800000u; /* every NaN becomes the same NaN, as in hardware */
    uint32_t tiny = te__f32_bits((float)(int)m * 5.9604644775390625e-8f); /* m 2^-24, exact */
    return te__bits_f32(sign | (m < 0x400u ? tiny : m >= 0x7c00u ? special : normal));
}

TE__BOTH uint16_t te__f32_to_f16(float f) {
    uint32_t u = te__f32_bits(f), a = u & 0x7fffffffu;
    uint32_t r = te__round_small(a, 10, 113);
    r = (r > 0x7c00u ? 0x7c00u : r) | (u >> 16 & 0x8000u);
    return (uint16_t)(a > 0x7f800000u ? 0x7fffu : r);
}

/* ---- e4m3: largest 448, no infinity, NaN = S.1111.111; saturates ---- */

TE__BOTH float te__e4m3_to_f32(uint8_t c) {
    uint32_t sign = (uint32_t)(c & 0x80u) << 24, m = c & 0x7fu;
    uint32_t normal = (m << 20) + (120u << 23);
    uint32_t tiny = te__f32_bits((float)(int)m * 0.001953125f); /* m 2^-9, exact */
    return te__bits_f32(m == 0x7fu ? 0x7fffffffu : sign | (m < 8u ? tiny : normal));
}

TE__BOTH uint8_t te__f32_to_e4m3(float f) {
    uint32_t u = te__f32_bits(f), a = u & 0x7fffffffu;
    uint32_t r = te__round_small(a, 3, 121);
    r = (r > 0x7eu ? 0x7eu : r) | (u >> 24 & 0x80u);
    return (uint8_t)(a > 0x7f800000u ? 0x7fu : r);
}

/* ---- e5m2: the upper half of an f16; largest 57344; saturates, infinity included ---- */

TE__BOTH float te__e5m2_to_f32(uint8_t c) { return te__f16_to_f32((uint16_t)(c << 8)); }

TE__BOTH uint8_t te__f32_to_e5m2(float f) {
    uint32_t u = te__f32_bits(f), a = u & 0x7fffffffu;
    uint32_t r = te__round_small(a, 2, 113);
    r = (r > 0x7bu ? 0x7bu : r) | (u >> 24 & 0x80u);
    return (uint8_t)(a > 0x7f800000u ? 0x7fu : r);
}

/* ---- e8m0: a power of two, 2^(c - 127); 0xff = NaN. The conversion drops the sign and rounds up, so that elements
 * divided by the scale fit. A number below 2^-127 gives code 0. Infinity gives code 0xfe ---- */

TE__BOTH float te__e8m0_to_f32(uint8_t c) {
    return te__bits_f32(c == 0 ? 0x400000u : c == 0xffu ? 0x7fffffffu : (uint32_t)c << 23);
}

TE__BOTH uint8_t te__f32_to_e8m0(float f) {
    uint32_t a = te__f32_bits(f) & 0x7fffffffu;
    uint32_t up = (a >> 23) + ((a & 0x7fffffu) != 0);
    if (a <= 0x400000u) up = 0; /* the subnormals up to 2^-127 */
    if (up > 0xfeu) up = 0xfeu;
    return (uint8_t)(a > 0x7f800000u ? 0xffu : up);
}

/* ---- e2m1: 0 0.5 1 1.5 2 3 4 6 and their negatives, in the low four bits; saturates; NaN becomes +6 ---- */

TE__BOTH float te__e2m1_to_f32(uint8_t c) {
    uint32_t sign = (uint32_t)(c & 8u) << 28, m = c & 7u;
    uint32_t normal = (m << 22) + (126u << 23);
    return te__bits_f32(sign | (m < 2u ? m * (126u << 23) : normal));
}

TE__BOTH uint8_t te__f32_to_e2m1(float f) {
    uint32_t u = te__f32_bits(f), a = u & 0x7fffffffu;
    uint32_t r = te__round_small(a, 1, 127);
    r = (r > 7u ? 7u : r) | (u >> 28 & 8u);
    return (uint8_t)(a > 0x7f800000u ? 7u : r);
}

#endif
