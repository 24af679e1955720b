// ops/act/act_fwd.cu: the forward pass of activations, into a float format or FP8. The formulas are in act.cuh.
//
//   y = f(x) or f(a) b;   FP8: q = saturate(y * scale), columns n .. ld-1 are 0;
//   amax = max |y| before y is scaled or rounded
//
// If the kernel is compiled with options, a thread issues all its loads before it computes. With a gate it computes
// eight neighbouring elements of y. Without a gate it computes two groups of eight, which are 2048 elements apart:
//
//       block 0: [thread 0: y 0..7][thread 1: y 8..15] ..   and then again from y 2048 on
//
// Without options, a thread computes eight elements that are 256 apart, so that each load of a warp is contiguous.
//
// Benchmark: "gelu forward", "swiglu forward" in tests/bench/h200.csv.
//
// Launch: block of 256 threads; grid ceil(m * ld / 2048), or ceil(m * ld / 4096) with options and without a gate. `col`
// is NULL. With options, n, ld and blocks of interleaved halves are multiples of 8, x is aligned to 16 bytes and y to
// 16 (8 for FP8). Rows that are neither gated nor padded are passed as one long row: m = 1, ld = n. Without options
// there are no conditions.
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
// te:row ACT=8 X_DT=3 Y_DT=3 INTERLEAVED=1
#include "ops/act/act.cuh"
#include "ops/act/act_tile.cuh"

extern "C" __global__ void __launch_bounds__(256) te_act_fwd(const __grid_constant__ te__act_fwd_kargs a) {
    te_follow();
    float largest = 0.0f, slope;
    te_i64 row;
#ifdef ACT
    constexpr bool quantized = Y_DT == TE_F8E4M3 || Y_DT == TE_F8E5M2;
    constexpr int vectors = te_act_gated(ACT) ? 1 : 2;
    te_i64 i = (te_i64)blockIdx.x * (vectors * 2048) + threadIdx.x * 8, all = a.m * a.ld, from[2], column;
    bool there[2];
#pragma unroll
    for (int k = 0; k < vectors; k++) {
        row = 0, column = i + k * 2048;
        if (te_act_gated(ACT) || a.m > 1) te_act_split8(column, a.ld, a.divisor.magic, a.divisor.shift, &row, &column);
        there[k] = i + k * 2048 < all && column < a.n;
        from[k] = !there[k] ? 0 : te_act_gated(ACT) ? te_act_at(row, column, a.n, a.rule.block) : row * a.n + column;
    }
    te_raw<X_DT> x[2]; // two vectors of x, or one vector and its gate
    x[0] = te_raw_load<X_DT>(a.x, from[0], X_DT);
    x[1] = te_raw_load<X_DT>(a.x, te_act_gated(ACT) ? from[0] + te_act_block(a.n, a.rule.block) : from[1], X_DT);
    te_loads_go_first();
    // The scale and amax are read after x, so that waiting for them costs no extra time.
    float scale = quantized ? *a.scale : 1.0f, seen = a.amax ? *a.amax : 0.0f;
#pragma unroll
    for (int k = 0; k < vectors; k++) {
        float y[8] = {};
        if (i + k * 2048 >= all) break;
        if (there[k]) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float u = te_raw_get(x[k], j);
                y[j] = te_act_gated(ACT) ? te_act_gate(ACT, u, te_raw_get(x[1], j), a.rule)
                                         : te_act(ACT, u, &slope);
            }
            if (a.amax) {
#pragma unroll
                for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(y[j]));
            }
            if (quantized) {
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] *= scale;
            }
        }
        te_store8(a.y, i + k * 2048, Y_DT, y);
    }
#else
    float scale = a.scale ? *a.scale : 1.0f, seen = a.amax ? *a.amax : 0.0f;
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.m * a.ld; i += 256) {
        float y = 0.0f;
        te_i64 column;
        te_act_split(i, a.ld, &row, &column);
        if (column < a.n) {
            if (te_act_gated(a.rule.act)) {
                te_i64 at = te_act_at(row, column, a.n, a.rule.block);
                float u = te_load(a.x, at, a.x_dt), g = te_load(a.x, at + a.rule.block, a.x_dt);
                y = te_act_gate(a.rule.act, u, g, a.rule);
            } else {
                y = te_act(a.rule.act, te_load(a.x, row * a.n + column, a.x_dt), &slope);
            }
            largest = fmaxf(largest, fabsf(y));
        }
        te_store(a.y, i, a.y_dt, a.scale ? y * scale : y);
    }
#endif
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);
    if (a.amax) te_act_amax(a.amax, seen, largest, TE_F32);
}
