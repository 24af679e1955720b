// ops/moe/moe_loss_fwd.cu: loss = coefficient * the sum of probs [rows, cols] * counts [cols] over all rows and
// columns, where coefficient = factor / total^2.
//
// Block b adds up `chunk` rows into partial[b]. The block that ends last adds the partial sums in their order.
//
// Launch: block 256; grid: rows / chunk rounded up, at least 1.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_loss_fwd(const __grid_constant__ te__moe_loss_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    te_i64 begin = (te_i64)blockIdx.x * a.chunk, end = begin + a.chunk < a.rows ? begin + a.chunk : a.rows;
    float sum = 0.0f;
    TE_LOOP
    for (te_i64 col = threadIdx.x; col < a.cols; col += 256) {
        float column = 0.0f;
        TE_LOOP
        for (te_i64 row = begin; row < end; row++) column += te_get(a.probs, row * a.cols + col, a.probs_dt);
        sum = fmaf(column, te_get(a.counts, col, a.counts_dt), sum);
    }
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
    if (!te_last_block(a.counter)) return;
    sum = 0.0f;
    TE_LOOP
    for (int i = threadIdx.x; i < gridDim.x; i += 256) sum += __ldcg(a.partial + i);
    sum = te_block_sum(sum, scratch);
    float total = a.total ? (float)*a.total : a.total_host;
    if (threadIdx.x == 0) te_put(a.out, 0, a.out_dt, sum * __fdiv_rn(__fdiv_rn(a.factor, total), total));
}
