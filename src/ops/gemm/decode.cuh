// ops/gemm/decode.cuh: multiplies MXFP8 and NVFP4 codes by their scales and gives bf16. The products are exact: codes
// and E4M3 scales have at most 4 significant bits each, bf16 has 8, and f32's exponents; only bits below 2^-133 are
// lost.
#pragma once
#include "device/mma.cuh"

// Returns the lower (half = 0) or upper two of four fp8 codes, times their scales, as bf16. e: two E8M0 scales, in the
// lower two bytes.
TE_DEV te_u32 te_decode_fp8x2(te_u32 codes, int half, int dt, te_u32 e) {
    te_u32 h = te_fp8x2_to_f16(codes, half, dt);
    float low = te_f16_to_f32((te_u16)h) * te__e8m0_to_f32((te_u8)e),
          high = te_f16_to_f32((te_u16)(h >> 16)) * te__e8m0_to_f32((te_u8)(e >> 8));
    return te_f32x2_to_half(low, high, TE_BF16);
}

// Returns an E4M3 scale as a pair of equal bf16.
TE_DEV te_u32 te_decode_fp4_scale(te_u8 e4m3) {
    float scale = te_f16_to_f32((te_u16)te_fp8x2_to_f16(e4m3, 0, TE_F8E4M3));
    return te_f32x2_to_half(scale, scale, TE_BF16);
}
// Multiplies two pairs of bf16, with rounding.
TE_DEV te_u32 te_decode_times(te_u32 pair, te_u32 factors) {
    te_u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(factors), "r"(0x80008000u));
    return r;
}
// Returns the two fp4 codes in byte `i` of `codes`, times their scale, as bf16. Moving the bits S.EE.M to
// S.000000EE.M000000 gives the value times 2^-126, denormals included.
TE_DEV te_u32 te_decode_fp4x2(te_u32 codes, int i, te_u32 scale) {
    te_u32 two = codes >> (8 * i);
    two = (two & 15) | (two & 0xf0) << 12;
    two = (two & 0x00080008u) << 12 | (two & 0x00070007u) << 6;
    return te_decode_times(te_decode_times(two, 0x7e807e80u), scale);
}
