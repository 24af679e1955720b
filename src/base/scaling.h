/* base/scaling.h: computes scales from amaxes, and the index of MXFP8 and NVFP4 scales in memory. The host and kernels
 * get equal bits. This file must not depend on how elements lie in memory.
 *
 * Operations are correctly rounded IEEE operations in the order of TransformerEngine's kernels. On the GPU,
 * te__mul_f32, te__div_f32 and te__rcp_f32 keep the compiler from fusing or approximating an operation. On the host
 * these functions are plain C, and a compiler may fuse a product with an addition. So a caller that adds to a product
 * must use te__fma. */
#ifndef TE__SCALING_H
#define TE__SCALING_H

TE__BOTH float te__mul_f32(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

TE__BOTH float te__div_f32(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

TE__BOTH float te__rcp_f32(float a) {
#ifdef __CUDA_ARCH__
    return __frcp_rn(a);
#else
    return 1.0f / a;
#endif
}

#define TE__F32_MAX 3.402823466e+38f

/* Returns the scale of a tensor or block: fp8_max / amax. An amax below `epsilon` counts as epsilon. An amax of 0,
 * infinity or NaN gives 1. A quotient beyond f32 gives `limit`. power_of_two rounds the scale down. */
TE__BOTH float te__block_scale(float amax, float fp8_max, float epsilon, float limit, int power_of_two) {
    float scale;
    if (amax < epsilon) amax = epsilon;
    if (amax == 0.0f || !(amax <= TE__F32_MAX)) return 1.0f;
    scale = te__div_f32(fp8_max, amax);
    if (scale > TE__F32_MAX) scale = limit;
    return power_of_two ? te__bits_f32(te__f32_bits(scale) & 0xff800000u) : scale;
}

/* Returns the E8M0 code of the scale of MXFP8 elements. Rounding amax * fp8_max_inverse to f32 hides the error of
 * fp8_max_inverse: with E4M3, an amax of 448 * 2^k gives exactly 2^k. */
TE__BOTH uint8_t te__mxfp8_exponent(float amax, float fp8_max_inverse) {
    return te__f32_to_e8m0(te__mul_f32(amax, fp8_max_inverse));
}

/* RN(1 / 448) and RN(1 / 57344). */
#define TE__E4M3_MAX_INVERSE 2.232142956927418709e-3f
#define TE__E5M2_MAX_INVERSE 1.743861685099545866e-5f

/* Returns 2^(127 - e), the factor by which MXFP8 elements are multiplied before they are rounded. */
TE__BOTH float te__mxfp8_multiplier(uint8_t e) {
    return te__bits_f32(e == 0xffu ? 0x7fc00000u : e == 0xfeu ? 0x400000u : (uint32_t)(254 - e) << 23);
}

/* Returns S, the tensor scale of NVFP4: S * amax = 6 * code_max. code_max is the largest block scale, 448 or 256. */
TE__BOTH float te__nvfp4_tensor_scale(float amax, float code_max) {
    float scale = te__div_f32(te__mul_f32(code_max, 6.0f), amax);
    if (!(scale < TE__F32_MAX)) scale = TE__F32_MAX;
    return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

#define TE__ONE_SIXTH 0.16666667163372039794921875f /* RN(1 / 6) */

/* Returns the E4M3 code of a block's scale in NVFP4. A NaN stays NaN. */
TE__BOTH uint8_t te__nvfp4_block_code(float block_amax, float tensor_scale) {
    return te__f32_to_e4m3(te__mul_f32(block_amax, te__mul_f32(tensor_scale, TE__ONE_SIXTH)));
}
/* Returns the block scale with which block_amax becomes the code 6. Elements are divided by the scale, so 1.5 times
 * this scale makes block_amax the code 4 (4-over-6). te__nvfp4_block_code multiplies in another order, so the two
 * results may differ by rounding. */
TE__BOTH float te__nvfp4_base(float block_amax, float tensor_scale) {
    return te__mul_f32(te__div_f32(block_amax, 6.0f), tensor_scale);
}

/* Returns d / S, the factor that decodes a block's codes. d is the block's scale, S the tensor scale. */
TE__BOTH float te__nvfp4_step(uint8_t block_code, float tensor_scale) {
    return te__mul_f32(te__e4m3_to_f32(block_code), te__rcp_f32(tensor_scale));
}

/* Returns S / d, the factor for elements before rounding; d is the block's scale. Code 0 gives the largest f32; all
 * codes of such a block decode to 0. */
TE__BOTH float te__nvfp4_multiplier(uint8_t block_code, float tensor_scale) {
    float inverse = te__rcp_f32(te__nvfp4_step(block_code, tensor_scale));
    return inverse < TE__F32_MAX ? inverse : TE__F32_MAX;
}

/* Returns the index of the scale of group number `group` in line number `line`. A line is a row or a column of the
 * tensor, and is divided into groups.
 *   ld        number of elements from one row of the array of scales to the next
 *   down      true: the array of scales is [group][line]; false: it is [line][group]
 *   swizzled  true: the scales lie in tiles of 128 lines by 4 groups, whatever `down` is. ld is then the number of
 *             groups, a multiple of 4 */
TE__BOTH int64_t te__group_scale_at(int swizzled, int down, int64_t ld, int64_t line, int64_t group) {
    if (swizzled)
        return ((line >> 7) * (ld >> 2) + (group >> 2)) * 512 + (line & 31) * 16 + (line & 127) / 32 * 4 + (group & 3);
    return down ? group * ld + line : line * ld + group;
}

#endif
