// ops/attn/attn_bwd_dkv_hopper.cu: computes dK and dV on Hopper for heads of more than 128 channels, in bf16 or f16. It
// is deterministic. attn_bwd_dq_hopper.cu computes dQ.
//
// A block owns 64 keys of one head of keys. K and V stay in shared memory. The block goes through tiles of 64 queries,
// from the last tile that sees the keys to the first. It takes each tile for all query heads of the group. The two
// consumer warpgroups are called `values` and `keys`. Both work on all 64 keys. Each computes one gradient:
//
//     values    dV += P^T dO, of the previous tile | S^T  = K Q^T  | P^T = 2^(scale2 S^T - lse2), sent to `keys`
//     keys      dK += dS^T Q, of the previous tile | dP^T = V dO^T | dS^T = P^T (dP^T - delta)
//
// Each thread of `values` sends P^T in f32 to the thread of `keys` that has the same elements. Warpgroup 0 is the
// producer: one of its threads starts all loads.
//
// Shared memory (panels of 64 channels, 128-byte swizzle), for D = D_V:
//
//     |         | K     | V     | Q, STAGES | dO, STAGES | P^T, 2    | lse2, delta | barriers |
//     | D = 256 | 32 KB | 32 KB | 2 x 32 KB | 2 x 32 KB  | 2 x 16 KB | 1 KB        |
//     | D = 192 | 24 KB | 24 KB | 3 x 24 KB | 3 x 24 KB  | 2 x 16 KB | 1.5 KB      |
//
// Each stage has a barrier of these kinds:
// - FULL_Q and FULL_DO: the loads of TMA have arrived. K and V come with the first tile.
// - EMPTY_Q and EMPTY_DO: the 8 consumer warps have read the stage.
//
// FULL_P and EMPTY_P exist for each of the two buffers and each warp, because each warp sends its rows independently.
// At named barrier 1 + w the threads of consumer w wait for each other.
//
// Memory beyond the end of a sequence may have any content. The rows of Q and dO there are cleared, because 0 times NaN
// is NaN. Rows of K and V there change only their own rows of the sums, which are not stored.
//
// S^T starts with the bias and ALiBi instead of 0. The bias is loaded one tile ahead to the registers of S^T. Element
// masks are converted to bits while products run. With a soft cap or the user's rule, `values` sends P^T times the
// derivative of the score to `keys`. The product P^T dO does not have this factor.
//
// Options: X_DT, X_D, X_D_V (hopper.cuh: 192 or 256 for both, or 192 and 128), those of hopper_dropout.cuh (dropped
//          elements of P^T pass with a mark, see MARK) and hopper_scores.cuh.
//
// Launch: grid: blocks of 64 keys of the longest sequence, of all heads and sequences; block 384; shared memory
// TE__ATTN_DKV_SHARED. Maps: boxes of 64 rows by 64 channels. The conditions are those of attn_fwd_hopper.cu.
// te:arch 90a
// te:row X_DT=2|3 X_D=256 X_D_V=256 X_DROPOUT=0|1
// te:row X_DT=3 X_D=192 X_D_V=128|192 X_DROPOUT=0|1|2
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0|1 X_ALIBI=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_BIAS=1|3 X_PAIRS=1|2
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=1 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_MASK=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_MOD=1|2|3
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_BLOCKS=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_BLOCKS=1 X_MOD=3
// te:row X_DT=3 X_D=192 X_D_V=192 X_DROPOUT=0 X_BLOCKS=1
// te:row X_DT=3 X_D=192 X_D_V=128 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0|1 X_CAP=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_CAP=1 X_MOD=2|3
// te:row X_DT=3 X_D=192 X_D_V=128 X_DROPOUT=0 X_CAP=1
#include "ops/attn/hopper_dropout.cuh"

enum {
    D = X_D,
    D_V = X_D_V,
    BK = 64,
    BQ = 64,
    STAGES = TE__ATTN_DKV_STAGES(X_D),
    BYTES_K = TE__ATTN_BYTES(64, X_D),   // of a stage of Q, too
    BYTES_V = TE__ATTN_BYTES(64, X_D_V), // of a stage of dO, too
    BYTES_P = BK * BQ * 4,
    BYTES_ROWS = BQ * 4,
    AT_K = 0,
    AT_V = AT_K + BYTES_K,
    AT_Q = AT_V + BYTES_V,
    AT_DO = AT_Q + STAGES * BYTES_K,
    AT_P = AT_DO + STAGES * BYTES_V,
    AT_LSE = AT_P + 2 * BYTES_P,
    AT_DELTA = AT_LSE + STAGES * BYTES_ROWS,
    AT_BARRIERS = AT_DELTA + STAGES * BYTES_ROWS,
    FULL_Q = 0,
    EMPTY_Q = FULL_Q + STAGES,
    FULL_DO = EMPTY_Q + STAGES,
    EMPTY_DO = FULL_DO + STAGES,
    FULL_P = EMPTY_DO + STAGES,
    EMPTY_P = FULL_P + 8,
    SHARED = AT_BARRIERS + 8 * (EMPTY_P + 8)
};
static_assert(SHARED == TE__ATTN_DKV_SHARED(X_D, X_D_V), "what the host asks for");
typedef te_attn_keys<BK, BQ, BIAS != 0> te_keys;
typedef te_attn_tiles<BK, BQ> te_tiles;

// This bit marks the elements of P^T that dropout drops. The sign bit is free, since P^T is not negative. With a user's
// rule, whose derivative may be negative, the mark is the lowest bit.
constexpr te_u32 MARK = MOD ? 1u : 0x80000000u;

TE_DEV void te_load_tiles(const te__attn_bwd_hopper_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    const te_keys t(a.a, a.order, blockIdx.x);
    const int batch_q = a.a.x.packed_q ? 0 : t.batch, batch_kv = a.a.x.packed_kv ? 0 : t.batch;
    te_queue<STAGES> at;
    bool keys = true; // K and V are still to load; they come with the first tile
    for (te_tiles i(a.a, t); i.left > 0; i.next(a.a, t), at.next(), keys = false) {
        const te_i64 rows = te_attn_work(a.a, t.batch, i.head, t.q_at) + i.m * BQ;
        auto part = [&](int full, int empty, int bytes, const void *map, int to, const float *of_rows, int rows_to,
                        const void *map_kv, int kv_to) {
            const te_u32 b = bar + 8 * (full + at.stage);
            te_mbar_wait(bar + 8 * (empty + at.stage), at.parity ^ 1);
            te_mbar_expect(b, (keys ? 2 : 1) * bytes + BYTES_ROWS);
            for (int c = 0; c < bytes / 8192; c++) {
                if (keys)
                    te_tma_load4(smem + kv_to + c * 8192, map_kv, 64 * c, t.kv_at + t.n * BK, t.head, batch_kv, b);
                te_tma_load4(smem + to + at.stage * bytes + c * 8192, map, 64 * c, t.q_at + i.m * BQ, i.head, batch_q,
                             b);
            }
            te_bulk_load(smem + rows_to + at.stage * BYTES_ROWS, of_rows + rows, BYTES_ROWS, b);
        };
        if (!te_leads()) continue;
        part(FULL_Q, EMPTY_Q, BYTES_K, a.q_map, AT_Q, a.a.lse2, AT_LSE, a.k_map, AT_K);
        part(FULL_DO, EMPTY_DO, BYTES_V, a.do_map, AT_DO, a.a.delta, AT_DELTA, a.v_map, AT_V);
    }
}

// A consumer warpgroup. It sums one gradient of N channels over tiles of queries. `now` and `old` are the stages of
// this tile and the previous one.
template <int N> struct te_consumer {
    const te__attn_bwd_hopper_kargs &a;
    const te_u32 smem, bar;
    const int lane, warp;
    const te_keys t;
    te_tiles i;
    int m_old; // number m of the previous tile
    int tail;  // how many of the next tiles have rows beyond the end of the sequence. With a block mask it only says
               // whether there are such tiles: 0 means none
    te_queue<STAGES> now, old;
    te_queue<2> pass;
    float sum[N / 2], s[BQ / 2];
    te_u32 weights[BQ / 4]; // 16-bit P^T or dS^T of the previous tile

    TE_DEV te_consumer(const te__attn_bwd_hopper_kargs &a, te_u32 smem)
        : a(a), smem(smem), bar(smem + AT_BARRIERS), lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3),
          t(a.a, a.order, blockIdx.x), i(a.a, t) {
        const te__attn_extra &x = a.a.x;
        tail = t.tiles() > 0 && t.m_end * BQ > t.s_q && t.s_q < (x.packed_q ? x.t_q - t.q_at : a.a.s_q) ? i.heads : 0;
#pragma unroll
        for (int k = 0; k < N / 2; k++) sum[k] = 0.0f;
    }
    // Returns true if the next tile, with the number m, has rows beyond the end of the sequence. The caller must clear
    // these rows.
    TE_DEV bool ends(int m) {
        if (BLOCKS) return tail > 0 && m == t.m_end - 1;
        return tail > 0 && tail-- > 0;
    }
    TE_DEV void await(int full, const te_queue<STAGES> &at) const {
        te_mbar_wait(bar + 8 * (full + at.stage), at.parity);
    }
    TE_DEV void release(int empty, const te_queue<STAGES> &at) const {
        if (lane == 0) te_mbar_arrive(bar + 8 * (empty + at.stage));
    }
    TE_DEV te_u32 of_p() const { return smem + AT_P + pass.stage * BYTES_P + (threadIdx.x & 127) * 16; }
    TE_DEV te_u32 of_rows(int at) const { return smem + at + now.stage * BYTES_ROWS + (lane & 3) * 8; }

    // Computes S^T = K Q^T or dP^T = V dO^T for the current tile. If FRESH is false, the product is added to s.
    template <int CHANNELS, bool FRESH> TE_DEV void products(int keys, int queries) {
        const te_u64 left = te_wgmma_desc(smem + keys, 0),
                     right = te_wgmma_desc(smem + queries + now.stage * TE__ATTN_BYTES(64, CHANNELS), 0);
        te_wgmma_fence();
        te_multiply<0, 0, FRESH>(s, left, right);
#pragma unroll
        for (int k = 1; k < CHANNELS / 16; k++)
            te_multiply<0, 0, false>(s, left + (k >> 2) * (8192 >> 4) + (k & 3) * 2,
                                     right + (k >> 2) * (8192 >> 4) + (k & 3) * 2);
        te_wgmma_commit();
    }
    // Computes sum += weights * dO, or sum += weights * Q, for the previous tile.
    TE_DEV void gather(int queries) {
        const te_u64 right = te_wgmma_desc(smem + queries + old.stage * TE__ATTN_BYTES(64, N), 8192);
        te_wgmma_keep(sum);
        te_wgmma_keep(weights);
        te_wgmma_fence();
#pragma unroll
        for (int k = 0; k < BQ / 16; k++) te_multiply(sum, weights + 4 * k, right + k * 128);
        te_wgmma_commit();
    }
    TE_DEV void gathered() {
        te_wgmma_keep(sum);
        te_wgmma_keep(weights);
    }
    TE_DEV void next(const te_tiles &ahead) {
        old = now;
        now.next(), pass.next();
        if (BLOCKS) m_old = i.m, i = ahead;
        else i.next(a.a, t);
    }
    TE_DEV void store(int at, const void *map, const te__attn_view &view, int d, float scale, int w) const {
        const te_keys u(a.a, a.order, blockIdx.x); // computed anew to save registers
        if (u.n * BK >= u.kv_end) return;
        const int key = u.n * BK + 16 * warp + (lane >> 2);
        const float by[2] = {key < u.s_kv ? scale : 0.0f, key + 8 < u.s_kv ? scale : 0.0f};
        te_store_gradient(sum, by, smem + at, map, view, a.a.x.packed_kv, d, u.kv_at + u.n * BK, u.kv_end - u.n * BK,
                          u.head, a.a.x.packed_kv ? 0 : u.batch, 1 + w);
    }
};

// The results of work that is done while products run: the elements that dropout keeps, the elements that masks show,
// the next tile.
struct te_beside {
    te_keep_columns keep;
    te_u32 show;
    te_tiles ahead;
};

struct te_values : te_consumer<D_V> {
    float slope; // ALiBi's slope for the tile's head
    TE_DEV te_values(const te__attn_bwd_hopper_kargs &a, te_u32 smem) : te_consumer<D_V>(a, smem) {}
    // Loads ALiBi's slope and the bias for the next tile. The bias goes to the registers of S^T.
    TE_DEV void load_ahead() {
        if (i.left <= 0) return;
        if (ALIBI) slope = te_slope(a.a, t.batch, i.head);
        if (BIAS)
            te_bias_columns<BQ / 2>::load(s, a.a, t.batch, i.head, i.m * BQ + 2 * (lane & 3),
                                          t.n * BK + 16 * warp + (lane >> 2));
    }
    TE_DEV void gather_values() {
        await(FULL_DO, old);
        if (ends(m_old)) {
            te_clear_rows64<te_panels(D_V)>(smem + AT_DO + old.stage * BYTES_V, t.s_q - (t.m_end - 1) * BQ);
            te_async_fence();
            te_meet<128>(1);
        }
        gather(AT_DO);
    }
    // Computes S^T of the current tile. At the same time the product for dV of the previous tile runs.
    template <bool FIRST> TE_DEV te_beside begin() {
        // `first` is the first key of the warp. `key` and `query` are the first key and the first query of the thread.
        const int first = t.n * BK + 16 * warp, key = first + (lane >> 2), query = i.m * BQ + 2 * (lane & 3);
        te_beside x = {{0}, 0, i};
        if (!FIRST) gather_values();
        if (BIAS) te_bias_columns<BQ / 2>::start(s, te_bias_scale(a.a));
        if (ALIBI) {
            const int diagonal = a.a.x.bottom_right ? t.s_kv - t.s_q : 0;
            te_start_alibi<BIAS != 0>(s, slope, query - key + diagonal, i.m * BQ - (first + 15) + diagonal);
        }
        await(FULL_Q, now);
        products<D, !ALIBI && !BIAS>(AT_K, AT_Q);
        if (DROPOUT) x.keep.load(a.a, a.bits, t.batch, i.head, t.q_at, i.m * BQ, first);
        if (HIDES) x.show = (te_u32)te_shown<BQ / 2, true, 1>(a.a, t.batch, i.head, query, key, BLOCKS && i.full);
        if (BLOCKS) x.ahead.next(a.a, t);
        if (!FIRST) {
            te_wgmma_wait<1>();
            gathered();
            release(EMPTY_DO, old);
        }
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
        return x;
    }
    // Turns S^T into P^T, and sends it to the other consumer.
    TE_DEV void finish(const te_beside &x) {
        const int key = t.n * BK + 16 * warp + (lane >> 2), query = i.m * BQ + 2 * (lane & 3);
        te_cap(s, a.a);
        if (t.hides(i.m)) {
#pragma unroll
            for (int half = 0; half < 2; half++) { // hides the queries that do not see the key
                const int j = key + 8 * half;
                te_hide_outside(s, half, j - t.hi - query, (j < t.s_kv ? min(j - t.lo, t.s_q - 1) : -1) - query);
            }
        }
        if (HIDES) {
#pragma unroll
            for (int e = 0; e < BQ / 2; e++)
                if (!(x.show >> e & 1)) s[e] = -TE_INF;
        }
        te_mbar_wait(bar + 8 * (EMPTY_P + 4 * pass.stage + warp), pass.parity ^ 1);
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            float l[2];
            te_u32 word[4];
            te_lds8(of_rows(AT_LSE) + j * 32, l[0], l[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float factor;
                const float p = te_weight(a.a, s[4 * j + e], l[e & 1], t.batch, i.head, query + 8 * j + (e & 1),
                                          key + 4 * (e & 2), factor);
                const bool dropped = DROPOUT && !x.keep.one(e >> 1, j, e & 1);
                word[e] = (__float_as_uint(factor) & (DROPOUT && MOD ? ~MARK : ~0u)) | (dropped ? MARK : 0u);
                s[4 * j + e] = dropped ? 0.0f : p;
            }
            te_sts16(of_p() + j * 2048, make_uint4(word[0], word[1], word[2], word[3]));
        }
        __syncwarp();
        if (lane == 0) te_mbar_arrive(bar + 8 * (FULL_P + 4 * pass.stage + warp));
        release(EMPTY_Q, now);
        te_pack16(weights, s);
        next(x.ahead);
        load_ahead();
    }
    TE_DEV void run() {
        load_ahead();
        if (i.left > 0) {
            te_beside x = begin<true>();
            if (SCORES || BLOCKS) { // the code of finish() is long, so this loop has only one call of it
#pragma unroll 1
                for (;;) {
                    finish(x);
                    if (i.left <= 0) break;
                    x = begin<false>();
                }
            } else {
                finish(x);
#pragma unroll 1
                while (i.left > 0) finish(begin<false>());
            }
            gather_values();
            te_wgmma_wait<0>();
            gathered();
        }
        store(AT_K, a.dv_map, a.a.dv, a.a.d_v, a.a.keep_scale, 0); // dV takes the place of K, which only this consumer
                                                                   // reads
    }
};

struct te_keys_of : te_consumer<D> {
    TE_DEV te_keys_of(const te__attn_bwd_hopper_kargs &a, te_u32 smem) : te_consumer<D>(a, smem) {}
    template <bool FIRST> TE_DEV void step() {
        if (ends(i.m)) {
            const int from = t.s_q - i.m * BQ;
            await(FULL_Q, now);
            await(FULL_DO, now);
            te_clear_rows64<te_panels(D)>(smem + AT_Q + now.stage * BYTES_K, from);
            te_clear_rows64<te_panels(D_V)>(smem + AT_DO + now.stage * BYTES_V, from);
            te_async_fence();
            te_meet<128>(2);
        }
        if (!FIRST) {
            await(FULL_Q, old);
            gather(AT_Q);
        }
        await(FULL_DO, now);
        products<D_V, true>(AT_V, AT_DO);
        te_tiles ahead = i;
        if (BLOCKS) ahead.next(a.a, t);
        if (!FIRST) {
            te_wgmma_wait<1>();
            gathered();
            release(EMPTY_Q, old);
        }
        te_mbar_wait(bar + 8 * (FULL_P + 4 * pass.stage + warp), pass.parity);
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            const uint4 y = te_lds16(of_p() + j * 2048);
            const te_u32 x[4] = {y.x, y.y, y.z, y.w};
            float d[2];
            te_lds8(of_rows(AT_DELTA) + j * 32, d[0], d[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float g = s[4 * j + e];
                if (DROPOUT) g = x[e] & MARK ? 0.0f : g * a.a.keep_scale;
                s[4 * j + e] = __uint_as_float(DROPOUT ? x[e] & ~MARK : x[e]) * (g - d[e & 1]);
            }
        }
        __syncwarp();
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_P + 4 * pass.stage + warp));
        release(EMPTY_DO, now);
        te_pack16(weights, s);
        next(ahead);
    }
    TE_DEV void run() {
        if (i.left > 0) {
            step<true>();
#pragma unroll 1
            while (i.left > 0) step<false>();
            await(FULL_Q, old);
            gather(AT_Q);
            te_wgmma_wait<0>();
            gathered();
        }
        // dK overwrites the first stages of Q in shared memory. The warpgroup of te_values has read all of Q before it
        // sends its last P^T, and this P^T has arrived here.
        store(AT_Q, a.dk_map, a.a.dk, a.a.d, a.a.scale, 1);
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    te_attn_bwd_dkv_hopper(const __grid_constant__ te__attn_bwd_hopper_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(bar + 8 * (FULL_Q + i), 1), te_mbar_init(bar + 8 * (EMPTY_Q + i), 8);
            te_mbar_init(bar + 8 * (FULL_DO + i), 1), te_mbar_init(bar + 8 * (EMPTY_DO + i), 8);
        }
        for (int i = 0; i < 16; i++) te_mbar_init(bar + 8 * (FULL_P + i), 1);
        te_mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<24>();
        if (threadIdx.x < (BLOCKS ? 32 : 1)) te_load_tiles(a, smem);
    } else {
        te_registers_up<240>();
        if (group == 1) {
            te_values values(a, smem);
            values.run();
        } else {
            te_keys_of keys(a, smem);
            keys.run();
        }
    }
}
