// ops/gemm/gemv_integers.cuh: multiplies one line Y of NVFP4 codes by sixteen lines of X, by products of integers.
//
// Twice the value of a code is an integer from -12 to 12. The sum of a block's 16 products is an integer too, and the
// tensor cores compute it exactly. So codes are not scaled, only the sums of blocks are. Two table look-ups decode four
// codes: one those that are positive, one the negative ones, which have products of their own.
//
// A product (mma.sync) has eight columns. Each column has a block of Y of its own, and zeros in place of the others.
// Four products, and four with negative codes, take the 128 values of a unit:
//
//                     values:   0 .. 15   16 .. 31   32 .. 47   ..
//     column 0                  block 0   0          0
//     column 1                  0         block 1    0
//     column 2                  0         0          block 2
//
// A lane (g, t) has the codes of blocks 2 t and 2 t + 1 of lines g and g + 8 of X, and gets the sums of these blocks.
//
// A turn of Y has 512 bytes of shared memory: 256 integers, in order; behind them, for each unit and each t, the scales
// of blocks 2 t and 2 t + 1, as f16 and times 2^-6. A scale of Y, so reduced, times one of X is a multiple of 2^-24,
// has eight bits and is below 2^12: exact in f16.
#pragma once
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "ops/nvfp4/nvfp4.cuh"

#define TE_INTEGERS_POWER 16.0f // of a sum: 2^6 for the scales, and 1/4 for twice each value

// Twice the values of codes 0 to 3, and of codes 4 to 7. `zeros` has 256 bytes: zeros, of which the first 144 are read,
// and from TE_INTEGERS_TABLE on the first of the two words four times.
#define TE_INTEGERS_LOWER 0x03020100u
#define TE_INTEGERS_UPPER 0x0c080604u
#define TE_INTEGERS_TABLE 240
TE_DEV void te_integers_zeros(te_u32 to) {
    const te_u32 v = threadIdx.x == TE_INTEGERS_TABLE / 16 ? TE_INTEGERS_LOWER : 0;
    if (threadIdx.x < 16) te_sts16(to + threadIdx.x * 16, make_uint4(v, v, v, v));
}
// Looks up the four codes in the lower half of `codes`, each into a byte. Negative codes give 0: with the highest bit
// set, a selector of prmt stands for the sign of the byte that it would select, and all signs of the table are 0.
TE_DEV te_u32 te_integers_of(te_u32 codes, te_u32 lower) {
    te_u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lower), "r"(TE_INTEGERS_UPPER), "r"(codes));
    return r;
}
TE_DEV te_u32 te_integers_scaled(te_u32 scales, te_u32 by) { // two f16 each
    te_u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(scales), "r"(by));
    return r;
}

// Quantizes a turn of Y, 256 values, to the codes of te_nvfp4_pack8, and writes it to shared memory at `turn`. Each
// lane has eight neighbouring values in `raw`, of format DT. All lanes of the warp call this. A NaN gets the code of
// 6, as infinity does.
//
// Codes from 0 to 2 are 1/2 apart, those up to 4 by 1, and those up to 6 by 2: by half of the largest power of two that
// is at most max(|y|, 1). With 1.5 * 2^22 of these powers added, an f32 has no bits below that. So y is rounded to the
// nearest, and ties to even codes.
template <int DT>
TE_DEV void te_integers_quantize(te_u32 turn, const te_raw<TE_ANY> &raw, const te_nvfp4_tensor &tensor) {
    const int lane = threadIdx.x & 31;
    const float last = 6291456.0f; // 1.5 * 2^22
    float v[8], pairs[4], most = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = te_raw_value(raw, j, DT), most = fmaxf(most, fabsf(v[j]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    const te_u8 code = te_nvfp4_block_code(most, tensor);
    const float step = te_nvfp4_step(code, tensor);
    // te__rcp_f32 of a step from 2^-126 to below 2^125, without the code for others
    float multiplier;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(multiplier) : "f"(step));
    multiplier = __fmaf_rn(multiplier, -__fmaf_rn(step, multiplier, -1.0f), multiplier);
    int again = 0;
    asm volatile("" : "+r"(again)); // else the compiler writes the loop out twice
#pragma unroll 1
    do {
        if (again) { // with the exact reciprocal, and clamped to the largest value of a code
            const float exact = te_nvfp4_multiplier(code, tensor);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = fmaxf(fminf(__fmul_rn(v[j], exact), 6.0f), -6.0f);
            multiplier = 1.0f, most = 6.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float y = __fmul_rn(v[j], multiplier);
            const float power = __uint_as_float(__float_as_uint(fmaxf(fabsf(y), 1.0f)) & 0x7f800000u);
            const float rounded = __fmaf_rn(power, -last, __fmaf_rn(power, last, y));
            // a pair is 2^23 + 2^15 + 2^7 and twice its values, the second one times 2^8: all bytes are positive
            pairs[j >> 1] = __fmaf_rn(rounded, j & 1 ? 512.0f : 2.0f, j & 1 ? pairs[j >> 1] : 8421504.0f);
        }
        // From 7 on, values would be rounded to 8. A NaN, or a step below 2^-126, makes a pair NaN.
        const float all = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
        again = !again && __any_sync(0xffffffffu, !(most * multiplier < 7.0f && all == all && step < 0x1p125f));
    } while (again);
    const te_u32 low = __byte_perm(__float_as_uint(pairs[0]), __float_as_uint(pairs[1]), 0x5410) ^ 0x80808080u,
                 high = __byte_perm(__float_as_uint(pairs[2]), __float_as_uint(pairs[3]), 0x5410) ^ 0x80808080u;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(turn + lane * 8), "r"(low), "r"(high) : "memory");
    if (lane % 2 == 0)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(turn + 256 + lane),
                     "h"((te_u16)te_integers_scaled(te_fp8x2_to_f16(code, 0, TE_F8E4M3), 0x24002400u)) // 2^-6
                     : "memory");
}

// The places of Y that a lane reads, in the first turn of its warp. SHARERS: the warps that share turns.
template <int SHARERS> struct te_integers_y {
    te_u32 own, step; // block g, if lane t has that block of X, else zeros; step: from one turn of the warp to the next
    te_u32 zeros, scales;
    bool odd; // whether g is odd
    TE_DEV te_integers_y(te_u32 base, te_u32 zeros, int warp) : zeros(zeros) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        base += warp * 512, odd = g & 1;
        own = g >> 1 == t ? base + g * 16 : zeros, step = g >> 1 == t ? SHARERS * 512 : 0;
        scales = base + 256 + t * 4;
    }
    // Adds the products of unit i of the warp's n-th turn to the sums of lines g and g + 8. x: their codes. of_x: the
    // two scales of each.
    TE_DEV void multiply(float sum[2], const uint4 x[2], const te_u32 of_x[2], int n, int i) const {
        const te_u32 lines[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w}, {x[1].x, x[1].y, x[1].z, x[1].w}};
        const te_u32 at = own + n * step, scale = te_lds4(scales + n * (SHARERS * 512) + i * 16);
        // Each lane reads the number from a place of its own. The compiler would copy one that all lanes share from a
        // uniform register for each look-up.
        const te_u32 lower = te_lds4(zeros + TE_INTEGERS_TABLE + (threadIdx.x & 3) * 4);
        const uint4 even_y = te_lds16((odd ? zeros : at) + i * 128), odd_y = te_lds16((odd ? at : zeros) + i * 128);
        const te_u32 y[4][2] = {{even_y.x, even_y.y}, {even_y.z, even_y.w}, {odd_y.x, odd_y.y}, {odd_y.z, odd_y.w}};
        int plus[4] = {0, 0, 0, 0}, minus[4] = {0, 0, 0, 0}; // with the values of X that are positive, and negative
#pragma unroll
        for (int j = 0; j < 4; j++) {
            te_u32 a[2][4];
#pragma unroll
            for (int l = 0; l < 2; l++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const te_u32 codes = lines[l][j] >> (16 * h);
                    a[0][2 * h + l] = te_integers_of(codes, lower);
                    a[1][2 * h + l] = te_integers_of(codes ^ 0x8888, lower);
                }
            te_mma_s8(plus, a[0], y[j]);
            te_mma_s8(minus, a[1], y[j]);
        }
#pragma unroll
        for (int l = 0; l < 2; l++) {
            const te_u32 s = te_integers_scaled(te_fp8x2_to_f16(of_x[l], 0, TE_F8E4M3), scale);
#pragma unroll
            for (int h = 0; h < 2; h++) { // an integer below 2^22 added to the bits of 1.5 * 2^23 adds its value
                const int bits = plus[2 * l + h] - minus[2 * l + h] + 0x4b400000;
                sum[l] = fmaf(__int_as_float(bits) - 12582912.0f, te_f16_to_f32((te_u16)(s >> (16 * h))), sum[l]);
            }
        }
    }
};
