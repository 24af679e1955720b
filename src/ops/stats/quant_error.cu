// ops/stats/quant_error.cu: counts and sums the errors of a quantization. Each block writes one partial result.
//
//   block b      elements [b * 8192, (b + 1) * 8192)
//   thread t     groups of eight elements with the indices t, t + 256, ..., one after another
//
// The sums of the threads are added first in each warp, then over the warps. So the order of additions depends only on
// the indices of the elements. The sums are f32: squares of values below 1e-19 lose bits.
//
// Launch: block 256; grid: one block for each partial result. With `vector` x, y and limit are aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/vector.cuh"
#include "base/scaling.h"
#include "ops/stats/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

TE_DEV te_u32 te_warp_count(te_u32 v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

extern "C" __global__ void __launch_bounds__(256) te_quant_error(const __grid_constant__ te__quant_error_kargs a) {
    te_follow();
    __shared__ te__quant_error_partial part[8];
    te_i64 begin = (te_i64)blockIdx.x * TE__STATS_CHUNK,
           end = begin + TE__STATS_CHUNK < a.n ? begin + TE__STATS_CHUNK : a.n;
    te__quant_error_partial p = {};
    for (te_i64 i = begin + threadIdx.x * 8; i < end; i += 2048) {
        float x[8], y[8], limit[8];
        int valid = end - i < 8 ? (int)(end - i) : 8;
        if (a.vector && valid == 8) {
            te_load8(a.x, i, X_DT, x);
            te_load8(a.y, i, TE_F32, y);
            if (a.limit) te_load8(a.limit, i, TE_F32, limit);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                x[k] = k < valid ? te_load(a.x, i + k, X_DT) : 0.0f;
                y[k] = k < valid ? a.y[i + k] : 0.0f;
                if (a.limit) limit[k] = k < valid ? a.limit[i + k] : 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float size = fabsf(x[k]), largest = a.limit ? limit[k] : TE_FLT_MAX;
            bool finite = size <= TE_FLT_MAX;
            p.count[0] += x[k] != 0.0f && y[k] == 0.0f;
            p.count[1] += finite && size > te__mul_f32(1.004f, largest);
            p.count[2] += x[k] != x[k];
            p.count[3] += size > TE_FLT_MAX;
            p.count[4] += k < valid && x[k] == 0.0f;
            if (finite && fabsf(y[k]) <= TE_FLT_MAX) {
                float d = __fsub_rn(x[k], y[k]);
                p.xx = fmaf(x[k], x[k], p.xx), p.yy = fmaf(y[k], y[k], p.yy), p.xy = fmaf(x[k], y[k], p.xy),
                p.dd = fmaf(d, d, p.dd);
                p.largest = fmaxf(p.largest, fabsf(d));
            }
        }
    }
    p.xx = te_warp_sum(p.xx), p.yy = te_warp_sum(p.yy), p.xy = te_warp_sum(p.xy), p.dd = te_warp_sum(p.dd),
    p.largest = te_warp_max(p.largest);
#pragma unroll
    for (int c = 0; c < TE__STATS_COUNTS; c++) p.count[c] = te_warp_count(p.count[c]);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = p;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < 8; w++) {
        const te__quant_error_partial &q = part[w];
        p.xx += q.xx, p.yy += q.yy, p.xy += q.xy, p.dd += q.dd, p.largest = fmaxf(p.largest, q.largest);
        for (int c = 0; c < TE__STATS_COUNTS; c++) p.count[c] += q.count[c];
    }
    a.partial[blockIdx.x] = p;
}
