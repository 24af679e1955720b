// ops/attn/sparse_attn_query.cu: the passes of sparse attention that go over queries. Each query reads the keys of its
// own list, and keys are also values (multi-query attention; DeepSeek-V4's sparse attention). The arithmetic is f32,
// and any formats and strides are allowed.
//   forward    o = sum p kv, p = e^(s - m) / (sum e^(s - m) + e^(sink - m)), s = scale q kv, m = max(s, -1e30). Each
//              head has a running maximum and sum; whenever the maximum grows, what has been summed so far is
//              rescaled. A head has o = 0 if its sum is 0: it has no key, or all its scores are far below -1e30.
//   backward   dQ = scale dS KV, dS = P (dP - delta), P = e^(s - lse), dP = dO KV, delta = dO O. Also writes lse2 and
//              delta, which sparse_attn_bwd_dkv.cu and attn_bwd_sink.cu read.
// The tiles are those of sparse.cuh.
//
// Options: X_BACKWARD (0, 1): the pass; if not set, it is the backward pass if there is a dO. X_DT (sparse.cuh).
//
// Launch: grid batch * s_q * ceil(heads / 8), block 128, shared memory 4 * (8 * (ROW(d) + ROW(d_v)) + tile *
// LANE_ROW(d) + 8 * tile) bytes, in the backward pass 32 * ROW(d) more (kargs.h).
// te:baseline
// te:row X_DT=1|3 X_BACKWARD=0|1
#include "ops/attn/sparse.cuh"
#ifndef X_BACKWARD
#define X_BACKWARD (a.d_o.p != 0)
#endif

extern "C" __global__ void __launch_bounds__(128, 2)
    te_sparse_attn_query(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const te_sparse_place at(a);
    const bool backward = X_BACKWARD;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = at.first + warp * TE_SPARSE_MINE;
    const int ld_q = TE__ATTN_ROW(a.d), ld_v = TE__ATTN_ROW(a.d_v), ld = TE__ATTN_LANE_ROW(a.d),
              d_acc = backward ? a.d : a.d_v, ld_acc = TE__ATTN_ROW(d_acc);
    const int *list = a.indices + ((te_i64)at.b * a.s_q + at.i) * a.n;
    float *q = (float *)te_shared, *g = q + TE__SPARSE_ROWS * ld_q, *acc = backward ? g + TE__SPARSE_ROWS * ld_v : g,
          *keys = acc + TE__SPARSE_ROWS * ld_acc;
    float *weight = keys + a.tile * ld + warp * (a.tile * TE_SPARSE_MINE);
    float m[TE_SPARSE_MINE], l[TE_SPARSE_MINE]; // forward: the maximum in units of log2, and this lane's share of the
                                                // sum; backward: lse2 and delta
    te_sparse_heads(q, ld_q, a.q, at, a.heads, a.d);
    if (backward) te_sparse_heads(g, ld_v, a.d_o, at, a.heads, a.d_v);
#pragma unroll 1
    for (int c = threadIdx.x; c < TE__SPARSE_ROWS * ld_acc; c += 128) acc[c] = 0.0f;
    __syncthreads();
    q += warp * TE_SPARSE_MINE * ld_q;
    g += warp * TE_SPARSE_MINE * ld_v;
    acc += warp * TE_SPARSE_MINE * ld_acc;
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++) {
        m[r] = backward ? TE_INF : -1e30f * TE_LOG2E; // +inf for a head that does not exist or sees no key: P is 0
        l[r] = 0.0f;
        if (!backward || first + r >= a.heads) continue;
        const te_i64 o = te_attn_at(a.o, at.b, first + r, at.i);
#pragma unroll 1
        for (int c = lane; c < a.d_v; c += 32)
            l[r] += te_sparse_load(a.o.p, o + c, TE_SPARSE_DT(a.o)) * g[r * ld_v + c];
        l[r] = te_warp_sum(l[r]);
        m[r] = a.lse[at.row(a, first + r)] * TE_LOG2E;
        if (m[r] == -TE_INF) m[r] = TE_INF;
        if (lane == 0) a.lse2[at.row(a, first + r)] = m[r], a.delta[at.row(a, first + r)] = l[r];
    }
#pragma unroll 1
    for (int k0 = 0; k0 < a.n; k0 += a.tile) {
        const int key = te_sparse_keys(keys, ld, a, list, at.b, k0);
        const float *mine = keys + min(lane, a.tile - 1) * ld;
        float p[TE_SPARSE_MINE], dp[TE_SPARSE_MINE], shrink[TE_SPARSE_MINE];
        if (!__any_sync(0xffffffffu, key >= 0)) continue;
        te_sparse_products(p, q, ld_q, mine, a.d);
        if (backward) te_sparse_products(dp, g, ld_v, mine, a.d_v);
#pragma unroll
        for (int r = 0; r < TE_SPARSE_MINE; r++) {
            const float s = key >= 0 ? p[r] * a.scale2 : -TE_INF;
            if (backward) {
                shrink[r] = 1.0f;
                p[r] = key >= 0 ? exp2f(s - m[r]) * (dp[r] - l[r]) : 0.0f;
                continue;
            }
            const float top = fmaxf(m[r], te_warp_max(s));
            shrink[r] = exp2f(m[r] - top);
            p[r] = exp2f(s - top);
            l[r] = l[r] * shrink[r] + p[r];
            m[r] = top;
        }
        if (lane < a.tile) *(float2 *)(weight + lane * TE_SPARSE_MINE) = make_float2(p[0], p[1]);
        __syncwarp();
        te_sparse_gather(acc, ld_acc, shrink, weight, keys, ld, a.tile, d_acc);
    }
    float factor[TE_SPARSE_MINE];
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++) {
        factor[r] = a.scale;
        if (backward) continue;
        const float sink2 = a.sinks && first + r < a.heads ? a.sinks[first + r] * TE_LOG2E : -TE_INF;
        float sum = te_warp_sum(l[r]);
        const float shrink = te_attn_add_sink(sink2, &m[r], &sum);
        factor[r] = sum == 0.0f ? 0.0f : shrink / sum;
        if (a.lse && lane == 0 && first + r < a.heads)
            a.lse[at.row(a, first + r)] = (sum == 0.0f ? sink2 : m[r] + log2f(sum)) * TE_LN2;
    }
    te_sparse_put(backward ? a.dq : a.o, at, first, a.heads, d_acc, acc, ld_acc, factor);
}
