// ops/gemm/decode.cuh: multiplies MXFP8 and NVFP4 codes by their scales, with bf16 results. Results are exact, except
// that bits below 2^-133 (the smallest positive bf16) are lost.
#pragma once
#include "device/mma.cuh"

// Decodes two FP8 codes of a word, the lower two (half = 0) or the upper two (half = 1). Returns two bf16. The lower
// two bytes of `e` are the codes' E8M0 scales.
TE_DEV te_u32 te_decode_fp8x2(te_u32 codes, int half, int dt, te_u32 e) {
    te_u32 h = te_fp8x2_to_f16(codes, half, dt);
    float low = te_f16_to_f32((te_u16)h) * te__e8m0_to_f32((te_u8)e),
          high = te_f16_to_f32((te_u16)(h >> 16)) * te__e8m0_to_f32((te_u8)(e >> 8));
    return te_f32x2_to_half(low, high, TE_BF16);
}

// Returns a word with two equal bf16: the value of an E4M3 scale.
TE_DEV te_u32 te_decode_fp4_scale(te_u8 e4m3) {
    float scale = te_f16_to_f32((te_u16)te_fp8x2_to_f16(e4m3, 0, TE_F8E4M3));
    return te_f32x2_to_half(scale, scale, TE_BF16);
}
// Multiplies two bf16 by two bf16 and rounds the products.
TE_DEV te_u32 te_decode_times(te_u32 pair, te_u32 factors) {
    te_u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(factors), "r"(0x80008000u));
    return r;
}
// Decodes the two FP4 codes in byte i of `codes`, times `scale`, into two bf16. The bits S.EE.M of a code, moved to
// S.000000EE.M000000, are its value times 2^-126 as bf16, denormals included.
TE_DEV te_u32 te_decode_fp4x2(te_u32 codes, int i, te_u32 scale) {
    te_u32 two = codes >> (8 * i);
    two = (two & 15) | (two & 0xf0) << 12;
    two = (two & 0x00080008u) << 12 | (two & 0x00070007u) << 6;
    return te_decode_times(te_decode_times(two, 0x7e807e80u), scale);
}

#define TE_DECODE_FP4 6.103515625e-5f /* 2^-14 */
// Decodes the eight FP4 codes of a word, times `scale` (two equal f16) and 2^-14, into the f16 pairs of codes (0, 4),
// (1, 5), (2, 6) and (3, 7). The bits S.EE.M of a code, moved to S.000EE.M000000000, are its value times 2^-14 as f16.
// A code is a multiple of 2^-1 and an E4M3 scale one of 2^-9, so that the product, of 6 bits, is one of 2^-24: exact.
TE_DEV void te_decode_fp4x8(te_u32 codes, te_u32 scale, te_u32 out[4]) {
    te_u32 even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu),
           odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
    out[0] = __byte_perm(even, 0, 0x2404), out[1] = __byte_perm(odd, 0, 0x2404);
    out[2] = even & 0xff00ff00u, out[3] = odd & 0xff00ff00u;
#pragma unroll
    for (int i = 0; i < 4; i++) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(out[i]) : "r"(scale));
}
