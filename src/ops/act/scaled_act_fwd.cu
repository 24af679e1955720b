// ops/act/scaled_act_fwd.cu: the forward pass of an activation that then multiplies each row by a number. y has a float
// format. The formulas are in act.cuh.
//
//   y = f(x) scales[row] or f(a) b scales[row], rounded once
//
// If the kernel is compiled with options, a thread computes eight neighbouring elements of y. Without options it
// computes eight elements that are 256 apart.
//
// Launch: block of 256 threads, grid ceil(m * n / 2048). With options, n and the size of interleaved blocks must be
// multiples of 8, and x and y aligned to 16 bytes. Without options, anything is allowed.
//
// te:baseline
// te:row ACT=8 X_DT=3 Y_DT=3
// te:row ACT=8 X_DT=3 Y_DT=3 INTERLEAVED=1
// te:row ACT=8 X_DT=1 Y_DT=1
// te:row ACT=5 X_DT=3 Y_DT=3
// te:row ACT=12 X_DT=3 Y_DT=3
#include "device/vector.cuh"
#include "ops/act/act.cuh"

extern "C" __global__ void __launch_bounds__(256) te_scaled_act_fwd(const __grid_constant__ te__scaled_act_kargs a) {
    te_follow();
    te_i64 row, column;
    float slope;
#ifdef ACT
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= a.m * a.n) return;
    te_act_split8(i, a.n, a.divisor.magic, a.divisor.shift, &row, &column);
    te_i64 at = te_act_gated(ACT) ? te_act_at(row, column, a.n, a.rule.block) : i;
    te_raw<X_DT> x = te_raw_load<X_DT>(a.x, at, X_DT), gate = x;
    if (te_act_gated(ACT)) gate = te_raw_load<X_DT>(a.x, at + te_act_block(a.n, a.rule.block), X_DT);
    float scale = te_load(a.scales, row, a.scales_dt), y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float u = te_raw_get(x, j);
        y[j] = (te_act_gated(ACT) ? te_act_gate(ACT, u, te_raw_get(gate, j), a.rule)
                                  : te_act(ACT, u, &slope)) *
               scale;
    }
    te_store8(a.out, i, Y_DT, y);
#else
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.m * a.n; i += 256) {
        float y;
        te_act_split(i, a.n, &row, &column);
        if (te_act_gated(a.rule.act)) {
            te_i64 at = te_act_at(row, column, a.n, a.rule.block);
            y = te_act_gate(a.rule.act, te_load(a.x, at, a.x_dt), te_load(a.x, at + a.rule.block, a.x_dt), a.rule);
        } else {
            y = te_act(a.rule.act, te_load(a.x, i, a.x_dt), &slope);
        }
        te_store(a.out, i, a.out_dt, y * te_load(a.scales, row, a.scales_dt));
    }
#endif
}
