// ops/context/context_merge.cu: attention to some keys joins attention to others:
//
//   L = log(exp(lse) + exp(x_lse)),  o = o exp(lse - L) + x exp(x_lse - L),  lse = L;  without lse: o += x
//
// Launch: a warp for each row of a head, or fewer, which step on. Blocks of 128 threads; the first one takes the maxima, too. Any formats and strides.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/context/kargs.h"

extern "C" __global__ void __launch_bounds__(128) te_context_merge(const __grid_constant__ te__context_merge_kargs a) {
    te_follow();
    const int lane = threadIdx.x % TE_WARP;
    const te_i64 rows = a.size[0] * a.size[1] * a.size[2];
    if (blockIdx.x == 0 && a.largest)
        for (te_i64 h = threadIdx.x; h < a.size[2]; h += 128)
            if (a.x_max[h] > a.largest[h]) a.largest[h] = a.x_max[h];
    for (te_i64 row = (te_i64)blockIdx.x * 4 + threadIdx.x / TE_WARP; row < rows; row += (te_i64)gridDim.x * 4) {
        const te_i64 h = row % a.size[2], s = row / a.size[2] % a.size[1], b = row / a.size[2] / a.size[1];
        const te_i64 from = b * a.x_stride[0] + s * a.x_stride[1] + h * a.x_stride[2], to = b * a.o_stride[0] + s * a.o_stride[1] + h * a.o_stride[2];
        float of_o = 1.0f, of_x = 1.0f;
        if (a.lse) {
            float *lse = a.lse + b * a.lse_stride[0] + s * a.lse_stride[1] + h * a.lse_stride[2];
            const float sum = te__context_lse(*lse, a.x_lse[(b * a.size[2] + h) * a.size[1] + s], &of_o, &of_x);
            __syncwarp();
            if (lane == 0) *lse = sum;
        }
        for (int c = lane; c < a.d; c += TE_WARP) te_store(a.o, to + c, a.o_dt, te_load(a.o, to + c, a.o_dt) * of_o + te_load(a.x, from + c, a.x_dt) * of_x);
    }
}
