// ops/attn/sparse_attn_bwd_dq.cu: dQ = scale dS KV of sparse attention (sparse_attn_fwd.cu), dS = P (dP - delta), P = e^(s - lse), dP = dO KV, delta = dO O; and lse2 and
// delta, which sparse_attn_bwd_dkv.cu and attn_bwd_sink.cu read. In f32, for any formats and strides.
//
// Options: X_DT (sparse.cuh).
//
// Launch: grid batch * s_q * ceil(heads / 8), block 128, shared memory 4 * (8 * (ROW(d) + ROW(d_v)) + tile * LANE_ROW(d) + 4 * tile * 2) bytes (kargs.h).
// te:baseline
// te:row X_DT=1|3
#include "ops/attn/sparse.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) te_sparse_attn_bwd_dq(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const te_sparse_place at(a);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = at.first + warp * TE_SPARSE_MINE;
    const int ld_q = TE__ATTN_ROW(a.d), ld_g = TE__ATTN_ROW(a.d_v), ld = TE__ATTN_LANE_ROW(a.d);
    const int *list = a.indices + ((te_i64)at.b * a.s_q + at.i) * a.n;
    float *q = (float *)te_shared, *g = q + TE__SPARSE_ROWS * ld_q, *keys = g + TE__SPARSE_ROWS * ld_g, *weight = keys + a.tile * ld + warp * (a.tile * TE_SPARSE_MINE);
    float acc[TE_SPARSE_MINE][TE_SPARSE_CHANNELS], lse2[TE_SPARSE_MINE], delta[TE_SPARSE_MINE];
    te_sparse_heads(q, ld_q, a.q, at, a.heads, a.d);
    te_sparse_heads(g, ld_g, a.d_o, at, a.heads, a.d_v);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++) {
#pragma unroll
        for (int t = 0; t < TE_SPARSE_CHANNELS; t++) acc[r][t] = 0.0f;
        lse2[r] = TE_INF; // of a head that is not there, or sees no key: its P is 0
        delta[r] = 0.0f;
        if (first + r >= a.heads) continue;
        const te_i64 o = te_attn_at(a.o, at.b, first + r, at.i);
        for (int c = lane; c < a.d_v; c += 32) delta[r] += te_load(a.o.p, o + c, TE_SPARSE_DT(a.o)) * g[(warp * TE_SPARSE_MINE + r) * ld_g + c];
        delta[r] = te_warp_sum(delta[r]);
        lse2[r] = a.lse[at.row(a, first + r)] * TE_LOG2E;
        if (lse2[r] == -TE_INF) lse2[r] = TE_INF;
        if (lane == 0) a.lse2[at.row(a, first + r)] = lse2[r], a.delta[at.row(a, first + r)] = delta[r];
    }
#pragma unroll 1
    for (int k0 = 0; k0 < a.n; k0 += a.tile) {
        const int key = te_sparse_keys(keys, ld, a, list, at.b, k0);
        const float *mine = keys + min(lane, a.tile - 1) * ld;
        float p[TE_SPARSE_MINE], dp[TE_SPARSE_MINE];
        if (!__any_sync(0xffffffffu, key >= 0)) continue;
        te_sparse_products(p, q + warp * TE_SPARSE_MINE * ld_q, ld_q, mine, a.d);
        te_sparse_products(dp, g + warp * TE_SPARSE_MINE * ld_g, ld_g, mine, a.d_v);
#pragma unroll
        for (int r = 0; r < TE_SPARSE_MINE; r++) p[r] = key >= 0 ? exp2f(p[r] * a.scale2 - lse2[r]) * (dp[r] - delta[r]) : 0.0f;
        if (lane < a.tile) *(float2 *)(weight + lane * TE_SPARSE_MINE) = make_float2(p[0], p[1]);
        __syncwarp();
        te_sparse_gather(acc, weight, keys, ld, a.tile, a.d);
    }
    const float scale[TE_SPARSE_MINE] = {a.scale, a.scale};
    te_sparse_put(a.dq, at, first, a.heads, a.d, acc, scale);
}
