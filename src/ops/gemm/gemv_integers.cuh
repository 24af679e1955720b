// ops/gemm/gemv_integers.cuh: products of NVFP4 codes of sixteen lines of X and of one line Y, by integer products.
//
// Twice the value of a code is an integer of -12 to 12. So the sum of a block of 16 products is an integer too, and
// integer tensor cores compute it exactly. Codes are decoded by table look-ups, without their scales. Only sums of
// blocks are scaled, a sixteenth of the values.
//
// A product (mma.sync) has eight columns. Each has another block of Y, and zeros for the values of all other blocks:
//
//                     128 values of k: four products, in each two words of four values of each lane and line
//     column 0        Y's block 0, then zeros
//     column 1        zeros, block 1, zeros
//     ..
//     column 7        zeros, then block 7
//
// A lane (g, t) has the codes of blocks 2 t and 2 t + 1 of lines g and g + 8, and gets the sums of these blocks.
//
// Y in shared memory, a turn in 512 bytes: 256 bytes of integers, in order, and for each unit and t a word with the
// scales of blocks 2 t and 2 t + 1, as f16 and times 2^-6. The product with a scale of X is a multiple of 2^-24, has
// eight bits and is below 2^12: exact in f16.
#pragma once
#include "device/mma.cuh"

#define TE_INTEGERS_POWER 16.0f // of a sum: 2^6, and 1/4 for twice each value

// Returns twice the values of the codes in the lower half of `codes` that are not negative, in bytes; 0 for others. A
// selector of prmt is the number of a byte in the table or, with the highest bit, stands for that byte's sign: 0 here.
// `lower` is TE_INTEGERS_LOWER, the lower half of the table.
#define TE_INTEGERS_LOWER 0x03020100u
#define TE_INTEGERS_TABLE 240 // where it stands four times, behind the start of zeros, of which 144 bytes are read
TE_DEV te_u32 te_integers_of(te_u32 codes, te_u32 lower = TE_INTEGERS_LOWER) {
    te_u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lower), "r"(0x0c080604), "r"(codes));
    return r;
}
TE_DEV te_u32 te_integers_scaled(te_u32 scales, te_u32 by) { // two f16 each
    te_u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(scales), "r"(by));
    return r;
}

// Writes 256 bytes: zeros, and the table's lower half.
TE_DEV void te_integers_zeros(te_u32 to) {
    const te_u32 v = threadIdx.x == TE_INTEGERS_TABLE / 16 ? TE_INTEGERS_LOWER : 0;
    if (threadIdx.x < 16) te_sts16(to + threadIdx.x * 16, make_uint4(v, v, v, v));
}
// Writes eight codes of Y, number `number` of these in the line, at `base`. `scale`: the scale of their block as f16.
TE_DEV void te_integers_put(te_u32 base, int number, te_u32 codes, te_u32 scale) {
    const te_u32 turn = base + number / 32 * 512, at = number % 32;
    te_u32 of[2];
#pragma unroll
    for (int h = 0; h < 2; h++) { // 128 more than the value: no byte takes a bit from the next one
        const te_u32 c = codes >> (16 * h);
        of[h] = ((te_integers_of(c) | 0x80808080u) - te_integers_of(c ^ 0x8888)) ^ 0x80808080u;
    }
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(turn + at * 8), "r"(of[0]), "r"(of[1]) : "memory");
    if (at % 2 == 0)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(turn + 256 + at),
                     "h"((te_u16)te_integers_scaled(scale, 0x24002400u)) // 2^-6
                     : "memory");
}

// The places of what a lane reads of Y, in the warp's first turn. SHARERS: the warps that share turns.
template <int SHARERS> struct te_integers_y {
    te_u32 own, step;      // the codes of block g, if lane t has that block of X, else zeros; and from turn to turn
    te_u32 zeros, scales;
    bool odd;              // whether block g is of odd number
    TE_DEV te_integers_y(te_u32 base, te_u32 zeros, int warp) : zeros(zeros) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        base += warp * 512, odd = g & 1;
        own = g >> 1 == t ? base + g * 16 : zeros, step = g >> 1 == t ? SHARERS * 512 : 0;
        scales = base + 256 + t * 4;
    }
    // Adds the products of unit i of the warp's n-th turn to the sums of lines g and g + 8. x: their codes; of_x: their
    // blocks' two scales.
    TE_DEV void multiply(float sum[2], const uint4 x[2], const te_u32 of_x[2], int n, int i) const {
        const te_u32 lines[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w}, {x[1].x, x[1].y, x[1].z, x[1].w}};
        const te_u32 at = own + n * step, scale = te_lds4(scales + n * (SHARERS * 512) + i * 16);
        // from memory, each lane from its own place: the compiler would move a number that is the same in all lanes
        // from a uniform register for each look-up
        const te_u32 lower = te_lds4(zeros + TE_INTEGERS_TABLE + (threadIdx.x & 3) * 4);
        const uint4 even_y = te_lds16((odd ? zeros : at) + i * 128), odd_y = te_lds16((odd ? at : zeros) + i * 128);
        const te_u32 y[4][2] = {{even_y.x, even_y.y}, {even_y.z, even_y.w}, {odd_y.x, odd_y.y}, {odd_y.z, odd_y.w}};
        int plus[4] = {0, 0, 0, 0}, minus[4] = {0, 0, 0, 0}; // with the values of X that are positive and negative
#pragma unroll
        for (int j = 0; j < 4; j++) {
            te_u32 a[2][4];
#pragma unroll
            for (int l = 0; l < 2; l++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const te_u32 codes = lines[l][j] >> (16 * h);
                    a[0][2 * h + l] = te_integers_of(codes, lower), a[1][2 * h + l] = te_integers_of(codes ^ 0x8888, lower);
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
