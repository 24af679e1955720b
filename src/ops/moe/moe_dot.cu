// ops/moe/moe_dot.cu: writes probs [tokens, copies] from dy [tokens, h] and x [rows, h]. Entry (t, c) is the dot
// product of row t of dy and the row of x that has copy c of token t. The entry is 0 if no row has this copy.
//
// Launch: block 256, one warp a token. With `vector`, rows of dy and x start at multiples of 16 bytes.
//
// te:baseline
#include "ops/moe/moe.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_dot(const __grid_constant__ te__moe_sum_kargs a) {
    te_follow();
    te_i64 t = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), place;
    int lane = threadIdx.x & 31;
    if (t >= a.tokens) return;
    te_i64 count = te_moe_count(a.map, t, a.copies, a.experts), whole = TE_WIDE(a.vector) ? a.h / 8 * 8 : 0;
    TE_LOOP
    for (te_i64 e = lane; e < a.copies; e += 32) te_put(a.probs, t * a.copies + e, a.probs_dt, 0.0f);
    __syncwarp();
    TE_LOOP
    for (te_i64 i = 0; i < count; i++) {
        te_i64 row = te_moe_row(a.map, a.pad_offsets, a.offsets_dt, t, i, a.tokens, a.rows, a.experts, &place);
        float sum = 0.0f;
        if (row < 0) continue;
        TE_LOOP
        for (te_i64 col = lane * 8; col < whole; col += 256) {
            float v[8], w[8];
            te_load8(a.dy, t * a.h + col, a.dy_dt, v);
            te_load8(a.x, row * a.h + col, a.x_dt, w);
#pragma unroll
            for (int k = 0; k < 8; k++) sum = fmaf(v[k], w[k], sum);
        }
        TE_LOOP
        for (te_i64 col = whole + lane; col < a.h; col += 32)
            sum = fmaf(te_get(a.dy, t * a.h + col, a.dy_dt), te_get(a.x, row * a.h + col, a.x_dt), sum);
        sum = te_warp_sum(sum);
        if (lane == 0) te_put(a.probs, t * a.copies + place, a.probs_dt, sum);
    }
}
