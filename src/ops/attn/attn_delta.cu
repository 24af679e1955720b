// ops/attn/attn_delta.cu: computes two numbers for each query row, which the backward kernels read. One warp handles a
// row.
//   delta = sum over channels of dO * O   (= sum over keys of P * dP, with or without dropout. In FP8 attention the two
//                                         sums differ, so attn_bwd_dq.cu computes delta, if k has all keys of a row)
//   lse2  = lse * log2(e), so that P = 2^(scale2 * s - lse2); +inf for rows that see no key, whose P is then 0.
// Both are [batch, heads, s_pad]. Rows from the sequence's end on get delta 0 and lse2 +inf, so that whole tiles can be
// read without a test. For packed sequences te__attn_seq.work_at gives the positions of the rows instead.
//
// Options: X_EXTRA (attn.cuh).
//
// Launch: grid ceil(batch * heads * s_pad / 8), block 256.
// te:baseline
// te:row X_EXTRA=0
#include "ops/attn/attn.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) te_attn_delta(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    const int lane = threadIdx.x & 31;
    const te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), head = row / a.s_pad;
    const int i = (int)(row - head * a.s_pad), b = (int)(head / a.heads), h = (int)(head - (te_i64)b * a.heads);
    float sum = 0.0f, lse2 = TE_INF;
    if (b >= a.batch) return;
    TE_ATTN_SEQUENCE(a, b);
    if (EXTRA && i >= (seq.s_q + TE__ATTN_PAD - 1) / TE__ATTN_PAD * TE__ATTN_PAD && i >= te_of::q_end(seq)) return;
    if (i < seq.s_q) {
        const te_of::view o_view = te_of::queries(a.o, seq), g_view = te_of::queries(a.d_o, seq);
        const te_i64 o = te_attn_at(o_view, b, h, i), g = te_attn_at(g_view, b, h, i);
        for (int c = te_of::sums_delta(a) ? a.d_v : lane; c < a.d_v; c += 32)
            sum += te_load(o_view.p, o + c, o_view.dt) * te_load(g_view.p, g + c, g_view.dt);
        sum = te_warp_sum(sum) * te_of::of_codes(a.x.do_inv);
        lse2 = a.lse[te_of::lse_at(seq, b, h) + i] * TE_LOG2E;
        if (lse2 == -TE_INF) lse2 = TE_INF;
    }
    if (lane == 0) {
        const te_i64 to = te_of::work_at(seq, b, h) + i;
        a.delta[to] = sum;
        a.lse2[to] = lse2;
    }
}
