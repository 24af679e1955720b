// ops/norm/norm_row.cuh: one row in the forward kernels of LayerNorm and RMSNorm. This file must not depend on how rows
// are loaded.
//
// With CHUNKS, a row lies in the registers of T = 32 WARPS threads, as V <= T * CHUNKS vectors of 8 elements. With
// FULL, V = T * CHUNKS. All these kernels give the same bits, because each divides a row like this:
//
//       thread   0    1   ..  T-1 |  0    1   ..  T-1 | ..
//       vector  [0]  [1]  .. [T-1]  [T] [T+1] ..        [V-1]
#pragma once
#include "ops/norm/kargs.h"
#include "ops/norm/norm_formula.cuh"

TE_DEV void te_norm_scale_inv(const te__norm_fwd_kargs &a) {
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(*a.scale);
}
// Raises amax to the largest |y| of the warp. Most warps find that amax is larger already, and need no atomic
// operation.
TE_DEV void te_norm_finish(const te__norm_fwd_kargs &a, float largest, int y_dt) {
    largest = te_warp_max(largest);
    largest = te_norm_rounded(largest, y_dt); // now it is the maximum of the values that are stored
    if (a.amax && (threadIdx.x & 31) == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
}

#ifdef CHUNKS
#ifndef ROUNDED
#define ROUNDED 0 /* 1: RMSNorm rounds x * rstd to X_DT, a 16-bit format, before it multiplies by gamma (or 1 +
                   * gamma) */
#endif
#define THREADS (WARPS * 32) /* threads of a row */
constexpr bool te_quantized = Y_DT == TE_F8E4M3 || Y_DT == TE_F8E5M2;
constexpr int te_y_size = te_quantized ? 1 : te_size<Y_DT>;

// The sums that the warps of a row exchange. Two copies take turns, so that no warp overwrites sums that others still
// read.
struct __align__(16) te_norm_scratch {
    float sums[2][2][WARPS], again[2][WARPS];
};

struct te_norm_row {
    te_raw<X_DT> x[CHUNKS];
    te_norm_moments of;

    // Returns the sums of x - shift and of (x - shift)^2 over the elements of this thread.
    TE_DEV float2 share(int t, int vectors, float shift) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (!FULL && t + c * THREADS >= vectors) continue;
            te_norm_add_share<LAYERNORM>(sum, x[c], shift);
        }
        return sum;
    }
    // Returns the sums of both components of v over all threads of the row, added in the order of the warps.
    static TE_DEV float2 add(float2 v, float (&scratch)[2][WARPS]) {
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        if (LAYERNORM) v = te_warp_sum2(v);
        else v.y = te_warp_sum(v.y);
        if (WARPS == 1) return v;
        if (lane == 0) {
            if (LAYERNORM) scratch[0][warp] = v.x;
            scratch[1][warp] = v.y;
        }
        __syncthreads();
        v = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (LAYERNORM) v.x += scratch[0][w];
            v.y += scratch[1][w];
        }
        return v;
    }
    // Computes the moments from the sums of x and of x^2 over the row.
    TE_DEV void finish(float2 sum, int t, int vectors, float one_nth, float eps, te_norm_scratch &scratch) {
        if (of.first<LAYERNORM>(sum, one_nth)) of.second(add(share(t, vectors, of.mean), scratch.again), one_nth);
        of.finish(eps);
    }
    // Computes y of vector c, before it is scaled.
    template <int G_DT>
    TE_DEV void result(int c, const te_raw<G_DT> &gamma, const te_raw<G_DT> &beta, bool centred, float y[8]) const {
        te_norm_result<LAYERNORM>(x[c], of, gamma, beta, centred, ROUNDED, y);
    }
};

TE_DEV void te_norm_stats(const te__norm_fwd_kargs &a, te_i64 row, int t, const te_norm_row &r) {
    if (t != 0) return;
    if (LAYERNORM && a.mean) a.mean[row] = r.of.mean;
    if (a.rstd) a.rstd[row] = r.of.rstd;
}
#endif
