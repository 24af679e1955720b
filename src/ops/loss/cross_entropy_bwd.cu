// ops/loss/cross_entropy_bwd.cu: computes the gradient of cross entropy. If dlogits is logits, this is done in place.
//
//   dx_i = (exp(x_i - lse) - e / V - [i == target] (1 - e)) * dloss * scale / max(count, 1)
//   0 in a row whose target does not count
//
//   one row:  | head | segment 0: 8192 elements | segment 1 | .. | tail |       head and tail belong to segment 0
//
// Benchmark: "cross-entropy backward" in tests/bench/h200.csv.
//
// Launch: block of 32 .. 256 threads; grid (rows, segments of 32 * threads elements), and blocks step through both
// dimensions. Any v is allowed. With X_DT, logits and dlogits have that format, and their addresses are equal modulo
// 16.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
// te:row X_DT=2
#include "device/vector.cuh"
#include "ops/loss/kargs.h"
#include "ops/loss/loss.cuh"

extern "C" __global__ void __launch_bounds__(256)
    te_cross_entropy_bwd(const __grid_constant__ te__cross_entropy_bwd_kargs a) {
    te_follow();
    float everywhere = a.smoothing / (float)a.vocab, count = a.count ? fmaxf(*a.count, 1.0f) : 1.0f;
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x) {
        te_i64 first = row * a.v, t = te_loss_target(a.target, row, a.target_dt, a.ignore_index, a.vocab),
               column = t - a.start;
        float lse = a.lse[row], factor = a.dloss[row * a.dloss_step] * a.scale / count;
        auto gradient = [&](float x, te_i64 i) {
            float d = te_loss_exp(x - lse) - everywhere;
            if (i == column) d -= 1.0f - a.smoothing;
            return t < 0 ? 0.0f : d * factor;
        };
#ifdef X_DT
        te_loss_span span = te_loss_split(a.logits, first, a.v, X_DT == TE_F32 ? 4 : 2);
        te_i64 step = 4 * (te_i64)blockDim.x;
        for (te_i64 segment = blockIdx.y * step; segment < span.vectors; segment += gridDim.y * step) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                te_i64 i = segment + k * blockDim.x + threadIdx.x, at = span.head + 8 * i;
                if (i >= span.vectors) break;
                float x[8];
                te_load8(a.logits, first + at, X_DT, x);
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = gradient(x[j], at + j);
                te_store8(a.dlogits, first + at, X_DT, x);
            }
        }
        if (blockIdx.y == 0 && threadIdx.x < 16) { // fewer than 8 elements at each end
            te_i64 i = threadIdx.x < 8 ? threadIdx.x : span.tail + threadIdx.x - 8;
            if (i < (threadIdx.x < 8 ? span.head : a.v))
                te_store(a.dlogits, first + i, X_DT, gradient(te_load(a.logits, first + i, X_DT), i));
        }
#else
        te_i64 step = 32 * (te_i64)blockDim.x;
        for (te_i64 segment = blockIdx.y * step; segment < a.v; segment += gridDim.y * step)
            for (te_i64 i = segment + threadIdx.x; i < segment + step && i < a.v; i += blockDim.x)
                te_store(a.dlogits, first + i, a.dlogits_dt, gradient(te_load(a.logits, first + i, a.logits_dt), i));
#endif
        if (t < 0 && threadIdx.x == 0 && blockIdx.y == 0)
            te_loss_tell(a.outside, a.target, row, a.target_dt, a.ignore_index, a.vocab);
    }
}
