// ops/loss/cross_entropy_merge.cu: computes the loss of each row from the parts of all ranks, in the order of the
// ranks.
//
//   lse = m + ln sum over ranks of exp(lse_r - m),  m = max lse_r
//
// Launch: block 256, one thread for each row; grid: number of rows / 256, rounded up.
//
// te:baseline
#include "ops/loss/kargs.h"
#include "ops/loss/loss.cuh"

extern "C" __global__ void __launch_bounds__(256)
    te_cross_entropy_merge(const __grid_constant__ te__cross_entropy_merge_kargs a) {
    te_follow();
    te_i64 row = (te_i64)blockIdx.x * 256 + threadIdx.x;
    if (row >= a.m) return;
    float m = -TE_INF, x_target = -TE_INF, s = 0.0f, sum = 0.0f;
    for (int r = 0; r < a.ranks; r++) m = fmaxf(m, a.parts[3 * (a.m * r + row)]);
    for (int r = 0; r < a.ranks; r++) {
        const float *part = a.parts + 3 * (a.m * r + row);
        s += te_loss_exp(part[0] - te_loss_reference(m));
        x_target = part[1] > x_target || part[1] != part[1] ? part[1] : x_target;
        sum += part[2];
    }
    float lse = m + logf(s);
    te_i64 t = te_loss_target(a.target, row, a.target_dt, a.ignore_index, a.vocab);
    if (t < 0) te_loss_tell(a.outside, a.target, row, a.target_dt, a.ignore_index, a.vocab);
    a.lse[row] = lse;
    a.loss[row] = t >= 0 ? te_loss_of(lse, x_target, sum, a.smoothing, a.vocab) : 0.0f;
}
