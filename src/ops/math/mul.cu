// ops/math/mul.cu: computes out = x * y in f32. With by_rows y has one number for each row of n elements.
//
// Launch: block 256; eight elements a thread. With `vector`, x and out are aligned to 16 bytes. In addition, n is a
// multiple of 8 (by_rows), or y is aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3 Y_DT=3 OUT_DT=3 BY_ROWS=0|1
// te:row X_DT=3 Y_DT=1 OUT_DT=3 BY_ROWS=1
// te:row X_DT=1 Y_DT=1 OUT_DT=1 BY_ROWS=0|1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define OUT_DT a.out_dt
#define BY_ROWS a.by_rows
#endif

extern "C" __global__ void __launch_bounds__(256) te_mul(const __grid_constant__ te__mul_kargs a) {
    te_follow();
    te_i64 first = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8, all = a.m * a.n;
    if (first >= all) return;
    if (TE_WIDE(a.vector) && first + 8 <= all) {
        float x[8], y[8];
        te_load8(a.x, first, X_DT, x);
        if (BY_ROWS) {
            // All eight elements are in one row, since with `vector` n is a multiple of 8. A 64-bit division would
            // cost as much as the rest of the kernel, so it is done only if 32 bits are not enough.
            te_i64 row = all >> 32 ? first / a.n : (te_i64)((te_u32)first / (te_u32)a.n);
            y[0] = te_load(a.y, row, Y_DT);
        } else {
            te_load8(a.y, first, Y_DT, y);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = __fmul_rn(x[k], y[BY_ROWS ? 0 : k]);
        te_store8(a.out, first, OUT_DT, x);
    } else {
        for (te_i64 i = first; i < first + 8 && i < all; i++)
            te_store(a.out, i, OUT_DT, __fmul_rn(te_load(a.x, i, X_DT), te_load(a.y, BY_ROWS ? i / a.n : i, Y_DT)));
    }
}
