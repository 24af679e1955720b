// ops/attn/attn_bwd_hopper.cu: computes dQ, dK and dV on Hopper for heads of 64 and 128 channels, in bf16 or f16. It is
// deterministic.
//
// A block owns 128 keys of one head of keys. K and V stay in shared memory, dK and dV in registers. The block goes
// through tiles of BQ queries, from the last tile that sees the keys to the first. It takes each tile for all query
// heads of the group. Each of the two consumer warpgroups has 64 keys:
//
//     S^T = K Q^T | dP^T = V dO^T, P^T | dS^T to shared memory | dV += P^T dO | (barrier) dQ = dS K | dK += dS^T Q
//
// Each consumer computes half of the channels (D = 128) or half of the rows (D = 64) of dQ. A tile of dQ in global
// memory is a sum over key blocks, in f32. The order of this sum is fixed: block n adds after all blocks before n that
// see the tile (`added` counts them). A block gets its number when it starts, so it waits only for running blocks.
// Blocks with much work come first. attn_bwd_rows.cu has computed delta and lse2, and set `added` to 0. attn_bwd_put.cu
// later converts dQ to its own dtype.
//
// Warpgroup 0: warp 0 loads; warp 1 adds the tiles of dQ in buffer 0 to memory, and warp 2 those in buffer 1.
//
// Shared memory (panels of 64 channels, 128-byte swizzle):
//
//     |         | K     | V     | Q, 2 stages | dO, 2 stages | dS^T, 2    | dQ (f32), 2 | lse2, delta | barriers
//     | D = 128 | 32 KB | 32 KB | 2 x 16 KB   | 2 x 16 KB    | 2 x 16 KB  | 2 x 32 KB   | 1 KB        |
//     | D = 64  | 16 KB | 16 KB | 2 x 16 KB   | 2 x 16 KB    | 2 x 32 KB  | 2 x 32 KB   | 2 KB        |
//
// Each of the two stages or buffers has these barriers:
// - FULL_Q and FULL_DO: the loads of TMA have arrived. K and V come with the first tile.
// - EMPTY_Q and EMPTY_DO: the 8 consumer warps have read the stage.
// - FULL_DQ, one for each consumer: the 4 warps of the consumer have written their part of the buffer.
// - EMPTY_DQ: the warp that adds has read the buffer.
// With TILES (see below) each consumer also has a barrier FULL_B: its tile of the bias has arrived.
//
// At named barrier 1 the consumers wait for each other after they have written dS^T. At named barrier 2 + w the threads
// of consumer w wait for each other.
//
// Memory beyond the end of a sequence may have any content. The rows there are cleared, because 0 times NaN is NaN.
//
// S^T starts with the bias and ALiBi instead of 0. With TILES, TMA loads the bias to the buffer of the consumer's next
// dS^T. Without TILES, the bias is loaded one tile ahead to the registers of S. P is multiplied by the derivative of a
// soft cap or of the user's rule after P has been packed.
//
// The gradient of a bias that all queries share is a sum along the rows of dS^T. With SUMS a block writes the sums of
// its keys over its heads, in f32. attn_bwd_bias_put.cu then adds up the sums of several blocks.
//
// Options: X_DT, X_D (64, 128) = X_D_V, X_TILES (1: a bias of 16 bits that TMA can read; with X_PAIRS = 1), X_SUMS
//          (0, 1), those of hopper_scores.cuh and hopper_dropout.cuh (X_DROPOUT only with D = 128: dropout's bits for a
//          tile of 64 queries fill one register).
//
// Launch: grid: key blocks of the longest sequence, of all heads and sequences; block 384; shared memory
// TE__ATTN_BWD_SHARED. Maps: boxes of 64 channels. A box has BQ rows of q or d_o, 128 of k or v, 64 of dk or dv. Map of
// the bias: boxes of 64 queries by 64 keys. If the bias is the same for all heads or sequences, this dimension has size
// 1. The conditions are those of attn_fwd_hopper.cu.
// te:arch 90a
// te:row X_DT=2|3 X_D=128 X_D_V=128 X_DROPOUT=0|1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=2
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0|1 X_ALIBI=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_BIAS=1|3 X_PAIRS=1|2
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_MASK=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_MOD=1|2|3
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0|1 X_CAP=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_CAP=1 X_MOD=3
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_CAP=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_BLOCKS=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_BLOCKS=1 X_MOD=3
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_BLOCKS=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_ALIBI=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=2 X_D=128 X_D_V=128 X_DROPOUT=0 X_BIAS=2 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0|1 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1 X_TILES=1 X_MOD=3
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_BIAS=3 X_PAIRS=2 X_SUMS=1
// te:spills 8 X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=1 X_BIAS=3 X_PAIRS=2 X_SUMS=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_BIAS=1 X_PAIRS=0 X_SUMS=1
#include "ops/attn/hopper_backward.cuh"
#include "ops/attn/hopper_dropout.cuh"

#ifndef X_TILES
#define X_TILES 0
#endif
#ifndef X_SUMS
#define X_SUMS 0
#endif
enum {
    TILES = X_TILES,
    SUMS = X_SUMS,
    D = X_D,
    AHEAD = ALIBI || BIAS || BLOCKS, // consumers find their next tile early, so that they can load data for it
    LATE = CAP && !MOD && X_D == 64, // The derivative of the soft cap is computed from P after dP is complete, because
                                     // there are no registers for it before.
    BK = 128,
    BQ = TE__ATTN_BWD_QUERIES(X_D),
    BYTES_KV = TE__ATTN_BYTES(BK, X_D),
    BYTES_Q = TE__ATTN_BYTES(BQ, X_D), // 16 KB
    BYTES_DS = BK * BQ * 2,
    BYTES_DQ = BQ * D * 4,             // 32 KB
    BYTES_ROWS = BQ * 4,
    AT_K = 0,
    AT_V = AT_K + BYTES_KV,
    AT_Q = AT_V + BYTES_KV,
    AT_DO = AT_Q + 2 * BYTES_Q,
    AT_DS = AT_DO + 2 * BYTES_Q,
    AT_DQ = AT_DS + 2 * BYTES_DS,
    AT_LSE = AT_DQ + 2 * BYTES_DQ,
    AT_DELTA = AT_LSE + 2 * BYTES_ROWS,
    AT_BARRIERS = AT_DELTA + 2 * BYTES_ROWS,
    AT_NUMBER = AT_BARRIERS + 16 * 8,
    SHARED = AT_NUMBER + 16
};
static_assert(SHARED == TE__ATTN_BWD_SHARED(X_D), "what the host asks for");
static_assert(!DROPOUT || BQ == 64, "see the options");
static_assert(!TILES || (PAIRS == 1 && BIAS != TE_F32), "words of pairs");
enum { FULL_Q = 0, EMPTY_Q = 2, FULL_DO = 4, EMPTY_DO = 6, FULL_DQ = 8, EMPTY_DQ = 12, FULL_B = 14 };

struct te_keys : te_attn_keys<BK, BQ, BIAS != 0> {
    TE_DEV te_keys(const te__attn_bwd_hopper_kargs &a, te_u32 number)
        : te_attn_keys<BK, BQ, BIAS != 0>(a.a, a.order, number) {}
};
typedef te_attn_tiles<BK, BQ> te_tiles;
// Returns how many key blocks before block t.n add to tile i of dQ. Blocks that are empty in the block mask do not
// count.
TE_DEV int te_before(const te__attn_kargs &a, const te_keys &t, const te_tiles &i) {
    const int begin = max(0, i.m * BQ + t.lo) / BK;
    if (!BLOCKS) return t.n - begin;
    const te_u8 *const blocks = te_blocks_of(a, t.batch, i.head, i.m * BQ);
    int count = 0;
    for (int n = begin; n < t.n; n += 32)
        count += __popc(__ballot_sync(TE_ALL, n + (threadIdx.x & 31) < t.n &&
                                                  blocks[n + (threadIdx.x & 31)] != TE_ATTN_BLOCK_EMPTY));
    return count;
}

// Splits the bias of tile m and consumer w into boxes of 64 queries by 64 keys. Calls `box` for each of them, with the
// first key, the first query, the head, the batch and the number of the box.
template <class BOX>
TE_DEV void te_bias_boxes(const te__attn_bwd_hopper_kargs &a, const te_keys &t, int head, int m, int w, BOX box) {
    for (int i = 0; i < BQ / 64; i++)
        box(t.n * BK + 64 * w, m * BQ + 64 * i, a.a.x.bias.h ? head : 0, a.a.x.bias.b ? t.batch : 0, i);
}

TE_DEV void te_load_tiles(const te__attn_bwd_hopper_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    const te__attn_extra &x = a.a.x;
    const int batch_q = x.packed_q ? 0 : t.batch, batch_kv = x.packed_kv ? 0 : t.batch;
    int stage = 0, parity = 1;
    bool keys = true; // K and V are still to load; they come with the first tile
    for (te_tiles i(a.a, t); i.left > 0; i.next(a.a, t), keys = false) {
        const te_i64 rows = te_attn_work(a.a, t.batch, i.head, t.q_at) + i.m * BQ;
        auto part = [&](int full, int empty, const void *map, int to, const float *of_rows, int rows_to,
                        const void *map_kv, int kv_to) {
            const te_u32 b = bar + 8 * (full + stage);
            te_mbar_wait(bar + 8 * (empty + stage), parity);
            te_mbar_expect(b, BYTES_Q + BYTES_ROWS + (keys ? BYTES_KV : 0));
            for (int c = 0; c < D / 64; c++) {
                if (keys)
                    te_tma_load4(smem + kv_to + c * BK * 128, map_kv, 64 * c, t.kv_at + t.n * BK, t.head, batch_kv, b);
                te_tma_load4(smem + to + stage * BYTES_Q + c * BQ * 128, map, 64 * c, t.q_at + i.m * BQ, i.head,
                             batch_q, b);
            }
            te_bulk_load(smem + rows_to + stage * BYTES_ROWS, of_rows + rows, BYTES_ROWS, b);
        };
        if (te_leads()) {
            for (int w = 0; w < (TILES ? 2 : 0); w++) // this only brings the bias to the L2 cache; the consumers load
                                                      // it later
                te_bias_boxes(a, t, i.head, i.m, w, [&](int key, int query, int head, int batch, int) {
                    te_tma_prefetch4(a.bias_map, key, query, head, batch);
                });
            part(FULL_Q, EMPTY_Q, a.q_map, AT_Q, a.a.lse2, AT_LSE, a.k_map, AT_K);
            part(FULL_DO, EMPTY_DO, a.do_map, AT_DO, a.a.delta, AT_DELTA, a.v_map, AT_V);
        }
        stage ^= 1;
        if (stage == 0) parity ^= 1;
    }
}

TE_DEV void te_add_tiles(const te__attn_bwd_hopper_kargs &a, te_u32 smem, int mine) {
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    int buffer = 0, parity = 0;
    for (te_tiles i(a.a, t); i.left > 0; i.next(a.a, t)) {
        if (buffer == mine) {
            const te_i64 number = te__attn_dq_tile(&a, t.batch, i.head, t.q_at, i.m);
            const int before = te_before(a.a, t, i);
            if (te_leads())
                te_add_tile<BQ * D>(a, number, before, smem + AT_DQ + buffer * BYTES_DQ,
                                    smem + AT_BARRIERS + 8 * (FULL_DQ + 2 * buffer),
                                    smem + AT_BARRIERS + 8 * (EMPTY_DQ + buffer), parity);
        }
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
    }
}

TE_DEV void te_consume(const te__attn_bwd_hopper_kargs &a, te_u32 smem, int w) {
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    const te_u32 bar = smem + AT_BARRIERS;
    const int tid = threadIdx.x & 127, warp = tid >> 5, lane = tid & 31;
    const int row = 64 * w + 16 * warp + (lane & 15); // the row of a tile of keys; this thread gives the address of the
                                                      // row to stmatrix
    const int key = t.n * BK + 64 * w + 16 * warp + (lane >> 2); // this thread's upper key
    const te__attn_extra &x = a.a.x;
    // tail_q: the last tile of queries goes on beyond the end of the sequence, and q has rows there.
    // tail_kv: this block of keys goes on beyond the end of the sequence, and k has rows there.
    const bool tail_q = t.s_q % BQ != 0 && t.s_q < (x.packed_q ? x.t_q - t.q_at : a.a.s_q);
    const bool tail_kv = (t.n + 1) * BK > t.s_kv && t.s_kv < (x.packed_kv ? x.t_kv - t.kv_at : a.a.s_kv);
    const int diagonal = x.bottom_right ? t.s_kv - t.s_q : 0; // ALiBi's offset of the diagonal
    float dk[D / 2], dv[D / 2], s[BQ / 2], dp[BQ / 2], dq[32];
    te_u32 p[BQ / 4], ds[BQ / 4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.0f;
    const te_u64 k_rows = te_wgmma_desc(smem + AT_K + w * 8192, 0), v_rows = te_wgmma_desc(smem + AT_V + w * 8192, 0);
    const te_u64 q_tile = te_wgmma_desc(smem + AT_Q, BQ * 128), do_tile = te_wgmma_desc(smem + AT_DO, BQ * 128);
    // dQ = dS K: dS^T is read transposed.
    const te_u64 dq_left = te_wgmma_desc(smem + AT_DS + (D == 64 ? w * 16384 : 0), 0),
                 dq_right = te_wgmma_desc(smem + AT_K + (D == 64 ? 0 : w * 16384), 16384);
    auto scores = [&](float(&d)[BQ / 2], te_u64 left, te_u64 right, bool fresh) {
        te_wgmma_fence();
        if (fresh) te_multiply<0, 0, true>(d, left, right);
        else te_multiply<0, 0, false>(d, left, right);
#pragma unroll
        for (int k = 1; k < D / 16; k++)
            te_multiply<0, 0, false>(d, left + (k >> 2) * (BK * 128 >> 4) + (k & 3) * 2,
                                     right + (k >> 2) * (BQ * 128 >> 4) + (k & 3) * 2);
        te_wgmma_commit();
    };
    auto accumulate = [&](float(&d)[D / 2], const te_u32 *left, te_u64 right) {
        te_wgmma_fence();
#pragma unroll
        for (int k = 0; k < BQ / 16; k++) te_multiply(d, left + 4 * k, right + k * 128);
        te_wgmma_commit();
    };
    // first_tail is the number of tiles that have rows beyond the end of the sequence. They come first.
    int stage = 0, parity = 0,
        first_tail = t.tiles() > 0 && t.m_end * BQ > t.s_q && tail_q ? a.a.heads / a.a.groups : 0;
    te_tiles i(a.a, t);
    bool keys = tail_kv;
    // ALiBi's slope for the head of the tile. The slope and the bias of the next tile are loaded while this tile is
    // computed.
    float slope = 0.0f;
    float sums[2] = {0.0f, 0.0f}; // of dS, for the thread's two keys
    auto load_tile = [&](int head, int m, int buffer) { // starts the loads of the bias
        if (!TILES || tid != 0) return;
        te_mbar_expect(bar + 8 * (FULL_B + w), BQ * 128);
        te_bias_boxes(a, t, head, m, w, [&](int at_key, int query, int of_head, int batch, int number) {
            te_tma_load4(smem + AT_DS + buffer * BYTES_DS + number * 16384 + w * 8192, a.bias_map, at_key, query,
                         of_head, batch, bar + 8 * (FULL_B + w));
        });
    };
    auto load_ahead = [&](int head, int m) {
        if (ALIBI) slope = te_slope(a.a, t.batch, head);
        if (BIAS && !TILES) te_bias_columns<BQ / 2>::load(s, a.a, t.batch, head, m * BQ + 2 * (lane & 3), key);
    };
    if (i.left > 0) load_ahead(i.head, i.m), load_tile(i.head, i.m, 0);
#pragma unroll 1
    for (; i.left > 0;) {
        te_tiles next = i;
        if (TILES) {
            te_mbar_wait(bar + 8 * (FULL_B + w), stage); // this barrier has one phase for each tile, so the parity is
                                                         // `stage`
            te_bias_columns<BQ / 2>::take(s, smem + AT_DS + stage * BYTES_DS + w * 8192);
        }
        if (BIAS) te_bias_columns<BQ / 2>::start(s, a.bias_factor);
        if (ALIBI)
            te_start_alibi<BIAS != 0>(s, slope, i.m * BQ + 2 * (lane & 3) - key + diagonal,
                                      i.m * BQ - (t.n * BK + 64 * w + 16 * warp + 15) + diagonal);
        te_mbar_wait(bar + 8 * (FULL_Q + stage), parity);
        const bool tail = BLOCKS ? tail_q && i.m * BQ + BQ > t.s_q : first_tail > 0;
        if (keys || tail) {
            te_mbar_wait(bar + 8 * (FULL_DO + stage), parity);
            if (keys)
                te_clear_rows<D / 64>(smem + AT_K, BK, t.s_kv - t.n * BK),
                    te_clear_rows<D / 64>(smem + AT_V, BK, t.s_kv - t.n * BK);
            if (tail)
                te_clear_rows<D / 64>(smem + AT_Q + stage * BYTES_Q, BQ, t.s_q - i.m * BQ),
                    te_clear_rows<D / 64>(smem + AT_DO + stage * BYTES_Q, BQ, t.s_q - i.m * BQ);
            keys = false, first_tail--;
            te_async_fence();
            te_meet<128>(2 + w);
        }
        scores(s, k_rows, q_tile + stage * (BYTES_Q >> 4), !BIAS && !ALIBI);
        te_mbar_wait(bar + 8 * (FULL_DO + stage), parity);
        scores(dp, v_rows, do_tile + stage * (BYTES_Q >> 4), true);
        const int query = i.m * BQ + 2 * (lane & 3); // this thread's first query
        te_keep_columns keep;
        if (DROPOUT) keep.load(a.a, a.bits, t.batch, i.head, t.q_at, i.m * BQ, t.n * BK + 64 * w + 16 * warp);
        const te_u64 show = HIDES ? te_shown<BQ / 2, true>(a.a, t.batch, i.head, query, key, BLOCKS && i.full) : 0;
        if (AHEAD) next.next(a.a, t);
        te_wgmma_wait<1>();
        te_wgmma_keep(s);
        te_cap(s, a.a);
        if ((t.n + 1) * BK > min(t.s_kv, i.m * BQ + t.hi + 1) || t.n * BK < i.m * BQ + BQ - 1 + t.lo ||
            i.m * BQ + BQ > t.s_q)
            te_hide_queries(s, t, key, query);
        if (HIDES) {
#pragma unroll
            for (int e = 0; e < BQ / 2; e++)
                if (!(show >> e & 1)) s[e] = -TE_INF;
        }
        const te_u32 lse2 = smem + AT_LSE + stage * BYTES_ROWS + (lane & 3) * 8,
                     delta = smem + AT_DELTA + stage * BYTES_ROWS + (lane & 3) * 8;
        auto pack_p = [&](int k) { // P^T after dropout
            const float lo = DROPOUT && !keep.one(k % 2, k / 2, 0) ? 0.0f : s[2 * k],
                        hi = DROPOUT && !keep.one(k % 2, k / 2, 1) ? 0.0f : s[2 * k + 1];
            p[k] = te_pack16(lo, hi);
        };
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            float l[2], factor[4];
            te_lds8(lse2 + j * 32, l[0], l[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &y = s[4 * j + e];
                y = te_weight(a.a, y, l[e & 1], t.batch, i.head, query + 8 * j + (e & 1), key + 4 * (e & 2), factor[e]);
            }
            if (CHANGES && !LATE) {
                pack_p(2 * j), pack_p(2 * j + 1);
#pragma unroll
                // P has been packed already. From here on s has P times the derivative of the score.
                for (int e = 0; e < 4; e++) s[4 * j + e] = factor[e];
            }
        }
#pragma unroll
        for (int k = 0; k < (CHANGES && !LATE ? 0 : BQ / 4); k++) pack_p(k);
        te_wgmma_wait<0>();
        te_wgmma_keep(dp);
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            float d[2], l[2];
            te_lds8(delta + j * 32, d[0], d[1]);
            if (LATE) te_lds8(lse2 + j * 32, l[0], l[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float g = dp[4 * j + e];
                if (DROPOUT) g = keep.one(e >> 1, j, e & 1) ? g * a.a.keep_scale : 0.0f;
                dp[4 * j + e] =
                    s[4 * j + e] * (g - d[e & 1]) * (LATE ? te_attn_slope_of(a.a, s[4 * j + e], l[e & 1]) : 1.0f);
                if (SUMS) sums[e >> 1] += dp[4 * j + e];
            }
        }
        te_pack16(ds, dp);
        if (TILES) te_meet<128>(2 + w); // all threads have read the bias, so dS may overwrite it
#pragma unroll
        for (int k = 0; k < BQ / 16; k++)
            te_stmatrix4(smem + AT_DS + stage * BYTES_DS + (k >> 2) * 16384 +
                             te_swizzled(row, 2 * (k & 3) + (lane >> 4)),
                         ds + 4 * k);
        accumulate(dv, p, do_tile + stage * (BYTES_Q >> 4));
        te_async_fence();
        te_meet<256>(1);
        // Both consumers have finished with the dS in the next buffer.
        if (TILES && next.left > 0) load_tile(next.head, next.m, stage ^ 1);
        te_wgmma_fence();
        const te_u64 left = dq_left + stage * (BYTES_DS >> 4);
        te_multiply<1, 1, true>(dq, left, dq_right);
#pragma unroll
        for (int k = 1; k < 8; k++) te_multiply<1, 1, false>(dq, left + k * 128, dq_right + k * 128);
        te_wgmma_commit();
        te_wgmma_wait<1>();
        te_wgmma_keep(dv);
        __syncwarp(); // every lane has read delta
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_DO + stage));
        if ((ALIBI || BIAS) && next.left > 0) load_ahead(next.head, next.m);
        accumulate(dk, ds, q_tile + stage * (BYTES_Q >> 4));
        te_wgmma_wait<1>();
        te_wgmma_keep(dq);
        te_mbar_wait(bar + 8 * (EMPTY_DQ + stage), parity ^ 1);
#pragma unroll
        for (int j = 0; j < 8; j++)
            te_sts16(smem + AT_DQ + stage * BYTES_DQ + w * (BYTES_DQ / 2) + tid * 16 + j * 2048,
                     make_uint4(__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])));
        te_async_fence();
        __syncwarp();
        if (lane == 0) te_mbar_arrive(bar + 8 * (FULL_DQ + 2 * stage + w));
        te_wgmma_wait<0>();
        te_wgmma_keep(dk);
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_Q + stage));
        stage ^= 1;
        if (stage == 0) parity ^= 1;
        if (AHEAD) i = next;
        else i.next(a.a, t);
    }
    te_meet<256>(1); // no one reads K any more
    const te_keys u(a, te_lds4(smem + AT_NUMBER)); // computed anew to save registers
    if (SUMS) {
        float *const to = a.bias_sum + ((te_i64)u.batch * a.a.groups + u.head) * a.bias_row + u.n * BK + 64 * w +
                          16 * warp + (lane >> 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = sums[half] + __shfl_xor_sync(TE_ALL, sums[half], 1);
            x += __shfl_xor_sync(TE_ALL, x, 2);
            if ((lane & 3) == 0) to[8 * half] = x;
        }
    }
    if (u.n * BK >= u.kv_end) return;
    te_store_keys<X_DT>(a, u, smem + AT_K, smem + AT_V, dk, dv, a.a.scale, a.a.keep_scale, w);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    te_attn_bwd_hopper(const __grid_constant__ te__attn_bwd_hopper_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            te_mbar_init(bar + 8 * (FULL_Q + i), 1), te_mbar_init(bar + 8 * (EMPTY_Q + i), 8);
            te_mbar_init(bar + 8 * (FULL_DO + i), 1), te_mbar_init(bar + 8 * (EMPTY_DO + i), 8);
            te_mbar_init(bar + 8 * (FULL_DQ + 2 * i), 4), te_mbar_init(bar + 8 * (FULL_DQ + 2 * i + 1), 4);
            te_mbar_init(bar + 8 * (EMPTY_DQ + i), 1), te_mbar_init(bar + 8 * (FULL_B + i), 1);
        }
        te_mbar_init_done();
        const te_u32 number = atomicAdd(a.order.counter, 1u);
        if (number == gridDim.x - 1) *a.order.counter = 0; // the last block sets the counter to 0 for the next launch
        te_sts4(smem + AT_NUMBER, number);
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<24>();
        const int warp = __shfl_sync(TE_ALL, threadIdx.x / 32, 0);
        if (BLOCKS || (threadIdx.x & 31) == 0) {
            if (warp == 0) te_load_tiles(a, smem);
            else if (warp <= 2) te_add_tiles(a, smem, warp - 1);
        }
    } else {
        te_registers_up<240>();
        te_consume(a, smem, group - 1);
    }
}
