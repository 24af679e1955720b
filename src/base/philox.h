/* base/philox.h: random numbers of Philox4x32 (ten rounds by default), with uniform and normal distributions. The host
 * and kernels get equal bits.
 *
 * Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
 *
 * For equal bits, no compiler may rearrange the arithmetic: some would fuse a plain a * b + c, others not. So each
 * float operation is one of three:
 *     exact: a conversion of a small integer, or a product with a power of two
 *     an explicit fused multiply-add
 *     the correctly rounded square root */
#ifndef TE__PHILOX_H
#define TE__PHILOX_H

#if defined(__MINGW32__) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
/* Replaces MinGW's fmaf, which rounds twice. The product is exact in double. The sum is rounded to odd, so rounding to
 * float is correct. */
static inline float te__exact_fmaf(float a, float b, float c) {
    volatile double product = (double)a * b, sum = product + c; /* volatile makes the x87 round to 64 bits too */
    volatile double back = sum - product, error = (product - (sum - back)) + (c - back);
    double kept = sum;
    uint64_t bits;
    memcpy(&bits, &kept, sizeof bits);
    if (error != 0 && error - error == 0 && !(bits & 1)) bits += (error > 0) == (kept > 0) ? 1 : UINT64_MAX;
    memcpy(&kept, &bits, sizeof bits);
    return (float)kept;
}
#define TE__FMAF te__exact_fmaf
#else
#define TE__FMAF fmaf
#endif

/* Returns a * b + c with one rounding. */
TE__BOTH float te__fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return TE__FMAF(a, b, c);
#endif
}

TE__BOTH void te__philox_round(uint32_t c[4], uint32_t k0, uint32_t k1) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
    c[0] = n0, c[1] = (uint32_t)p1, c[2] = n2, c[3] = (uint32_t)p0;
}
#define TE__PHILOX_STEP0 0x9E3779B9u /* added to the key's halves after each round */
#define TE__PHILOX_STEP1 0xBB67AE85u
/* Computes four random words. The key is `seed`. The lower half of the counter is `block`, and the upper half is
 * `offset`. */
TE__BOTH void te__philox_rounds(int rounds, uint64_t seed, uint64_t offset, uint64_t block, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    out[0] = (uint32_t)block, out[1] = (uint32_t)(block >> 32), out[2] = (uint32_t)offset,
    out[3] = (uint32_t)(offset >> 32);
    for (int round = 0; round < rounds; round++) {
        te__philox_round(out, k0, k1);
        k0 += TE__PHILOX_STEP0, k1 += TE__PHILOX_STEP1;
    }
}
TE__BOTH void te__philox(uint64_t seed, uint64_t offset, uint64_t block, uint32_t out[4]) {
    te__philox_rounds(10, seed, offset, block, out);
}

/* Applies a random state in device memory, {seed, offset}: replaces *seed, and adds to *offset. `state` may be NULL. */
TE__BOTH void te__rng_read(const void *state, uint64_t *seed, uint64_t *offset) {
    const uint64_t *words = (const uint64_t *)state;
    if (!words) return;
    *seed = words[0];
    *offset += words[1];
}

/* Returns a number in [0, 1), a multiple of 2^-24. */
TE__BOTH float te__uniform01(uint32_t x) { return (float)(int32_t)(x >> 8) * 5.9604644775390625e-8f; }

/* Returns ln u for 2^-100 < u <= 1, with a relative error of about 1e-7. u = 2^e (1 + f), with 1 + f in [sqrt(1/2),
 * sqrt(2)]. The polynomial is a Chebyshev fit of (ln(1 + f) - f) / f^2. */
TE__BOTH float te__ln_unit(float u) {
    uint32_t i = te__f32_bits(u) - 0x3f3504f3u + 0x3f800000u; /* its exponent bits are e + 127, with e such that 1 + f
                                                               * is at least sqrt(1/2) */
    int32_t e = (int32_t)(i >> 23) - 127;
    float f = te__bits_f32((i & 0x7fffffu) + 0x3f3504f3u) - 1.0f; /* exact */
    float q = 0.0878726542f;
    q = te__fma(q, f, -0.141596466f);
    q = te__fma(q, f, 0.14834787f);
    q = te__fma(q, f, -0.165884882f);
    q = te__fma(q, f, 0.199720502f);
    q = te__fma(q, f, -0.250011474f);
    q = te__fma(q, f, 0.333336711f);
    q = te__fma(q, f, -0.5f);
    float ff = te__fma(f, f, 0.0f);
    return te__fma((float)e, 0.693147182f, te__fma(ff, q, f));
}

/* Computes the sine and the cosine of t / 2^32 turns. x, the rest after the nearest quarter turn, is in [-1/8, 1/8].
 * Chebyshev fits in x^2 give sin(2 pi x) / x and (cos(2 pi x) - 1) / x^2. */
TE__BOTH void te__sincos_turn(uint32_t t, float *s, float *c) {
    uint32_t quarter = (t + 0x20000000u) >> 30;
    float x = (float)(int32_t)(t - (quarter << 30)) * 2.3283064365386963e-10f;
    float z = te__fma(x, x, 0.0f);
    float p = -75.4016113f;
    p = te__fma(p, z, 81.5925446f);
    p = te__fma(p, z, -41.3416634f);
    p = te__fma(p, z, 6.28318548f);
    float q = 59.4241066f;
    q = te__fma(q, z, -85.448822f);
    q = te__fma(q, z, 64.9393692f);
    q = te__fma(q, z, -19.7392082f);
    float sine = te__fma(p, x, 0.0f), cosine = te__fma(q, z, 1.0f);
    float a = quarter & 1u ? cosine : sine, b = quarter & 1u ? sine : cosine;
    *s = quarter & 2u ? -a : a;
    *c = (quarter + 1u) & 2u ? -b : b;
}

/* Computes two independent standard normal numbers (Box and Muller). The radius comes from `a`, the angle from `b`.
 * (0, 1] is divided into 2^32 equal intervals, and u is the middle of interval number `a`. So u is at least 2^-33, and
 * the results lie between -6.77 and 6.77. */
TE__BOTH void te__normal2(uint32_t a, uint32_t b, float out[2]) {
    float u = te__fma((float)a, 2.3283064365386963e-10f, 1.16415321826934814e-10f);
    float t = -2.0f * te__ln_unit(u);
#ifdef __CUDA_ARCH__
    float r = __fsqrt_rn(t);
#else
    float r = sqrtf(t);
#endif
    float s, c;
    te__sincos_turn(b, &s, &c);
    out[0] = te__fma(r, c, 0.0f);
    out[1] = te__fma(r, s, 0.0f);
}

#endif
