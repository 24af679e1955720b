// ops/norm/norm_fwd.cu: the forward pass of LayerNorm and RMSNorm, into a float format or FP8.
//
//   LayerNorm  mean = sum x / n,  rstd = 1 / sqrt(sum (x - mean)^2 / n + eps)
//   RMSNorm    mean = 0,          rstd = 1 / sqrt(sum x^2 / n + eps)
//   y = (x - mean) * rstd * gamma' + beta;   ROUNDED: (x - mean) * rstd is rounded to x's format first;
//   FP8: q = saturate(y * scale), amax = max |y|
//
// With CHUNKS, a row is read once and stays in registers (norm_row.cuh). Each lane of a warp issues CHUNKS loads of 16
// bytes before the warp waits. A multiprocessor has RESIDENT blocks, so several rows are in flight. With PACKED,
// elements stay packed from pass to pass, and weights are loaded where they are used. This saves registers, so more
// blocks fit. If there are many long rows, norm_fwd_queue handles them.
//
// Benchmark: "rmsnorm forward ...", "layernorm forward ..." in tests/bench/h200.csv.
//
// Launch with CHUNKS: one block of 32 WARPS threads for each row; if WARPS is 1, one block of 128 threads for every
// four rows. n and ld are multiples of 8 (with FULL, ld = n). x, gamma and beta are aligned to 16 bytes, y to 16 (8 for
// FP8). Launch without CHUNKS: blocks of up to 512 threads, a multiple of 32, and any grid, since blocks step through
// the rows. Any n and any alignment are allowed.
//
// te:baseline
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=6 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=6 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=9 PACKED=1 AMAX=1 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=9 PACKED=1 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=9 PACKED=1 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=2 FULL=1 RESIDENT=12 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=2 FULL=1 RESIDENT=18 PACKED=1 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=8 FULL=1 RESIDENT=3 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=8 FULL=1 RESIDENT=4 PACKED=1 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=16 FULL=1 RESIDENT=2 PACKED=1 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=2 WARPS=1 FULL=1 RESIDENT=6 PACKED=0 AMAX=0 ZERO_CENTERED=1 LAYERNORM=1 X_DT=3 W_DT=1 Y_DT=3
// te:row CHUNKS=4 WARPS=5 FULL=0 RESIDENT=1 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=16 FULL=0 RESIDENT=1 PACKED=0 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=2 W_DT=2 Y_DT=5
// te:row CHUNKS=8 WARPS=16 FULL=0 RESIDENT=1 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=1 W_DT=1 Y_DT=1
// te:row CHUNKS=4 WARPS=4 FULL=1 RESIDENT=6 PACKED=0 AMAX=0 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3 ROUNDED=1
#include "ops/norm/norm_row.cuh"

#ifdef CHUNKS

#define ROWS (WARPS == 1 ? 4 : 1) /* rows of a block */

extern "C" __global__ void __launch_bounds__(THREADS *ROWS, RESIDENT)
    te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    te_follow();
    __shared__ te_norm_scratch scratch;
    int t = threadIdx.x % THREADS, vectors = FULL ? CHUNKS * THREADS : (int)(a.n >> 3);
    te_i64 row = (te_i64)blockIdx.x * ROWS + threadIdx.x / THREADS;
    if (ROWS > 1 && row >= a.m) return;
    const char *from = (const char *)a.x + (row * a.n + 8 * t) * te_size<X_DT>;
    te_norm_row r;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        r.x[c] = FULL || t + c * THREADS < vectors ? te_raw_load_hinted<X_DT, TE_LOAD_ONCE>(from, c * THREADS * 8)
                                                   : te_raw_zero<X_DT>();
    float scale = te_quantized ? *a.scale : 1.0f, largest = 0.0f,
          one_nth = FULL ? 1.0f / (CHUNKS * THREADS * 8) : 1.0f / (float)a.n;
    te_norm_scale_inv(a);
    r.finish(r.add(r.share(t, vectors, 0.0f), scratch.sums[0]), t, vectors, one_nth, a.eps, scratch);
    if (PACKED) te_raw_seal(r.x);
    te_norm_stats(a, row, t, r);

    char *to = (char *)a.y + (row * a.ld + 8 * t) * te_y_size;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int v = t + c * THREADS;
        if (!FULL && v >= vectors) continue;
        constexpr te_load_hint HINT = PACKED ? TE_LOAD_HERE : TE_LOAD_CONSTANT;
        te_raw<W_DT> g = te_raw_load_hinted<W_DT, HINT>(a.gamma, 8 * v), b = te_raw_zero<W_DT>();
        if (LAYERNORM && a.beta) b = te_raw_load_hinted<W_DT, HINT>(a.beta, 8 * v);
        float y[8];
        r.result(c, g, b, ZERO_CENTERED, y);
        if (AMAX) largest = fmaxf(largest, te_largest8(y));
        if (te_quantized) {
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] *= scale;
        }
        te_store8(to + c * (THREADS * 8 * te_y_size), 0, Y_DT, y);
    }
    if (te_quantized && !FULL) {
        const float zeros[8] = {};
        for (te_i64 v = vectors + t; v < a.ld >> 3; v += THREADS) te_store8(a.y, row * a.ld + 8 * v, Y_DT, zeros);
    }
    if (AMAX) te_norm_finish(a, largest, Y_DT);
}

#else

extern "C" __global__ void __launch_bounds__(512) te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    te_follow();
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
                y = (te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd;
                if (a.rounded) y = te_norm_rounded(y, a.x_dt);
                y = fmaf(y, te_load(a.gamma, i, a.gamma_dt) + centre, beta);
                largest = fmaxf(largest, fabsf(y));
            }
            te_store(a.y, row * a.ld + i, a.y_dt, a.scale ? y * scale : y);
        }
    }
    te_norm_finish(a, largest, a.y_dt);
}

#endif
