// ops/attn/attn_bwd_dq.cu: dQ = scale dS K for any dtypes, sizes and strides, in f32.
//
// The tiles are those of general.cuh: 16 query rows and 32 keys at a time. P is computed again from lse2. dP is dO V^T
// with the dropout of the forward pass. dS = P (dP - delta). attn_delta.cu writes lse2 and delta. In FP8 attention O
// comes from rounded P, so delta is the sum of P dP instead (te__attn_extra.sums_delta). A first pass over the keys
// computes this sum, and writes it for the other kernels. FP8 attention also rounds dS.
//
// Options: X_EXTRA, X_MOD (attn.cuh), X_WIDE (general.cuh).
//
// Launch: grid (ceil(s_q / 16) * batch * heads, WIDE: ceil(d / 256)), block 128, shared memory
//          4 * (16 * (ROW(d) + ROW(d_v)) + 32 * (LANE_ROW(d) + LANE_ROW(d_v)) + 4 * 32 * 4) bytes (kargs.h), if WIDE
//          4 * (16 * ROW(256) + 32 * LANE_ROW(256) + 4 * 32 * 4).
// te:baseline
// te:row X_EXTRA=0 X_WIDE=0|1
// te:row X_WIDE=0|1
// te:row X_MOD=1|2|3 X_WIDE=0|1
#include "ops/attn/general.cuh"

extern "C" __global__ void __launch_bounds__(128, 3) te_attn_bwd_dq(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_q + TE__ATTN_ROWS - 1) / TE__ATTN_ROWS, a.heads, true);
    TE_ATTN_SEQUENCE(a, at.b);
    const int group = at.h / (a.heads / a.groups), q_end = te_of::q_end(seq);
    const te_of::view k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const float slope2 = te_of::slope2(a, at.b, at.h);
    const int block_first = at.tile * TE__ATTN_ROWS, first = block_first + warp * TE_MINE;
    // the channels of dQ that the block writes
    const int c = WIDE ? (int)blockIdx.y * TE__ATTN_CHUNK : 0, d = WIDE ? te_attn_chunk(a.d, c) : a.d;
    const int ld_q = TE__ATTN_ROW(WIDE ? TE__ATTN_CHUNK : a.d), ld_g = TE__ATTN_ROW(a.d_v),
              ld_k = TE__ATTN_LANE_ROW(WIDE ? TE__ATTN_CHUNK : a.d);
    const int ld_v = WIDE ? ld_k : TE__ATTN_LANE_ROW(a.d_v);
    float *q = (float *)te_shared, *g = WIDE ? q : q + TE__ATTN_ROWS * ld_q,
          *k = WIDE ? q + TE__ATTN_ROWS * ld_q : g + TE__ATTN_ROWS * ld_g;
    float *v = WIDE ? k : k + TE__ATTN_LANES * ld_k;
    float *weight = v + TE__ATTN_LANES * ld_v + warp * (TE__ATTN_LANES * TE_MINE);

    if (EXTRA && block_first >= q_end) return;
    const float of_scores = te_attn_scores_of(a), of_dp = te_attn_dp_of(a); // the factors of FP8 codes
    float acc[TE_MINE][TE_CHANNELS], lse2[TE_MINE], delta[TE_MINE];
    te_attn_clear(acc);
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) {
        te_i64 row = te_of::work_at(seq, at.b, at.h) + first + r;
        lse2[r] = a.lse2[row];
        // Where delta is the sum of P dP, a.delta is 0 before this kernel. With WIDE the thread block of the first
        // chunk of channels may already have stored its sum there, so a.delta is not read.
        delta[r] = WIDE && te_of::sums_delta(a) ? 0.0f : a.delta[row];
    }
    if (!WIDE) {
        te_attn_stage(q, ld_q, te_of::queries(a.q, seq), at.b, at.h, block_first, TE__ATTN_ROWS, seq.s_q, a.d);
        te_attn_stage(g, ld_g, te_of::queries(a.d_o, seq), at.b, at.h, block_first, TE__ATTN_ROWS, seq.s_q, a.d_v);
    }

    const te_attn_blocks blocks(a, at.b, at.h, block_first);
    const int begin = te_attn_tile_begin(a, te_attn_keys_begin(seq, block_first), TE__ATTN_LANES);
    const int end =
        EXTRA && block_first >= seq.s_q ? 0 : te_attn_keys_end(seq, min(block_first + TE__ATTN_ROWS, seq.s_q) - 1);
    // Computes three numbers for each row of the warp and this lane's key: P in p, dP after dropout in dp, and the
    // derivative of the score with respect to the scaled product in `factor`.
    auto weigh = [&](int j0, float p[TE_MINE], float dp[TE_MINE], float factor[TE_MINE]) {
        if (WIDE) {
            te_attn_products_wide(p, q, te_of::queries(a.q, seq), at.h, block_first, seq.s_q, k, k_view, group, j0,
                                  seq.s_kv, at.b, a.d);
            te_attn_products_wide(dp, g, te_of::queries(a.d_o, seq), at.h, block_first, seq.s_q, v, v_view, group, j0,
                                  seq.s_kv, at.b, a.d_v);
        } else {
            __syncthreads();
            te_attn_stage(k, ld_k, k_view, at.b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d);
            te_attn_stage(v, ld_v, v_view, at.b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d_v);
            __syncthreads();
            te_attn_products(p, q + warp * TE_MINE * ld_q, ld_q, k + lane * ld_k, a.d);
            te_attn_products(dp, g + warp * TE_MINE * ld_g, ld_g, v + lane * ld_v, a.d_v);
        }
        const te_u32 keep = a.dropout_p > 0.0f ? te_attn_keep_four(a, at.b, at.h, first, j0) : 15u;
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) {
            p[r] *= of_scores, dp[r] *= of_dp;
            float x = te_of::score2(a, seq, at.b, at.h, first + r, j0 + lane, p[r], slope2);
            factor[r] = EXTRA && x == -TE_INF ? 0.0f
                                              : te_of::bprop(a, seq, at.b, at.h, first + r, j0 + lane, p[r], slope2) *
                                                    te_of::slope(a, p[r]);
            p[r] = x == -TE_INF ? 0.0f : exp2f(x - lse2[r]);
            if (a.dropout_p > 0.0f) dp[r] = keep >> r & 1u ? dp[r] * a.keep_scale : 0.0f;
        }
    };
    if (te_of::sums_delta(a)) {
        for (int j0 = begin; j0 < end; j0 += TE__ATTN_LANES) {
            float p[TE_MINE], dp[TE_MINE], factor[TE_MINE];
            if (blocks.empty(j0)) continue;
            weigh(j0, p, dp, factor);
#pragma unroll
            for (int r = 0; r < TE_MINE; r++) delta[r] += p[r] * dp[r];
        }
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) {
            delta[r] = te_warp_sum(delta[r]);
            if (lane == 0 && first + r < seq.s_q && c == 0)
                a.delta[te_of::work_at(seq, at.b, at.h) + first + r] = delta[r];
        }
    }
    te_attn_rounding<EXTRA> rounded(a.x.dp_dt, a.x.dp_scale);
    for (int j0 = begin; j0 < end; j0 += TE__ATTN_LANES) {
        float p[TE_MINE], dp[TE_MINE], factor[TE_MINE];
        if (blocks.empty(j0)) continue;
        weigh(j0, p, dp, factor);
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) p[r] = rounded(p[r] * (dp[r] - delta[r]) * factor[r]);
        *(float4 *)(weight + lane * TE_MINE) = make_float4(p[0], p[1], p[2], p[3]);
        if (WIDE) te_attn_stage_wide(k, k_view, group, j0, seq.s_kv, at.b, c, d);
        else __syncwarp();
        te_attn_gather(acc, weight, k, ld_k, d);
    }
    rounded.publish(a.x.dp_amax);
    te_attn_put(WIDE ? te_attn_channels(te_of::queries(a.dq, seq), c) : te_of::queries(a.dq, seq), at.b, at.h, first,
                q_end, d, acc, a.scale * te_of::of_codes(a.x.k_inv));
}
