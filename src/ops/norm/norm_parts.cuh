// ops/norm/norm_parts.cuh: computes dgamma and dbeta from norm_bwd's partial sums, always in the same order.
//
//   A unit is 32 V neighbouring columns; a lane has V (1 or 4) of them. There are 16 shares: share w adds the rows
//   w, w + 16, w + 32 ... The shares are added in the order of w.
#pragma once
#include "device/base.cuh"
#include "ops/norm/kargs.h"

// Computes one unit of dgamma (kind 0) or dbeta (kind 1). All threads of the block must call this function. `sums` is
// 512 V floats of shared memory. If V is 4, n is a multiple of 4.
template <int V> TE_DEV void te_norm_add_parts(const te__norm_bwd_sum_kargs &a, int kind, te_i64 unit, float *sums) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    void *out = kind ? a.dbeta : a.dgamma;
    int dt = kind ? a.dbeta_dt : a.dgamma_dt;
    te_i64 first = unit * 32 * V, column = first + lane * V, stride = a.kinds * a.n;
    if (!out) return;
    for (int share = warp; share < 16; share += warps) {
        const float *from = a.partial + kind * a.n + column;
        float sum[V] = {};
        for (te_i64 r = share; r < a.parts && column < a.n; r += 9 * 16) {
            float v[9][V];
#pragma unroll
            for (int k = 0; k < 9; k++) {
                const float *p = from + (r + 16 * k) * stride;
                bool there = r + 16 * k < a.parts;
                if constexpr (V == 4) {
                    float4 u = there ? __ldcg((const float4 *)p) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    v[k][0] = u.x, v[k][1] = u.y, v[k][2] = u.z, v[k][3] = u.w;
                } else {
                    v[k][0] = there ? __ldcg(p) : 0.0f;
                }
            }
#pragma unroll
            for (int k = 0; k < 9; k++)
#pragma unroll
                for (int j = 0; j < V; j++) sum[j] += v[k][j];
        }
#pragma unroll
        for (int j = 0; j < V; j++) sums[share * 32 * V + lane * V + j] = sum[j];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * V && first + c < a.n; c += blockDim.x) {
        float sum = sums[c];
#pragma unroll
        for (int share = 1; share < 16; share++) sum += sums[share * 32 * V + c];
        if (a.accumulate) sum += te_load(out, first + c, dt);
        te_store(out, first + c, dt, sum);
    }
    __syncthreads();
}
