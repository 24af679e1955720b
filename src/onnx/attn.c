/* onnx/attn.c: translates rotary embeddings and attention into nodes of an ONNX graph. This file must not depend on
 * modules.
 *
 * The graph computes positions, masks and distances from the sizes of its inputs. Attention is two matrix products and
 * a softmax. */

/* ---- rotary embeddings ---- */

/* A rotary embedding. The export runs the module twice, the second time with larger inputs. */
typedef struct te__onnx_rotation {
    const te_rope_angles *a, *b; /* `a`: the angles in the first run; `b`: the angles in the second run */
    bool batch_first, backward;
    te__onnx_size s;
} te__onnx_rotation;

static const char te__onnx_no_thd[] = "sequences behind each other (thd); a graph takes batches of sequences, bshd or "
                                      "sbhd, with an attention_mask where their lengths differ";

/* Checks that both runs of the export use the same angles. The angles differ if a RoPE scaling changes them for longer
 * sequences. */
static bool te__onnx_angles_fit(te__onnx *g, const te__onnx_rotation *r) {
    const te_rope_angles *a = r->a, *b = r->b;
    bool same = a->position_scale == b->position_scale && a->attention_factor == b->attention_factor &&
                !a->inv_freq == !b->inv_freq;
    if (same && a->inv_freq) same = memcmp(a->inv_freq, b->inv_freq, (size_t)(a->rotary_dim / 2) * sizeof(float)) == 0;
    if (same && a->cp_size <= 1) return true;
    if (same)
        te__onnx_refuse(g, "cp_size is %d: the rank has a part of each sequence, and a file has one rank", a->cp_size);
    else
        te__onnx_refuse(g, "positions or frequencies are others for longer inputs (seq_len_interpolation_factor with "
                           "pretrained_max_position_embeddings, TE_ROPE_DYNAMIC, "
                           "TE_ROPE_LONGROPE); a graph has one set: give max_seqlen in the rotary desc");
    return false;
}
/* Returns the positions as in te__rope_position: [s or 1, b or 1, 1, 1]. If batch_first, the first two dimensions are
 * exchanged. */
static int te__onnx_positions(te__onnx *g, const te__onnx_rotation *r) {
    const te_rope_angles *a = r->a;
    int64_t column[4] = {1, 1, 1, 1};
    int v, order[2] = {1, 0};
    column[r->batch_first ? 1 : 0] = -1;
    if (a->positions && te__numel(r->b->positions) > r->s.second) { /* More than s positions: their shape is [b, s], not
                                                                     * [s], since b > 1 in the run with larger
                                                                     * sizes. */
        te__onnx_pair p = te__onnx_pair_of(a->positions, r->b->positions);
        te__onnx_size shape[4];
        shape[0].first = te__numel(a->positions) / r->s.first;
        shape[0].second = te__numel(r->b->positions) / r->s.second;
        shape[1] = r->s;
        p = te__onnx_as(&p, 2, shape, shape[1]);
        v = te__onnx_read_as(g, &p, a->positions, r->b->positions);
        if (!r->batch_first) v = te__onnx_transpose(g, v, 2, order);
        v = te__onnx_unsqueeze(g, te__onnx_unsqueeze(g, v, -1), -1);
    } else
        v = te__onnx_2(g, "Reshape",
                       a->positions ? te__onnx_read(g, a->positions, r->b->positions) : te__onnx_range(g, r->s),
                       te__onnx_i64s(g, 4, column));
    if (a->position_offset) v = te__onnx_2(g, "Add", v, te__onnx_i64(g, a->position_offset));
    if (a->start_positions) {
        column[0] = column[1] = 1;
        column[r->batch_first ? 0 : 1] = -1;
        v = te__onnx_2(g, "Add", v,
                       te__onnx_2(g, "Reshape", te__onnx_read(g, a->start_positions, r->b->start_positions),
                                  te__onnx_i64s(g, 4, column)));
    }
    return v;
}
/* Returns the rows of the caller's table `freqs` at the positions: [s or 1, b or 1, 1, rotary_dim]. batch_first swaps
 * the first two dimensions. */
static int te__onnx_rows_of_freqs(te__onnx *g, const te__onnx_rotation *r) {
    const te_rope_angles *a = r->a;
    const te_tensor *f = a->freqs, *f2 = r->b->freqs;
    int v;
    if (f2->shape[1] > 1) { /* this size is b and not 1, so each sequence has its own rows */
        if (a->positions || a->start_positions)
            return te__onnx_refuse(
                g,
                "freqs has angles of its own for each sequence, and %s chooses their rows; give a row "
                "for each token, and %s NULL",
                a->positions ? "positions" : "start_positions", a->positions ? "positions" : "start_positions");
        v = te__onnx_range(g, r->s);
        if (a->position_offset) v = te__onnx_2(g, "Add", v, te__onnx_i64(g, a->position_offset));
        v = te__onnx_2(g, "Gather", te__onnx_read(g, f, f2), v);
        return r->batch_first ? te__onnx_swap4(g, v, 1, 0, 2, 3) : v;
    }
    int64_t table[2] = {-1, a->rotary_dim};
    v = te__onnx_squeeze(g, te__onnx_positions(g, r), 3);
    return te__onnx_2(g, "Gather", te__onnx_2(g, "Reshape", te__onnx_read(g, f, f2), te__onnx_i64s(g, 2, table)), v);
}
/* Returns f32 angles [s or 1, b or 1, 1, half]. r->batch_first swaps the first two dimensions. `mate` selects the first
 * (0) or second channel of each pair. */
static int te__onnx_angles(te__onnx *g, const te__onnx_rotation *r, int mate) {
    const te_rope_angles *a = r->a;
    float inv_freq[TE__ROPE_MAX_HALF];
    int64_t half = a->rotary_dim / 2;
    int i, v;
    if (a->freqs && a->interleaved) return te__onnx_cut(g, te__onnx_rows_of_freqs(g, r), -1, mate, a->rotary_dim, 2);
    if (a->freqs) return te__onnx_cut(g, te__onnx_rows_of_freqs(g, r), -1, mate * half, (mate + 1) * half, 1);
    for (i = 0; i < half; i++)
        inv_freq[i] = a->inv_freq ? a->inv_freq[i] : (float)pow((double)a->base, -2.0 * i / a->rotary_dim);
    v = te__onnx_scaled(g, te__onnx_cast(g, te__onnx_positions(g, r), TE__ONNX_FLOAT), a->position_scale);
    return te__onnx_2(g, "Mul", v,
                      te__onnx_numbers(g, TE__ONNX_FLOAT, 1, &half, inv_freq, (size_t)half * sizeof(float)));
}
/* Rotates the first rotary_dim channels of x, f32 [s, b, h, d] or [b, s, h, d]. Returns the result in the same
 * shape. */
static int te__onnx_rotated(te__onnx *g, int x, int64_t d, const te__onnx_rotation *r) {
    const te_rope_angles *a = r->a;
    const int64_t n = a->rotary_dim, step = a->interleaved ? 2 : 1, mate = a->interleaved ? 1 : n / 2;
    int cosine[2], sine[2], u, v, part[3], parts = 2, i; /* index 0 of each array: the first channels of the pairs;
                                                          * index 1: the second channels */
    if (n == 0) return x;
    for (i = 0; i < 2; i++) {
        const int angle = te__onnx_angles(g, r, i), from = r->backward ? 1 - i : i;
        cosine[i] = te__onnx_scaled(g, te__onnx_1(g, "Cos", angle), a->attention_factor);
        sine[from] = te__onnx_scaled(g, te__onnx_1(g, "Sin", angle), a->attention_factor);
        if (r->backward) sine[from] = te__onnx_1(g, "Neg", sine[from]);
    }
    u = te__onnx_cut(g, x, -1, 0, a->interleaved ? n : n / 2, step);
    v = te__onnx_cut(g, x, -1, mate, n, step);
    part[0] = te__onnx_2(g, "Sub", te__onnx_2(g, "Mul", u, cosine[0]), te__onnx_2(g, "Mul", v, sine[0]));
    part[1] = te__onnx_2(g, "Add", te__onnx_2(g, "Mul", v, cosine[1]), te__onnx_2(g, "Mul", u, sine[1]));
    if (a->interleaved) {
        int64_t joined[4];
        joined[0] = joined[1] = joined[2] = 0; /* For Reshape a size of 0 means: keep the size of the input. */
        joined[3] = n;
        part[0] = te__onnx_concat2(g, -1, te__onnx_unsqueeze(g, part[0], -1), te__onnx_unsqueeze(g, part[1], -1));
        part[0] = te__onnx_2(g, "Reshape", part[0], te__onnx_i64s(g, 4, joined));
        parts = 1;
    }
    if (n < d) part[parts++] = te__onnx_cut(g, x, -1, n, d, 1);
    return te__onnx_concat(g, -1, parts, part);
}

static void te__onnx_rope(te__onnx *g, const te_op_rope_args *a, const te_op_rope_args *b) {
    te__onnx_pair in = TE__ONNX_PAIR(x);
    te__onnx_rotation r = TE_ZERO;
    int v;
    if (a->format == TE_THD) {
        te__onnx_refuse(g, "%s", te__onnx_no_thd);
        return;
    }
    r.a = &a->angles;
    r.b = &b->angles;
    r.batch_first = a->format == TE_BSHD;
    r.backward = a->backward;
    r.s = te__onnx_dim(&in, r.batch_first ? 1 : 0);
    v = TE__ONNX_READ(x);
    if (!a->no_rope && te__onnx_angles_fit(g, &r)) v = te__onnx_rotated(g, v, a->x->shape[3], &r);
    TE__ONNX_STORE(y, v);
}

static void te__onnx_qkv_rope(te__onnx *g, const te_op_qkv_rope_args *a, const te_op_qkv_rope_args *b) {
    te__onnx_pair packed = TE__ONNX_PAIR(qkv), leading = a->rotated ? packed : TE__ONNX_PAIR(q);
    const int64_t heads = a->num_heads, groups = a->num_groups, in_group = heads / groups;
    const te_tensor *out[3], *out2[3];
    te__onnx_rotation r = TE_ZERO;
    te__onnx_size shape[5];
    int64_t of_group[4], begin = 0;
    int v, i, n = 0, part[3];
    if (a->k_cache) {
        te__onnx_refuse(g, "keys and values that go into a cache");
        return;
    }
    out[0] = a->q, out[1] = a->k, out[2] = a->v;
    out2[0] = b->q, out2[1] = b->k, out2[2] = b->v;
    r.a = &a->angles;
    r.b = &b->angles;
    r.batch_first = a->format == TE_BSHD;
    r.s = te__onnx_dim(&leading, r.batch_first ? 1 : 0);
    if (!a->no_rope && !te__onnx_angles_fit(g, &r)) return;
    shape[n++] = te__onnx_dim(&leading, 0);
    shape[n++] = te__onnx_dim(&leading, 1);
    if (a->interleaved_groups) shape[n++] = te__onnx_fixed(groups);
    shape[n++] = te__onnx_fixed(a->interleaved_groups ? in_group + 2 : heads + 2 * groups);
    shape[n++] = te__onnx_fixed(a->head_dim);
    packed = te__onnx_as(&packed, n, shape, shape[n - 1]);
    v = te__onnx_read_as(g, &packed, a->qkv, b->qkv);
    of_group[0] = of_group[1] = 0; /* For Reshape a size of 0 means: keep the size of the input. */
    of_group[3] = a->head_dim;
    for (i = 0; i < 3; i++) {
        int64_t count = a->interleaved_groups ? (i ? 1 : in_group) : i ? groups : heads;
        part[i] = te__onnx_cut(g, v, n - 2, begin, begin + count, 1);
        begin += count;
        of_group[2] = i ? groups : heads;
        if (a->interleaved_groups) part[i] = te__onnx_2(g, "Reshape", part[i], te__onnx_i64s(g, 4, of_group));
        if (i < 2 && !a->no_rope) part[i] = te__onnx_rotated(g, part[i], a->head_dim, &r);
        if (a->rotated && a->interleaved_groups) {
            int64_t by_group[5] = {0, 0, 0, -1, 0};
            by_group[2] = groups;
            by_group[4] = a->head_dim;
            part[i] = te__onnx_2(g, "Reshape", part[i], te__onnx_i64s(g, 5, by_group));
        }
        if (!a->rotated) te__onnx_store(g, out[i], out2[i], part[i]);
    }
    if (!a->rotated) return;
    packed = TE__ONNX_PAIR(rotated);
    packed = te__onnx_as(&packed, n, shape, shape[n - 1]);
    te__onnx_store_as(g, &packed, te__onnx_concat(g, n - 2, 3, part));
}

/* ---- attention ---- */

/* Changes x from [s, b, G, d] or [b, s, G, d] to [b, H, s, d] or, if `turned`, [b, H, d, s]. Repeats the key-value
 * heads. */
static int te__onnx_heads(te__onnx *g, int x, bool batch_first, bool turned, int64_t heads, int64_t groups, int64_t d) {
    int64_t times[5] = {1, 1, 1, 1, 1}, joined[4];
    const int s = batch_first ? 1 : 0;
    x = turned ? te__onnx_swap4(g, x, 1 - s, 2, 3, s) : te__onnx_swap4(g, x, 1 - s, 2, s, 3);
    if (heads == groups) return x;
    times[2] = heads / groups;
    joined[0] = 0; /* For Reshape a size of 0 means: keep the size of the input. */
    joined[1] = heads;
    joined[2] = turned ? d : -1;
    joined[3] = turned ? -1 : d;
    x = te__onnx_2(g, "Expand", te__onnx_unsqueeze(g, x, 2), te__onnx_i64s(g, 5, times));
    return te__onnx_2(g, "Reshape", x, te__onnx_i64s(g, 4, joined));
}
/* Reshapes x to broadcast over scores: [H] to [1, H, 1, 1] or, if of_sequences is true, [b, H] to [b, H, 1, 1]. */
static int te__onnx_over_heads(te__onnx *g, int x, int64_t heads, bool of_sequences) {
    int64_t shape[4] = {1, 1, 1, 1};
    shape[0] = of_sequences ? -1 : 1;
    shape[1] = heads;
    return te__onnx_2(g, "Reshape", x, te__onnx_i64s(g, 4, shape));
}
/* Returns ALiBi's bias, -slope * |i + delta - j|. */
static int te__onnx_alibi(te__onnx *g, const te_op_attn_fwd_args *a, const te_op_attn_fwd_args *b,
                          const te__onnx_scores *s, int64_t heads) {
    int distance = te__onnx_2(g, "Sub", te__onnx_distance(g, s), te__onnx_diagonal(g, s, te__onnx_corner(s), 0)), slope,
        h;
    distance = te__onnx_cast(g, te__onnx_1(g, "Abs", distance), TE__ONNX_FLOAT);
    if (a->rule.alibi_slopes) {
        slope = TE__ONNX_READ(rule.alibi_slopes);
    } else {
        float *v = (float *)te__alloc(g->te, (size_t)heads * sizeof(float));
        if (!v) return TE__ONNX_FAILED;
        for (h = 0; h < heads; h++) v[h] = te__attn_slope((int)heads, h);
        slope = te__onnx_numbers(g, TE__ONNX_FLOAT, 1, &heads, v, (size_t)heads * sizeof(float));
        te__free(g->te, v);
    }
    slope = te__onnx_over_heads(g, slope, heads, a->rule.alibi_slopes && a->rule.alibi_slopes->ndim > 1);
    return te__onnx_1(g, "Neg", te__onnx_2(g, "Mul", slope, distance));
}
/* Returns a softmax with exp(extra) as an additional term in its denominator. `extra` has the shape [.., H, 1, 1]. */
static int te__onnx_softmax_with(te__onnx *g, int scores, int visible, int extra) {
    int zero = te__onnx_f32(g, 0.0f), most, v, sum;
    if (visible != TE__ONNX_ALL) scores = te__onnx_3(g, "Where", visible, scores, te__onnx_f32(g, -3e38f));
    most = te__onnx_2(g, "Max", te__onnx_reduce(g, "ReduceMax", scores, -1), extra);
    v = te__onnx_1(g, "Exp", te__onnx_2(g, "Sub", scores, most));
    if (visible != TE__ONNX_ALL) v = te__onnx_3(g, "Where", visible, v, zero);
    sum = te__onnx_2(g, "Add", te__onnx_reduce(g, "ReduceSum", v, -1),
                     te__onnx_1(g, "Exp", te__onnx_2(g, "Sub", extra, most)));
    return te__onnx_2(g, "Div", v, sum);
}

/* Translates the operation that makes cu_seqlens from a padding mask. cu_seqlens has b + 1 elements. The graph can
 * express the size of a dimension only as a product (te__onnx_factor), and b + 1 is a sum. So the graph computes the b
 * lengths instead. */
static void te__onnx_cu_seqlens(te__onnx *g, const te_op_cu_seqlens_args *a, const te_op_cu_seqlens_args *b) {
    int64_t rows[2] = {0, -1}; /* For Reshape a size of 0 means: keep the size of the input. */
    int v = te__onnx_cast(g, te__onnx_2(g, "Equal", TE__ONNX_READ(mask), te__onnx_i64(g, 0)), TE__ONNX_INT64);
    te__onnx_write *w = TE__ONNX_UNKNOWN(cu_seqlens);
    v = te__onnx_reduce_away(g, "ReduceSum", te__onnx_2(g, "Reshape", v, te__onnx_i64s(g, 2, rows)), 1);
    if (w && v >= 0) w->lengths = v;
}
/* Returns the lengths of the sequences as 64-bit [b, 1, 1, 1]. Fails if cu_seqlens was not computed from a padding
 * mask. */
static int te__onnx_lengths(te__onnx *g, const te_tensor *cu, const te_tensor *cu2) {
    int64_t shape[4] = {-1, 1, 1, 1};
    te__onnx_pair x = te__onnx_pair_of(cu, cu2);
    int i = te__onnx_last(g, &x, g->num_writes);
    if (i < 0 || !g->writes[i].lengths)
        return te__onnx_refuse(g,
                               "the lengths of sequences (cu_seqlens) are given; a graph takes an attention_mask, from "
                               "which it counts them");
    return te__onnx_2(g, "Reshape", g->writes[i].lengths, te__onnx_i64s(g, 4, shape));
}
static te_result te__onnx_attn_refuse(te__onnx *g, const te_op_attn_fwd_args *a) {
    const te_score_mod *m = &a->rule.score_mod;
    if (a->format == TE_THD) te__onnx_refuse(g, "%s", te__onnx_no_thd);
    else if (a->rule.block_mask)
        te__onnx_refuse(g, "a block mask, of which a graph has none; export the module with another attention backend, "
                           "which has masks of elements");
    else if (a->rule.page_table)
        te__onnx_refuse(g, "a paged cache of keys and values: memory that calls share, which a graph has not");
    else if (a->rule.k_factors)
        te__onnx_refuse(g, "keys and values that are codes of a cache: memory that calls share, which a graph has not");
    else if (m->score_mod || m->mask_mod || m->score_fn || m->mask_fn)
        te__onnx_refuse(g,
                        "a score_mod of the user's: an expression that kernels are made of, and a graph is not; give a "
                        "core_attention_bias or an attention_mask");
    else if (a->rule.dropout_p > 0.0f) te__onnx_refuse_dropout(g, a->rule.dropout_p);
    return te_error_code(g->te);
}
static void te__onnx_attn_fwd(te__onnx *g, const te_op_attn_fwd_args *a, const te_op_attn_fwd_args *b) {
    const bool q_first = a->format == TE_BSHD, kv_first = q_first || a->rule.kv_bshd;
    te__onnx_pair q = TE__ONNX_PAIR(q), k = TE__ONNX_PAIR(k);
    const int64_t heads = a->q->shape[2], groups = a->k->shape[2];
    const te_attn_bias bias_type = a->rule.core_attention_bias_type;
    te__onnx_scores s = TE_ZERO;
    int v, bias, visible, extra;
    if (te__onnx_attn_refuse(g, a) != TE_OK) return;
    TE__ONNX_UNKNOWN(lse);
    TE__ONNX_UNKNOWN(fp8.s_amax);
    s.s_q = te__onnx_dim(&q, q_first ? 1 : 0);
    s.s_kv = te__onnx_dim(&k, kv_first ? 1 : 0);
    s.mask = a->rule.mask;
    s.window = a->rule.window;
    s.bottom_right_diagonal = a->rule.bottom_right_diagonal;
    s.padded = a->rule.cu_seqlens_q != NULL;
    if (s.padded) {
        s.len_q = te__onnx_lengths(g, a->rule.cu_seqlens_q, b->rule.cu_seqlens_q);
        s.len_kv = te__onnx_lengths(g, a->rule.cu_seqlens_kv, b->rule.cu_seqlens_kv);
        if (s.len_q < 0 || s.len_kv < 0) return;
    }
    v = te__onnx_2(g, "MatMul", te__onnx_heads(g, TE__ONNX_READ(q), q_first, false, heads, heads, a->q->shape[3]),
                   te__onnx_heads(g, TE__ONNX_READ(k), kv_first, true, heads, groups, a->k->shape[3]));
    bias = a->rule.core_attention_bias ? TE__ONNX_READ(rule.core_attention_bias) : TE__ONNX_FAILED;
    if (bias_type == TE_ATTN_BIAS_PRE_SCALE) v = te__onnx_2(g, "Add", v, bias);
    v = te__onnx_scaled(g, v, a->rule.softmax_scale);
    if (a->rule.softcap > 0.0f) v = te__onnx_capped(g, v, a->rule.softcap);
    if (bias_type == TE_ATTN_BIAS_POST_SCALE) v = te__onnx_2(g, "Add", v, bias);
    if (bias_type == TE_ATTN_BIAS_ALIBI) v = te__onnx_2(g, "Add", v, te__onnx_alibi(g, a, b, &s, heads));
    visible = te__onnx_visible(g, &s);
    if (a->rule.attention_mask) {
        int mask = te__onnx_2(g, "Equal", TE__ONNX_READ(rule.attention_mask), te__onnx_i64(g, 0));
        visible = te__onnx_both(g, visible, mask);
    }
    if (a->max_logit) {
        int64_t others[3] = {0, 2, 3};
        te__text t = te__onnx_attributes(g);
        int in[2];
        te__onnx_attr_int(&t, "keepdims", 0);
        in[0] = visible == TE__ONNX_ALL ? v : te__onnx_3(g, "Where", visible, v, te__onnx_f32(g, -INFINITY));
        in[1] = te__onnx_i64s(g, 3, others);
        TE__ONNX_STORE(max_logit, te__onnx_node(g, "ReduceMax", &t, 2, in));
    }
    if (a->rule.softmax_type == TE_SOFTMAX_VANILLA)
        v = te__onnx_softmax_of(g, v, visible);
    else {
        extra = te__onnx_f32(g, 0.0f);
        if (a->rule.softmax_type == TE_SOFTMAX_LEARNABLE)
            extra = te__onnx_over_heads(g, TE__ONNX_READ(rule.softmax_offset), heads, false);
        v = te__onnx_softmax_with(g, v, visible, extra);
    }
    if (a->fp8.s_dtype && !a->fp8.s_scale) { /* the largest of a row becomes 2^8; rows without keys are zeros */
        const int most = te__onnx_2(g, "Max", te__onnx_reduce(g, "ReduceMax", v, -1), te__onnx_f32(g, exp2f(-100.0f))),
                  factor = te__onnx_2(g, "Div", te__onnx_f32(g, exp2f(TE__ATTN_FP8_ROW)), most);
        v = te__onnx_through_codes(g, te__onnx_2(g, "Mul", v, factor), te__onnx_f32(g, 1.0f), a->fp8.s_dtype);
        v = te__onnx_2(g, "Div", v, factor);
    } else if (a->fp8.s_dtype)
        v = te__onnx_through_codes(g, v, te__onnx_inverse(g, a->fp8.s_scale, b->fp8.s_scale), a->fp8.s_dtype);
    v = te__onnx_2(g, "MatMul", v, te__onnx_heads(g, TE__ONNX_READ(v), kv_first, false, heads, groups, a->v->shape[3]));
    v = q_first ? te__onnx_swap4(g, v, 0, 2, 1, 3) : te__onnx_swap4(g, v, 2, 0, 1, 3);
    TE__ONNX_STORE(o, v);
}
