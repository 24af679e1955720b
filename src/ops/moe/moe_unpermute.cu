// ops/moe/moe_unpermute.cu: computes y [tokens, h]. The row of a token is the sum of those rows of x that are copies of
// the token, each multiplied by its probability. The copies are added in the order of the map. With `probs`, the kernel
// also copies the probability of each copy from permuted_probs to probs [tokens, copies].
//
// Launch: block 256, one warp for each token; grid tokens / 8, rounded up. With `vector` the rows of x and y start at
// multiples of 16 bytes.
//
// te:baseline
// te:row X_DT=3 Y_DT=3
// te:row X_DT=1 Y_DT=1
#include "ops/moe/moe.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_moe_unpermute(const __grid_constant__ te__moe_sum_kargs a) {
    te_follow();
    te_i64 t = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), place;
    int lane = threadIdx.x & 31;
    if (t >= a.tokens) return;
    te_i64 count = te_moe_count(a.map, t, a.copies, a.experts), whole = TE_WIDE(a.vector) ? a.h / 8 * 8 : 0;
    TE_LOOP
    for (te_i64 col = lane * 8; col < whole; col += 256) {
        float sum[8] = {};
        TE_LOOP
        for (te_i64 i = 0; i < count; i++) {
            te_i64 row = te_moe_row(a.map, a.pad_offsets, a.offsets_dt, t, i, a.tokens, a.rows, a.experts, &place);
            if (row < 0) continue;
            float p = a.merging_probs ? te_get(a.merging_probs, t * a.copies + place, a.merging_dt) : 1.0f, v[8];
            te_load8(a.x, row * a.h + col, X_DT, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] = fmaf(v[k], p, sum[k]);
        }
        te_store8(a.y, t * a.h + col, Y_DT, sum);
    }
    TE_LOOP
    for (te_i64 col = whole + lane; col < a.h; col += 32) {
        float sum = 0.0f;
        TE_LOOP
        for (te_i64 i = 0; i < count; i++) {
            te_i64 row = te_moe_row(a.map, a.pad_offsets, a.offsets_dt, t, i, a.tokens, a.rows, a.experts, &place);
            if (row < 0) continue;
            float p = a.merging_probs ? te_get(a.merging_probs, t * a.copies + place, a.merging_dt) : 1.0f;
            sum = fmaf(te_get(a.x, row * a.h + col, X_DT), p, sum);
        }
        te_put(a.y, t * a.h + col, Y_DT, sum);
    }
    if (!a.probs) return;
    TE_LOOP
    for (te_i64 e = lane; e < a.copies; e += 32) te_put(a.probs, t * a.copies + e, a.probs_dt, 0.0f);
    __syncwarp();
    TE_LOOP
    for (te_i64 i = lane; i < count; i += 32) {
        te_i64 row = te_moe_row(a.map, a.pad_offsets, a.offsets_dt, t, i, a.tokens, a.rows, a.experts, &place);
        if (row >= 0) te_put(a.probs, t * a.copies + place, a.probs_dt, te_get(a.permuted_probs, row, a.permuted_dt));
    }
}
