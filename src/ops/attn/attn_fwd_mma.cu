// ops/attn/attn_fwd_mma.cu: computes O = softmax(scale Q K^T, masked) V in bf16 or f16, on the tensor cores of sm_80
// and later (mma.sync). The method is that of FlashAttention-2 (Dao, 2023).
//
//               keys
//            BN   BN
//          +----+----+----
//     warp0|    |    | ...
//     warp1|    |    |
//
// A block owns WARPS * 16 M query rows of one head, and a warp owns 16 M of them. A row is never split between warps,
// so four neighbouring lanes compute its softmax. K and V are loaded BN keys at a time by cp.async into two buffers:
// the next tile is loaded while the current one is multiplied. S = Q K^T stays in registers. The accumulator layout of
// S is the operand layout of P, so P V needs no exchange either. A tile of keys that no row of the block sees is not
// read. A warp skips a tile that none of its own rows sees.
//
// The running maximum is raised only when it would grow by more than 8 (in units of log2). Until then P is at most 2^8,
// which both formats can hold, and O need not be rescaled. The sum l has the same factor as O, so the result is the
// same.
//
// Options: X_DT (te_dtype of q, k, v and o), X_D (the larger of d and d_v, rounded up to a multiple of 32; channels
// beyond d or d_v are zeros), X_TILE, X_WARPS, X_M, X_DROPOUT, X_EXTRA (attn.cuh).
//
// Launch: grid (ceil(s_q / (16 M WARPS)) * batch * heads), block 32 WARPS, shared memory (2 D + 16) (16 M WARPS + 4 BN)
// bytes. Rows start at multiples of 16 bytes, d and d_v are multiples of 8, scale > 0.
// te:arch 80
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=192 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=256 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=96 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=128 X_TILE=32 X_WARPS=4 X_M=2 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=192 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=3 X_D=256 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=0
// te:row X_DT=2 X_D=128 X_TILE=64 X_WARPS=4 X_M=2 X_DROPOUT=0 X_EXTRA=0
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=192 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=256 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=32 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=64 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=96 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=192 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=3 X_D=256 X_TILE=32 X_WARPS=4 X_M=1 X_DROPOUT=1 X_EXTRA=1
// te:row X_DT=2 X_D=128 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1
// te:row X_DT=3 X_D=128 X_TILE=64 X_WARPS=4 X_M=1 X_DROPOUT=0 X_EXTRA=1 X_CAP=1
#include "ops/attn/fragments.cuh"

#ifndef X_DT // the rows above name every option; these defaults are for an editor
#define X_DT 3
#define X_D 128
#define X_TILE 64
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
    te_attn_fwd_mma(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ uint4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_q + BM - 1) / BM, a.heads, true);
    TE_ATTN_SEQUENCE(a, at.b);
    const te_of::view q_view = te_of::queries(a.q, seq), o_view = te_of::queries(a.o, seq),
                      k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const int group = at.h / (a.heads / a.groups);
    const int block_first = at.tile * BM, first = block_first + warp * 16 * M, last = min(first + 16 * M, seq.s_q) - 1;
    const te_attn_blocks blocks(a, at.b, at.h, block_first);
    const int begin = te_attn_keys_begin(seq, block_first) / BN * BN;
    const int end = EXTRA && block_first >= seq.s_q ? 0 : te_attn_keys_end(seq, min(block_first + BM, seq.s_q) - 1);
    const float slope2 = te_of::slope2(a, at.b, at.h);
    if (EXTRA && block_first >= te_of::q_end(seq)) return;

    const te_u32 shared = te_smem(te_shared), q = shared + warp * (16 * M) * te_tile<D>::ROW,
                 kv = shared + BM * te_tile<D>::ROW;
    te_copier<D, BN, THREADS, EXTRA> k_copier(k_view, at.b, group, begin, a.d, &a.x),
        v_copier(v_view, at.b, group, begin, a.d_v, &a.x);
    const te_reader<D> rows_first(true), channels_first(false);

    float o[M][D / 8][4], top[M][2], l[M][2]; // top: the maximum, in units of log2; l: this lane's share of the sum
    float peak = -TE_INF;                              // X_EXTRA: the largest score, which `top` need not be
    te_clear(o);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) top[m][half] = -TE_INF, l[m][half] = 0.0f;

    if (begin < end) {
        te_copier<D, BM, THREADS>(q_view, at.b, at.h, block_first, a.d).copy(shared, a.q.s, seq.s_q);
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

        float s[M][N][4];
        te_clear(s);
        te_products<DT, D>(s, rows_first, q, channels_first, k);
#if X_EXTRA
        te_adjust<DT, false>(s, a, seq, at.b, at.h, first + (lane >> 2), j0 + 2 * (lane & 3), slope2);
#else
        if (j0 + BN > a.s_kv || j0 + BN - 1 > first + a.hi || j0 < last + a.lo)
            te_mask(s, a, first + (lane >> 2), j0 + 2 * (lane & 3));
#endif

        float grown[M][2];
        bool grows = false;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = -TE_INF;
#pragma unroll
                for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)) * te_of::scale2(a);
                grown[m][half] = x;
                if (EXTRA) peak = fmaxf(peak, x);
                grows = grows || x > top[m][half] + 8.0f;
            }
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float now = fmaxf(top[m][half], grown[m][half]),
                          shrink = now == -TE_INF ? 1.0f : te_exp2(top[m][half] - now);
                    top[m][half] = now;
                    l[m][half] *= shrink;
#pragma unroll
                    for (int n = 0; n < D / 8; n++) o[m][n][2 * half] *= shrink, o[m][n][2 * half + 1] *= shrink;
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float base = top[m][half] == -TE_INF ? 0.0f : top[m][half];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[m][n][e] = te_exp2(fmaf(s[m][n][e], te_of::scale2(a), -base));
                        l[m][half] += s[m][n][e];
                    }
            }
        if (DROPOUT) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const te_u64 row =
                        te__attn_keep_row(&a, at.b, at.h, first + 16 * m + 8 * half + (lane >> 2)) + j0 / 32;
#pragma unroll
                    for (int k = 0; k < N / 4; k++) {
                        const te_u32 keep = te_attn_keep_quad(a, row + k) >> 2 * (lane & 3);
#pragma unroll
                        for (int e = 0; e < 8; e++)
                            if (!(keep >> (8 * (e / 2) + e % 2) & 1)) s[m][4 * k + e / 2][2 * half + e % 2] = 0.0f;
                    }
                }
            }
        }
        te_weighted<DT, D>(o, s, rows_first, v);
    }

    if (EXTRA && a.x.max_logit) {
        peak = te_warp_max(peak);
        if (lane == 0) te_attn_raise(a.x.max_logit + at.h, peak);
    }
    const float sink2 = EXTRA ? te_attn_sink2(a, at.h) : -TE_INF;
    float inverse[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = first + 16 * m + 8 * half + (lane >> 2);
            float sum = l[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float shrink = EXTRA ? te_attn_add_sink(sink2, &top[m][half], &sum) : 1.0f;
            inverse[m][half] = sum == 0.0f ? 0.0f : __fdividef(shrink * a.keep_scale, sum);
            if (a.lse && (lane & 3) == 0 && i < te_of::q_end(seq))
                a.lse[te_of::lse_at(seq, at.b, at.h) + i] =
                    sum == 0.0f ? -TE_INF : (top[m][half] + __log2f(sum)) * TE_LN2;
        }
    te_put<DT, D, M>(q, o, inverse, te_attn_head(o_view, at.b, at.h, 2), 2 * a.o.s, first, te_of::q_end(seq), a.d_v);
}
