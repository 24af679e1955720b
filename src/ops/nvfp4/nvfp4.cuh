// ops/nvfp4/nvfp4.cuh: turns 16 elements into 16 codes and their scale. This file may use arithmetic.h. It must not
// depend on where the elements lie.
#pragma once
#include "device/base.cuh"
#include "ops/nvfp4/arithmetic.h"
#include "ops/nvfp4/kargs.h"

// Returns the larger of a and b, or NaN if one of them is NaN.
TE_DEV float te_nvfp4_max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
TE_DEV float te_nvfp4_largest(const float v[16]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) largest = fmaxf(largest, fabsf(v[i]));
    return largest;
}

// te_nvfp4_mul_sat returns a * b, and te_nvfp4_fma_sat returns a * b + c, both clamped to 0 .. 1.
TE_DEV float te_nvfp4_mul_sat(float a, float b) {
    float r;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
TE_DEV float te_nvfp4_fma_sat(float a, float b, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
// Rounds four magnitudes y (>= 0, no NaN) to codes in the low 16 bits. The first code is in the lowest four bits. The
// code is piecewise linear in y:
//
//   2 y for y <= 2,  y + 2 for 2 <= y <= 4,  y / 2 + 4 for 4 <= y <= 6
//
// So the code is a sum of three terms: 4 s(y / 2) + 2 s(y / 2 - 1) + s(y / 2 - 2), where s clamps to 0 .. 1. At most
// one of the three s lies between 0 and 1, so at most one term has a fraction. The terms are added to 2^23, where an
// f32 holds only integers. So the sum is rounded to nearest with ties to even codes, or down if `down` is set.
// Multiplying by 16 makes space for the next code.
template <bool down> TE_DEV float te_nvfp4_add(float a, float b, float c) {
    return down ? __fmaf_rd(a, b, c) : __fmaf_rn(a, b, c);
}
template <bool down> TE_DEV te_u32 te_nvfp4_pack4(const float y[4]) {
    float r = 8388608.0f;
#pragma unroll
    for (int k = 3; k >= 0; k--) {
        if (k < 3) r = __fmaf_rn(r, 16.0f, -15.0f * 8388608.0f);
        r = te_nvfp4_add<down>(te_nvfp4_mul_sat(y[k], 0.5f), 4.0f, r);
        r = te_nvfp4_add<down>(te_nvfp4_fma_sat(y[k], 0.5f, -1.0f), 2.0f, r);
        r = te_nvfp4_add<down>(te_nvfp4_fma_sat(y[k], 0.5f, -2.0f), 1.0f, r);
    }
    return __float_as_uint(r);
}
// Returns the signs of eight numbers, each at the place of the sign bit in its code.
TE_DEV te_u32 te_nvfp4_signs8(const float v[8]) {
    te_u32 w[8];
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = __float_as_uint(v[i]);
    te_u32 even = __byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[4], w[6], 0x0073), 0x5410);
    te_u32 odd = __byte_perm(__byte_perm(w[1], w[3], 0x0073), __byte_perm(w[5], w[7], 0x0073), 0x5410);
    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}
// Returns the codes of eight products v * multiplier. The first code is in the lowest four bits. No v may be NaN.
TE_DEV te_u32 te_nvfp4_pack8(const float v[8], float multiplier) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = __fmul_rn(fabsf(v[i]), multiplier);
    return __byte_perm(te_nvfp4_pack4<false>(y), te_nvfp4_pack4<false>(y + 4), 0x5410) | te_nvfp4_signs8(v);
}
// Returns eight codes with the stochastic rounding of te__nvfp4_stochastic. `random` has a byte k for each element.
//
// te__nvfp4_stochastic adds (k / 256) * step to |y|, where y is v * multiplier, and `step` is the distance between
// neighbouring codes at |y|. Here the same summand is (k / 512) * twice, where `twice` is 2 * step. `twice` is 1 for
// |y| < 2, otherwise the largest power of two not above |y|. For |y| > 8 the step does not matter, since the largest
// code stands for 6. With the byte k in its last bits, the float 16384 becomes 16384 + k / 512. Subtracting 16384 is
// exact.
TE_DEV te_u32 te_nvfp4_pack8_stochastic(const float v[8], float multiplier, const te_u32 random[2]) {
    float t[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float y = __fmul_rn(fabsf(v[i]), multiplier),
              twice = __uint_as_float(__float_as_uint(fmaxf(y, 1.0f)) & 0x7f800000u);
        float k = __uint_as_float(__byte_perm(random[i >> 2], 0x46800000u, 0x7650 | (i & 3))) - 16384.0f;
        t[i] = __fmaf_rn(k, twice, y);
    }
    return __byte_perm(te_nvfp4_pack4<true>(t), te_nvfp4_pack4<true>(t + 4), 0x5410) | te_nvfp4_signs8(v);
}

// Factors of a tensor: S is the tensor's scale, and F is the largest block scale. Codes and scales that are computed
// from these factors equal those of arithmetic.h. No amax may be NaN.
struct te_nvfp4_tensor {
    float sixth, inverse;    // S / 6 and 1 / S
    float scale, amax, most; // S, the amax that S comes from, and 6 F; only 4-over-6 reads them
};
TE_DEV te_nvfp4_tensor te_nvfp4_tensor_of(float amax, float code_max) {
    float scale = te__nvfp4_tensor_scale(amax, code_max);
    te_nvfp4_tensor s = {__fmul_rn(scale, TE__ONE_SIXTH), te__rcp_f32(scale), scale, amax, __fmul_rn(code_max, 6.0f)};
    return s;
}
TE_DEV te_u8 te_nvfp4_to_e4m3(float f) { return (te_u8)te_f32x2_to_fp8(f, 0.0f, TE_F8E4M3); }
TE_DEV te_u8 te_nvfp4_block_code(float amax, const te_nvfp4_tensor &s) {
    return te_nvfp4_to_e4m3(__fmul_rn(amax, s.sixth));
}
TE_DEV float te_nvfp4_scale_value(te_u8 d) {
#if TE_HAS_FP8_CVT
    te_u32 h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((te_u16)d));
    return te_f16_to_f32((te_u16)h);
#else
    return te__e4m3_to_f32(d);
#endif
}
TE_DEV float te_nvfp4_step(te_u8 d, const te_nvfp4_tensor &s) { return __fmul_rn(te_nvfp4_scale_value(d), s.inverse); }
TE_DEV float te_nvfp4_multiplier(te_u8 d, const te_nvfp4_tensor &s) {
    return fminf(te__rcp_f32(te_nvfp4_step(d, s)), TE_FLT_MAX); // never NaN: a step is finite and not negative
}

// Compares two pairs of 16-bit floats. Each half of the result has the larger magnitude, or is NaN if one float is NaN.
// Its sign has no meaning.
TE_DEV te_u32 te_nvfp4_max2(te_u32 a, te_u32 b, int dt) {
    te_u32 r;
#if __CUDA_ARCH__ >= 860
    if (dt == TE_BF16) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    a &= 0x7fff7fffu, b &= 0x7fff7fffu;
    if (dt == TE_BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
    return r;
}
// Returns one element of a word: the word (dt is f32), its lower half (half = 0) or its upper half.
TE_DEV float te_nvfp4_of_word(te_u32 w, int half, int dt) {
    if (dt == TE_F32) return __uint_as_float(w);
    if (dt == TE_BF16) return __uint_as_float(__byte_perm(w, 0, half ? 0x3244 : 0x1044));
    return te_f16_to_f32((te_u16)(w >> (16 * half)));
}
// Returns the largest magnitude of 16 elements, or NaN if one of them is NaN.
TE_DEV float te_nvfp4_amax(const float v[16]) {
    float amax = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 16; i++) amax = te_nvfp4_max_nan(amax, fabsf(v[i]));
    return amax;
}

// How one copy is rounded.
struct te_nvfp4_rounding {
    bool stochastic;
    bool nan; // a NaN makes the scale of its block NaN
    int four;
    te_u64 seed, offset;
    const void *rng; // te__rng_read
};

// Draws the 16 random bytes of a block. The seed and the offset are read again for each block, because registers are
// scarce.
TE_DEV void te_nvfp4_draw(const te_nvfp4_rounding &how, te_u64 block, te_u32 random[4]) {
    uint64_t seed = how.seed, offset = how.offset;
    te__rng_read(how.rng, &seed, &offset);
    te__philox(seed, offset, block, random);
}

TE_DEV te_u8 te_nvfp4_code(const te_nvfp4_rounding &how, float y, const te_u32 random[4], int i) {
    return how.stochastic ? te__nvfp4_stochastic(y, te__nvfp4_random_byte(random, i)) : te__f32_to_e2m1(y);
}
// Quantizes 16 elements one by one. A block with a NaN needs this. With stochastic rounding, a block in which an
// element times `multiplier` is not finite needs this too.
TE_DEV uint2 te_nvfp4_slow(const te_nvfp4_rounding &how, const float v[16], float multiplier, const te_u32 random[4]) {
    te_u32 w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        w[i >> 3] |= (te_u32)te_nvfp4_code(how, __fmul_rn(v[i], multiplier), random, i) << (4 * (i & 7));
    return make_uint2(w[0], w[1]);
}
TE_DEV uint2 te_nvfp4_codes(const te_nvfp4_rounding &how, const float v[16], float multiplier, const te_u32 random[4],
                            bool slow) {
    if (slow) return te_nvfp4_slow(how, v, multiplier, random);
    if (how.stochastic)
        return make_uint2(te_nvfp4_pack8_stochastic(v, multiplier, random),
                          te_nvfp4_pack8_stochastic(v + 8, multiplier, random + 2));
    return make_uint2(te_nvfp4_pack8(v, multiplier), te_nvfp4_pack8(v + 8, multiplier));
}
// Returns the error (see te__nvfp4_loss) of quantizing 16 elements with the block scale d.
TE_DEV float te_nvfp4_error(const te_nvfp4_rounding &how, const float v[16], te_u8 d, const te_nvfp4_tensor &s,
                            const te_u32 random[4]) {
    float multiplier = te_nvfp4_multiplier(d, s), scale = te_nvfp4_scale_value(d), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        te_u8 code = te_nvfp4_code(how, __fmul_rn(v[i], multiplier), random, i);
        sum = __fadd_rn(sum, te__nvfp4_loss(v[i], code, scale, s.amax, s.most, how.four == TE_4OVER6_MSE));
    }
    return sum;
}
// Returns the better of 4-over-6's two block scales. `amax` is the amax of the block. `tile`: the block is a 16 x 16
// tile in 16 lanes, whose errors are summed.
TE_DEV te_u8 te_nvfp4_four_over_six(const te_nvfp4_rounding &how, const float v[16], float amax,
                                    const te_nvfp4_tensor &s, const te_u32 random[4], bool tile) {
    float base = te__nvfp4_base(amax, s.scale), least = 0.0f;
    te_u8 best = 0;
#pragma unroll 1
    for (int k = 0; k < 2; k++) { // not unrolled: the body has sixteen divisions
        te_u8 d = te_nvfp4_to_e4m3(__fmul_rn(base, k ? 1.5f : 1.0f));
        float lost = te_nvfp4_error(how, v, d, s, random);
#pragma unroll
        for (int half = 8; tile && half; half >>= 1)
            lost = __fadd_rn(lost, __shfl_down_sync(0xffffffffu, lost, half, 16));
        if (k == 0 || lost < least) best = d, least = lost;
    }
    return best;
}
// Returns the codes of one block of 16 elements, and writes its scale to *scale. `amax` is the result of te_nvfp4_amax.
//
// `tile`         the block belongs to a 16 x 16 tile, whose scale is `tile_code`
// `block`        index of the block in the row-wise or column-wise copy
// `multipliers`  NULL, or a multiplier for each of the 128 possible codes of a block scale
TE_DEV uint2 te_nvfp4_block(const te_nvfp4_rounding &how, const float v[16], float amax, const te_nvfp4_tensor &s,
                            const float *multipliers, bool tile, const int &tile_code, te_u64 block, te_u8 *scale) {
    te_u32 random[4];
    if (how.stochastic) te_nvfp4_draw(how, block, random);
    bool nan = amax != amax;
    if (nan && how.nan) {
        *scale = 0x7f;
        return make_uint2(0x77777777u, 0x77777777u);
    }
    if (nan) amax = te_nvfp4_largest(v);
    te_u8 d = tile       ? (te_u8)tile_code
              : how.four ? te_nvfp4_four_over_six(how, v, amax, s, random, false)
                         : te_nvfp4_block_code(amax, s);
    *scale = d;
    float multiplier = multipliers ? multipliers[d] : te_nvfp4_multiplier(d, s);
    return te_nvfp4_codes(how, v, multiplier, random,
                          nan || (how.stochastic && !(__fmul_rn(amax, multiplier) <= TE_FLT_MAX)));
}

// Transforms 16 elements of format dt for the column-wise copy. `rht`: 0 none, 1 with random signs, 2 without signs.
//
// Usually each sum fits in 24 bits. Then plain f32 sums are exact, and equal to those of te__nvfp4_transform_bf16. NaN
// stays NaN.
TE_DEV void te_nvfp4_transform(float v[16], int rht, int dt) {
    if (!rht) return;
    if (rht == 1) te__nvfp4_flip(v, TE__NVFP4_SIGNS);
    float most = fabsf(v[0]), least = most;
#pragma unroll
    for (int i = 1; i < 16; i++) most = fmaxf(most, fabsf(v[i])), least = fminf(least, fabsf(v[i]));
    te_u32 top = __float_as_uint(most) >> 23, spread = top - (__float_as_uint(least) >> 23);
    // a sum of 16 numbers has 4 bits more than the numbers, which have 8 (bf16) or 11 (f16)
    if (dt == TE_F32 || spread > (dt == TE_BF16 ? 12 : 9) || top > 249) return te__nvfp4_transform_bf16(v);
#pragma unroll
    for (int h = 1; h < 16; h *= 2)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (!(i & h)) {
                float a = v[i], b = v[i + h];
                v[i] = __fadd_rn(a, b), v[i + h] = __fsub_rn(a, b);
            }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        // + 0 turns a -0 into 0
        te_u32 pair = te_f32x2_to_half(__fmaf_rn(v[i], 0.25f, 0.0f), __fmaf_rn(v[i + 1], 0.25f, 0.0f), TE_BF16);
        v[i] = te_nvfp4_of_word(pair, 0, TE_BF16), v[i + 1] = te_nvfp4_of_word(pair, 1, TE_BF16);
    }
}
