/* nn/attention.c: rotary embedding, splitting a packed projection, attention: differentiable functions like those of nn/functions.c. */

/* ---- rope ---- */

static te_op_rope_args te__rope_args(const te_rotary_desc *d, te_qkv_format format, int64_t head_dim, int64_t length) {
    te_op_rope_args a = TE_ZERO;
    float percent = d->rotary_percent > 0.0f && d->rotary_percent < 1.0f ? d->rotary_percent : 1.0f;
    a.format = format;
    a.base = d->base;
    a.rotary_dim = (int)((float)te__min(head_dim, 1 << 24) * percent); /* exact in a float; te_op_rope refuses sizes far below 2^24 */
    a.interleaved = d->interleaved;
    a.llama3 = d->llama3;
    a.position_offset = d->position_offset;
    a.start_positions = d->start_positions;
    /* Positions are interpolated when both fields are set: sequences beyond the stretched range are squeezed into it, others are divided
     * by the factor (TransformerEngine, RotaryPositionEmbedding). */
    if (d->seq_len_interpolation_factor > 0.0f && d->pretrained_max_position_embeddings > 0) {
        float limit = (float)d->pretrained_max_position_embeddings * d->seq_len_interpolation_factor;
        a.position_scale = (float)length > limit ? te__floats_divide((float)d->pretrained_max_position_embeddings, (float)length)
                                                    : te__floats_divide(1.0, d->seq_len_interpolation_factor);
    }
    return a;
}

static te_tensor *te__rope_apply(te_tensor *x, te_op_rope_args args) {
    args.x = x;
    args.y = te__empty_like(x, x->dtype);
    return args.y ? te__checked(args.y, te_op_rope(x->te, &args)) : NULL;
}
static te_result te__rope_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_op_rope_args args = *(const te_op_rope_args *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    args.start_positions = saved[0];
    args.backward = true;
    dx[0] = g ? te__rope_apply(g, args) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format) {
    te_rotary_desc zero = TE_ZERO;
    te_op_rope_args args;
    te_tensor *saved[1];
    char text[TE__SHAPE_TEXT];
    if (!x || !te__need_float(x, "te_apply_rotary_pos_emb")) return NULL;
    if (!desc) desc = &zero;
    if (x->ndim != 4) {
        te__fail(x->te, TE_ERR_SHAPE, "te_apply_rotary_pos_emb: the input is %s; [s, b, h, d] or [b, s, h, d] is needed", te__shape_text(x, text));
        return NULL;
    }
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    args = te__rope_args(desc, format, x->shape[3], x->shape[format == TE_BSHD ? 1 : 0]);
    saved[0] = desc->start_positions;
    return te__record("rope", te__rope_apply(x, args), te__rope_backward, &args, sizeof(args), &x, 1, saved, 1);
}

/* ---- a packed projection to q, k and v, rotated ---- */

static te_result te__qkv_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te_op_qkv_rope_args *f = (const te_op_qkv_rope_args *)state;
    te_op_qkv_rope_bwd_args args = TE_ZERO;
    te_tensor *g[3];
    const te_tensor *like = dy[0] ? dy[0] : dy[1] ? dy[1] : dy[2];
    int64_t shape[4];
    int i;
    (void)needs;
    memcpy(shape, like->shape, sizeof(shape));
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? f->num_heads : f->num_groups;
        g[i] = dy[i] ? te_tensor_contiguous(dy[i]) : te_tensor_zeros(te, like->dtype, 4, shape);
        if (!g[i]) return te_error_code(te);
    }
    shape[2] = (int64_t)(f->num_heads + 2 * f->num_groups) * f->head_dim;
    args.qkv = dx[0] = te_tensor_empty(te, like->dtype, 3, shape);
    if (!dx[0]) return te_error_code(te);
    args.q = g[0];
    args.k = g[1];
    args.v = g[2];
    args.format = f->format;
    args.num_heads = f->num_heads;
    args.num_groups = f->num_groups;
    args.head_dim = f->head_dim;
    args.interleaved_groups = f->interleaved_groups;
    args.no_rope = f->no_rope;
    args.base = f->base;
    args.rotary_dim = f->rotary_dim;
    args.interleaved = f->interleaved;
    args.position_scale = f->position_scale;
    args.llama3 = f->llama3;
    args.position_offset = f->position_offset;
    args.start_positions = saved[0];
    return te_op_qkv_rope_bwd(te, &args);
}

/* qkv [s, b, (H + 2G) d] to out[0] = q [s, b, H, d], out[1] = k, out[2] = v [s, b, G, d]. False on failure. */
static bool te__split_qkv(te_tensor *qkv, int heads, int groups, int64_t head_dim, bool interleaved, te_qkv_format format, const te_rotary_desc *rotary,
                          te_tensor *out[3]) {
    te_op_qkv_rope_args args = TE_ZERO;
    te_node_desc node = TE_ZERO;
    te_tensor *saved[1];
    int64_t shape[4];
    int i;
    qkv = te_tensor_contiguous(qkv);
    if (!qkv) return false;
    shape[0] = qkv->shape[0];
    shape[1] = qkv->shape[1];
    shape[3] = head_dim;
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? heads : groups;
        out[i] = te_tensor_empty(qkv->te, qkv->dtype, 4, shape);
        if (!out[i]) return false;
    }
    args.qkv = qkv;
    args.q = out[0];
    args.k = out[1];
    args.v = out[2];
    args.format = format;
    args.num_heads = heads;
    args.num_groups = groups;
    args.head_dim = (int)head_dim;
    args.interleaved_groups = interleaved;
    args.no_rope = !rotary;
    if (rotary) {
        te_op_rope_args r = te__rope_args(rotary, format, head_dim, qkv->shape[format == TE_BSHD ? 1 : 0]);
        args.base = r.base;
        args.rotary_dim = r.rotary_dim;
        args.interleaved = r.interleaved;
        args.position_scale = r.position_scale;
        args.llama3 = r.llama3;
        args.position_offset = r.position_offset;
        args.start_positions = r.start_positions;
    }
    if (te_op_qkv_rope(qkv->te, &args) != TE_OK) return false;
    saved[0] = rotary ? rotary->start_positions : NULL;
    node.name = "split_qkv";
    node.inputs = &qkv;
    node.num_inputs = 1;
    node.outputs = out;
    node.num_outputs = 3;
    node.saved = saved;
    node.num_saved = 1;
    node.state = &args;
    node.state_size = sizeof(args);
    node.backward = te__qkv_backward;
    return te_record(qkv->te, &node) == TE_OK;
}

/* ---- attention ---- */

/* The tensors of extras, for a node to save: forth, and back. */
enum { TE__ATTENTION_EXTRAS = 9 };
static void te__attention_extras(te_attn_extras *x, te_tensor **list, bool back) {
    te_tensor **field[TE__ATTENTION_EXTRAS];
    int i;
    field[0] = &x->attention_mask;
    field[1] = &x->cu_seqlens_q;
    field[2] = &x->cu_seqlens_kv;
    field[3] = &x->cu_seqlens_q_padded;
    field[4] = &x->cu_seqlens_kv_padded;
    field[5] = &x->core_attention_bias;
    field[6] = &x->alibi_slopes;
    field[7] = &x->softmax_offset;
    field[8] = &x->page_table;
    for (i = 0; i < TE__ATTENTION_EXTRAS; i++) {
        if (back)
            *field[i] = list[i];
        else
            list[i] = *field[i];
    }
}

static te_result te__attention_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te_op_attn_fwd_args *f = (const te_op_attn_fwd_args *)state;
    te_op_attn_bwd_args args = TE_ZERO;
    args.q = saved[0];
    args.k = saved[1];
    args.v = saved[2];
    args.o = saved[3];
    args.lse = saved[4];
    args.d_o = te_tensor_contiguous(dy[0]);
    args.dq = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    args.dk = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    args.dv = dx[2] = te__empty_like(saved[2], saved[2]->dtype);
    args.format = f->format;
    args.mask = f->mask;
    args.window = f->window;
    args.softmax_scale = f->softmax_scale;
    args.dropout_p = f->dropout_p;
    args.seed = f->seed;
    args.offset = f->offset;
    args.rng = saved[5];
    args.extras = f->extras;
    te__attention_extras(&args.extras, (te_tensor **)saved + 6, true);
    if (needs[3]) args.dbias = dx[3] = te__empty_like(args.extras.core_attention_bias, args.extras.core_attention_bias->dtype);
    if (needs[4]) args.dsoftmax_offset = dx[4] = te__empty_like(args.extras.softmax_offset, TE_F32);
    return args.d_o && dx[0] && dx[1] && dx[2] && (!needs[3] || dx[3]) && (!needs[4] || dx[4]) ? te_op_attn_bwd(te, &args) : te_error_code(te);
}

TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc) {
    te_attention_desc zero = TE_ZERO;
    te_op_attn_fwd_args args = TE_ZERO;
    te__rng_state before;
    te__draw draw = TE_ZERO;
    te_tensor *in[5], *saved[6 + TE__ATTENTION_EXTRAS], *o;
    te_ctx *te;
    int64_t shape[4], lse[3];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool packed, packed_kv;
    if (!q || !te__operand(q, k, false, "te_attention") || !te__operand(q, v, false, "te_attention") || !te__need_float(q, "te_attention")) return NULL;
    if (!desc) desc = &zero;
    te = q->te;
    packed = desc->format == TE_THD;
    packed_kv = packed && !desc->extras.kv_bshd && !desc->extras.page_table;
    if (q->ndim != (packed ? 3 : 4) || k->ndim != (packed_kv ? 3 : 4) || v->ndim != (packed_kv ? 3 : 4)) {
        te__fail(te, TE_ERR_SHAPE, "te_attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, or with TE_THD [tokens, heads, d]",
                 te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
        return NULL;
    }
    memcpy(shape, q->shape, sizeof(shape));
    shape[q->ndim - 1] = v->shape[v->ndim - 1];
    lse[0] = packed ? 1 : q->shape[desc->format == TE_BSHD ? 0 : 1];
    lse[1] = q->shape[q->ndim - 2];
    lse[2] = q->shape[desc->format == TE_BSHD ? 1 : 0];
    in[0] = q;
    in[1] = k;
    in[2] = v;
    in[3] = desc->extras.core_attention_bias;
    in[4] = desc->extras.softmax_offset;
    te__frame_begin(te);
    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o = te_tensor_empty(te, q->dtype, q->ndim, shape);
    args.lse = te_tensor_empty(te, TE_F32, 3, lse);
    args.format = desc->format;
    args.mask = desc->mask;
    args.window = desc->window;
    args.softmax_scale = desc->softmax_scale;
    args.dropout_p = desc->dropout_p;
    args.extras = desc->extras;
    args.max_logit = desc->max_logit;
    before = te__rng_now(te);
    if (desc->dropout_p > 0.0f) draw = te__rng_draw(te, 1);
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    if (!o || !args.lse || te_op_attn_fwd(te, &args) != TE_OK) o = NULL;
    saved[0] = q;
    saved[1] = k;
    saved[2] = v;
    saved[3] = o;
    saved[4] = args.lse;
    saved[5] = draw.rng;
    te__attention_extras(&args.extras, saved + 6, false);
    o = te__record("attention", o, te__attention_backward, &args, sizeof(args), in, 5, saved, 6 + TE__ATTENTION_EXTRAS);
    if (!o) te__rng_back(te, before);
    return te__frame_return(te, o);
}

/* ---- attention whose scores are capped ----
 *
 * Head by head, with the scores of one in memory: te_op_attn_fwd has no cap. The backward pass computes them again. */

typedef struct te__capped_state {
    float scale, cap;
    te_attn_mask mask;
    te_window window;
} te__capped_state;

/* Matrix i of x [b, n, s, d]. */
static te_tensor *te__head(const te_tensor *x, int64_t i) {
    const int64_t rows = x->shape[2], cols = x->shape[3];
    return te__alias_2d(x, i * rows * cols * te__dtype_size(x->dtype), x->dtype, rows, cols);
}

/* d = op(a) op(b), or added to it. */
static te_result te__head_product(te_tensor *a, bool a_transposed, te_tensor *b, bool b_transposed, te_tensor *d, bool accumulate) {
    te_op_gemm_args g = TE_ZERO;
    if (!a || !b || !d) return TE_ERR_STATE;
    g.a = a;
    g.b = b;
    g.d = d;
    g.m = d->shape[0];
    g.n = d->shape[1];
    g.k = a->shape[a_transposed ? 0 : 1];
    g.a_transposed = a_transposed;
    g.b_transposed = b_transposed;
    g.accumulate = accumulate;
    return te_op_gemm(d->te, &g);
}

static te_result te__capped_softmax(const te__capped_state *s, te_tensor *x, te_tensor *y) {
    te_op_capped_softmax_fwd_args a = TE_ZERO;
    a.x = x;
    a.y = y;
    a.scale = s->scale;
    a.cap = s->cap;
    a.mask = s->mask;
    a.window = s->window;
    return te_op_capped_softmax_fwd(x->te, &a);
}

static te_result te__capped_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__capped_state *s = (const te__capped_state *)state;
    te_tensor *q = saved[0], *k = saved[1], *v = saved[2], *d_o = te_tensor_contiguous(dy[0]);
    const int64_t heads = q->shape[0] * q->shape[1], per_group = q->shape[1] / k->shape[1], s_q = q->shape[2], s_kv = k->shape[2];
    /* The sums over the heads of a group are rounded once. */
    te_tensor *scores = te__empty_2d(te, TE_F32, s_q, s_kv), *dp = te__empty_2d(te, TE_F32, s_q, s_kv), *p = te__empty_2d(te, q->dtype, s_q, s_kv);
    te_tensor *dq = te__empty_like(q, q->dtype), *dk = te_tensor_zeros(te, TE_F32, 4, k->shape), *dv = te_tensor_zeros(te, TE_F32, 4, v->shape);
    te_op_capped_softmax_bwd_args back = TE_ZERO;
    te_result result = scores && dp && p && dq && dk && dv && d_o ? TE_OK : te_error_code(te);
    int64_t h;
    (void)needs;
    back.x = scores;
    back.dy = dp;
    back.dx = p;
    back.scale = s->scale;
    back.cap = s->cap;
    back.mask = s->mask;
    back.window = s->window;
    for (h = 0; h < heads && result == TE_OK; h++) {
        te_tensor *qh = te__head(q, h), *kh = te__head(k, h / per_group), *d_oh = te__head(d_o, h);
        result = te__head_product(qh, false, kh, true, scores, false);
        if (result == TE_OK) result = te__capped_softmax(s, scores, p);
        if (result == TE_OK) result = te__head_product(p, true, d_oh, false, te__head(dv, h / per_group), true);
        if (result == TE_OK) result = te__head_product(d_oh, false, te__head(v, h / per_group), true, dp, false);
        if (result == TE_OK) result = te_op_capped_softmax_bwd(te, &back);
        if (result == TE_OK) result = te__head_product(p, false, kh, false, te__head(dq, h), false);
        if (result == TE_OK) result = te__head_product(p, true, qh, false, te__head(dk, h / per_group), true);
    }
    if (result != TE_OK) return result;
    dx[0] = dq;
    dx[1] = te_tensor_cast(dk, k->dtype);
    dx[2] = te_tensor_cast(dv, v->dtype);
    return dx[1] && dx[2] ? TE_OK : te_error_code(te);
}

/* q [b, H, s_q, d], k and v [b, G, s_kv, d] -> [b, H, s_q, dv]. */
static te_tensor *te__capped_heads(te_tensor *q, te_tensor *k, te_tensor *v, const te__capped_state *s) {
    te_ctx *te = q->te;
    const int64_t heads = q->shape[0] * q->shape[1], per_group = q->shape[1] / k->shape[1], shape[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    te_tensor *scores, *p, *o, *in[3];
    te_result result;
    int64_t h;
    in[0] = q;
    in[1] = k;
    in[2] = v;
    te__frame_begin(te);
    scores = te__empty_2d(te, TE_F32, q->shape[2], k->shape[2]);
    p = te__empty_2d(te, q->dtype, q->shape[2], k->shape[2]);
    o = te_tensor_empty(te, q->dtype, 4, shape);
    result = scores && p && o ? TE_OK : te_error_code(te);
    for (h = 0; h < heads && result == TE_OK; h++) {
        result = te__head_product(te__head(q, h), false, te__head(k, h / per_group), true, scores, false);
        if (result == TE_OK) result = te__capped_softmax(s, scores, p);
        if (result == TE_OK) result = te__head_product(p, false, te__head(v, h / per_group), false, te__head(o, h), false);
    }
    if (result != TE_OK) o = NULL;
    return te__frame_return(te, te__record("capped_attention", o, te__capped_backward, s, sizeof(*s), in, 3, in, 3));
}

/* [s, b, n, d] or [b, s, n, d] to [b, n, s, d], or back. */
static te_tensor *te__heads_first(te_tensor *x, te_qkv_format format) {
    if (format == TE_SBHD) x = te_tensor_transpose(x, 0, 1);
    return te_tensor_contiguous(te_tensor_transpose(x, 1, 2));
}
static te_tensor *te__heads_back(te_tensor *x, te_qkv_format format) {
    x = te_tensor_transpose(x, 1, 2);
    return te_tensor_contiguous(format == TE_SBHD ? te_tensor_transpose(x, 0, 1) : x);
}

/* te_attention with scores x that become cap * tanh(x / cap). */
static te_tensor *te__capped_attention(te_tensor *q, te_tensor *k, te_tensor *v, float cap, const te_attention_desc *desc) {
    te__capped_state state = TE_ZERO;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4;
    const int s = desc->format == TE_BSHD ? 1 : 0;
    if (!te__operand(q, k, false, "attention") || !te__operand(q, v, false, "attention") || !te__need_float(q, "attention")) return NULL;
    fits = fits && k->shape[2] > 0 && q->shape[2] % k->shape[2] == 0 && k->shape[2] == v->shape[2] && q->shape[3] == k->shape[3] && k->shape[s] == v->shape[s] &&
           q->shape[1 - s] == k->shape[1 - s] && k->shape[1 - s] == v->shape[1 - s] && q->dtype == k->dtype && k->dtype == v->dtype;
    if (!fits) {
        te__fail(q->te, TE_ERR_SHAPE, "attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, of one format, and the heads of k and v divide q's",
                 te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
        return NULL;
    }
    state.cap = cap;
    state.scale = desc->softmax_scale != 0.0f ? desc->softmax_scale : te__floats_divide(1.0, sqrt((double)q->shape[3]));
    state.mask = desc->mask;
    state.window = desc->window;
    q = te__heads_first(q, desc->format);
    k = te__heads_first(k, desc->format);
    v = te__heads_first(v, desc->format);
    if (!q || !k || !v) return NULL;
    return te__heads_back(te__capped_heads(q, k, v, &state), desc->format);
}
