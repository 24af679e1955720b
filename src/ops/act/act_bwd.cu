// ops/act/act_bwd.cu: activations, backward. Formulas: act.cuh.
//
//   dx = dy f'(x);   gated: [da | db] = [dy f'(a) b | dy f(a)]
//
// Elements of dy go to threads as those of y do in act_fwd.cu.
//
// One H200, 2026-11-21, te_bench glu: 16384x4096 bf16, of copy: GELU 0.96, SwiGLU 0.95, GEGLU 0.95.
//
// Launch: block of 256 threads, grid ceil(m * n / 2048). With options: n a multiple of 8, all pointers aligned to 16 bytes. Without:
// anything.
//
// te:baseline
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=1 DY_DT=1 X_DT=1 DX_DT=1
// te:row ACT=5 DY_DT=2 X_DT=2 DX_DT=2
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=8 DY_DT=1 X_DT=1 DX_DT=1
// te:row ACT=6 DY_DT=3 X_DT=3 DX_DT=3
// te:row ACT=12 DY_DT=3 X_DT=3 DX_DT=3
#include "ops/act/act.cuh"
#include "ops/act/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_act_bwd(const __grid_constant__ te__act_bwd_kargs a) {
    te_i64 row, column;
#ifdef ACT
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= a.m * a.n) return;
    float dy[8], x[8], dx[8];
    te_load8(a.dy, i, DY_DT, dy);
    if (te_act_gated(ACT)) {
        float gate[8], dgate[8];
        te_act_split(i, a.n, &row, &column);
        te_i64 at = row * 2 * a.n + column;
        te_load8(a.x, at, X_DT, x);
        te_load8(a.x, at + a.n, X_DT, gate);
#pragma unroll
        for (int j = 0; j < 8; j++) te_act_gate_grad(ACT, x[j], gate[j], dy[j], a.limit, a.alpha, &dx[j], &dgate[j]);
        te_store8(a.dx, at, DX_DT, dx);
        te_store8(a.dx, at + a.n, DX_DT, dgate);
    } else {
        te_load8(a.x, i, X_DT, x);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float slope;
            te_act(ACT, x[j], &slope);
            dx[j] = dy[j] * slope;
        }
        te_store8(a.dx, i, DX_DT, dx);
    }
#else
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.m * a.n; i += 256) {
        float dy = te_load(a.dy, i, a.dy_dt), da, db;
        if (te_act_gated(a.act)) {
            te_act_split(i, a.n, &row, &column);
            te_i64 at = row * 2 * a.n + column;
            te_act_gate_grad(a.act, te_load(a.x, at, a.x_dt), te_load(a.x, at + a.n, a.x_dt), dy, a.limit, a.alpha, &da, &db);
            te_store(a.dx, at, a.dx_dt, da);
            te_store(a.dx, at + a.n, a.dx_dt, db);
        } else {
            te_act(a.act, te_load(a.x, i, a.x_dt), &da);
            te_store(a.dx, i, a.dx_dt, dy * da);
        }
    }
#endif
}
