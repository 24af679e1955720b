// ops/attn/attn_bwd_dq_hopper.cu: computes dQ on Hopper for heads of more than 128 channels, in bf16 or f16, with TMA,
// mbarriers and wgmma. It is deterministic. attn_bwd_dkv_hopper.cu computes dK and dV.
//
// A thread block owns 128 queries of one head. Q and dO stay in shared memory. The thread block goes through blocks of
// 64 keys, from the last one that the queries see to the first. Each of the two consumer warpgroups has 64 queries:
//
//     dQ += dS K (previous block) | S = Q K^T | dP = dO V^T, P = 2^(scale2 S - lse2) | dS = P (dP - delta)
//
// Warpgroup 0 is the producer: one of its threads starts all loads.
//
// Shared memory (panels of 64 channels, 128-byte swizzle), for D = D_V:
//
//     |         | Q, two of 64 rows | dO, two of 64 rows | K, STAGES_K | V, STAGES_V | barriers |
//     | D = 256 | 64 KB             | 64 KB              | 2 x 32 KB   | 32 KB       |
//     | D = 192 | 48 KB             | 48 KB              | 3 x 24 KB   | 2 x 24 KB   |
//
// Barriers: FULL_Q and FULL_DO (the loads of TMA have arrived); for each stage FULL_K and FULL_V (the loads of TMA have
// arrived), EMPTY_K and EMPTY_V (the 8 consumer warps have read the stage). At named barrier 1 + w the threads of
// consumer w wait for each other.
//
// If memory goes on after the end of a sequence, the keys there may have any content. They are cleared, because 0 times
// NaN is NaN. Queries beyond a sequence change only their own rows of dQ, and these become 0.
//
// S starts with ALiBi instead of 0. When the registers of dS are free, a bias is loaded to them while the products run.
// At that time element masks are converted to bits, too. Empty blocks of a block mask are skipped. The producer and the
// consumers each read the mask.
//
// Options: X_DT, X_D, X_D_V (hopper.cuh: 192 or 256 for both, or 192 and 128), those of hopper_dropout.cuh and
//          hopper_scores.cuh.
//
// Launch: grid: tiles of 128 queries of the longest sequence, of all heads and sequences; block 384; shared memory
// TE__ATTN_DQ_SHARED. Maps: boxes of 64 rows by 64 channels. The conditions are those of attn_fwd_hopper.cu.
// te:arch 90a
// te:row X_DT=2|3 X_D=256 X_D_V=256 X_DROPOUT=0|1
// te:row X_DT=3 X_D=192 X_D_V=128|192 X_DROPOUT=0|1|2
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0|1 X_ALIBI=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=0 X_BIAS=1|3 X_PAIRS=0|1|2
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
    // true: the bias is loaded after the bits of dropout and masks, because computing them needs the registers of the
    // bias
    LATE = DROPOUT || HIDES,
    BM = 128,
    BN = 64,
    STAGES_K = TE__ATTN_DQ_STAGES_K(X_D),
    STAGES_V = TE__ATTN_DQ_STAGES_V(X_D),
    BYTES_K = TE__ATTN_BYTES(64, X_D),   // bytes of 64 keys, and of 64 rows of Q
    BYTES_V = TE__ATTN_BYTES(64, X_D_V), // bytes of 64 rows of V, and of dO
    AT_Q = 0,
    AT_DO = AT_Q + 2 * BYTES_K,
    AT_K = AT_DO + 2 * BYTES_V,
    AT_V = AT_K + STAGES_K * BYTES_K,
    AT_BARRIERS = AT_V + STAGES_V * BYTES_V,
    FULL_Q = 0,
    FULL_DO = 1,
    FULL_K = 2,
    EMPTY_K = FULL_K + STAGES_K,
    FULL_V = EMPTY_K + STAGES_K,
    EMPTY_V = FULL_V + STAGES_V,
    SHARED = AT_BARRIERS + 8 * (EMPTY_V + STAGES_V)
};
static_assert(SHARED == TE__ATTN_DQ_SHARED(X_D, X_D_V), "what the host asks for");
static_assert(!BLOCKS || (BM == TE_ATTN_BLOCK_SIZE && TE_ATTN_BLOCK_SIZE % BN == 0),
              "a tile, and its keys, lie in one block of a block mask");
typedef te_attn_tile<BM, BN, BIAS != 0> te_tile;

TE_DEV void te_load_tiles(const te__attn_bwd_hopper_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_tile t;
    t.find(a, blockIdx.x);
    const int batch_q = a.a.x.packed_q ? 0 : t.batch, batch_kv = a.a.x.packed_kv ? 0 : t.batch,
              group = t.head / (a.a.heads / a.a.groups);
    te_queue<STAGES_K> k;
    te_queue<STAGES_V> v;
    auto rows = [&](const void *map, te_u32 full, int to, int bytes) {
        te_mbar_expect(full, 2 * bytes);
        for (int w = 0; w < 2; w++)
            for (int c = 0; c < bytes / 8192; c++)
                te_tma_load4(smem + to + w * bytes + c * 8192, map, 64 * c, t.q_at + t.row + 64 * w, t.head, batch_q,
                             full);
    };
    auto keys = [&](const void *map, te_u32 full, te_u32 empty, int parity, te_u32 to, int bytes, int n) {
        te_mbar_wait(empty, parity ^ 1);
        te_mbar_expect(full, bytes);
        for (int c = 0; c < bytes / 8192; c++)
            te_tma_load4(to + c * 8192, map, 64 * c, t.kv_at + n * BN, group, batch_kv, full);
    };
    const te_u8 *const blocks = BLOCKS ? te_blocks_of(a.a, t.batch, t.head, t.row) : 0;
    for (int n = t.end - 1; n >= t.begin;
         n = BLOCKS ? te_last_seen<BN>(blocks, t.begin, n) : n - 1, k.next(), v.next()) {
        if (n == t.end - 1) rows(a.q_map, bar + 8 * FULL_Q, AT_Q, BYTES_K);
        keys(a.k_map, bar + 8 * (FULL_K + k.stage), bar + 8 * (EMPTY_K + k.stage), k.parity,
             smem + AT_K + k.stage * BYTES_K, BYTES_K, n);
        if (n == t.end - 1) rows(a.do_map, bar + 8 * FULL_DO, AT_DO, BYTES_V);
        keys(a.v_map, bar + 8 * (FULL_V + v.stage), bar + 8 * (EMPTY_V + v.stage), v.parity,
             smem + AT_V + v.stage * BYTES_V, BYTES_V, n);
    }
}

// Consumer warpgroup w.
struct te_consumer {
    const te__attn_bwd_hopper_kargs &a;
    const te_u32 smem, bar;
    const int w, lane, warp;
    te_tile t;
    int row; // the thread's upper row
    te_queue<STAGES_K> k, old; // old: stage of the block before
    te_queue<STAGES_V> v;
    te_bias_rows<BN / 2> bias;
    float slope; // ALiBi's
    const te_u8 *blocks;
    int below;             // the next block of keys that is not empty
    bool full, full_below; // full: the user's mask hides nothing of the current block; full_below: nothing of the block
                           // `below`
    float dq[D / 2], s[BN / 2], dp[BN / 2], lse2[2], delta[2];
    te_u32 ds[BN / 4];

    TE_DEV te_consumer(const te__attn_bwd_hopper_kargs &a, te_u32 smem, int w)
        : a(a), smem(smem), bar(smem + AT_BARRIERS), w(w), lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3) {
        t.find(a, blockIdx.x);
        row = t.row + 64 * w + 16 * warp + (lane >> 2);
#pragma unroll
        for (int i = 0; i < D / 2; i++) dq[i] = 0.0f;
    }
    // Computes S = Q K^T or dP = dO V^T for this consumer's rows and the current block of keys. If FRESH is false, the
    // product is added to d.
    template <int CHANNELS, bool FRESH> TE_DEV void products(float (&d)[BN / 2], int queries, te_u32 keys) {
        const te_u64 left = te_wgmma_desc(smem + queries + w * TE__ATTN_BYTES(64, CHANNELS), 0),
                     right = te_wgmma_desc(keys, 0);
        te_wgmma_fence();
        te_multiply<0, 0, FRESH>(d, left, right);
#pragma unroll
        for (int i = 1; i < CHANNELS / 16; i++)
            te_multiply<0, 0, false>(d, left + (i >> 2) * (8192 >> 4) + (i & 3) * 2,
                                     right + (i >> 2) * (8192 >> 4) + (i & 3) * 2);
        te_wgmma_commit();
    }
    TE_DEV void gather() { // dQ += dS K, for the previous block
        const te_u64 right = te_wgmma_desc(smem + AT_K + old.stage * BYTES_K, 8192);
        te_wgmma_keep(dq);
        te_wgmma_keep(ds);
        te_wgmma_fence();
#pragma unroll
        for (int i = 0; i < BN / 16; i++) te_multiply(dq, ds + 4 * i, right + i * 128);
        te_wgmma_commit();
    }
    TE_DEV void gathered() {
        te_wgmma_keep(dq);
        te_wgmma_keep(ds);
    }
    // Finds the block of keys after n.
    TE_DEV void look(int n) {
        if (BLOCKS) full = full_below, below = te_last_seen<BN>(blocks, t.begin, n, full_below);
    }
    template <bool FIRST> TE_DEV void step(int n) {
        const int column = n * BN + 2 * (lane & 3);
        if (FIRST) {
            te_mbar_wait(bar + 8 * FULL_Q, 0);
            if (t.tail) {
                te_mbar_wait(bar + 8 * (FULL_K + k.stage), k.parity);
                te_mbar_wait(bar + 8 * (FULL_V + v.stage), v.parity);
                te_clear_rows64<te_panels(D)>(smem + AT_K + k.stage * BYTES_K, t.s_kv - n * BN);
                te_clear_rows64<te_panels(D_V)>(smem + AT_V + v.stage * BYTES_V, t.s_kv - n * BN);
                te_async_fence();
                te_meet<128>(1 + w);
            }
        } else {
            gather();
        }
        if (ALIBI) {
            const int diagonal = a.a.x.bottom_right ? t.s_kv - t.s_q : 0;
            te_start_alibi<false>(s, slope, column - row - diagonal,
                                  n * BN - (t.row + 64 * w + 16 * warp + 15) - diagonal);
        }
        te_mbar_wait(bar + 8 * (FULL_K + k.stage), k.parity);
        products<D, !ALIBI>(s, AT_Q, smem + AT_K + k.stage * BYTES_K);
        if (!FIRST) {
            te_wgmma_wait<1>();
            gathered();
            if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_K + old.stage));
        }
        if (BIAS && !LATE) bias.load(n * BN); // to the registers of dS
        if (FIRST) te_mbar_wait(bar + 8 * FULL_DO, 0);
        te_mbar_wait(bar + 8 * (FULL_V + v.stage), v.parity);
        products<D_V, true>(dp, AT_DO, smem + AT_V + v.stage * BYTES_V);
        te_keep_rows<BN> keep;
        if (DROPOUT) keep.load(a.a, a.bits, t.batch, t.head, t.q_at, row, n * BN);
        look(n);
        const te_u32 show =
            HIDES ? (te_u32)te_shown<BN / 2, false, 1>(a.a, t.batch, t.head, row, column, BLOCKS && full) : 0;
        if (BIAS && LATE) bias.load(n * BN);
        te_wgmma_wait<1>();
        te_wgmma_keep(s);
        if (BIAS) bias.add(s, n * BN, te_bias_scale(a.a));
        te_cap(s, a.a);
        if (FIRST || n >= t.hidden_from || n < t.hidden_to) {
#pragma unroll
            for (int half = 0; half < 2; half++) // hides the keys that the row does not see
                te_hide_outside(s, half, row + 8 * half + t.lo - column,
                                min(row + 8 * half + t.hi, t.s_kv - 1) - column);
        }
        if (HIDES) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (!(show >> i & 1)) s[i] = -TE_INF;
        }
#pragma unroll
        for (int i = 0; i < BN / 2; i++)
            te_weight(a.a, s[i], lse2[i / 2 & 1], t.batch, t.head, row + 8 * (i / 2 & 1),
                      column + 8 * (i / 4) + (i & 1), s[i]);
        te_wgmma_wait<0>();
        te_wgmma_keep(dp);
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_V + v.stage));
#pragma unroll
        for (int i = 0; i < BN / 2; i++) {
            float g = dp[i];
            if (DROPOUT) g = keep.one(i / 2 % 2, i / 4, i % 2) ? g * a.a.keep_scale : 0.0f;
            s[i] *= g - delta[i / 2 & 1];
        }
        te_pack16(ds, s);
        old = k;
        k.next(), v.next();
    }
    TE_DEV void run() {
        if (t.begin < t.end) {
            const te_i64 work = te_attn_work(a.a, t.batch, t.head, t.q_at) + row; // lse2 and delta are padded to whole
                                                                                  // tiles
#pragma unroll
            for (int half = 0; half < 2; half++)
                lse2[half] = a.a.lse2[work + 8 * half], delta[half] = a.a.delta[work + 8 * half];
            if (ALIBI) slope = te_slope(a.a, t.batch, t.head);
            if (BIAS) bias.open(a.a, t.batch, t.head, row, 2 * (lane & 3));
            if (BLOCKS) {
                blocks = te_blocks_of(a.a, t.batch, t.head, t.row);
                full_below = blocks[(t.end - 1) * BN / TE_ATTN_BLOCK_SIZE] == TE_ATTN_BLOCK_FULL;
            }
            step<true>(t.end - 1);
#pragma unroll 1
            for (int n = BLOCKS ? below : t.end - 2; n >= t.begin; n = BLOCKS ? below : n - 1) step<false>(n);
            gather();
            te_wgmma_wait<0>();
            gathered();
        }
        const int first = t.row + 64 * w;
        const float by[2] = {row < t.s_q ? a.a.scale : 0.0f, row + 8 < t.s_q ? a.a.scale : 0.0f};
        te_store_gradient(dq, by, smem + AT_Q + w * BYTES_K, a.dq_map, a.a.dq, a.a.x.packed_q, a.a.d, t.q_at + first,
                          t.q_end - first, t.head, a.a.x.packed_q ? 0 : t.batch, 1 + w);
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    te_attn_bwd_dq_hopper(const __grid_constant__ te__attn_bwd_hopper_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        te_mbar_init(bar + 8 * FULL_Q, 1), te_mbar_init(bar + 8 * FULL_DO, 1);
        for (int i = 0; i < STAGES_K; i++)
            te_mbar_init(bar + 8 * (FULL_K + i), 1), te_mbar_init(bar + 8 * (EMPTY_K + i), 8);
        for (int i = 0; i < STAGES_V; i++)
            te_mbar_init(bar + 8 * (FULL_V + i), 1), te_mbar_init(bar + 8 * (EMPTY_V + i), 8);
        te_mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<24>();
        if (threadIdx.x == 0) te_load_tiles(a, smem);
    } else {
        te_registers_up<240>();
        te_consumer consumer(a, smem, group - 1);
        consumer.run();
    }
}
