// ops/loss/mse_bwd.cu: computes dx = (x - target) * (2 dloss / count).
//
// Benchmark: "mean squared error backward" in tests/bench/h200.csv.
//
// Launch: block of 256 threads, grid ceil(count / 2048). If the kernel is compiled with options, count is a multiple of
// 8, dx has the format X_DT, and all pointers are aligned to 16 bytes. Without options, anything is allowed.
//
// te:baseline
// te:row X_DT=3 T_DT=3
// te:row X_DT=1 T_DT=1
// te:row X_DT=3 T_DT=1
#include "device/vector.cuh"
#include "ops/loss/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_mse_bwd(const __grid_constant__ te__mse_kargs a) {
    te_follow();
    float factor = 2.0f * *a.dloss / (float)a.count;
#ifdef X_DT
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= a.count) return;
    float x[8], t[8];
    te_load8(a.x, i, X_DT, x);
    te_load8(a.target, i, T_DT, t);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = (x[j] - t[j]) * factor;
    te_store8(a.dx, i, X_DT, x);
#else
    te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x;
    for (te_i64 i = first; i < first + 2048 && i < a.count; i += 256)
        te_store(a.dx, i, a.dx_dt, (te_load(a.x, i, a.x_dt) - te_load(a.target, i, a.target_dt)) * factor);
#endif
}
