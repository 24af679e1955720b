// ops/attn/attn_bwd_bias.cu: computes dB = c dS in f32, summed over the dimensions along which the bias B repeats, for
// any dtypes, sizes and strides. c is 1, or the scale with TE_ATTN_BIAS_PRE_SCALE.
//
// The tiles are those of general.cuh. A block owns 16 rows and 32 keys of dB. It goes through all sequences, heads and
// rows that read these elements of B, in that order. P and dS are computed as in attn_bwd_dq.cu, but without the
// derivative of a soft cap, because B is added after the cap.
//
// Options: X_MOD (attn.cuh), X_WIDE (general.cuh).
//
// Launch: grid (ceil(s_kv / 32) * ceil(dbias_i / 16) * dbias_h * dbias_b), block 128, as much shared memory as
// attn_bwd_dq.cu.
// te:baseline
// te:row X_WIDE=0|1
// te:row X_MOD=1|2|3 X_WIDE=0|1
#include "ops/attn/general.cuh"

extern "C" __global__ void __launch_bounds__(128, 3) te_attn_bwd_bias(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int key_tiles = (a.s_kv + TE__ATTN_LANES - 1) / TE__ATTN_LANES,
              row_tiles = (a.x.dbias_i + TE__ATTN_ROWS - 1) / TE__ATTN_ROWS;
    const int j0 = (int)(blockIdx.x % key_tiles) * TE__ATTN_LANES, j = j0 + lane;
    te_u32 rest = blockIdx.x / key_tiles;
    const int row_first = (int)(rest % row_tiles) * TE__ATTN_ROWS;
    rest /= row_tiles;
    const int th = (int)(rest % a.x.dbias_h), tb = (int)(rest / a.x.dbias_h);
    const bool all_b = a.x.dbias_b == 1, all_h = a.x.dbias_h == 1, all_i = a.x.dbias_i == 1;
    const int ld_q = TE__ATTN_ROW(WIDE ? TE__ATTN_CHUNK : a.d), ld_g = TE__ATTN_ROW(a.d_v),
              ld_k = TE__ATTN_LANE_ROW(WIDE ? TE__ATTN_CHUNK : a.d);
    const int ld_v = WIDE ? ld_k : TE__ATTN_LANE_ROW(a.d_v);
    float *q = (float *)te_shared, *g = WIDE ? q : q + TE__ATTN_ROWS * ld_q,
          *k = WIDE ? q + TE__ATTN_ROWS * ld_q : g + TE__ATTN_ROWS * ld_g;
    float *v = WIDE ? k : k + TE__ATTN_LANES * ld_k;
    float *sums = v + TE__ATTN_LANES * ld_v;

    // dp_scale is made for dS times the derivative of the soft cap (see te_attn_fp8). Here dS lacks this derivative. So
    // with a soft cap dS is not rounded here.
    te_attn_rounding<1> rounded(a.x.softcap > 0.0f ? 0 : a.x.dp_dt, a.x.dp_scale);
    const float of_scores = te_attn_scores_of(a), of_dp = te_attn_dp_of(a); // the factors of FP8 codes
    float acc[TE_MINE];
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) acc[r] = 0.0f;
    for (int b = all_b ? 0 : tb; b < (all_b ? a.batch : tb + 1); b++) {
        const te__attn_seq seq = te__attn_seq_of(&a, b);
        if (j0 >= seq.s_kv) continue;
        const te__attn_view q_view = te_of::queries(a.q, seq), g_view = te_of::queries(a.d_o, seq),
                            k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
        for (int h = all_h ? 0 : th; h < (all_h ? a.heads : th + 1); h++) {
            const int group = h / (a.heads / a.groups);
            const float slope2 = te_of::slope2(a, b, h);
            for (int i0 = row_first; i0 < (all_i ? seq.s_q : min(seq.s_q, row_first + 1)); i0 += TE__ATTN_ROWS) {
                const int first = i0 + warp * TE_MINE;
                if (te_attn_is_empty(a, b, h, i0, j0)) continue;
                float s[TE_MINE], dp[TE_MINE];
                if (WIDE) {
                    te_attn_products_wide(s, q, q_view, h, i0, seq.s_q, k, k_view, group, j0, seq.s_kv, b, a.d);
                    te_attn_products_wide(dp, g, g_view, h, i0, seq.s_q, v, v_view, group, j0, seq.s_kv, b, a.d_v);
                } else {
                    __syncthreads();
                    te_attn_stage(q, ld_q, q_view, b, h, i0, TE__ATTN_ROWS, seq.s_q, a.d);
                    te_attn_stage(g, ld_g, g_view, b, h, i0, TE__ATTN_ROWS, seq.s_q, a.d_v);
                    te_attn_stage(k, ld_k, k_view, b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d);
                    te_attn_stage(v, ld_v, v_view, b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d_v);
                    __syncthreads();
                    te_attn_products(s, q + warp * TE_MINE * ld_q, ld_q, k + lane * ld_k, a.d);
                    te_attn_products(dp, g + warp * TE_MINE * ld_g, ld_g, v + lane * ld_v, a.d_v);
                }
                const te_u32 keep = a.dropout_p > 0.0f ? te_attn_keep_four(a, b, h, first, j0) : 15u;
#pragma unroll
                for (int r = 0; r < TE_MINE; r++) {
                    const te_i64 row = te_of::work_at(seq, b, h) + first + r;
                    s[r] *= of_scores, dp[r] *= of_dp;
                    float x = te_of::score2(a, seq, b, h, first + r, j, s[r], slope2);
                    if (x == -TE_INF) continue;
                    if (a.dropout_p > 0.0f) dp[r] = keep >> r & 1u ? dp[r] * a.keep_scale : 0.0f;
                    acc[r] += rounded(exp2f(x - a.lse2[row]) * (dp[r] - a.delta[row]) *
                                      te_of::bprop(a, seq, b, h, first + r, j, s[r], slope2));
                }
            }
        }
    }
    if (all_i) {
        __syncthreads();
        sums[warp * 32 + lane] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        __syncthreads();
        acc[0] = (sums[lane] + sums[32 + lane]) + (sums[64 + lane] + sums[96 + lane]);
    }
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) {
        const int i = row_first + warp * TE_MINE + r;
        if (i < a.x.dbias_i && j < a.s_kv)
            te_store(a.x.dbias.p, tb * a.x.dbias.b + th * a.x.dbias.h + i * a.x.dbias.i + j, a.x.dbias.dt,
                     acc[r] * a.x.bias_scale);
    }
}
