// ops/moe/moe_loss_bwd.cu: dprobs [rows, cols] = coefficient * counts [cols] * dloss, where coefficient = factor /
// total^2.
//
// Launch: block 256; grid: rows * cols / 1024 rounded up.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_loss_bwd(const __grid_constant__ te__moe_loss_kargs a) {
    te_follow();
    float total = a.total ? (float)*a.total : a.total_host, g = te_get(a.dloss, 0, a.dloss_dt),
          c = __fdiv_rn(__fdiv_rn(a.factor, total), total);
    for (int k = 0; k < 4; k++) {
        te_i64 i = (te_i64)blockIdx.x * 1024 + k * 256 + threadIdx.x;
        if (i < a.rows * a.cols) te_put(a.out, i, a.out_dt, c * te_get(a.counts, i % a.cols, a.counts_dt) * g);
    }
}
