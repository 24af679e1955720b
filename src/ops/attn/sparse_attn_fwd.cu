// ops/attn/sparse_attn_fwd.cu: attention in which each query reads the keys of a list of its own, and keys are values, too (multi-query attention; DeepSeek-V4's sparse
// attention): o = sum p kv, p = e^(s - m) / (sum e^(s - m) + e^(sink - m)), s = scale q kv, m = max(s, -1e30). In f32, for any formats and strides.
//
// The tiles are those of sparse.cuh. A running maximum and sum per head rescale what has been summed so far whenever the maximum grows. A head with no key, or none
// whose score is above -1e30 by enough for a sum, has o = 0.
//
// Options: X_DT (sparse.cuh).
//
// Launch: grid batch * s_q * ceil(heads / 8), block 128, shared memory 4 * (8 * ROW(d) + tile * LANE_ROW(d) + 4 * tile * 2) bytes (kargs.h).
// te:baseline
// te:row X_DT=1|3
#include "ops/attn/sparse.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) te_sparse_attn_fwd(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const te_sparse_place at(a);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = at.first + warp * TE_SPARSE_MINE;
    const int ld_q = TE__ATTN_ROW(a.d), ld = TE__ATTN_LANE_ROW(a.d);
    const int *list = a.indices + ((te_i64)at.b * a.s_q + at.i) * a.n;
    float *q = (float *)te_shared, *keys = q + TE__SPARSE_ROWS * ld_q, *weight = keys + a.tile * ld + warp * (a.tile * TE_SPARSE_MINE);
    float acc[TE_SPARSE_MINE][TE_SPARSE_CHANNELS], m[TE_SPARSE_MINE], l[TE_SPARSE_MINE]; // in units of log2; l: this lane's share
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++) {
        m[r] = -1e30f * TE_LOG2E;
        l[r] = 0.0f;
#pragma unroll
        for (int t = 0; t < TE_SPARSE_CHANNELS; t++) acc[r][t] = 0.0f;
    }
    te_sparse_heads(q, ld_q, a.q, at, a.heads, a.d);
    __syncthreads();
#pragma unroll 1
    for (int k0 = 0; k0 < a.n; k0 += a.tile) {
        const int key = te_sparse_keys(keys, ld, a, list, at.b, k0);
        float p[TE_SPARSE_MINE];
        if (!__any_sync(0xffffffffu, key >= 0)) continue;
        te_sparse_products(p, q + warp * TE_SPARSE_MINE * ld_q, ld_q, keys + min(lane, a.tile - 1) * ld, a.d);
#pragma unroll
        for (int r = 0; r < TE_SPARSE_MINE; r++) {
            const float s = key >= 0 ? p[r] * a.scale2 : -TE_INF, top = fmaxf(m[r], te_warp_max(s)), shrink = exp2f(m[r] - top);
            p[r] = exp2f(s - top);
            l[r] = l[r] * shrink + p[r];
            m[r] = top;
#pragma unroll
            for (int t = 0; t < TE_SPARSE_CHANNELS; t++) acc[r][t] *= shrink;
        }
        if (lane < a.tile) *(float2 *)(weight + lane * TE_SPARSE_MINE) = make_float2(p[0], p[1]);
        __syncwarp();
        te_sparse_gather(acc, weight, keys, ld, a.tile, a.d_v);
    }
    float inverse[TE_SPARSE_MINE];
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++) {
        const float sink2 = a.sinks && first + r < a.heads ? a.sinks[first + r] * TE_LOG2E : -TE_INF;
        float sum = te_warp_sum(l[r]);
        const float shrink = te_attn_add_sink(sink2, &m[r], &sum);
        inverse[r] = sum == 0.0f ? 0.0f : shrink / sum;
        if (a.lse && lane == 0 && first + r < a.heads) a.lse[at.row(a, first + r)] = (sum == 0.0f ? sink2 : m[r] + log2f(sum)) * TE_LN2;
    }
    te_sparse_put(a.o, at, first, a.heads, a.d_v, acc, inverse);
}
