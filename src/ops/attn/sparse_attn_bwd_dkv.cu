// ops/attn/sparse_attn_bwd_dkv.cu: dKV = scale dS^T Q + P^T dO of sparse attention, whose keys are also its values.
// sparse_attn_query.cu, which runs before, defines P and dS. A block owns one key, and goes through the queries that
// read this key (sparse_attn_list.cu). A warp takes every eighth pair of query and head. Each sum always has the same
// order.
//
// Options: X_DT (sparse.cuh).
//
// Launch: grid batch * s_kv, block 256.
// te:baseline
// te:row X_DT=1|3
#include "ops/attn/sparse.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
    te_sparse_attn_bwd_dkv(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    __shared__ float sums[8][TE__SPARSE_MAX_D], key[TE__SPARSE_MAX_D];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = (int)(blockIdx.x / (te_u32)a.s_kv),
              j = (int)(blockIdx.x - (te_u32)b * (te_u32)a.s_kv);
    const int *start = a.start + (te_i64)b * (a.s_kv + 1) + j, *list = a.list + (te_i64)b * a.s_q * a.n + start[0];
    const te_i64 pairs = (te_i64)(start[1] - start[0]) * a.heads, row = te_attn_at(a.kv, b, 0, j);
    for (int c = threadIdx.x; c < a.d; c += 256) key[c] = te_sparse_load(a.kv.p, row + c, TE_SPARSE_DT(a.kv));
    for (int c = lane; c < a.d; c += 32) sums[warp][c] = 0.0f;
    __syncthreads();
#pragma unroll 1
    for (te_i64 pair = warp; pair < pairs; pair += 8) {
        const int e = (int)(pair / a.heads), h = (int)(pair - (te_i64)e * a.heads), i = list[e] / a.n;
        const te_i64 q_at = te_attn_at(a.q, b, h, i), g_at = te_attn_at(a.d_o, b, h, i),
                     at = ((te_i64)b * a.heads + h) * a.s_q + i;
        float s = 0.0f, dp = 0.0f;
#pragma unroll TE_SPARSE_UNROLL
        for (int c = lane; c < a.d; c += 32) s += te_sparse_load(a.q.p, q_at + c, TE_SPARSE_DT(a.q)) * key[c];
#pragma unroll TE_SPARSE_UNROLL
        for (int c = lane; c < a.d_v; c += 32) dp += te_sparse_load(a.d_o.p, g_at + c, TE_SPARSE_DT(a.d_o)) * key[c];
        const float p = exp2f(te_warp_sum(s) * a.scale2 - a.lse2[at]),
                    ds = p * (te_warp_sum(dp) - a.delta[at]) * a.scale;
#pragma unroll TE_SPARSE_UNROLL
        for (int c = lane; c < a.d; c += 32) { // q and d_o are read again, from the L1 cache; each lane has its own
                                               // words of sums
            float sum = sums[warp][c] + ds * te_sparse_load(a.q.p, q_at + c, TE_SPARSE_DT(a.q));
            if (c < a.d_v) sum += p * te_sparse_load(a.d_o.p, g_at + c, TE_SPARSE_DT(a.d_o));
            sums[warp][c] = sum;
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.d; c += 256) {
        float sum = 0.0f;
#pragma unroll 1
        for (int w = 0; w < 8; w++) sum += sums[w][c];
        te_sparse_store(a.dkv.p, te_attn_at(a.dkv, b, 0, j) + c, TE_SPARSE_DT(a.dkv), sum);
    }
}
