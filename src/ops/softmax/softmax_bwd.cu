// ops/softmax/softmax_bwd.cu: computes dx = scale * (y * dy - y * sum(y * dy)) for each row. dx may be dy.
//
// Launch: block of 32 .. 512 threads, a multiple of 32. A block handles one row at a time and steps through the rows.
// Any n and any alignment are allowed. If X_DT is defined, dy, y and dx have this te_dtype and are aligned to 16 bytes,
// and n is a multiple of 8.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/softmax/kargs.h"

extern "C" __global__ void __launch_bounds__(512, 2) te_softmax_bwd(const __grid_constant__ te__softmax_bwd_kargs a) {
    te_follow();
    __shared__ float scratch[32];
#ifdef X_DT
    const int width = 8;
#else
    const int width = 1;
#endif
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x) {
        te_i64 first = row * a.n;
        auto load = [&](te_i64 at, float y[width], float dy[width]) {
#ifdef X_DT
            te_load8(a.y, first + at, X_DT, y);
            te_load8(a.dy, first + at, X_DT, dy);
#else
            y[0] = te_load(a.y, first + at, a.y_dt), dy[0] = te_load(a.dy, first + at, a.dy_dt);
#endif
        };
        float sum = 0.0f;
        for (te_i64 at = (te_i64)threadIdx.x * width; at < a.n; at += (te_i64)blockDim.x * width) {
            float y[width], dy[width];
            load(at, y, dy);
#pragma unroll
            for (int j = 0; j < width; j++) sum = fmaf(y[j], dy[j], sum);
        }
        sum = te_block_sum(sum, scratch);
        for (te_i64 at = (te_i64)threadIdx.x * width; at < a.n; at += (te_i64)blockDim.x * width) {
            float y[width], dy[width];
            load(at, y, dy);
#pragma unroll
            for (int j = 0; j < width; j++) dy[j] = a.scale * (y[j] * dy[j] - y[j] * sum);
#ifdef X_DT
            te_store8(a.dx, first + at, X_DT, dy);
#else
            te_store(a.dx, first + at, a.dx_dt, dy[0]);
#endif
        }
    }
}
