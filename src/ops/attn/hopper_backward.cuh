// ops/attn/hopper_backward.cuh: steps that attn_bwd_hopper.cu and attn_bwd_fp8_hopper.cu share: sums of dQ in a fixed
// order, and the stores of dK and dV.
#pragma once
#include "ops/attn/hopper.cuh"

// Adds a tile of dQ of SIZE f32 from shared memory at `from` to global memory, after `before` other key blocks have
// added to the tile. full and full + 8 are the barriers of its two halves. Then arrives at `empty`. `parity` is that of
// the two barriers.
template <int SIZE>
TE_DEV void te_add_tile(const te__attn_bwd_hopper_kargs &a, te_i64 number, int before, te_u32 from, te_u32 full,
                        te_u32 empty, int parity) {
    float *to = a.dq_sum + number * SIZE;
    // Nothing checks the starts of packed sequences. If they are wrong, two sequences may share a tile, and its count
    // may exceed `before`. This loop ends even then.
    while (te_load_acquire(a.added + number) < before) {}
    te_async_fence_global();
    for (int w = 0; w < 2; w++) {
        te_mbar_wait(full + 8 * w, parity);
        if (before == 0) te_bulk_store(to + w * (SIZE / 2), from + w * 2 * SIZE, 2 * SIZE); // the first block stores
                                                                                            // instead of adding, so the
                                                                                            // sums need not be cleared
                                                                                            // before
        else te_bulk_add(to + w * (SIZE / 2), from + w * 2 * SIZE, 2 * SIZE);
    }
    te_bulk_commit();
    te_bulk_wait_read<0>();
    te_mbar_arrive(empty);
    te_bulk_wait<0>();
    te_add_release(a.added + number, 1);
}

// Sets the rows of a tile to 0, beginning with row `from`. A tile has `rows` rows, in panels of 128 bytes. The 128
// threads of a warpgroup call this together.
template <int PANELS> TE_DEV void te_clear_rows(te_u32 tile, int rows, int from) {
    for (int i = (threadIdx.x & 127) + 8 * from; i < 8 * rows; i += 128)
        for (int panel = 0; panel < PANELS; panel++)
            te_sts16(tile + panel * rows * 128 + 16 * i, make_uint4(0, 0, 0, 0));
}

// Hides the queries that do not see the keys `key` and `key` + 8 of block t: sets their elements of S^T to -inf.
// `query` is the thread's first query.
template <int N, class KEYS> TE_DEV void te_hide_queries(float (&s)[N], const KEYS &t, int key, int query) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j0 = key + 8 * half, from = j0 - t.hi - query,
                  to = (j0 < t.s_kv ? min(j0 - t.lo, t.s_q - 1) : -1) - query;
        te_hide_outside(s, half, from, to);
    }
}

// Stores dK times `by_k` and dV times `by_v` in format DT. `u` is the block of 128 keys, of which consumer w has 64.
// The rows go through shared memory at `at_k` and `at_v`, which nobody may read any more. Named barrier 2 + w is used.
template <int DT, class KEYS, int N>
TE_DEV void te_store_keys(const te__attn_bwd_hopper_kargs &a, const KEYS &u, te_u32 at_k, te_u32 at_v,
                          const float (&dk)[N], const float (&dv)[N], float by_k, float by_v, int w) {
    const te__attn_extra &x = a.a.x;
    const int tid = threadIdx.x & 127, lane = tid & 31, row = 64 * w + 16 * (tid >> 5) + (lane & 15);
    auto stage_rows = [&](te_u32 at, const float(&d)[N], float scale) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            te_u32 r[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                r[e] = te_f32x2_to_half(d[8 * j + 2 * e] * scale, d[8 * j + 2 * e + 1] * scale, DT);
            const int piece = 2 * j + (lane >> 4);
            te_stmatrix4(at + (piece >> 3) * 16384 + te_swizzled(row, piece & 7), r);
        }
    };
    stage_rows(at_v, dv, by_v);
    stage_rows(at_k, dk, by_k);
    te_async_fence();
    te_meet<128>(2 + w);
    const int first = u.n * 128 + 64 * w;
    if (!x.packed_kv || first + 64 <= u.kv_end) {
        if (tid == 0) {
            for (int c = 0; c < N / 32; c++) {
                te_tma_store4(a.dv_map, at_v + c * 16384 + w * 8192, 64 * c, u.kv_at + first, u.head,
                              x.packed_kv ? 0 : u.batch);
                te_tma_store4(a.dk_map, at_k + c * 16384 + w * 8192, 64 * c, u.kv_at + first, u.head,
                              x.packed_kv ? 0 : u.batch);
            }
            te_bulk_commit();
            te_bulk_wait_read<0>();
        }
        return;
    }
    for (int which = 0; which < 2; which++) { // a packed sequence ends within the tile
        const te__attn_view &view = which ? a.a.dk : a.a.dv;
        const int pieces = (which ? a.a.d : a.a.d_v) / 8;
        char *to = (char *)view.p + 2 * (u.head * view.h + (u.kv_at + first) * view.s);
        for (int j = tid; j < 64 * pieces; j += 128) {
            const int r = j / pieces, piece = j - r * pieces;
            if (first + r < u.kv_end)
                *(uint4 *)(to + 2 * r * view.s + 16 * piece) =
                    te_lds16((which ? at_k : at_v) + (piece >> 3) * 16384 + te_swizzled(64 * w + r, piece & 7));
        }
    }
}
