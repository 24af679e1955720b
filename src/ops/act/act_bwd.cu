// ops/act/act_bwd.cu: the backward pass of activations. The formulas are in act.cuh.
//
//   dx = dy f'(x);   gated: [da | db] = [dy f'(a) b | dy f(a)];   FP8: q = saturate(dx * scale);
//   amax = max |dx|, rounded to the format amax_dt
//
// If the kernel is compiled with options, a thread computes eight neighbouring elements. Otherwise it computes eight
// elements of dy that are 256 apart.
//
// Benchmark: "gelu backward", "swiglu backward" in tests/bench/h200.csv.
//
// Launch: block of 256 threads, grid ceil(m * n / 2048). dx is as wide as x. `col` and `partial` are NULL. With
// options, n is a multiple of 8, all pointers are aligned to 16 bytes (FP8: 8), and blocks of interleaved halves are
// multiples of 8. A tensor that is not gated is passed as one long row. Without options there are no conditions.
//
// te:baseline
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=1 DY_DT=1 X_DT=1 DX_DT=1
// te:row ACT=5 DY_DT=2 X_DT=2 DX_DT=2
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=8 DY_DT=1 X_DT=1 DX_DT=1
// te:row ACT=6 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=12 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=5
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=4
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=3 INTERLEAVED=1
#include "ops/act/act.cuh"
#include "ops/act/act_tile.cuh"

// Reads scale and amax. Call it after the loads of dy and x: then waiting for scale and amax costs no extra time.
TE_DEV void te_act_begin(const te__act_bwd_kargs &a, float *scale, float *seen) {
    te_loads_go_first();
    if (a.scale) *scale = *a.scale;
    if (a.amax) *seen = *a.amax;
}
// Prepares eight elements of dx for the store. Raises *largest to their greatest absolute value. If dx is FP8,
// multiplies them by the scale.
TE_DEV void te_act_finish(const te__act_bwd_kargs &a, int dt, float scale, float v[8], float *largest) {
    if (a.amax) {
#pragma unroll
        for (int j = 0; j < 8; j++) *largest = fmaxf(*largest, fabsf(v[j]));
    }
    if (dt == TE_F8E4M3 || dt == TE_F8E5M2) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= scale;
    }
}

// Six blocks per multiprocessor, not eight: eight blocks leave only 32 registers a thread, and then the load of x would
// wait for the registers of dy.
extern "C" __global__ void __launch_bounds__(256, 6) te_act_bwd(const __grid_constant__ te__act_bwd_kargs a) {
    te_follow();
    float largest = 0.0f, scale = 1.0f, seen = 0.0f;
    te_i64 row, column;
#ifdef ACT
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i < a.m * a.n) {
        float dy[8], x[8], dx[8];
        te_load8(a.dy, i, DY_DT, dy);
        if (te_act_gated(ACT)) {
            float gate[8], dgate[8];
            te_act_split8(i, a.n, a.divisor.magic, a.divisor.shift, &row, &column);
            te_i64 at = te_act_at(row, column, a.n, a.rule.block), other = at + te_act_block(a.n, a.rule.block);
            te_load8(a.x, at, X_DT, x);
            te_load8(a.x, other, X_DT, gate);
            te_act_begin(a, &scale, &seen);
#pragma unroll
            for (int j = 0; j < 8; j++)
                te_act_gate_grad(ACT, x[j], gate[j], dy[j], a.rule, &dx[j], &dgate[j]);
            te_act_finish(a, DX_DT, scale, dx, &largest);
            te_act_finish(a, DX_DT, scale, dgate, &largest);
            te_store8(a.dx, at, DX_DT, dx);
            te_store8(a.dx, other, DX_DT, dgate);
        } else {
            te_load8(a.x, i, X_DT, x);
            te_act_begin(a, &scale, &seen);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float slope;
                te_act(ACT, x[j], &slope);
                dx[j] = dy[j] * slope;
            }
            te_act_finish(a, DX_DT, scale, dx, &largest);
            te_store8(a.dx, i, DX_DT, dx);
        }
    }
#else
    te_act_begin(a, &scale, &seen);
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.m * a.n; i += 256) {
        float dy = te_load(a.dy, i, a.dy_dt), da, db = 0.0f;
        te_i64 at = i;
        if (te_act_gated(a.rule.act)) {
            te_act_split(i, a.n, &row, &column);
            at = te_act_at(row, column, a.n, a.rule.block);
            te_act_gate_grad(a.rule.act, te_load(a.x, at, a.x_dt), te_load(a.x, at + a.rule.block, a.x_dt), dy, a.rule,
                             &da, &db);
            te_store(a.dx, at + a.rule.block, a.dx_dt, a.scale ? db * scale : db);
        } else {
            te_act(a.rule.act, te_load(a.x, i, a.x_dt), &da);
            da *= dy;
        }
        te_store(a.dx, at, a.dx_dt, a.scale ? da * scale : da);
        largest = fmaxf(largest, fmaxf(fabsf(da), fabsf(db)));
    }
#endif
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);
    if (a.amax) te_act_amax(a.amax, seen, largest, a.amax_dt);
}
