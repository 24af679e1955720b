/* ops/softcap/op.c: the front door of capped numbers and of the softmax of capped scores: checks, and the description that both backends work from. Knows tensors; must not
 * know which backend runs. */

static te_result te__want_cap(te_ctx *te, const char *op, float cap, bool zero) {
    if ((cap > 0.0f || (zero && cap == 0.0f)) && cap <= FLT_MAX) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: cap is %g; it is positive%s", op, (double)cap, zero ? ", or 0 for none" : "");
}

static te_result te__check_softcap(te_ctx *te, te_op_softcap_args *a) {
    te_result r = te__want_cap(te, "softcap", a->cap, false);
    if (r == TE_OK) r = te__want_like(te, "softcap", "dy", a->dy, "x", a->x);
    return r == TE_OK ? te__want_like(te, "softcap", "y", a->y, "x", a->x) : r;
}

static te_result te__capped_softmax_check(te_ctx *te, const char *op, const te_tensor *x, float *scale, float cap, te_attn_mask *mask, const te_window *w) {
    char text[TE__SHAPE_TEXT];
    if (*scale == 0.0f) *scale = 1.0f;
    if (!*mask) *mask = TE_MASK_CAUSAL;
    if (x->ndim < 2) return te__fail(te, TE_ERR_SHAPE, "%s: x is %s; [.., queries, keys] is needed", op, te__shape_text(x, text));
    if ((int)*mask < TE_MASK_NONE || *mask > TE_MASK_CAUSAL_BOTTOM_RIGHT)
        return te__fail(te, TE_ERR_INVALID, "%s: mask is %d; TE_MASK_NONE (1) to TE_MASK_CAUSAL_BOTTOM_RIGHT (3) are possible", op, (int)*mask);
    if (w->on && (w->left < -1 || w->right < -1))
        return te__fail(te, TE_ERR_INVALID, "%s: window is %lld, %lld; -1 is the least", op, (long long)w->left, (long long)w->right);
    return te__want_cap(te, op, cap, true);
}
static te_result te__check_capped_softmax_fwd(te_ctx *te, te_op_capped_softmax_fwd_args *a) {
    te_result r = te__capped_softmax_check(te, "capped_softmax_fwd", a->x, &a->scale, a->cap, &a->mask, &a->window);
    return r == TE_OK ? te__want_same(te, "capped_softmax_fwd", "y", a->y, "x", a->x) : r;
}
static te_result te__check_capped_softmax_bwd(te_ctx *te, te_op_capped_softmax_bwd_args *a) {
    te_result r = te__capped_softmax_check(te, "capped_softmax_bwd", a->x, &a->scale, a->cap, &a->mask, &a->window);
    if (r == TE_OK) r = te__want_same(te, "capped_softmax_bwd", "dy", a->dy, "x", a->x);
    return r == TE_OK ? te__want_same(te, "capped_softmax_bwd", "dx", a->dx, "x", a->x) : r;
}

/* ---- the description ---- */

static te__softcap_kargs te__softcap_problem(const te_op_softcap_args *a) {
    te__softcap_kargs k = TE_ZERO;
    k.x = te__data(a->x);
    k.dy = te__data(a->dy);
    k.y = te__data(a->y);
    k.count = te__numel(a->x);
    k.cap = a->cap;
    k.x_dt = (int)a->x->dtype;
    k.dy_dt = a->dy ? (int)a->dy->dtype : 0;
    k.y_dt = (int)a->y->dtype;
    return k;
}

static te__capped_softmax_kargs te__capped_softmax_problem(const te_tensor *x, const te_tensor *dy, const te_tensor *y, float scale, float cap, te_attn_mask mask, te_window w) {
    te__capped_softmax_kargs k = TE_ZERO;
    k.x = te__data(x);
    k.dy = te__data(dy);
    k.y = te__data(y);
    k.rows = te__rows(x);
    k.s_q = x->shape[x->ndim - 2];
    k.s_kv = te__cols(x);
    k.delta = mask == TE_MASK_CAUSAL_BOTTOM_RIGHT ? k.s_kv - k.s_q : 0;
    k.left = w.on && w.left >= 0 ? w.left : k.s_kv + k.s_q;
    k.right = w.on && w.right >= 0 ? w.right : k.s_kv + k.s_q;
    if (mask != TE_MASK_NONE) k.right = 0;
    k.scale = scale;
    k.cap = cap;
    k.x_dt = (int)x->dtype;
    k.dy_dt = dy ? (int)dy->dtype : 0;
    k.y_dt = (int)y->dtype;
    return k;
}
static te__capped_softmax_kargs te__capped_softmax_forward(const te_op_capped_softmax_fwd_args *a) {
    return te__capped_softmax_problem(a->x, NULL, a->y, a->scale, a->cap, a->mask, a->window);
}
static te__capped_softmax_kargs te__capped_softmax_backward(const te_op_capped_softmax_bwd_args *a) {
    return te__capped_softmax_problem(a->x, a->dy, a->dx, a->scale, a->cap, a->mask, a->window);
}
