// ops/gemm/decode.cuh: MXFP8 and NVFP4 codes times their scales as bf16. Exact: a code has at most 4 significant bits, an E4M3 scale too, and bf16 has 8
// and f32's exponents; only bits below 2^-133 are lost.
#pragma once
#include "device/mma.cuh"

// The index of the scale of group `group` of line `line`; groups run along lines. ld: from one row of scales to the next; down: groups are rows.
TE_DEV te_i64 te_decode_scale_at(int swizzled, int down, te_i64 ld, te_i64 line, te_i64 group) {
    if (swizzled) return ((line >> 7) * (ld >> 2) + (group >> 2)) * 512 + (line & 31) * 16 + (line & 127) / 32 * 4 + (group & 3);
    return down ? group * ld + line : line * ld + group;
}

// The lower (half = 0) or upper two of four fp8 codes times their scales e, E8M0 in the lower two bytes.
TE_DEV te_u32 te_decode_fp8x2(te_u32 codes, int half, int dt, te_u32 e) {
    te_u32 h = te_fp8x2_to_f16(codes, half, dt), r;
    float low = te_f16_to_f32((te_u16)h) * te__e8m0_to_f32((te_u8)e), high = te_f16_to_f32((te_u16)(h >> 16)) * te__e8m0_to_f32((te_u8)(e >> 8));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// An E4M3 scale as two bf16.
TE_DEV te_u32 te_decode_fp4_scale(te_u8 e4m3) {
    float scale = te_f16_to_f32((te_u16)te_fp8x2_to_f16(e4m3, 0, TE_F8E4M3));
    te_u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(scale), "f"(scale));
    return r;
}
// Both halves times a factor, rounded: bf16 pairs.
TE_DEV te_u32 te_decode_times(te_u32 pair, te_u32 factors) {
    te_u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(factors), "r"(0x80008000u));
    return r;
}
// Byte `i` of a word of fp4 codes, two of them, times their scale. S.EE.M moved to S.000000EE.M000000 is the value times 2^-126, denormals included.
TE_DEV te_u32 te_decode_fp4x2(te_u32 codes, int i, te_u32 scale) {
    te_u32 two = codes >> (8 * i);
    two = (two & 15) | (two & 0xf0) << 12;
    two = (two & 0x00080008u) << 12 | (two & 0x00070007u) << 6;
    return te_decode_times(te_decode_times(two, 0x7e807e80u), scale);
}
