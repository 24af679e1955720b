// ops/attn/sparse_tiles.cuh: sparse attention on tensor cores: which work a block has, masks of scores, and how
// accumulators are stored. It must not depend on the instructions that multiply.
//
// An accumulator has the layout of mma.sync and of wgmma: lane 4 g + t of a warp has d[4 j], d[4 j + 1]: row g, columns
// 8 j + 2 t and 8 j + 2 t + 1; d[4 j + 2], d[4 j + 3]: row g + 8.
//
// Options: X_DT: bf16, f16.
#pragma once
#include "ops/attn/sparse.cuh"

// The query and the heads of one item of a block's work.
struct te_sparse_item {
    int b, i, first; // first: the first head
    int at, tile;    // the query's number in the launch, and the tile of heads
    TE_DEV te_sparse_item(const te__sparse_attn_kargs &a, te_u32 work) {
        const te_u32 tiles = (te_u32)a.head_tiles, queries = (te_u32)(a.i_end - a.i_begin), row = work / tiles;
        tile = (int)(work - row * tiles);
        first = tile * TE__SPARSE_TILE_ROWS;
        at = (int)row;
        b = (int)(row / queries);
        i = a.i_begin + (int)(row - (te_u32)b * queries);
        b += a.b_begin;
    }
    TE_DEV static te_u32 count(const te__sparse_attn_kargs &a) {
        return (te_u32)a.head_tiles * (te_u32)(a.i_end - a.i_begin) * (te_u32)(a.b_end - a.b_begin);
    }
};

// Writes -inf to the scores of entries that are no keys. `mask` begins with the entry of the accumulator's first
// column.
template <int N> TE_DEV void te_sparse_hide(float (&s)[N], te_u32 mask) {
    mask >>= 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!(mask >> (i / 4 * 8 + i % 2) & 1)) s[i] = -TE_INF;
}

// Rounds a warpgroup's accumulators and stores them: a thread's upper row at `to`, its lower row `apart` elements
// further, each if it is wanted. The four lanes of a row exchange words, so that each has 16 bytes.
template <int N>
TE_DEV void te_sparse_put_rows(const float (&x)[N], const float (&by)[2], te_u16 *to, te_i64 apart, bool upper,
                               bool lower) {
    const int t = threadIdx.x & 3;
    to += 8 * t;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) { // 32 columns
            te_u32 w[4], u, v;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *y = x + 16 * i + 4 * j + 2 * half;
                w[j] = te_f32x2_to_half(y[0] * by[half], y[1] * by[half], X_DT);
            }
            u = __shfl_xor_sync(0xffffffffu, t & 1 ? w[0] : w[1], 1);
            v = __shfl_xor_sync(0xffffffffu, t & 1 ? w[2] : w[3], 1);
            if (t & 1) w[0] = u, w[2] = v;
            else w[1] = u, w[3] = v;
            u = __shfl_xor_sync(0xffffffffu, t & 2 ? w[0] : w[2], 2);
            v = __shfl_xor_sync(0xffffffffu, t & 2 ? w[1] : w[3], 2);
            if (t & 2) w[0] = u, w[1] = v;
            else w[2] = u, w[3] = v;
            if (half ? lower : upper)
                *(uint4 *)(to + half * apart + 32 * i) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
// Stores a warpgroup's accumulators as rows of a query's heads, from channel c on. `row`: the thread's upper row.
TE_DEV void te_sparse_put_heads(const te__attn_view &x, const te_sparse_item &at, int row, int heads, int c,
                                const float (&y)[128], const float (&by)[2]) {
    const int h = at.first + row;
    te_sparse_put_rows(y, by, (te_u16 *)x.p + te_attn_at(x, at.b, h, at.i) + c, 8 * x.h, h < heads, h + 8 < heads);
}

// Turns products into e^(s - m), in place, and updates a row's maximum m, in units of log2, and this lane's share l of
// the sum. shrink: the factor of what has been summed so far.
template <int N>
TE_DEV void te_sparse_softmax(float (&s)[N], float (&m)[2], float (&l)[2], float (&shrink)[2], float scale2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -TE_INF, sum = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < N; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(m[r], top * scale2);
        shrink[r] = te_exp2(m[r] - top);
        m[r] = top;
#pragma unroll
        for (int i = 2 * r; i < N; i += 4) {
            s[i] = te_exp2(fmaf(s[i], scale2, -top));
            s[i + 1] = te_exp2(fmaf(s[i + 1], scale2, -top));
            sum += s[i] + s[i + 1];
        }
        l[r] = l[r] * shrink[r] + sum;
    }
}

// Stores O and lse of a thread's rows, `row` and row + 8 of the item, and of half of the channels.
TE_DEV void te_sparse_finish(const te__sparse_attn_kargs &a, const te_sparse_item &at, int row, int half,
                             const float (&o)[128], float (&m)[2], const float (&l)[2]) {
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = at.first + row + 8 * r;
        const float sink2 = a.sinks && h < a.heads ? a.sinks[h] * TE_LOG2E : -TE_INF;
        float sum = l[r] + __shfl_xor_sync(0xffffffffu, l[r], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float shrink = te_attn_add_sink(sink2, &m[r], &sum);
        by[r] = sum == 0.0f ? 0.0f : shrink / sum;
        if (a.lse && half == 0 && (threadIdx.x & 3) == 0 && h < a.heads)
            a.lse[((te_i64)at.b * a.heads + h) * a.s_q + at.i] = (sum == 0.0f ? sink2 : m[r] + log2f(sum)) * TE_LN2;
    }
    te_sparse_put_heads(a.o, at, row, a.heads, 256 * half, o, by);
}
