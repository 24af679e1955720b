// ops/attn/attn_delta.cu: per query row, a term that the backward kernels read, one warp a row:
//   delta = sum over channels of dO * O   (= sum over keys of P * dP, with or without dropout)
//   lse2  = lse * log2(e), so that P = 2^(scale2 * s - lse2); +inf for rows that see no key, whose P is then 0 everywhere.
// Both are [batch, heads, s_pad]; rows from s_q on get delta 0 and lse2 +inf, so that whole tiles can be read without a test.
//
// Launch: grid ceil(batch * heads * s_pad / 8), block 256.
// te:baseline
#include "ops/attn/attn.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) te_attn_delta(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    const int lane = threadIdx.x & 31;
    const te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), head = row / a.s_pad;
    const int i = (int)(row - head * a.s_pad), b = (int)(head / a.heads), h = (int)(head - (te_i64)b * a.heads);
    float sum = 0.0f, lse2 = TE_INF;
    if (b >= a.batch) return;
    if (i < a.s_q) {
        const te_i64 o = te_attn_at(a.o, b, h, i), g = te_attn_at(a.d_o, b, h, i);
        for (int c = lane; c < a.d_v; c += 32) sum += te_load(a.o.p, o + c, a.o.dt) * te_load(a.d_o.p, g + c, a.d_o.dt);
        sum = te_warp_sum(sum);
        lse2 = a.lse[head * a.s_q + i] * TE_LOG2E;
        if (lse2 == -TE_INF) lse2 = TE_INF;
    }
    if (lane == 0) {
        a.delta[row] = sum;
        a.lse2[row] = lse2;
    }
}
