// ops/attn/fragments.cuh: tiles of 16-bit values in shared memory, and their fragments, for the mma.sync attention
// kernels.
//
// A row has D / 8 pieces of 16 bytes and one unused piece. The total is odd, so the eight rows of an ldmatrix lie in
// different banks. Every address is a constant plus a number that depends only on the lane.
#pragma once
#include "device/mma.cuh"
#include "ops/attn/attn.cuh"

// ---- words of shared memory ----

TE_DEV float2 te_lds8(te_u32 src) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(src) : "memory");
    return r;
}

// ---- tiles and their fragments ----

template <int D> struct te_tile {
    enum { ROW = 2 * D + 16 }; // bytes
    TE_DEV static te_u32 piece(int row, int piece) { return (te_u32)(row * ROW + piece * 16); }
};

// Finds rows of a head. With PAGED = 1, the rows are keys, which may lie in pages. away() returns the row's address
// minus its address in a contiguous sequence, in bytes.
template <int PAGED> struct te_paging {
    TE_DEV te_paging(const te__attn_view &, int, const te__attn_extra *) {}
    TE_DEV te_i64 away(int, te_i64, int) const { return 0; }
};
template <> struct te_paging<1> {
    const te__attn_extra *extra;
    int b;
    te_i64 page; // elements from one page to the next
    TE_DEV te_paging(const te__attn_view &x, int b, const te__attn_extra *extra) : extra(extra), b(b), page(x.b) {}
    TE_DEV te_i64 away(int row, te_i64 row_elements, int end) const {
        if (!extra->pages || row >= end) return 0;
        int r;
        te_i64 p = te__attn_page(extra, b, row, &r);
        return 2 * ((p - b) * page + (r - row) * row_elements);
    }
};

// One thread that copies tiles of a head by cp.async. GROUP threads copy a row in pieces of 16 bytes: each thread
// copies every GROUP-th piece.
template <int D, int ROWS, int THREADS, int PAGED = 0> struct te_copier : te_paging<PAGED> {
    enum { GROUP = D % 64 == 0 ? 8 : 4, STEP = THREADS / GROUP, PIECES = D / 8 / GROUP };
    static_assert(ROWS % STEP == 0, "every thread copies as much");
    const char *at;
    te_u32 to;
    int row, channels; // row of this thread's first piece; channels from that piece on

    TE_DEV te_copier(const te__attn_view &x, int b, int h, int first, int d, const te__attn_extra *extra = 0)
        : te_paging<PAGED>(x, b, extra) {
        int column = threadIdx.x % GROUP, r = threadIdx.x / GROUP;
        row = first + r;
        at = (const char *)x.p + 2 * (b * x.b + h * x.h + row * x.s) + 16 * column;
        to = te_tile<D>::piece(r, column);
        channels = d - 8 * column;
    }
    // Skips the next ROWS rows.
    TE_DEV void skip(te_i64 row_elements) {
        at += 2 * ROWS * row_elements;
        row += ROWS;
    }
    // Copies the next ROWS rows. Rows from `end` on and channels from d on are not read, and become 0.
    TE_DEV void copy(te_u32 tile, te_i64 row_elements, int end) {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; i++) {
            const te_i64 away = this->away(row + i * STEP, row_elements, end);
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                bool there = row + i * STEP < end && channels > 8 * GROUP * j;
                te_cp_async16(tile + to + i * STEP * te_tile<D>::ROW + j * GROUP * 16,
                              at + 2 * i * STEP * row_elements + j * GROUP * 16 + away, there ? 16 : 0);
            }
        }
        skip(row_elements);
    }
};

// This lane's address for ldmatrix, which reads a 16 x 16 fragment as four 8 x 8 matrices. Their order:
// - rows_first (operand A, transposed operand B): rows 0-7 and 8-15 of channels 0-7, then the same of channels 8-15.
// - otherwise (operand B): channels 0-7 and 8-15 of rows 0-7, then of rows 8-15.
template <int D> struct te_reader {
    te_u32 lane_at;
    TE_DEV te_reader(bool rows_first) {
        int lane = threadIdx.x & 31;
        lane_at = rows_first ? te_tile<D>::piece(lane & 15, lane >> 4)
                             : te_tile<D>::piece((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    }
    // Returns the address for the fragment of 16 rows from `row` on and 16 channels from 16 * step on.
    TE_DEV te_u32 at(te_u32 tile, int row, int step) const { return tile + lane_at + te_tile<D>::piece(row, 2 * step); }
};

// ---- products ----

template <int DT> TE_DEV void te_mma(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    if (DT == TE_BF16)
        te_mma_bf16(d, a, b);
    else
        te_mma_f16(d, a, b);
}

// Rounds two f32 to 16-bit values and returns them in one word. `lo` is in the low half.
template <int DT> TE_DEV te_u32 te_pack(float lo, float hi) {
    te_u32 r;
    if (DT == TE_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// Converts two neighbouring accumulator fragments (columns 16 s .. 16 s + 15) to one operand A.
template <int DT> TE_DEV void te_pack_a(te_u32 a[4], const float left[4], const float right[4]) {
    a[0] = te_pack<DT>(left[0], left[1]);
    a[1] = te_pack<DT>(left[2], left[3]);
    a[2] = te_pack<DT>(right[0], right[1]);
    a[3] = te_pack<DT>(right[2], right[3]);
}

template <int M, int N> TE_DEV void te_clear(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] = 0.0f;
}

// Adds A B^T to s. A has 16 M rows, B has 8 N rows, both have D channels. s[m][n] has A's rows from 16 m on and B's
// from 8 n on.
template <int DT, int D, int M, int N>
TE_DEV void te_products(float (&s)[M][N][4], const te_reader<D> &reader_a, te_u32 a, const te_reader<D> &reader_b,
                        te_u32 b) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        te_u32 fa[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) te_ldmatrix4(fa[m], reader_a.at(a, 16 * m, step));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            te_u32 fb[4];
            te_ldmatrix4(fb, reader_b.at(b, 8 * n, step));
#pragma unroll
            for (int m = 0; m < M; m++) {
                te_mma<DT>(s[m][n], fa[m], fb);
                te_mma<DT>(s[m][n + 1], fa[m], fb + 2);
            }
        }
    }
}

// Computes acc[m] += w[m] B. The accumulators w[m] of an earlier product are rounded to DT, and become operand A.
template <int DT, int D, int M, int K>
TE_DEV void te_weighted(float (&acc)[M][D / 8][4], const float (&w)[M][K][4], const te_reader<D> &reader, te_u32 b) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        te_u32 fa[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) te_pack_a<DT>(fa[m], w[m][k], w[m][k + 1]);
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            te_u32 fb[4];
            te_ldmatrix4_trans(fb, reader.at(b, 8 * k, step));
#pragma unroll
            for (int m = 0; m < M; m++) {
                te_mma<DT>(acc[m][2 * step], fa[m], fb);
                te_mma<DT>(acc[m][2 * step + 1], fa[m], fb + 2);
            }
        }
    }
}

// ---- masks, and the epilogue ----

// Writes -inf to scores where row i does not see key j. `row` and `column` belong to this lane's first element.
template <int M, int N> TE_DEV void te_mask(float (&s)[M][N][4], const te__attn_kargs &a, int row, int column) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row + 16 * m + 8 * half, from = i + a.lo - column, to = min(i + a.hi, a.s_kv - 1) - column;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < from || 8 * n + e > to) s[m][n][2 * half + e] = -TE_INF;
        }
}

// Turns products into scores in units of log2, or -inf where row i does not see key j. `row` is the query and `column`
// the key of this lane's first element. With TRANSPOSED, the rows of a fragment are keys.
template <int DT, bool TRANSPOSED, int M, int N>
TE_DEV void te_adjust(float (&s)[M][N][4], const te__attn_kargs &a, const te__attn_seq &seq, int b, int h, int row,
                      int column, float slope2) {
#define TE_EACH_SCORE                                                                                     \
    _Pragma("unroll") for (int m = 0; m < M; m++) _Pragma("unroll") for (int n = 0; n < N; n++)           \
        _Pragma("unroll") for (int e = 0; e < 4; e++) {                                                   \
        const int across = 16 * m + (e & 2) * 4, along = 8 * n + (e & 1);                                 \
        const int i = row + (TRANSPOSED ? along : across), j = column + (TRANSPOSED ? across : along);    \
        float &x = s[m][n][e];
    TE_EACH_SCORE x = !te_attn_sees(seq, i, j) ? -TE_INF : CAP ? a.x.softcap2 * te_attn_tanh(a, x) : x * a.scale2;
}
    const te__attn_table &bias = a.x.bias, &mask = a.x.mask;
    if (bias.p) {
        const te_i64 at = b * bias.b + h * bias.h;
        const float scale2 = a.x.bias_scale * TE_LOG2E;
        TE_EACH_SCORE
            if (x == -TE_INF) continue;
            const te_i64 k = at + i * bias.i + j * bias.j;
            x += scale2 * (bias.dt == TE_F32 ? ((const float *)bias.p)[k] : te_load(bias.p, k, DT));
        }
    }
    if (a.x.alibi) {
        TE_EACH_SCORE x -= slope2 * fabsf((float)(i + seq.delta - j)); }
    }
    if (mask.p) {
        const te_u8 *at = (const te_u8 *)mask.p + b * mask.b + h * mask.h;
        TE_EACH_SCORE if (x != -TE_INF && at[i * mask.i + j * mask.j]) x = -TE_INF; }
    }
#undef TE_EACH_SCORE
}

// Scales and rounds the warp's accumulators, and stores them from row `first` on. They go through `tile`, the warp's
// own shared memory. scale[m][0] is for the upper eight rows.
template <int DT, int D, int M>
TE_DEV void te_put(te_u32 tile, const float (&acc)[M][D / 8][4], const float (&scale)[M][2], char *head,
                   te_i64 stride_bytes, int first, int end, int d) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                te_u32 pair =
                    te_pack<DT>(acc[m][n][2 * half] * scale[m][half], acc[m][n][2 * half + 1] * scale[m][half]);
                te_sts4(tile + te_tile<D>::piece(16 * m + 8 * half + (lane >> 2), n) + (lane & 3) * 4, pair);
            }
    __syncwarp();
#pragma unroll 4
    for (int at = lane; at < 16 * M * (D / 8); at += 32) {
        int row = at / (D / 8), column = at % (D / 8);
        uint4 v = te_lds16(tile + te_tile<D>::piece(row, column));
        if (first + row < end && column * 8 < d) *(uint4 *)(head + (first + row) * stride_bytes + column * 16) = v;
    }
}
