// ops/norm/norm_fwd.cu: LayerNorm and RMSNorm, forward, into a float format or FP8.
//
//   LayerNorm  mean = sum x / n,  rstd = 1 / sqrt(sum (x - mean)^2 / n + eps)
//   RMSNorm    mean = 0,          rstd = 1 / sqrt(sum x^2 / n + eps)
//   y = (x - mean) * rstd * gamma' + beta;   FP8: q = saturate(y * scale), amax = max |y|
//
//   with CHUNKS, a row lives in the registers of WARPS warps; T = 32 WARPS threads, vectors of 8, n = 8 V:
//
//       thread   0    1   ..  T-1 |  0    1   ..  T-1 | ..          V <= T * CHUNKS, FULL: V = T * CHUNKS
//       vector  [0]  [1]  .. [T-1]  [T] [T+1] ..        [V-1]
//
// A row is read once and its statistics take one pass and one barrier. Each warp sums x - s and its squares, with s the mean of the warp's
// first vectors, and the warps' means and squares are then merged (Chan, Golub, LeVeque): a mean that is large beside the spread costs no
// digits. A warp takes 16 bytes a lane CHUNKS times before it waits, and several rows are on their way on a multiprocessor: RESIDENT blocks.
// PACKED: elements stay packed from pass to pass, and weights are loaded where they are used, which leaves room for more blocks.
//
// One H200, 2026-11-21, te_bench, 16384x4096 bf16, of copy: LayerNorm 0.88, RMSNorm 0.87, RMSNorm to FP8 with amax 0.87, before rows lost
// their loop and FP8 outputs were PACKED.
//
// Launch: CHUNKS: a block for every row, of 32 WARPS threads; WARPS = 1: 128 threads, a block for every four rows. n and ld multiples
// of 8 (FULL: ld = n); x, gamma, beta aligned to 16 bytes, y to 16 (8 for FP8). Without: any n, any alignment; block of up to 512, a
// multiple of 32; grid: any, blocks step through the rows.
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
#include "device/raw8.cuh"
#include "ops/norm/kargs.h"

TE_DEV void te_norm_scale_inv(const te__norm_fwd_kargs &a) {
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(*a.scale);
}
// What was the largest |y| when the block began, of all that had ended: most blocks have nothing to add to it in the end.
TE_DEV float te_norm_known(const te__norm_fwd_kargs &a) { return a.amax ? *(volatile float *)a.amax : 0.0f; }
TE_DEV void te_norm_finish(const te__norm_fwd_kargs &a, float largest, float known, int y_dt) {
    largest = te_warp_max(largest);
    if (y_dt == TE_BF16) largest = te_bf16_to_f32(te_f32_to_bf16(largest)); // of what is stored
    if (y_dt == TE_F16) largest = te_f16_to_f32(te_f32_to_f16(largest));
    if (a.amax && (threadIdx.x & 31) == 0 && largest > known) te_atomic_amax(a.amax, largest);
}

#ifdef CHUNKS

#define THREADS (WARPS * 32)      /* of a row */
#define ROWS (WARPS == 1 ? 4 : 1) /* of a block */
constexpr bool te_quantized = Y_DT == TE_F8E4M3 || Y_DT == TE_F8E5M2;
constexpr int te_y_size = te_quantized ? 1 : te_size<Y_DT>;

// How many elements of a row warp w holds in its first `chunks` vectors.
TE_DEV float te_norm_count(int w, int vectors, int chunks) {
    if (FULL) return (float)(chunks * 256);
    int count = 0;
#pragma unroll
    for (int c = 0; c < chunks; c++) count += min(max(vectors - (w + c * WARPS) * 32, 0), 32);
    return (float)(8 * count);
}
TE_DEV float te_norm_inverse(float count) { return 1.0f / fmaxf(count, 1.0f); }

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    te_follow();
    __shared__ __align__(16) float scratch[2][WARPS];
    int lane = threadIdx.x & 31, warp = WARPS == 1 ? 0 : threadIdx.x >> 5, t = WARPS == 1 ? lane : threadIdx.x;
    int vectors = FULL ? CHUNKS * THREADS : (int)(a.n >> 3);
    te_i64 row = WARPS == 1 ? (te_i64)blockIdx.x * ROWS + (threadIdx.x >> 5) : blockIdx.x;
    if (WARPS == 1 && row >= a.m) return;
    const char *from = (const char *)a.x + (row * a.n + 8 * t) * te_size<X_DT>;
    te_raw8<X_DT> x[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        x[c] = FULL || t + c * THREADS < vectors ? te_raw8_load_once<X_DT>(from, c * THREADS * 8) : te_raw8_zero<X_DT>();
    float scale = te_quantized ? *a.scale : 1.0f, largest = 0.0f, known = AMAX ? te_norm_known(a) : 0.0f;
    float one_nth = FULL ? 1.0f / (CHUNKS * THREADS * 8) : 1.0f / (float)a.n;
    te_norm_scale_inv(a);

    // One pass, over what is left of the elements without the mean of the warp's first ones: these alone give the row a variance that is at
    // least 1 / (CHUNKS - 1) of what the difference of the two means takes away from the sum of squares.
    float shift = 0.0f, mean = 0.0f, squares = 0.0f;
    if (LAYERNORM) {
#pragma unroll
        for (int j = 0; j < 8; j++) shift += te_raw8_get(x[0], j);
        shift = te_warp_sum(shift) * te_norm_inverse(te_norm_count(warp, vectors, 1));
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (!FULL && t + c * THREADS >= vectors) continue;
        float2 part = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = te_raw8_get(x[c], j);
            if (LAYERNORM) d -= shift, part.x += d;
            part.y = fmaf(d, d, part.y);
        }
        mean += part.x, squares += part.y;
    }
    if (LAYERNORM) {
        float share = te_norm_inverse(te_norm_count(warp, vectors, CHUNKS));
        float2 both = te_warp_sum2(make_float2(mean, squares));
        squares = fmaf(both.x * -share, both.x, both.y);
        mean = fmaf(both.x, share, shift);
    } else {
        squares = te_warp_sum(squares);
    }
    if (WARPS > 1) {
        if (lane == 0) scratch[0][warp] = mean, scratch[1][warp] = squares;
        __syncthreads();
        squares = mean = 0.0f;
        if (LAYERNORM) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) mean = fmaf(scratch[0][w], te_norm_count(w, vectors, CHUNKS), mean);
            mean *= one_nth;
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            squares += scratch[1][w];
            if (LAYERNORM) { // their mean is not the row's
                float d = scratch[0][w] - mean;
                squares = fmaf(te_norm_count(w, vectors, CHUNKS) * d, d, squares);
            }
        }
    }
    if (PACKED) te_raw8_seal(x);
    float rstd = __frsqrt_rn(squares * one_nth + a.eps), rest = (shift - mean) * rstd;
    if (t == 0) {
        if (LAYERNORM && a.mean) a.mean[row] = mean;
        if (a.rstd) a.rstd[row] = rstd;
    }
    char *to = (char *)a.y + (row * a.ld + 8 * t) * te_y_size;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int v = t + c * THREADS;
        if (!FULL && v >= vectors) continue;
        te_raw8<W_DT> g = PACKED ? te_raw8_load_here<W_DT>(a.gamma, 8 * v) : te_raw8_load<W_DT>(a.gamma, 8 * v), b = te_raw8_zero<W_DT>();
        if (LAYERNORM && a.beta) b = PACKED ? te_raw8_load_here<W_DT>(a.beta, 8 * v) : te_raw8_load<W_DT>(a.beta, 8 * v);
        float y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float gamma = ZERO_CENTERED ? te_raw8_get(g, j) + 1.0f : te_raw8_get(g, j), d = te_raw8_get(x[c], j);
            y[j] = LAYERNORM ? fmaf(fmaf(d - shift, rstd, rest), gamma, te_raw8_get(b, j)) : d * rstd * gamma;
        }
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
    if (AMAX) te_norm_finish(a, largest, known, Y_DT);
}

#else

extern "C" __global__ void __launch_bounds__(512) te_norm_fwd(const __grid_constant__ te__norm_fwd_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float scale = a.scale ? *a.scale : 1.0f, centre = a.zero_centered ? 1.0f : 0.0f, largest = 0.0f, known = te_norm_known(a);
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
    te_norm_finish(a, largest, known, a.y_dt);
}

#endif
