// ops/attn/attn_bwd_dq_mma.cu: computes dQ = scale dS K in bf16 or f16, on the tensor cores of sm_80 and later
// (mma.sync).
//
//               keys
//            BN   BN
//          +----+----+----
//     warp0|    |    | ...
//     warp1|    |    |
//
// A block owns WARPS * 16 M query rows of one head, and a warp owns 16 M of them. K and V are loaded BN keys at a time
// by cp.async into two buffers, as in attn_fwd_mma.cu. For each tile of keys there are three products, all in
// registers: S = Q K^T, dP = dO V^T and dQ += dS K. Between these products the block computes P = 2^(scale2 S - lse2)
// and dS = P (dP - delta). Dropout is applied to dP as it was to P.
//
// attn_bwd_dkv_mma.cu computes dK and dV. It computes S and dP again. A single kernel for all three gradients would
// save these two products. But with two kernels no sum depends on the order in which blocks run.
//
// Options: as in attn_fwd_mma.cu.
// Benchmark: "attention backward" in tests/bench/h200.csv.
//
// Launch: grid (ceil(s_q / (16 M WARPS)) * batch * heads), block 32 WARPS, shared memory (2 D + 16) (32 M WARPS + 4 BN)
// bytes. Rows start at multiples of 16 bytes, d and d_v are multiples of 8, and 16 M WARPS divides TE__ATTN_PAD.
// te:arch 80
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=32 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=2 X_D=128 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=32 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=64 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=96 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=32 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=64 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=96 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=2 X_D=128 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1 X_CAP=1
#include "ops/attn/fragments.cuh"

#ifndef X_DT // the rows above name every option; these defaults are for an editor
#define X_DT 3
#define X_D 128
#define X_TILE 32
#define X_WARPS 4
#define X_M 2
#define X_DROPOUT 0
#endif
enum {
    DT = X_DT,
    D = X_D,
    BN = X_TILE, // keys of a tile
    WARPS = X_WARPS,
    M = X_M, // 16-row fragments of a warp
    DROPOUT = X_DROPOUT,
    N = BN / 8,
    BM = 16 * M * WARPS,
    THREADS = 32 * WARPS,
    SLOT = te_tile<D>::ROW * BN // bytes of a tile of K or V
};

extern "C" __global__ void __launch_bounds__(THREADS, WARPS <= 4 ? 2 : 1)
    te_attn_bwd_dq_mma(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ uint4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_q + BM - 1) / BM, a.heads, true);
    TE_ATTN_SEQUENCE(a, at.b);
    const te_of::view q_view = te_of::queries(a.q, seq), g_view = te_of::queries(a.d_o, seq),
                      dq_view = te_of::queries(a.dq, seq);
    const te_of::view k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const int group = at.h / (a.heads / a.groups);
    const int block_first = at.tile * BM, first = block_first + warp * 16 * M, last = min(first + 16 * M, seq.s_q) - 1;
    const te_attn_blocks blocks(a, at.b, at.h, block_first);
    const int begin = te_attn_keys_begin(seq, block_first) / BN * BN;
    const int end = EXTRA && block_first >= seq.s_q ? 0 : te_attn_keys_end(seq, min(block_first + BM, seq.s_q) - 1);
    const float slope2 = te_of::slope2(a, at.b, at.h);
    if (EXTRA && block_first >= te_of::q_end(seq)) return;

    const te_u32 shared = te_smem(te_shared), q = shared + warp * (16 * M) * te_tile<D>::ROW,
                 g = q + BM * te_tile<D>::ROW;
    const te_u32 kv = shared + 2 * BM * te_tile<D>::ROW;
    te_copier<D, BN, THREADS> k_copier(k_view, at.b, group, begin, a.d), v_copier(v_view, at.b, group, begin, a.d_v);
    const te_reader<D> rows_first(true), channels_first(false);

    float dq[M][D / 8][4], lse2[M][2], delta[M][2];
    te_clear(dq);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            te_i64 row = te_of::work_at(seq, at.b, at.h) + first + 16 * m + 8 * half + (lane >> 2);
            lse2[m][half] = a.lse2[row];
            delta[m][half] = a.delta[row];
        }

    if (begin < end) {
        te_copier<D, BM, THREADS>(q_view, at.b, at.h, block_first, a.d).copy(shared, a.q.s, seq.s_q);
        te_copier<D, BM, THREADS>(g_view, at.b, at.h, block_first, a.d_v)
            .copy(shared + BM * te_tile<D>::ROW, a.d_o.s, seq.s_q);
        k_copier.copy(kv, a.k.s, seq.s_kv);
        v_copier.copy(kv + SLOT, a.v.s, seq.s_kv);
        te_cp_async_commit();
    }
#pragma unroll 1
    for (int j0 = begin, turn = 0; j0 < end; j0 += BN, turn ^= 1) {
        const te_u32 k = kv + turn * (2 * SLOT), v = k + SLOT;
        te_cp_async_wait<0>();
        __syncthreads(); // every warp sees the tile, and none reads the other slot any more
        if (EXTRA && j0 + BN < end && blocks.empty(j0 + BN)) {
            k_copier.skip(a.k.s);
            v_copier.skip(a.v.s);
        } else if (j0 + BN < end) {
            te_u32 next = kv + (turn ^ 1) * (2 * SLOT);
            k_copier.copy(next, a.k.s, seq.s_kv);
            v_copier.copy(next + SLOT, a.v.s, seq.s_kv);
            te_cp_async_commit();
        }
        if (j0 > last + seq.hi || j0 + BN - 1 < first + seq.lo || blocks.empty(j0)) continue;

        float s[M][N][4], dp[M][N][4];
        te_clear(s);
        te_products<DT, D>(s, rows_first, q, channels_first, k);
#if X_EXTRA
        te_adjust<DT, false>(s, a, seq, at.b, at.h, first + (lane >> 2), j0 + 2 * (lane & 3), slope2);
#else
        if (j0 + BN > a.s_kv || j0 + BN - 1 > first + a.hi || j0 < last + a.lo)
            te_mask(s, a, first + (lane >> 2), j0 + 2 * (lane & 3));
#endif
        te_clear(dp);
        te_products<DT, D>(dp, rows_first, g, channels_first, v);
#pragma unroll
        for (int m = 0; m < M; m++) {
            te_u32 keep[2];
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (DROPOUT && n % 4 == 0) {
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        keep[half] = te_attn_keep_quad(
                                         a, te__attn_keep_row(&a, at.b, at.h, first + 16 * m + 8 * half + (lane >> 2)) +
                                                (j0 + 8 * n) / 32) >>
                                     2 * (lane & 3);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float p = te_exp2(fmaf(s[m][n][e], te_of::scale2(a), -lse2[m][e >> 1])), x = dp[m][n][e];
                    if (DROPOUT) x = keep[e >> 1] >> (8 * (n % 4) + (e & 1)) & 1 ? x * a.keep_scale : 0.0f;
                    s[m][n][e] = p * (x - delta[m][e >> 1]) * te_attn_slope_of(a, p, lse2[m][e >> 1]);
                }
            }
        }
        te_weighted<DT, D>(dq, s, rows_first, k);
    }

    float scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) scale[m][0] = scale[m][1] = a.scale;
    te_put<DT, D, M>(q, dq, scale, te_attn_head(dq_view, at.b, at.h, 2), 2 * a.dq.s, first, te_of::q_end(seq), a.d);
}
