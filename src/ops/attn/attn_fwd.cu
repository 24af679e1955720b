// ops/attn/attn_fwd.cu: O = softmax(scale Q K^T, masked) V for any formats, sizes and strides, in f32, without an s x s
// matrix.
//
// Each row has a running maximum m and a running sum l (Milakov and Gimelshein, 2018; FlashAttention). A row that sees
// no key keeps l = 0; its o becomes 0 and its lse -inf. FP8 attention rounds the normalized P, or P over the largest
// element of its row, so it goes through the keys twice: first for m and l, then for P V. q, k and v may be FP8 codes,
// or k and v alone those of a cache, whose rows have factors.
//
// Options: X_EXTRA, X_MOD (attn.cuh), X_WIDE (general.cuh).
//
// Launch: grid (ceil(s_q / 16) * batch * heads, WIDE: ceil(d_v / 256)), block 128, shared memory
//          4 * (16 * ROW(d) + 32 * LANE_ROW(max(d, d_v)) + 4 * 32 * 4) bytes (kargs.h), with 256 for d and d_v if WIDE.
// te:baseline
// te:row X_EXTRA=0 X_WIDE=0|1
// te:row X_WIDE=0|1
// te:row X_MOD=1|2|3 X_WIDE=0|1
#include "ops/attn/general.cuh"

extern "C" __global__ void __launch_bounds__(128, 3) te_attn_fwd(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const te_attn_place at((a.s_q + TE__ATTN_ROWS - 1) / TE__ATTN_ROWS, a.heads, true);
    TE_ATTN_SEQUENCE(a, at.b);
    const int group = at.h / (a.heads / a.groups), q_end = te_of::q_end(seq);
    const te_of::view k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const te_of::view k_factors = te_of::keys(a.x.k_factors, seq), v_factors = te_of::keys(a.x.v_factors, seq);
    const float slope2 = te_of::slope2(a, at.b, at.h);
    const int block_first = at.tile * TE__ATTN_ROWS, first = block_first + warp * TE_MINE;
    const int ld_q = TE__ATTN_ROW(WIDE ? TE__ATTN_CHUNK : a.d),
              ld = TE__ATTN_LANE_ROW(WIDE ? TE__ATTN_CHUNK : max(a.d, a.d_v));
    // the channels of O that the block writes
    const int c = WIDE ? (int)blockIdx.y * TE__ATTN_CHUNK : 0, d_v = WIDE ? te_attn_chunk(a.d_v, c) : a.d_v;
    float *q = (float *)te_shared, *kv = q + TE__ATTN_ROWS * ld_q;
    float *weight = kv + TE__ATTN_LANES * ld + warp * (TE__ATTN_LANES * TE_MINE);

    float acc[TE_MINE][TE_CHANNELS], m[TE_MINE], l[TE_MINE];
    te_attn_clear(acc);
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) m[r] = -TE_INF, l[r] = 0.0f; // m is in units of log2; l is this lane's part of
                                                                   // the sum
    if (EXTRA && block_first >= q_end) return;
    if (!WIDE) te_attn_stage(q, ld_q, te_of::queries(a.q, seq), at.b, at.h, block_first, TE__ATTN_ROWS, seq.s_q, a.d);

    const te_attn_blocks blocks(a, at.b, at.h, block_first);
    const int begin = te_attn_tile_begin(a, te_attn_keys_begin(seq, block_first), TE__ATTN_LANES);
    const int end =
        EXTRA && block_first >= seq.s_q ? 0 : te_attn_keys_end(seq, min(block_first + TE__ATTN_ROWS, seq.s_q) - 1);
    te_attn_rounding<EXTRA> rounded(a.x.s_dt, a.x.s_scale);
    const float product = te_of::of_codes(a.x.q_inv) * te_of::of_codes(a.x.k_inv), values = te_of::of_codes(a.x.v_inv);
    const float sink2 = EXTRA ? te_attn_sink2(a, at.h) : -TE_INF;
    // Computes the scores of the warp's rows for the key of this lane.
    auto score = [&](int j0, float s[TE_MINE]) {
        if (WIDE) {
            te_attn_products_wide(s, q, te_of::queries(a.q, seq), at.h, block_first, seq.s_q, kv, k_view, group, j0,
                                  seq.s_kv, at.b, a.d, &a.x, &k_factors);
        } else {
            __syncthreads();
            te_attn_stage(kv, ld, k_view, at.b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d, &a.x, &k_factors);
            __syncthreads();
            te_attn_products(s, q + warp * TE_MINE * ld_q, ld_q, kv + lane * ld, a.d);
        }
#pragma unroll
        for (int r = 0; r < TE_MINE; r++)
            s[r] = te_of::score2(a, seq, at.b, at.h, first + r, j0 + lane, EXTRA ? s[r] * product : s[r], slope2);
    };
    // Updates the row's maximum m and sum l with a score, and replaces the score by its exponential. Returns the factor
    // for everything that was summed before.
    auto take = [&](int r, float *s) {
        float top = fmaxf(m[r], te_warp_max(*s)), base = top == -TE_INF ? 0.0f : top, shrink = exp2f(m[r] - base);
        *s = exp2f(*s - base);
        l[r] = l[r] * shrink + *s;
        m[r] = top;
        return shrink;
    };
    float known2[TE_MINE]; // FP8 attention: lse of the rows, in units of log2
    // FP8 attention with a scale for each row: P is 2^(score - base). `real` turns it into the softmax.
    float base[TE_MINE], real[TE_MINE];
    if (rounded.on()) {
        for (int j0 = begin; j0 < end; j0 += TE__ATTN_LANES) {
            float s[TE_MINE];
            if (blocks.empty(j0)) continue;
            score(j0, s);
#pragma unroll
            for (int r = 0; r < TE_MINE; r++) take(r, &s[r]);
        }
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) {
            float top = m[r], sum = te_warp_sum(l[r]);
            te_attn_add_sink(sink2, &top, &sum);
            known2[r] = sum == 0.0f ? 0.0f : top + log2f(sum);
            base[r] = te_of::by_row(a) && sum != 0.0f ? m[r] - TE__ATTN_FP8_ROW : known2[r];
            real[r] = exp2f(base[r] - known2[r]) * a.keep_scale;
        }
    }
    for (int j0 = begin; j0 < end; j0 += TE__ATTN_LANES) {
        float p[TE_MINE];
        if (blocks.empty(j0)) continue;
        score(j0, p);
        const te_u32 keep = a.dropout_p > 0.0f ? te_attn_keep_four(a, at.b, at.h, first, j0) : 15u;
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) {
            float shrink = 1.0f;
            if (rounded.on())
                p[r] = exp2f(p[r] - base[r]);
            else
                shrink = take(r, &p[r]);
            if (!(keep >> r & 1u)) p[r] = 0.0f;
            if (rounded.on()) {
                const float x = p[r] * real[r];
                p[r] = rounded.of(te_of::by_row(a) ? p[r] : x, x);
            }
#pragma unroll
            for (int t = 0; t < TE_CHANNELS; t++) acc[r][t] *= shrink;
        }
        *(float4 *)(weight + lane * TE_MINE) = make_float4(p[0], p[1], p[2], p[3]);
        if (WIDE) {
            te_attn_stage_wide(kv, v_view, group, j0, seq.s_kv, at.b, c, d_v, &a.x, &v_factors);
        } else {
            __syncthreads();
            te_attn_stage(kv, ld, v_view, at.b, group, j0, TE__ATTN_LANES, seq.s_kv, a.d_v, &a.x, &v_factors);
            __syncthreads();
        }
        te_attn_gather(acc, weight, kv, ld, d_v);
    }

    if (EXTRA && a.x.max_logit && lane == 0)
        te_attn_raise(a.x.max_logit + at.h, fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3])));
    rounded.publish(a.x.s_amax);
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) {
        float sum = te_warp_sum(l[r]), shrink = EXTRA ? te_attn_add_sink(sink2, &m[r], &sum) : 1.0f;
        float inverse = sum == 0.0f                            ? 0.0f
                        : rounded.on() ? (te_of::by_row(a) ? real[r] : 1.0f)
                                       : shrink * a.keep_scale / sum;
        if (EXTRA) inverse *= values;
        if (a.lse && lane == 0 && first + r < q_end && c == 0)
            a.lse[te_of::lse_at(seq, at.b, at.h) + first + r] = sum == 0.0f ? -TE_INF : (m[r] + log2f(sum)) * TE_LN2;
#pragma unroll
        for (int t = 0; t < TE_CHANNELS; t++) acc[r][t] *= inverse;
    }
    te_attn_put(WIDE ? te_attn_channels(te_of::queries(a.o, seq), c) : te_of::queries(a.o, seq), at.b, at.h, first,
                q_end, d_v, acc, 1.0f);
}
