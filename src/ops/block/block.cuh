// ops/block/block.cuh: converts FP8 codes to f32, for the kernels block_dequantize and block_dequantize_col. This file
// must not depend on where the scales lie.
#pragma once
#include "device/vector.cuh"

TE_DEV void te_fp8x8_to_f32(te_u32 low, te_u32 high, int dt, float v[8]) {
    te_fp8x2_to_f32(low, dt, v + 0, v + 1);
    te_fp8x2_to_f32(low >> 16, dt, v + 2, v + 3);
    te_fp8x2_to_f32(high, dt, v + 4, v + 5);
    te_fp8x2_to_f32(high >> 16, dt, v + 6, v + 7);
}
// Loads n codes, at most eight, from an address of any alignment. The rest of the eight codes become 0.
TE_DEV uint2 te_codes_part(const void *q, te_i64 i, te_i64 n) {
    te_u32 w[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= n) break;
        w[k >> 2] |= (te_u32)((const te_u8 *)q)[i + k] << (8 * (k & 3));
    }
    return make_uint2(w[0], w[1]);
}
