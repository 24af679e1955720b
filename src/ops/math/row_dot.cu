// ops/math/row_dot.cu: computes out [m]: out[i] is the dot product of row i of x [m, n] and row i of y [m, n], summed
// in f32.
//
// Launch: block 256, one warp for each row; grid m / 8, rounded up. With `vector` x and y are aligned to 16 bytes, and
// n is a multiple of 8.
//
// te:baseline
// te:row X_DT=3 Y_DT=3
// te:row X_DT=1 Y_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_row_dot(const __grid_constant__ te__mul_kargs a) {
    te_follow();
    te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    if (row >= a.m) return;
    if (a.vector) {
        for (te_i64 column = lane * 8; column < a.n; column += 256) {
            float x[8], y[8];
            te_load8(a.x, row * a.n + column, X_DT, x);
            te_load8(a.y, row * a.n + column, Y_DT, y);
#pragma unroll
            for (int k = 0; k < 8; k++) sum = fmaf(x[k], y[k], sum);
        }
    } else {
        for (te_i64 column = lane; column < a.n; column += 32)
            sum = fmaf(te_load(a.x, row * a.n + column, X_DT), te_load(a.y, row * a.n + column, Y_DT), sum);
    }
    sum = te_warp_sum(sum);
    if (lane == 0) te_store(a.out, row, a.out_dt, sum);
}
