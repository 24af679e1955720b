// ops/attn/hopper_dropout.cuh: the elements of P that dropout keeps, for the attention kernels of sm_90a. This file
// depends on the layout of fragments of S. It must not depend on a kernel's pipeline.
//
// X_DROPOUT: 0: none. 1: the bits lie in memory (attn_dropout_bits.cu). 2: the bits would need too much memory, so the
// kernels draw them.
#pragma once
#include "ops/attn/hopper_scores.cuh"

enum { DROPOUT = X_DROPOUT };

TE_DEV void te_ldg16(const void *p, te_u32 *x) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(p));
}
// Returns the address of dropout's bits of row `row` for the keys from j on. `row` is the index of the query in lse2
// (te_attn_work). The bits of the next row are four words further.
TE_DEV const te_u32 *te_kept(const te__attn_bits &bits, te_i64 row, int j) {
    return bits.words + 4 * (j / 128 * bits.rows + row) + j / 32 % 4;
}

// Dropout's bits for a thread's part of S, whose rows are queries: two rows, 8 apart, and two of every eight columns.
template <int N> struct te_keep_rows {
    te_u32 word[2][N / 32];

    // Loads the bits of rows i and i + 8 and columns j .. j + N - 1. Rows beyond the last one may get any bits.
    TE_DEV void load(const te__attn_kargs &a, const te__attn_bits &bits, int b, int h, int q_at, int i, int j) {
        load(a, bits, b, h, te_attn_work(a, b, h, q_at) + i, i, j);
    }
    TE_DEV void load(const te__attn_kargs &a, const te__attn_bits &bits, int b, int h, te_i64 row, int i, int j) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (DROPOUT == 1 && N == 128) te_ldg16(te_kept(bits, row + 8 * half, j), word[half]);
            else if (DROPOUT == 1 && N == 64) te_ldg8(te_kept(bits, row + 8 * half, j), word[half][0], word[half][1]);
            else {
#pragma unroll
                for (int k = 0; k < N / 32; k++) {
                    if (DROPOUT == 1) word[half][k] = te_ldg4(te_kept(bits, row + 8 * half, j + 32 * k));
                    if (DROPOUT == 2)
                        word[half][k] = te_attn_keep_quad(a, te__attn_keep_row(&a, b, h, i + 8 * half) + j / 32 + k);
                }
            }
        }
    }
    // Returns a mask for two 16-bit values in one word: columns 8 j + 2 (lane & 3) and the next. All ones: kept; zeros:
    // dropped. prmt spreads the sign bits of bytes.
    TE_DEV te_u32 pair(int half, int j) const {
        const int at = 2 * (threadIdx.x & 3), byte = 8 + j % 4;
        const te_u32 w = word[half][j / 4];
        te_u32 mask;
        asm("prmt.b32 %0, %1, %2, %3;"
            : "=r"(mask)
            : "r"(w << (7 - at)), "r"(w << (6 - at)), "r"(0x11 * byte + 0x1100 * (byte + 4)));
        return mask;
    }
    // Returns true if dropout keeps the element in row `half` and column 8 j + 2 (lane & 3) + e.
    TE_DEV bool one(int half, int j, int e) const {
        return word[half][j / 4] >> 2 * (threadIdx.x & 3) >> (8 * (j % 4) + e) & 1;
    }
};

// Dropout's bits for a thread's part of S^T: 16 keys by 64 queries for each warp. A thread has two keys, 8 apart.
// Bit number 2 * (j % 4) + e + 16 * (j / 4) + 8 * half is for key `half` and query 8 j + 2 (lane & 3) + e.
struct te_keep_columns {
    te_u32 bits;

    // Loads the bits of the queries i .. i + 63. j is the warp's first key.
    TE_DEV void load(const te__attn_kargs &a, const te__attn_bits &from, int b, int h, int q_at, int i, int j) {
        const int lane = threadIdx.x & 31;
        bits = 0;
        if (DROPOUT == 1) {
            const te_u32 *const p = te_kept(from, te_attn_work(a, b, h, q_at) + i + 2 * (lane & 3), j);
            const int at = (j & 16) + (lane >> 2);
            te_u32 word[16];
#pragma unroll
            for (int q = 0; q < 16; q++) word[q] = te_ldg4(p + 4 * (8 * (q / 2) + q % 2));
#pragma unroll
            for (int q = 0; q < 16; q++) bits |= (word[q] >> at & 0x101) << (q % 8 + 16 * (q / 8));
        }
        if (DROPOUT == 2) {
#pragma unroll 1
            for (int n = 0; n < 8; n++) {
                const te_u32 x = te_attn_keep_transposed(
                    te_attn_keep_quad(a, te__attn_keep_row(&a, b, h, i + 8 * n + (lane >> 2)) + j / 32), j);
                bits |= ((x & 3) | (x >> 2) << 8) << (2 * (n % 4) + 16 * (n / 4));
            }
        }
    }
    // Returns true if dropout keeps key number `half` for query 8 j + 2 (lane & 3) + e.
    TE_DEV bool one(int half, int j, int e) const { return bits >> (2 * (j % 4) + e + 16 * (j / 4) + 8 * half) & 1; }
};
