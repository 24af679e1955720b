// ops/act/scaled_act_bwd.cu: the backward pass of scaled_act_fwd.cu. Reads dy and x once, and computes dx and dscales.
// The formulas are in act.cuh.
//
//   dx = (dy scales[row]) f'(x);   gated: [da | db] = (dy scales[row]) [f'(a) b | f(a)];
//   dscales[row] = sum of dy f(x)      gated: sum of dy f(a) b
//
// Each warp computes one row. Compiled with options, each lane computes eight neighbouring elements at a time.
//
// Launch: block of 256 threads, grid ceil(m / 8). With options, n and the size of interleaved blocks are multiples of
// 8, and dy, x and dx are aligned to 16 bytes. Without options there are no conditions.
//
// te:baseline
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=3 INTERLEAVED=1
// te:row ACT=8 DY_DT=1 X_DT=1 DX_DT=1
// te:row ACT=5 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=12 DY_DT=3 X_DT=3 DX_DT=3
#include "device/vector.cuh"
#include "ops/act/act.cuh"

// Computes the gradients *dx and *dgate of one element from g = dy * scale. Returns y before scaling, for the caller's
// dscales.
TE_DEV float te_scaled_act(const te__scaled_act_kargs &a, int act, float x, float gate, float g, float *dx,
                           float *dgate) {
    float slope, f;
    if (te_act_gated(act)) {
        te_act_gate_grad(act, x, gate, 1.0f, a.rule, dx, dgate);
        *dx *= g;
        *dgate *= g;
        return te_act_gate(act, x, gate, a.rule);
    }
    f = te_act(act, x, &slope);
    *dx = g * slope;
    return f;
}

extern "C" __global__ void __launch_bounds__(256) te_scaled_act_bwd(const __grid_constant__ te__scaled_act_kargs a) {
    te_follow();
    te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (row >= a.m) return;
    float scale = te_load(a.scales, row, a.scales_dt), sum = 0.0f;
#ifdef ACT
    for (te_i64 column = lane * 8; column < a.n; column += 256) {
        te_i64 i = row * a.n + column, at = te_act_gated(ACT) ? te_act_at(row, column, a.n, a.rule.block) : i,
               other = at + te_act_block(a.n, a.rule.block);
        float dy[8], x[8], gate[8] = {}, dx[8], dgate[8];
        te_load8(a.dy, i, DY_DT, dy);
        te_load8(a.x, at, X_DT, x);
        if (te_act_gated(ACT)) te_load8(a.x, other, X_DT, gate);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum = fmaf(dy[j], te_scaled_act(a, ACT, x[j], gate[j], dy[j] * scale, &dx[j], &dgate[j]), sum);
        te_store8(a.out, at, DX_DT, dx);
        if (te_act_gated(ACT)) te_store8(a.out, other, DX_DT, dgate);
    }
#else
    for (te_i64 column = lane; column < a.n; column += 32) {
        te_i64 i = row * a.n + column, at = te_act_gated(a.rule.act) ? te_act_at(row, column, a.n, a.rule.block) : i;
        float dy = te_load(a.dy, i, a.dy_dt),
              gate = te_act_gated(a.rule.act) ? te_load(a.x, at + a.rule.block, a.x_dt) : 0.0f, dx, dgate;
        sum = fmaf(dy, te_scaled_act(a, a.rule.act, te_load(a.x, at, a.x_dt), gate, dy * scale, &dx, &dgate), sum);
        te_store(a.out, at, a.out_dt, dx);
        if (te_act_gated(a.rule.act)) te_store(a.out, at + a.rule.block, a.out_dt, dgate);
    }
#endif
    sum = te_warp_sum(sum);
    if (a.dscales && lane == 0) te_store(a.dscales, row, a.dscales_dt, sum);
}
