/* ops/softmax/op.c: fills in defaults and checks the arguments of softmax calls. This file must not depend on the
 * backend. */

/* The value that replaces a masked score. */
#define TE__SOFTMAX_MASKED (-10000.0f)

static te_result te__check_softmax_fwd(te_ctx *te, te_op_softmax_fwd_args *a) {
    const char *op = "softmax_fwd";
    char x[TE__SHAPE_TEXT], mask[TE__SHAPE_TEXT];
    const te_tensor *m = a->mask;
    if (a->scale == 0.0f) a->scale = 1.0f;
    if (a->causal && a->x->ndim < 2)
        return te__fail(te, TE_ERR_SHAPE, "%s: x is %s; a causal one has at least 2 dimensions, [.., s_q, s_k]", op,
                        te__shape_text(a->x, x));
    if (m && (a->x->ndim != 4 || m->ndim != 4 || (m->shape[0] != 1 && m->shape[0] != a->x->shape[0]) ||
              m->shape[1] != 1 || m->shape[2] != a->x->shape[2] || m->shape[3] != a->x->shape[3]))
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: mask is %s and x is %s; [b or 1, 1, s_q, s_k] and [b, h, s_q, s_k] are needed", op,
                        te__shape_text(m, mask), te__shape_text(a->x, x));
    return te__want_like(te, op, "y", a->y, "x", a->x);
}
static te_result te__check_softmax_bwd(te_ctx *te, te_op_softmax_bwd_args *a) {
    te_result r = te__want_like(te, "softmax_bwd", "dy", a->dy, "y", a->y);
    if (a->scale == 0.0f) a->scale = 1.0f;
    return r == TE_OK ? te__want_like(te, "softmax_bwd", "dx", a->dx, "y", a->y) : r;
}

/* Returns the number of rows of one matrix of x. It is 1 if x has a single dimension. */
static int64_t te__softmax_rows(const te_tensor *x) { return x->ndim >= 2 ? x->shape[x->ndim - 2] : 1; }
