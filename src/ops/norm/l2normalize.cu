// ops/norm/l2normalize.cu: L2 normalization of rows. If there is a dy, the kernel does the backward pass.
//
//   rnorm = 1 / sqrt(sum x^2 + eps),  y = x * rnorm
//   dx = rnorm * (dy - x * rnorm^2 * sum(x * dy))
//
// There are two passes over a row. The second one finds the row in a cache.
//
// Launch: block 128, one warp a row; any grid. Any n and any alignment are allowed. y may be x, and dx may be dy.
//
// te:baseline
#include "device/base.cuh"
#include "ops/norm/kargs.h"

extern "C" __global__ void __launch_bounds__(128) te_l2normalize(const __grid_constant__ te__l2normalize_kargs a) {
    te_follow();
    int lane = threadIdx.x & 31;
    const bool backward = a.dy != 0;
    const void *other = backward ? a.dy : a.x;
    int other_dt = backward ? a.dy_dt : a.x_dt;
    for (te_i64 row = (te_i64)blockIdx.x * 4 + (threadIdx.x >> 5); row < a.m; row += (te_i64)gridDim.x * 4) {
        te_i64 first = row * a.n;
        float sum = 0.0f;
        for (te_i64 i = lane; i < a.n; i += 32)
            sum = fmaf(te_load(a.x, first + i, a.x_dt), te_load(other, first + i, other_dt), sum);
        sum = te_warp_sum(sum);
        float rnorm = backward ? a.rnorm[row] : __frsqrt_rn(sum + a.eps), along = backward ? rnorm * rnorm * sum : 0.0f;
        for (te_i64 i = lane; i < a.n; i += 32) {
            float v = te_load(other, first + i, other_dt);
            if (backward) v -= te_load(a.x, first + i, a.x_dt) * along;
            te_store(a.y, first + i, a.y_dt, rnorm * v);
        }
        if (!backward && a.rnorm && lane == 0) a.rnorm[row] = rnorm;
    }
}
