/* ops/attn/sparse_op.c: the defaults, checks and kernel arguments of sparse attention, for both backends. This file
 * must not depend on the backend. */

/* Checks that x has the sizes `shape`, and that the channels of a row are adjacent in memory. */
static te_result te__sparse_want(te_ctx *te, const char *op, const char *name, const te_tensor *x, int ndim,
                                 const int64_t *shape) {
    char text[TE__SHAPE_TEXT], want[TE__SHAPE_TEXT];
    if (x->ndim != ndim || memcmp(shape, x->shape, (size_t)ndim * sizeof(int64_t)) != 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; with this q, kv and o it must be %s", op, name,
                        te__shape_text(x, text), te__dims_text(ndim, shape, want));
    return te__want_channels(te, op, name, x);
}

static te_result te__sparse_attn_check(te_ctx *te, const char *op, te_op_sparse_attn_fwd_args *a) {
    char t[TE__SHAPE_TEXT], u[TE__SHAPE_TEXT], v[TE__SHAPE_TEXT], w[TE__SHAPE_TEXT];
    const te_tensor *q = a->q, *kv = a->kv, *x = a->indices;
    int64_t shape[4];
    te_result r;
    if (q->ndim != 4 || kv->ndim != 3 || a->o->ndim != 4 || x->ndim != 3 || kv->shape[0] != q->shape[0] ||
        kv->shape[2] != q->shape[3] || x->shape[0] != q->shape[0] || x->shape[1] != q->shape[1])
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: q is %s, kv %s, indices %s and o %s; [b, s_q, H, d], [b, s_kv, d], [b, s_q, n] and [b, "
                        "s_q, H, d_v] are needed",
                        op, te__shape_text(q, t), te__shape_text(kv, u), te__shape_text(x, v), te__shape_text(a->o, w));
    if (q->shape[3] < 1 || q->shape[3] > TE__SPARSE_MAX_D || a->o->shape[3] < 1 || a->o->shape[3] > q->shape[3])
        return te__fail(
            te, TE_ERR_UNSUPPORTED,
            "%s: keys have %lld channels and values %lld; 1 to %d are possible, and values have no more than keys", op,
            (long long)q->shape[3], (long long)a->o->shape[3], TE__SPARSE_MAX_D);
    memcpy(shape, q->shape, sizeof(shape));
    shape[3] = a->o->shape[3];
    r = te__sparse_want(te, op, "o", a->o, 4, shape);
    if (r == TE_OK) r = te__want_channels(te, op, "q", q);
    if (r == TE_OK) r = te__want_channels(te, op, "kv", kv);
    if (r == TE_OK) r = te__want_numel(te, op, "sinks", a->sinks, q->shape[2]);
    if (r == TE_OK) r = te__want_numel(te, op, "lse", a->lse, te__rows(q));
    if (r == TE_OK && (te__numel(x) > INT_MAX || te__rows(kv) > INT_MAX || te__rows(q) > INT_MAX))
        r = te__fail(te, TE_ERR_UNSUPPORTED,
                     "%s: q is %s, kv %s and indices %s; at most 2^31 - 1 rows of q and kv, and slots, are possible",
                     op, te__shape_text(q, t), te__shape_text(kv, u), te__shape_text(x, v));
    a->softmax_scale = te__attn_scale(a->softmax_scale, q->shape[3]);
    return r;
}
static te_result te__check_sparse_attn_fwd(te_ctx *te, te_op_sparse_attn_fwd_args *a) {
    return te__sparse_attn_check(te, "sparse_attn_fwd", a);
}

/* Returns the arguments of the forward pass to which the backward pass `a` belongs. */
static te_op_sparse_attn_fwd_args te__sparse_attn_forward_of(const te_op_sparse_attn_bwd_args *a) {
    te_op_sparse_attn_fwd_args f = TE_ZERO;
    f.q = a->q;
    f.kv = a->kv;
    f.indices = a->indices;
    f.sinks = a->sinks;
    f.o = (te_tensor *)a->o;
    f.lse = (te_tensor *)a->lse;
    f.softmax_scale = a->softmax_scale;
    return f;
}
static te_result te__check_sparse_attn_bwd(te_ctx *te, te_op_sparse_attn_bwd_args *a) {
    const char *op = "sparse_attn_bwd";
    te_op_sparse_attn_fwd_args f = te__sparse_attn_forward_of(a);
    te_result r = te__sparse_attn_check(te, op, &f);
    if (r != TE_OK) return r;
    a->softmax_scale = f.softmax_scale;
    r = te__sparse_want(te, op, "d_o", a->d_o, 4, a->o->shape);
    if (r == TE_OK) r = te__sparse_want(te, op, "dq", a->dq, 4, a->q->shape);
    if (r == TE_OK) r = te__sparse_want(te, op, "dkv", a->dkv, 3, a->kv->shape);
    if (r == TE_OK && a->dsinks && !a->sinks)
        r = te__fail(te, TE_ERR_INVALID, "%s: dsinks is given and sinks is NULL; there are no sinks to have a gradient",
                     op);
    return r == TE_OK ? te__want_numel(te, op, "dsinks", a->dsinks, a->q->shape[2]) : r;
}

/* Returns where x lies; x is [b, s, heads, d] or [b, s, d]. */
static te__attn_view te__sparse_view(const te_tensor *x) {
    te__attn_view v = TE_ZERO;
    v.p = te__data(x);
    v.b = x->stride[0];
    v.s = x->stride[1];
    v.h = x->ndim == 4 ? x->stride[2] : 0;
    v.dt = (int)x->dtype;
    return v;
}

/* Returns the kernels' arguments for checked args. */
static te__sparse_attn_kargs te__sparse_attn_problem(const te_op_sparse_attn_fwd_args *a) {
    te__sparse_attn_kargs k = TE_ZERO;
    k.q = te__sparse_view(a->q);
    k.kv = te__sparse_view(a->kv);
    k.o = te__sparse_view(a->o);
    k.indices = te__int_data(a->indices);
    k.sinks = te__f32_data(a->sinks);
    k.lse = te__f32_data(a->lse);
    k.batch = (int)a->q->shape[0];
    k.s_q = (int)a->q->shape[1];
    k.heads = (int)a->q->shape[2];
    k.d = (int)a->q->shape[3];
    k.d_v = (int)a->o->shape[3];
    k.s_kv = (int)a->kv->shape[1];
    k.n = (int)a->indices->shape[2];
    k.scale = a->softmax_scale;
    k.scale2 = (float)(a->softmax_scale * 1.4426950408889634);
    return k;
}
static te__sparse_attn_kargs te__sparse_attn_problem_bwd(const te_op_sparse_attn_bwd_args *a) {
    const te_op_sparse_attn_fwd_args f = te__sparse_attn_forward_of(a);
    te__sparse_attn_kargs k = te__sparse_attn_problem(&f);
    k.d_o = te__sparse_view(a->d_o);
    k.dq = te__sparse_view(a->dq);
    k.dkv = te__sparse_view(a->dkv);
    return k;
}
