// ops/math/axpby.cu: computes out = alpha * x + beta * y in f32. Each product is rounded by itself, so the bits equal
// those of the CPU.
//
// Benchmark: "sum of two" in tests/bench/h200.csv.
//
// Launch: block 256; a block handles 2048 elements, a thread eight. With `vector` all arrays are aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3 Y_DT=3 OUT_DT=3
// te:row X_DT=1 Y_DT=1 OUT_DT=1
// te:row X_DT=3 Y_DT=0 OUT_DT=3
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define OUT_DT a.out_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_axpby(const __grid_constant__ te__axpby_kargs a) {
    te_follow();
    te_i64 first = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    float alpha = a.alpha_device ? __fmul_rn(a.alpha, *a.alpha_device) : a.alpha, x[8], y[8];
    if (a.divide_device && *a.divide_device > 1.0f) alpha = __fdiv_rn(alpha, *a.divide_device);
    if (first >= a.n) return;
    bool with_y = Y_DT != TE_DTYPE_NONE;
    if (a.vector && first + 8 <= a.n) {
        te_load8(a.x, first, X_DT, x);
        if (with_y) te_load8(a.y, first, Y_DT, y);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] = __fmul_rn(alpha, x[k]);
            if (with_y) x[k] = __fadd_rn(x[k], __fmul_rn(a.beta, y[k]));
        }
        te_store8(a.out, first, OUT_DT, x);
    } else {
        for (te_i64 i = first; i < first + 8 && i < a.n; i++) {
            float v = __fmul_rn(alpha, te_load(a.x, i, X_DT));
            if (with_y) v = __fadd_rn(v, __fmul_rn(a.beta, te_load(a.y, i, Y_DT)));
            te_store(a.out, i, OUT_DT, v);
        }
    }
}
