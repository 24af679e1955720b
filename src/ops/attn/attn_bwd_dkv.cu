// ops/attn/attn_bwd_dkv.cu: computes dK = scale dS^T Q and dV = P^T dO, summed over the query heads of a group. The
// arithmetic is f32. Any formats, sizes and strides are allowed.
//
// The tiles are those of general.cuh with queries and keys swapped: 16 keys and 32 query rows at a time. The heads of
// the group come one after another, so every sum always has the same order. P and dS are computed as in attn_bwd_dq.cu.
// In FP8 attention attn_bwd_dq.cu runs first, since it writes delta; here P is rounded too.
//
// Options: X_EXTRA, X_MOD (attn.cuh), X_WIDE (general.cuh).
//
// Launch: grid (ceil(s_kv / 16) * batch * groups, WIDE: ceil(max(d, d_v) / 256)), block 128, shared memory 4 * (16 *
// (ROW(d) + ROW(d_v)) + 32 * (LANE_ROW(d) + LANE_ROW(d_v)) + 4 * 32 * 4) bytes (kargs.h), if WIDE 4 * (16 * ROW(256) +
// 32 * LANE_ROW(256) + 4 * 32 * 4).
// te:baseline
// te:row X_EXTRA=0 X_WIDE=0|1
// te:row X_WIDE=0|1
// te:row X_MOD=1|2|3 X_WIDE=0|1
#include "ops/attn/general.cuh"

extern "C" __global__ void __launch_bounds__(128, 3) te_attn_bwd_dkv(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_kv + TE__ATTN_ROWS - 1) / TE__ATTN_ROWS, a.groups, false);
    TE_ATTN_SEQUENCE(a, at.b);
    const te_of::view q_view = te_of::queries(a.q, seq), g_view = te_of::queries(a.d_o, seq);
    const int per_group = a.heads / a.groups, kv_end = te_of::kv_end(seq);
    const int block_first = at.tile * TE__ATTN_ROWS, first = block_first + warp * TE_MINE;
    const int c = WIDE ? (int)blockIdx.y * TE__ATTN_CHUNK : 0; // the channels of dK and dV that the block writes
    const int d = WIDE ? te_attn_chunk(a.d, c) : a.d, d_v = WIDE ? te_attn_chunk(a.d_v, c) : a.d_v;
    const int ld_k = TE__ATTN_ROW(WIDE ? TE__ATTN_CHUNK : a.d), ld_v = TE__ATTN_ROW(a.d_v),
              ld_q = TE__ATTN_LANE_ROW(WIDE ? TE__ATTN_CHUNK : a.d);
    const int ld_g = WIDE ? ld_q : TE__ATTN_LANE_ROW(a.d_v);
    float *k = (float *)te_shared, *v = WIDE ? k : k + TE__ATTN_ROWS * ld_k,
          *q = WIDE ? k + TE__ATTN_ROWS * ld_k : v + TE__ATTN_ROWS * ld_v;
    float *g = WIDE ? q : q + TE__ATTN_LANES * ld_q;
    float *weight = g + TE__ATTN_LANES * ld_g + warp * (TE__ATTN_LANES * TE_MINE);

    if (EXTRA && block_first >= kv_end) return;
    const float of_scores = te_attn_scores_of(a), of_dp = te_attn_dp_of(a); // the factors of FP8 codes
    float dk[TE_MINE][TE_CHANNELS], dv[TE_MINE][TE_CHANNELS];
    te_attn_clear(dk);
    te_attn_clear(dv);
    if (!WIDE) {
        te_attn_stage(k, ld_k, te_of::keys(a.k, seq), at.b, at.h, block_first, TE__ATTN_ROWS, seq.s_kv, a.d);
        te_attn_stage(v, ld_v, te_of::keys(a.v, seq), at.b, at.h, block_first, TE__ATTN_ROWS, seq.s_kv, a.d_v);
    }

    te_attn_rounding<EXTRA> rounded_s(a.x.s_dt, a.x.s_scale), rounded_dp(a.x.dp_dt, a.x.dp_scale);
    const int begin = EXTRA ? te_attn_tile_begin(a, te_attn_rows_begin(seq, block_first), TE__ATTN_LANES)
                            : te_attn_rows_begin(seq, block_first);
    const int end =
        EXTRA && block_first >= seq.s_kv ? 0 : te_attn_rows_end(seq, min(block_first + TE__ATTN_ROWS, seq.s_kv) - 1);
    for (int h = at.h * per_group; h < (at.h + 1) * per_group; h++) {
        const float slope2 = te_of::slope2(a, at.b, h);
        for (int i0 = begin; i0 < end; i0 += TE__ATTN_LANES) {
            const int i = i0 + lane;
            if (EXTRA && te_attn_is_empty(a, at.b, h, i0, block_first)) continue;
            float s[TE_MINE], dp[TE_MINE], lse2 = TE_INF, delta = 0.0f;
            if (!WIDE) {
                __syncthreads();
                te_attn_stage(q, ld_q, q_view, at.b, h, i0, TE__ATTN_LANES, seq.s_q, a.d);
                te_attn_stage(g, ld_g, g_view, at.b, h, i0, TE__ATTN_LANES, seq.s_q, a.d_v);
            }
            if (i < seq.s_q) {
                te_i64 row = te_of::work_at(seq, at.b, h) + i;
                lse2 = a.lse2[row];
                delta = a.delta[row];
            }
            if (WIDE) {
                te_attn_products_wide(s, k, te_of::keys(a.k, seq), at.h, block_first, seq.s_kv, q, q_view, h, i0,
                                      seq.s_q, at.b, a.d);
                te_attn_products_wide(dp, v, te_of::keys(a.v, seq), at.h, block_first, seq.s_kv, g, g_view, h, i0,
                                      seq.s_q, at.b, a.d_v);
            } else {
                __syncthreads();
                te_attn_products(s, k + warp * TE_MINE * ld_k, ld_k, q + lane * ld_q, a.d);
                te_attn_products(dp, v + warp * TE_MINE * ld_v, ld_v, g + lane * ld_g, a.d_v);
            }
            te_u32 keep = 15u; // dropout's bits of the lane's row: the warp's keys lie in one word
            if (a.dropout_p > 0.0f) {
                uint64_t seed = a.seed, offset = a.offset;
                te__rng_read(a.rng, &seed, &offset);
                keep = te__attn_keep_word(te__attn_threshold(&a), seed, offset,
                                          te__attn_keep_row(&a, at.b, h, i) + first / 32) >>
                       first % 32;
            }
#pragma unroll
            for (int r = 0; r < TE_MINE; r++) {
                s[r] *= of_scores, dp[r] *= of_dp;
                float x = te_of::score2(a, seq, at.b, h, i, first + r, s[r], slope2),
                      p = x == -TE_INF ? 0.0f : exp2f(x - lse2), dropped = p;
                if (!(keep >> r & 1u)) dropped = dp[r] = 0.0f;
                const float factor = EXTRA && p == 0.0f ? 0.0f
                                                        : te_of::bprop(a, seq, at.b, h, i, first + r, s[r], slope2) *
                                                              te_of::slope(a, s[r]);
                s[r] = rounded_dp(p * (dp[r] * a.keep_scale - delta) * factor);
                dp[r] = rounded_s.on() ? rounded_s(dropped * a.keep_scale) : dropped;
            }
            *(float4 *)(weight + lane * TE_MINE) = make_float4(dp[0], dp[1], dp[2], dp[3]);
            if (WIDE) te_attn_stage_wide(g, g_view, h, i0, seq.s_q, at.b, c, d_v);
            else __syncwarp();
            te_attn_gather(dv, weight, g, ld_g, d_v);
            __syncwarp();
            *(float4 *)(weight + lane * TE_MINE) = make_float4(s[0], s[1], s[2], s[3]);
            if (WIDE) te_attn_stage_wide(q, q_view, h, i0, seq.s_q, at.b, c, d);
            else __syncwarp();
            te_attn_gather(dk, weight, q, ld_q, d);
        }
    }
    te_attn_put(WIDE ? te_attn_channels(te_of::keys(a.dk, seq), c) : te_of::keys(a.dk, seq), at.b, at.h, first, kv_end,
                d, dk, a.scale * te_of::of_codes(a.x.q_inv));
    te_attn_put(WIDE ? te_attn_channels(te_of::keys(a.dv, seq), c) : te_of::keys(a.dv, seq), at.b, at.h, first, kv_end,
                d_v, dv, (rounded_s.on() ? 1.0f : a.keep_scale) * te_of::of_codes(a.x.do_inv));
}
