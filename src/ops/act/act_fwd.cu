// ops/act/act_fwd.cu: activations, forward, into a float format or FP8. Formulas: act.cuh.
//
//   y = f(x) or f(a) b;   FP8: q = saturate(y * scale), amax = max |y|, columns n .. ld-1 are 0
//
// With options, a thread computes eight neighbours of y:
//
//       block 0: [thread 0: y 0..7][thread 1: y 8..15] ..   block 1: [y 2048..] ..
//
// without, eight elements that lie 256 apart, so that each step of a warp reads neighbours.
//
// One H200, 2026-11-21, te_bench glu: 16384x4096 bf16, of copy: GELU 0.84, SwiGLU 0.90, GEGLU 0.84.
//
// Launch: block of 256 threads, grid ceil(m * ld / 2048). With options: n and ld multiples of 8, x aligned to 16 bytes, y to 16 (8 for
// FP8), and what is neither gated nor quantized is one long row: m = 1, ld = n. Without: anything.
//
// te:baseline
// te:row ACT=1 X_DT=3 Y_DT=3
// te:row ACT=1 X_DT=1 Y_DT=1
// te:row ACT=2 X_DT=3 Y_DT=3
// te:row ACT=3 X_DT=2 Y_DT=2
// te:row ACT=8 X_DT=3 Y_DT=3
// te:row ACT=8 X_DT=1 Y_DT=1
// te:row ACT=8 X_DT=3 Y_DT=4
// te:row ACT=6 X_DT=3 Y_DT=3
// te:row ACT=6 X_DT=3 Y_DT=5
// te:row ACT=12 X_DT=3 Y_DT=4
#include "ops/act/act.cuh"
#include "ops/act/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_act_fwd(const __grid_constant__ te__act_fwd_kargs a) {
    __shared__ float scratch[32];
    float scale = a.scale ? *a.scale : 1.0f, largest = 0.0f, slope;
    te_i64 row, column;
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);
#ifdef ACT
    constexpr bool quantized = Y_DT == TE_F8E4M3 || Y_DT == TE_F8E5M2;
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i < a.m * a.ld) {
        float x[8], gate[8], y[8] = {};
        row = 0, column = i;
        if (te_act_gated(ACT) || quantized) te_act_split(i, a.ld, &row, &column);
        if (column < a.n) {
            if (te_act_gated(ACT)) {
                te_load8(a.x, row * 2 * a.n + column, X_DT, x);
                te_load8(a.x, row * 2 * a.n + a.n + column, X_DT, gate);
            } else {
                te_load8(a.x, row * a.n + column, X_DT, x);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                y[j] = te_act_gated(ACT) ? te_act_gate(ACT, x[j], gate[j], a.limit, a.alpha) : te_act(ACT, x[j], &slope);
                if (quantized) {
                    largest = fmaxf(largest, fabsf(y[j]));
                    y[j] *= scale;
                }
            }
        }
        te_store8(a.y, i, Y_DT, y);
    }
#else
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.m * a.ld; i += 256) {
        float y = 0.0f;
        te_act_split(i, a.ld, &row, &column);
        if (column < a.n) {
            if (te_act_gated(a.act)) {
                float u = te_load(a.x, row * 2 * a.n + column, a.x_dt), g = te_load(a.x, row * 2 * a.n + a.n + column, a.x_dt);
                y = te_act_gate(a.act, u, g, a.limit, a.alpha);
            } else {
                y = te_act(a.act, te_load(a.x, row * a.n + column, a.x_dt), &slope);
            }
            largest = fmaxf(largest, fabsf(y));
        }
        te_store(a.y, i, a.y_dt, a.scale ? y * scale : y);
    }
#endif
    if (a.amax) {
        largest = te_block_max(largest, scratch);
        // One atomic for each block that has something to say: most find a larger amax there already.
        if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
    }
}
