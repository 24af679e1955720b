// ops/attn/attn_bwd_dkv_mma.cu: dK = scale dS^T Q and dV = P^T dO, summed over the query heads of a group, in bf16 or
// f16 on the tensor cores of sm_80 and later (mma.sync).
//
//             query rows
//            BM   BM
//          +----+----+----
//     warp0|    |    | ...
//     warp1|    |    |
//     keys
//
// A block owns WARPS * 16 M keys of one head of K and V. A warp owns 16 M of them. BM rows of Q, dO, lse2 and delta at
// a time are copied by cp.async into two buffers. The heads of the group come one after the other, so every sum has a
// fixed order. The steps for a tile are:
//
//     S^T  = K Q^T  | P^T  = 2^(scale2 S^T - lse2) | dV += P^T dO
//     dP^T = V dO^T | dS^T = P^T (dP^T - delta)    | dK += dS^T Q
//
// P^T and dS^T are accumulators, and their layout is the operand layout that the products for dV and dK need. Tiles
// whose rows see none of the block's keys are not read. A warp skips tiles whose rows see none of its own keys.
//
// Options: X_DT (te_dtype of q, k, v, d_o, dk and dv), X_D (the larger of d and d_v, rounded up to a multiple of 32;
//          the channels added are zeros), X_TILE, X_WARPS, X_M, X_DROPOUT, X_EXTRA (attn.cuh).
//
// Launch: grid (ceil(s_kv / (16 M WARPS)) * batch * groups), block 32 WARPS, shared memory (2 D + 16) (32 M WARPS + 4
//         BM) + 16 BM bytes. Rows start at multiples of 16 bytes, d and d_v are multiples of 8, BM divides
//         TE__ATTN_PAD.
// te:arch 80
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=8 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=2 X_D=128 X_TILE=64 X_WARPS=8 X_M=1 X_DROPOUT=0 X_EXTRA=0
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
#define X_TILE 64
#define X_WARPS 8
#define X_M 1
#define X_DROPOUT 0
#endif
enum {
    DT = X_DT,
    D = X_D,
    BM = X_TILE, // query rows of a tile
    WARPS = X_WARPS,
    M = X_M, // 16-key fragments of a warp
    DROPOUT = X_DROPOUT,
    N = BM / 8,
    BN = 16 * M * WARPS,
    THREADS = 32 * WARPS,
    TILE = te_tile<D>::ROW * BM,  // bytes of a tile of Q or dO
    SLOT = 2 * TILE + 8 * BM      // bytes of a tile of Q and a tile of dO, with lse2 and delta
};

// Goes through the tiles of Q and dO in the order of this thread block: head by head, and in each head through the rows
// `begin` .. `end` - 1.
struct te_walk {
    int begin, h, i0; // h and i0 are the head and the first row of the tile that is copied next
    te_copier<D, BM, THREADS> q, g;
    TE_DEV te_walk(const te__attn_kargs &a, const te_of::sequence &seq, int b, int head, int first)
        : begin(first), h(head), i0(first), q(te_of::queries(a.q, seq), b, head, first, a.d),
          g(te_of::queries(a.d_o, seq), b, head, first, a.d_v) {}
    // Copies the next tile to `slot`, and moves to the tile after it. `key` is the first key of the thread block.
    TE_DEV void copy(te_u32 slot, const te__attn_kargs &a, const te_of::sequence &seq, int b, int key, int end) {
        te_i64 row = te_of::work_at(seq, b, h) + i0;
        const bool empty = EXTRA && te_attn_is_empty(a, b, h, i0, key);
        if (empty) {
            q.skip(a.q.s);
            g.skip(a.d_o.s);
        } else {
            q.copy(slot, a.q.s, seq.s_q);
            g.copy(slot + TILE, a.d_o.s, seq.s_q);
        }
        if (!empty && threadIdx.x < BM / 2) { // each thread copies four rows of lse2 or of delta
            bool second = threadIdx.x >= BM / 4;
            te_cp_async16(slot + 2 * TILE + 16 * threadIdx.x,
                          (second ? a.delta : a.lse2) + row + 4 * (threadIdx.x % (BM / 4)), 16);
        }
        te_cp_async_commit();
        i0 += BM;
        if (i0 >= end) *this = te_walk(a, seq, b, h + 1, begin);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, WARPS <= 4 ? 2 : 1)
    te_attn_bwd_dkv_mma(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ uint4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_kv + BN - 1) / BN, a.groups, false);
    TE_ATTN_SEQUENCE(a, at.b);
    const te_of::view k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq), dk_view = te_of::keys(a.dk, seq),
                      dv_view = te_of::keys(a.dv, seq);
    const int per_group = a.heads / a.groups;
    const int block_first = at.tile * BN, first = block_first + warp * 16 * M, last = min(first + 16 * M, seq.s_kv) - 1;
    const int begin = te_attn_rows_begin(seq, block_first) / BM * BM;
    const int end = EXTRA && block_first >= seq.s_kv ? 0 : te_attn_rows_end(seq, min(block_first + BN, seq.s_kv) - 1);
    if (EXTRA && block_first >= te_of::kv_end(seq)) return;

    const te_u32 shared = te_smem(te_shared), k = shared + warp * (16 * M) * te_tile<D>::ROW,
                 v = k + BN * te_tile<D>::ROW;
    const te_u32 slots = shared + 2 * BN * te_tile<D>::ROW;
    const te_reader<D> rows_first(true), channels_first(false);
    te_walk walk(a, seq, at.b, at.h * per_group, begin);

    float dk[M][D / 8][4], dv[M][D / 8][4];
    te_clear(dk);
    te_clear(dv);
    int left = begin < end ? (end - begin + BM - 1) / BM * per_group : 0; // tiles
    if (left) {
        te_copier<D, BN, THREADS>(k_view, at.b, at.h, block_first, a.d).copy(shared, a.k.s, seq.s_kv);
        te_copier<D, BN, THREADS>(v_view, at.b, at.h, block_first, a.d_v)
            .copy(shared + BN * te_tile<D>::ROW, a.v.s, seq.s_kv);
        walk.copy(slots, a, seq, at.b, block_first, end);
    }
    int i0 = begin, h = at.h * per_group;
    float slope2 = te_of::slope2(a, at.b, h);
#pragma unroll 1
    for (int turn = 0; left > 0; left--, turn ^= 1) {
        const te_u32 q = slots + turn * SLOT, g = q + TILE, rows = g + TILE;
        const int i = i0 + 2 * (lane & 3); // this lane's first row
        te_cp_async_wait<0>();
        __syncthreads(); // every warp sees the tile, and all warps have finished reading the other slot
        if (left > 1) walk.copy(slots + (turn ^ 1) * SLOT, a, seq, at.b, block_first, end);

        // The rows i0 .. i0 + BM - 1 see no other keys than i0 + lo .. i0 + BM - 1 + hi.
        if (first <= i0 + BM - 1 + seq.hi && last >= i0 + seq.lo &&
            !(EXTRA && te_attn_is_empty(a, at.b, h, i0, block_first))) {
            float s[M][N][4], dp[M][N][4];
            te_u32 keep[M][N];
            te_clear(s);
            te_products<DT, D>(s, rows_first, k, channels_first, q);
#if X_EXTRA
            te_adjust<DT, true>(s, a, seq, at.b, h, i, first + (lane >> 2), slope2);
#else
            if (last > i0 + a.hi || first < i0 + BM - 1 + a.lo) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int j = first + 16 * m + 8 * half + (lane >> 2), from = j - a.hi - i, to = j - a.lo - i;
#pragma unroll
                        for (int n = 0; n < N; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (8 * n + e < from || 8 * n + e > to) s[m][n][2 * half + e] = -TE_INF;
                    }
            }
#endif
#pragma unroll
            for (int n = 0; n < N; n++) {
                float2 lse2 = te_lds8(rows + 4 * (8 * n + 2 * (lane & 3)));
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[m][n][e] = te_exp2(fmaf(s[m][n][e], te_of::scale2(a), -(e & 1 ? lse2.y : lse2.x)));
            }
            te_clear(dp);
            te_products<DT, D>(dp, rows_first, v, channels_first, g);
            if (DROPOUT) {
                float p[M][N][4];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        keep[m][n] = te_attn_keep_transposed(
                            te_attn_keep_quad(a, te__attn_keep_row(&a, at.b, h, i0 + 8 * n + (lane >> 2)) +
                                                     (first + 16 * m) / 32),
                            first + 16 * m);
#pragma unroll
                        for (int e = 0; e < 4; e++) p[m][n][e] = keep[m][n] >> e & 1 ? s[m][n][e] : 0.0f;
                    }
                te_weighted<DT, D>(dv, p, rows_first, g);
            } else {
                te_weighted<DT, D>(dv, s, rows_first, g);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                float2 delta = te_lds8(rows + 4 * (BM + 8 * n + 2 * (lane & 3))),
                       lse2 = CAP ? te_lds8(rows + 4 * (8 * n + 2 * (lane & 3))) : delta;
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float x = dp[m][n][e];
                        if (DROPOUT) x = keep[m][n] >> e & 1 ? x * a.keep_scale : 0.0f;
                        s[m][n][e] *= (x - (e & 1 ? delta.y : delta.x)) *
                                      te_attn_slope_of(a, s[m][n][e], e & 1 ? lse2.y : lse2.x);
                    }
            }
            te_weighted<DT, D>(dk, s, rows_first, q);
        }
        i0 += BM;
        if (i0 >= end) {
            i0 = begin, h++;
            if (EXTRA && left > 1) slope2 = te_of::slope2(a, at.b, h);
        }
    }

    float k_scale[M][2], v_scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        k_scale[m][0] = k_scale[m][1] = a.scale;
        v_scale[m][0] = v_scale[m][1] = a.keep_scale;
    }
    te_put<DT, D, M>(k, dk, k_scale, te_attn_head(dk_view, at.b, at.h, 2), 2 * a.dk.s, first, te_of::kv_end(seq), a.d);
    te_put<DT, D, M>(v, dv, v_scale, te_attn_head(dv_view, at.b, at.h, 2), 2 * a.dv.s, first, te_of::kv_end(seq),
                     a.d_v);
}
