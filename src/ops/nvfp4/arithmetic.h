/* ops/nvfp4/arithmetic.h: the transform, the rounding and the errors of a block of 16 elements. The host and the
 * kernels both compile this file, and get the same bits. */
#ifndef TE__NVFP4_ARITHMETIC_H
#define TE__NVFP4_ARITHMETIC_H

/* Returns a * b, rounded. The host's compiler may fuse a plain a * b with a sum that follows, and then a * b is not
 * rounded. It cannot do this to te__fma. Adding -0 changes nothing. */
TE__BOTH float te__nvfp4_product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return te__fma(a, b, -0.0f);
#endif
}
TE__BOTH float te__nvfp4_sum(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
TE__BOTH float te__nvfp4_abs(float a) { return te__bits_f32(te__f32_bits(a) & 0x7fffffffu); }

/* The signs of the random Hadamard transform: element i is negated if bit number i is set. */
#define TE__NVFP4_SIGNS 0xd7e8u

#ifdef __CUDA_ARCH__
#define TE__NVFP4_UNROLL _Pragma("unroll")
#else
#define TE__NVFP4_UNROLL
#endif

/* Replaces v by H v / 4 in f32, where H is the Sylvester (Hadamard) matrix of order 16. The transform is its own
 * inverse. v is divided by 4 first, to avoid overflow. */
TE__BOTH void te__nvfp4_hadamard(float v[16]) {
    TE__NVFP4_UNROLL
    for (int i = 0; i < 16; i++) v[i] = te__nvfp4_product(v[i], 0.25f);
    TE__NVFP4_UNROLL
    for (int h = 1; h < 16; h *= 2)
        TE__NVFP4_UNROLL
        for (int i = 0; i < 16; i++)
            if (!(i & h)) {
                float a = v[i], b = v[i + h];
                v[i] = te__nvfp4_sum(a, b), v[i + h] = te__nvfp4_sum(a, -b);
            }
}
TE__BOTH void te__nvfp4_flip(float v[16], uint32_t signs) {
    TE__NVFP4_UNROLL
    for (int i = 0; i < 16; i++) v[i] = te__bits_f32(te__f32_bits(v[i]) ^ (signs >> i & 1u) << 31);
}


/* Returns s as an f32, rounded toward 0. |s| < 2^30. */
TE__BOTH float te__nvfp4_toward_zero(int32_t s) {
#ifdef __CUDA_ARCH__
    return __int2float_rz(s);
#else
    uint32_t m = s < 0 ? 0u - (uint32_t)s : (uint32_t)s, cut = 0;
    while (m >> 24 >> cut) cut++;
    m = m >> cut << cut;
    return s < 0 ? -(float)(int32_t)m : (float)(int32_t)m;
#endif
}
/* Replaces v by H v / 4, rounded to bf16. The sums are those of the tensor cores on which TransformerEngine computes
 * them (mma.sync on Hopper and Blackwell, tcgen05.mma):
 * - The 16 products of a sum are computed exactly.
 * - The products are truncated: bits more than 25 places below the leading bit of the largest product become 0.
 * - The truncated products are added up exactly.
 * - The sum is rounded toward 0 to f32.
 *
 * Each product is an element of v, times 1/4 or -1/4. So this function truncates each element once, and then adds up
 * integers. If v has infinities or NaNs, all its finite elements count as 0. */
TE__BOTH void te__nvfp4_transform_bf16(float v[16]) {
    uint32_t top = 0;
    int32_t t[16];
    float up, down, back = 1.0f;
    int i, h;
    TE__NVFP4_UNROLL
    for (i = 0; i < 16; i++) {
        uint32_t e = te__f32_bits(v[i]) & 0x7f800000u;
        top = e > top ? e : top;
    }
    if (top == 0x7f800000u) {
        TE__NVFP4_UNROLL
        for (i = 0; i < 16; i++) v[i] = (te__f32_bits(v[i]) & 0x7f800000u) == 0x7f800000u ? v[i] : 0.0f;
        te__nvfp4_hadamard(v);
        return;
    }
    if (top < 28u << 23) { /* `down` below would be subnormal: v is scaled up */
        top = 0;
        TE__NVFP4_UNROLL
        for (i = 0; i < 16; i++) {
            uint32_t e;
            v[i] = te__nvfp4_product(v[i], 18446744073709551616.0f); /* 2^64 */
            e = te__f32_bits(v[i]) & 0x7f800000u;
            top = e > top ? e : top;
        }
        back = 5.421010862427522e-20f; /* 2^-64 */
        if (top < 28u << 23) top = 28u << 23; /* v is all zeros */
    }
    up = te__bits_f32((279u << 23) - top);  /* 2^25 over the largest power of two in v: 2^(127 + 25 - e) */
    down = te__bits_f32(top - (27u << 23)); /* the reciprocal of `up`, times the factor of 1/4 */
    TE__NVFP4_UNROLL
    for (i = 0; i < 16; i++) t[i] = (int32_t)te__nvfp4_product(v[i], up);
    TE__NVFP4_UNROLL
    for (h = 1; h < 16; h *= 2)
        TE__NVFP4_UNROLL
        for (i = 0; i < 16; i++)
            if (!(i & h)) {
                int32_t a = t[i], b = t[i + h];
                t[i] = a + b, t[i + h] = a - b;
            }
    TE__NVFP4_UNROLL
    for (i = 0; i < 16; i++) {
        float sum = te__nvfp4_product(te__nvfp4_product(te__nvfp4_toward_zero(t[i]), down), back);
        v[i] = te__bf16_to_f32(te__f32_to_bf16(sum));
    }
}

/* Returns the code of y by stochastic rounding: the largest code not above |y| + (k / 256) * step, with the sign of
 * y. `k` is a random byte. `step` is the distance between neighbouring codes at |y|. NaN becomes 6. */
TE__BOTH uint8_t te__nvfp4_stochastic(float y, uint32_t k) {
    float m = te__nvfp4_abs(y), step = m < 2.0f ? 0.5f / 256 : m < 4.0f ? 1.0f / 256 : 2.0f / 256;
    float t = te__nvfp4_sum(m, te__nvfp4_product((float)(int32_t)k, step));
    /* for t of 1 or more, the code is made of the exponent and the first fraction bit of t */
    uint32_t code = t < 1.0f ? t >= 0.5f : (te__f32_bits(t) - (126u << 23)) >> 22;
    if (code > 7u) code = 7u;
    return (uint8_t)(m == m ? code | (te__f32_bits(y) >> 28 & 8u) : 7u);
}
/* Returns byte t of Philox's four words. */
TE__BOTH uint32_t te__nvfp4_random_byte(const uint32_t words[4], int t) {
    return words[t >> 2] >> (8 * (t & 3)) & 0xffu;
}

/* Returns |e|, or e * e if `squared`, where e is the error of quantizing x to `code`. d is the scale of the block.
 * `most` is 6 F, where F is the largest value that a block scale may have: 448 or 256. The decoded value is
 * code * d * amax / `most`.
 *
 * The tensor's scale is not used. It is limited to the largest f32, so it is not `most` / amax if amax is very
 * small. */
TE__BOTH float te__nvfp4_loss(float x, uint8_t code, float d, float amax, float most, int squared) {
    float value = te__div_f32(te__mul_f32(te__mul_f32(te__e2m1_to_f32(code), d), amax), most),
          e = te__nvfp4_sum(value, -x);
    return squared ? te__nvfp4_product(e, e) : te__nvfp4_abs(e);
}

/* Returns the factor that decodes the codes of a block: d * amax / (6 F). `most` is 6 F. An amax of 0 means a tensor
 * scale of 1. Then the factor is d. */
TE__BOTH float te__nvfp4_decode_factor(float d, float amax, float most, float one_over_most) {
    return te__mul_f32(te__mul_f32(d, amax == 0.0f ? most : amax), one_over_most);
}
TE__BOTH float te__nvfp4_decode_step(uint8_t block_code, float amax, float code_max) {
    float most = te__mul_f32(code_max, 6.0f);
    return te__nvfp4_decode_factor(te__e4m3_to_f32(block_code), amax, most, te__rcp_f32(most));
}

/* Returns the index of the scale of row i and group j of 16 elements. `groups` is a multiple of 4. Swizzled scales
 * lie in tiles of 128 x 4. */
TE__BOTH int64_t te__nvfp4_scale_at(int64_t i, int64_t j, int64_t groups, int swizzled) {
    return te__group_scale_at(swizzled, 0, groups, i, j);
}

#endif
