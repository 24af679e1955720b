// ops/norm/norm_bwd.cu: LayerNorm and RMSNorm, backward.
//
//   xhat = (x - mean) * rstd,  g = dy * gamma'
//   dx = rstd * (g - mean(g xhat) * xhat - mean(g)) + add          RMSNorm: without mean(g)
//   dgamma = sum over rows of dy xhat,  dbeta = sum over rows of dy
//
//   block b takes rows b, b + B, b + 2B ..; its sums over those rows become row b of `partial`, which norm_bwd_sum adds up in order:
//
//       row      0 1 2 .. B-1 | B B+1 ..             partial  [0] <- rows 0, B, 2B ..
//       block    0 1 2 .. B-1 | 0 1   ..                      [1] <- rows 1, B+1 ..
//
// B is chosen from the shape and the device alone. With CHUNKS, columns are split among threads as in norm_fwd, the sums stay in
// registers (in shared memory if SUMS_SHARED) and the next row is on its way while this one is reduced.
//
// One H200, 2026-11-21, te_bench norm: 16384x4096 bf16, of copy: RMSNorm 0.85, LayerNorm 0.77.
//
// Launch: grid of B <= m blocks of 32 .. 512 threads. With CHUNKS: n a multiple of 8 and at most 8 * CHUNKS * threads; dy, x, add, dx of
// X_DT and all pointers aligned to 16 bytes; SUMS_SHARED: kinds * 8 * CHUNKS * threads floats of dynamic shared memory. Without: anything;
// `partial` is summed in place.
//
// te:baseline
// te:row CHUNKS=1 SUMS_SHARED=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 SUMS_SHARED=0 LAYERNORM=0 X_DT=3 W_DT=3
// te:row CHUNKS=2 SUMS_SHARED=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 SUMS_SHARED=0 LAYERNORM=1 X_DT=1 W_DT=1
// te:row CHUNKS=2 SUMS_SHARED=0 LAYERNORM=0 X_DT=2 W_DT=1
// te:row CHUNKS=4 SUMS_SHARED=1 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=4 SUMS_SHARED=1 LAYERNORM=0 X_DT=2 W_DT=1
#include "ops/norm/kargs.h"
#include "ops/norm/norm.cuh"

// Both sums at once, with one barrier: scratch alternates from row to row, so that nobody overwrites what others still read.
TE_DEV float2 te_norm_sum2(float2 v, float2 *scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = make_float2(te_warp_sum(v.x), te_warp_sum(v.y));
    if (warps == 1) return v;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = lane < warps ? scratch[lane] : make_float2(0.0f, 0.0f);
    return make_float2(te_warp_sum(v.x), te_warp_sum(v.y));
}

#ifdef CHUNKS

#define KINDS (LAYERNORM ? 2 : 1)

// One thread's share of the sums over rows: kind 0 is dgamma, 1 is dbeta.
struct te_norm_sums {
#if SUMS_SHARED
    float4 *sums; // [KINDS][CHUNKS][2][threads]: neighbouring threads touch neighbouring banks
    TE_DEV float4 &at(int kind, int c, int half) const { return sums[((kind * CHUNKS + c) * 2 + half) * blockDim.x + threadIdx.x]; }
    TE_DEV void clear() {
        extern __shared__ float4 te_norm_shared[];
        sums = te_norm_shared;
        for (int k = 0; k < KINDS; k++)
            for (int c = 0; c < CHUNKS; c++) at(k, c, 0) = at(k, c, 1) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    TE_DEV void add(int kind, int c, const float v[8]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float4 s = at(kind, c, h);
            at(kind, c, h) = make_float4(s.x + v[4 * h], s.y + v[4 * h + 1], s.z + v[4 * h + 2], s.w + v[4 * h + 3]);
        }
    }
    TE_DEV void get(int kind, int c, float v[8]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float4 s = at(kind, c, h);
            v[4 * h] = s.x, v[4 * h + 1] = s.y, v[4 * h + 2] = s.z, v[4 * h + 3] = s.w;
        }
    }
#else
    float sums[KINDS][CHUNKS][8];
    TE_DEV void clear() {
#pragma unroll
        for (int i = 0; i < KINDS * CHUNKS * 8; i++) sums[i / (CHUNKS * 8)][i / 8 % CHUNKS][i % 8] = 0.0f;
    }
    TE_DEV void add(int kind, int c, const float v[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[kind][c][j] += v[j];
    }
    TE_DEV void get(int kind, int c, float v[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = sums[kind][c][j];
    }
#endif
};

// What a thread holds of one row.
struct te_norm_row {
    te_raw8<X_DT> x[CHUNKS], dy[CHUNKS];
    float mean, rstd;
};
TE_DEV void te_norm_fetch(const te__norm_bwd_kargs &a, te_i64 row, te_norm_row *r) {
    int vectors = (int)(a.n >> 3);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int v = threadIdx.x + c * blockDim.x;
        bool here = row < a.m && v < vectors;
        r->x[c] = here ? te_raw8_load<X_DT>(a.x, row * a.n + 8 * v) : te_raw8_zero<X_DT>();
        r->dy[c] = here ? te_raw8_load<X_DT>(a.dy, row * a.n + 8 * v) : te_raw8_zero<X_DT>();
    }
    r->mean = LAYERNORM && row < a.m ? a.mean[row] : 0.0f;
    r->rstd = row < a.m ? a.rstd[row] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(512) te_norm_bwd(const __grid_constant__ te__norm_bwd_kargs a) {
    __shared__ float2 scratch[2][32];
    int vectors = (int)(a.n >> 3), turn = 0;
    float centre = a.zero_centered ? 1.0f : 0.0f;
    te_norm_sums sums;
    te_norm_row now;
    sums.clear();
    te_norm_fetch(a, blockIdx.x, &now);
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x, turn ^= 1) {
        te_norm_row next;
        te_norm_fetch(a, row + gridDim.x, &next);
        float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int v = threadIdx.x + c * blockDim.x;
            if (v >= vectors) continue;
            te_raw8<W_DT> gamma = te_raw8_load<W_DT>(a.gamma, 8 * v); // near by: cheaper than registers
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float xhat = (te_raw8_get(now.x[c], j) - now.mean) * now.rstd;
                float g = te_raw8_get(now.dy[c], j) * (te_raw8_get(gamma, j) + centre);
                s.x = fmaf(g, xhat, s.x);
                if (LAYERNORM) s.y += g;
            }
        }
        s = te_norm_sum2(s, scratch[turn]);
        float c1 = s.x / (float)a.n, c2 = s.y / (float)a.n;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int v = threadIdx.x + c * blockDim.x;
            if (v >= vectors) continue;
            te_raw8<W_DT> gamma = te_raw8_load<W_DT>(a.gamma, 8 * v);
            float dx[8], dgamma[8], dbeta[8], add[8] = {};
            if (a.add) te_load8(a.add, row * a.n + 8 * v, X_DT, add);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float xhat = (te_raw8_get(now.x[c], j) - now.mean) * now.rstd;
                dbeta[j] = te_raw8_get(now.dy[c], j);
                dgamma[j] = dbeta[j] * xhat;
                float g = dbeta[j] * (te_raw8_get(gamma, j) + centre);
                if (LAYERNORM) g -= c2;
                dx[j] = fmaf(now.rstd, fmaf(-c1, xhat, g), add[j]);
            }
            te_store8(a.dx, row * a.n + 8 * v, X_DT, dx);
            sums.add(0, c, dgamma);
            if (LAYERNORM) sums.add(1, c, dbeta);
        }
        now = next;
    }
    if (!a.partial) return;
#pragma unroll
    for (int k = 0; k < KINDS; k++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int v = threadIdx.x + c * blockDim.x;
            if (v >= vectors) continue;
            float out[8];
            sums.get(k, c, out);
            te_store8(a.partial, ((te_i64)blockIdx.x * KINDS + k) * a.n + 8 * v, TE_F32, out);
        }
}

#else

extern "C" __global__ void __launch_bounds__(512) te_norm_bwd(const __grid_constant__ te__norm_bwd_kargs a) {
    __shared__ float2 scratch[2][32];
    int turn = 0;
    float centre = a.zero_centered ? 1.0f : 0.0f;
    // Each thread alone touches its columns of the block's row of partial sums.
    float *dgamma = a.partial ? a.partial + (te_i64)blockIdx.x * (a.layernorm ? 2 : 1) * a.n : 0;
    if (a.partial)
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            dgamma[i] = 0.0f;
            if (a.layernorm) dgamma[a.n + i] = 0.0f;
        }
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x, turn ^= 1) {
        float mean = a.layernorm ? a.mean[row] : 0.0f, rstd = a.rstd[row];
        float2 s = make_float2(0.0f, 0.0f);
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            float xhat = (te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd;
            float g = te_load(a.dy, row * a.n + i, a.dy_dt) * (te_load(a.gamma, i, a.gamma_dt) + centre);
            s.x = fmaf(g, xhat, s.x);
            s.y += g;
        }
        s = te_norm_sum2(s, scratch[turn]);
        float c1 = s.x / (float)a.n, c2 = a.layernorm ? s.y / (float)a.n : 0.0f;
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            float xhat = (te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd;
            float dy = te_load(a.dy, row * a.n + i, a.dy_dt);
            float g = dy * (te_load(a.gamma, i, a.gamma_dt) + centre);
            float add = a.add ? te_load(a.add, row * a.n + i, a.add_dt) : 0.0f;
            te_store(a.dx, row * a.n + i, a.dx_dt, fmaf(rstd, fmaf(-c1, xhat, g - c2), add));
            if (a.partial) {
                dgamma[i] += dy * xhat;
                if (a.layernorm) dgamma[a.n + i] += dy;
            }
        }
    }
}

#endif
