// ops/norm/norm_fwd.cu: LayerNorm and RMSNorm, forward, into a float format or FP8.
//
//   LayerNorm  mean = sum x / n,  rstd = 1 / sqrt(sum (x - mean)^2 / n + eps)      two passes, so that large means cost no digits
//   RMSNorm    mean = 0,          rstd = 1 / sqrt(sum x^2 / n + eps)
//   y = (x - mean) * rstd * gamma' + beta;   FP8: q = saturate(y * scale), amax = max |y|
//
//   with CHUNKS, a row lives in registers; T threads, vectors of 8, n = 8 V:
//
//       thread   0    1   ..  T-1 |  0    1   ..  T-1 | ..          V <= T * CHUNKS
//       vector  [0]  [1]  .. [T-1]  [T] [T+1] ..        [V-1]
//
// One H200, 2026-11-21, te_bench norm: 16384x4096 bf16, of copy: RMSNorm 0.83, LayerNorm 0.67, to e4m3 0.60 and 0.46.
//
// Launch: block of 32 .. 512 threads (256 with less than 4 chunks), a multiple of 32; grid: any, blocks step through the rows.
// With CHUNKS: n and ld multiples of 8; x, gamma, beta aligned to 16 bytes, y to 16 (8 for FP8); V <= CHUNKS * T with T the block, or
// 32 if warp_rows. Without: any n, any alignment.
//
// te:baseline
// te:row CHUNKS=2 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 LAYERNORM=1 X_DT=3 W_DT=1 Y_DT=3
// te:row CHUNKS=4 LAYERNORM=1 X_DT=1 W_DT=1 Y_DT=1
// te:row CHUNKS=4 LAYERNORM=1 X_DT=2 W_DT=2 Y_DT=5
// te:row CHUNKS=8 LAYERNORM=1 X_DT=1 W_DT=1 Y_DT=1
// te:row CHUNKS=8 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=1 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=2 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=2 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
#include "ops/norm/kargs.h"
#include "ops/norm/norm.cuh"

TE_DEV void te_norm_scale_inv(const te__norm_fwd_kargs &a) {
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(*a.scale);
}
// One atomic for each block that has something to say: most find a larger amax there already.
TE_DEV void te_norm_amax(const te__norm_fwd_kargs &a, float v) {
    if (v > *(volatile float *)a.amax) te_atomic_amax(a.amax, v);
}

#ifdef CHUNKS

constexpr bool te_quantized = Y_DT == TE_F8E4M3 || Y_DT == TE_F8E5M2;

extern "C" __global__ void __launch_bounds__(CHUNKS >= 4 ? 512 : 256) te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    __shared__ float scratch[32];
    bool by_warp = a.warp_rows;
    int threads = by_warp ? 32 : blockDim.x, t = by_warp ? threadIdx.x & 31 : threadIdx.x;
    int rows = by_warp ? blockDim.x >> 5 : 1;
    int vectors = (int)(a.n >> 3);
    float scale = te_quantized ? *a.scale : 1.0f, centre = a.zero_centered ? 1.0f : 0.0f, largest = 0.0f;
    auto total = [&](float v) { return by_warp ? te_warp_sum(v) : te_block_sum(v, scratch); };
    te_norm_scale_inv(a);

    for (te_i64 row = (te_i64)blockIdx.x * rows + (by_warp ? threadIdx.x >> 5 : 0); row < a.m; row += (te_i64)gridDim.x * rows) {
        te_raw8<X_DT> x[CHUNKS];
        float mean = 0.0f, sum = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int v = t + c * threads;
            x[c] = v < vectors ? te_raw8_load<X_DT>(a.x, row * a.n + 8 * v) : te_raw8_zero<X_DT>();
        }
        if (LAYERNORM) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum += te_raw8_get(x[c], j);
            mean = total(sum) / (float)a.n;
            sum = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (t + c * threads >= vectors) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float d = te_raw8_get(x[c], j) - mean;
                sum = fmaf(d, d, sum);
            }
        }
        float rstd = __frsqrt_rn(total(sum) / (float)a.n + a.eps);
        if (t == 0) {
            if (LAYERNORM && a.mean) a.mean[row] = mean;
            if (a.rstd) a.rstd[row] = rstd;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int v = t + c * threads;
            if (v >= vectors) continue;
            te_raw8<W_DT> g = te_raw8_load<W_DT>(a.gamma, 8 * v);
            te_raw8<W_DT> b = LAYERNORM && a.beta ? te_raw8_load<W_DT>(a.beta, 8 * v) : te_raw8_zero<W_DT>();
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                y[j] = fmaf((te_raw8_get(x[c], j) - mean) * rstd, te_raw8_get(g, j) + centre, te_raw8_get(b, j));
                if (te_quantized) {
                    largest = fmaxf(largest, fabsf(y[j]));
                    y[j] *= scale;
                }
            }
            te_store8(a.y, row * a.ld + 8 * v, Y_DT, y);
        }
        if (te_quantized) {
            const float zeros[8] = {};
            for (te_i64 v = vectors + t; v < a.ld >> 3; v += threads) te_store8(a.y, row * a.ld + 8 * v, Y_DT, zeros);
        }
    }
    if (a.amax) {
        largest = by_warp ? te_warp_max(largest) : te_block_max(largest, scratch);
        if (t == 0) te_norm_amax(a, largest);
    }
}

#else

extern "C" __global__ void __launch_bounds__(512) te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    __shared__ float scratch[32];
    float scale = a.scale ? *a.scale : 1.0f, centre = a.zero_centered ? 1.0f : 0.0f, largest = 0.0f;
    te_norm_scale_inv(a);

    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x) {
        float mean = 0.0f, sum = 0.0f;
        if (a.layernorm) {
            for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) sum += te_load(a.x, row * a.n + i, a.x_dt);
            mean = te_block_sum(sum, scratch) / (float)a.n;
            sum = 0.0f;
        }
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            float d = te_load(a.x, row * a.n + i, a.x_dt) - mean;
            sum = fmaf(d, d, sum);
        }
        float rstd = __frsqrt_rn(te_block_sum(sum, scratch) / (float)a.n + a.eps);
        if (threadIdx.x == 0) {
            if (a.mean) a.mean[row] = mean;
            if (a.rstd) a.rstd[row] = rstd;
        }
        for (te_i64 i = threadIdx.x; i < a.ld; i += blockDim.x) {
            float y = 0.0f;
            if (i < a.n) {
                float beta = a.beta ? te_load(a.beta, i, a.beta_dt) : 0.0f;
                y = fmaf((te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd, te_load(a.gamma, i, a.gamma_dt) + centre, beta);
                largest = fmaxf(largest, fabsf(y));
            }
            te_store(a.y, row * a.ld + i, a.y_dt, a.scale ? y * scale : y);
        }
    }
    if (a.amax) {
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0) te_norm_amax(a, largest);
    }
}

#endif
