/* nn/capped.c: x that becomes cap * tanh(x / cap), and attention whose scores do (Gemma 2): differentiable functions like those of nn/functions.c. */

/* ---- capped numbers ---- */

static te_tensor *te__softcap(te_tensor *x, te_tensor *dy, float cap) {
    te_op_softcap_args args = TE_ZERO;
    args.x = x;
    args.dy = dy;
    args.y = te__empty_like(x, x->dtype);
    args.cap = cap;
    return args.y ? te__checked(args.y, te_op_softcap(x->te, &args)) : NULL;
}
static te_result te__softcap_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    dx[0] = g ? te__softcap(saved[0], g, *(const float *)state) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_softcap(te_tensor *x, float cap) {
    if (!x || !te__need_float(x, "te_softcap")) return NULL;
    x = te_tensor_contiguous(x);
    return x ? te__record("softcap", te__softcap(x, NULL, cap), te__softcap_backward, &cap, sizeof(cap), &x, 1, &x, 1) : NULL;
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
