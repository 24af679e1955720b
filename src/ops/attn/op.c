/* ops/attn/op.c: the front door of attention: defaults, checks, and the one description of a problem that both backends start from.
 * Knows tensors; must not know which backend runs. */

/* Masks that have their names and not yet their work. */
static bool te__mask_is_later(te_attn_mask mask) { return (int)mask >= (int)TE_MASK_PADDING && (int)mask <= (int)TE_MASK_ARBITRARY; }

/* x is [s, b, heads, d] in the given format; `like` names where the sizes come from. */
static te_result te__attn_want_shape(te_ctx *te, const char *op, const char *name, const te_tensor *x, te_qkv_format format, int64_t s, int64_t b,
                                     int64_t heads, int64_t d, const char *like) {
    char text[TE__SHAPE_TEXT], want[TE__SHAPE_TEXT];
    int64_t shape[4];
    te_result r = te__want_heads(te, op, name, x);
    if (r != TE_OK) return r;
    shape[0] = format == TE_BSHD ? b : s;
    shape[1] = format == TE_BSHD ? s : b;
    shape[2] = heads;
    shape[3] = d;
    if (memcmp(shape, x->shape, sizeof(shape)) == 0) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; with %s it must be %s", op, name, te__shape_text(x, text), like, te__dims_text(4, shape, want));
}

static te_result te__attn_check(te_ctx *te, const char *op, te_op_attn_fwd_args *a) {
    const int seq = a->format == TE_BSHD ? 1 : 0;
    char qt[TE__SHAPE_TEXT], kt[TE__SHAPE_TEXT];
    int64_t b, heads, s_q, s_kv;
    te_result r = te__want_heads(te, op, "q", a->q);
    if (r == TE_OK) r = te__want_heads(te, op, "k", a->k);
    if (r == TE_OK) r = te__want_heads(te, op, "v", a->v);
    if (r == TE_OK) r = te__want_format(te, op, a->format);
    if (r != TE_OK) return r;
    s_q = a->q->shape[seq];
    s_kv = a->k->shape[seq];
    b = a->q->shape[1 - seq];
    heads = a->q->shape[2];
    if (a->k->shape[1 - seq] != b || a->k->shape[3] != a->q->shape[3])
        return te__fail(te, TE_ERR_SHAPE, "%s: q is %s and k is %s; batch and head size must be equal", op, te__shape_text(a->q, qt), te__shape_text(a->k, kt));
    if (a->k->shape[2] == 0 ? heads != 0 : heads % a->k->shape[2] != 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: q has %lld heads and k has %lld; the second must divide the first", op, (long long)heads,
                        (long long)a->k->shape[2]);
    r = te__attn_want_shape(te, op, "v", a->v, a->format, s_kv, b, a->k->shape[2], a->v->shape[3], "k");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "o", a->o, a->format, s_q, b, heads, a->v->shape[3], "q and v");
    if (r != TE_OK) return r;
    if (a->q->shape[3] < 1 || a->q->shape[3] > TE__ATTN_MAX_D || a->v->shape[3] < 1 || a->v->shape[3] > TE__ATTN_MAX_D)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: the head sizes are %lld (q, k) and %lld (v); 1 to %d are possible", op, (long long)a->q->shape[3],
                        (long long)a->v->shape[3], TE__ATTN_MAX_D);
    r = te__want_numel(te, op, "lse", a->lse, b * heads * s_q);
    if (r == TE_OK) r = te__want_rng(te, op, a->rng);
    if (r != TE_OK) return r;
    if (a->mask == TE_MASK_DEFAULT) a->mask = TE_MASK_CAUSAL;
    if ((int)a->mask < (int)TE_MASK_NONE || (int)a->mask > (int)TE_MASK_CAUSAL_BOTTOM_RIGHT)
        return te__fail(te, te__mask_is_later(a->mask) ? TE_ERR_UNSUPPORTED : TE_ERR_INVALID, "%s: mask is %d%s; TE_MASK_NONE (1) to TE_MASK_CAUSAL_BOTTOM_RIGHT (3) are possible", op,
                        (int)a->mask, te__mask_is_later(a->mask) ? ", which is not there yet" : "");
    if (!a->window.on) a->window.left = a->window.right = -1;
    if (a->window.left < -1 || a->window.right < -1)
        return te__fail(te, TE_ERR_INVALID, "%s: the window is %lld, %lld; each is a number of keys, or -1 for no bound", op, (long long)a->window.left,
                        (long long)a->window.right);
    if (a->softmax_scale == 0.0f) a->softmax_scale = (float)(1.0 / sqrt((double)a->q->shape[3]));
    if (!(a->dropout_p >= 0.0f && a->dropout_p <= 1.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: dropout_p is %g; it is a probability, 0 to 1", op, (double)a->dropout_p);
    return TE_OK;
}

static te_result te__check_attn_fwd(te_ctx *te, te_op_attn_fwd_args *a) {
    return te__attn_check(te, "attn_fwd", a);
}

/* The forward that a backward belongs to. */
static te_op_attn_fwd_args te__attn_forward_of(const te_op_attn_bwd_args *a) {
    te_op_attn_fwd_args f = TE_ZERO;
    f.q = a->q;
    f.k = a->k;
    f.v = a->v;
    f.o = (te_tensor *)a->o;
    f.lse = (te_tensor *)a->lse;
    f.format = a->format;
    f.mask = a->mask;
    f.window = a->window;
    f.softmax_scale = a->softmax_scale;
    f.dropout_p = a->dropout_p;
    f.seed = a->seed;
    f.offset = a->offset;
    f.rng = a->rng;
    return f;
}

static te_result te__check_attn_bwd(te_ctx *te, te_op_attn_bwd_args *a) {
    const char *op = "attn_bwd";
    const int seq = a->format == TE_BSHD ? 1 : 0;
    te_op_attn_fwd_args f = te__attn_forward_of(a);
    te_result r = te__attn_check(te, op, &f);
    int64_t b, s_q, s_kv, heads, groups, d, d_v;
    if (r != TE_OK) return r;
    a->mask = f.mask;
    a->window = f.window;
    a->softmax_scale = f.softmax_scale;
    b = a->q->shape[1 - seq];
    s_q = a->q->shape[seq];
    s_kv = a->k->shape[seq];
    heads = a->q->shape[2];
    groups = a->k->shape[2];
    d = a->q->shape[3];
    d_v = a->v->shape[3];
    r = te__attn_want_shape(te, op, "d_o", a->d_o, a->format, s_q, b, heads, d_v, "q and v");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dq", a->dq, a->format, s_q, b, heads, d, "q");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dk", a->dk, a->format, s_kv, b, groups, d, "k");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dv", a->dv, a->format, s_kv, b, groups, d_v, "v");
    return r;
}

/* ---- the problem ---- */

static te__attn_view te__attn_view_of(const te_tensor *x, te_qkv_format format) {
    te__attn_view v = TE_ZERO;
    v.p = te__data(x);
    v.s = x->stride[format == TE_BSHD ? 1 : 0];
    v.b = x->stride[format == TE_BSHD ? 0 : 1];
    v.h = x->stride[2];
    v.dt = (int)x->dtype;
    return v;
}

/* Checked args. Masks and windows become two diagonals; lo and hi stay within -s_q - 1 .. s_kv, which is as good as further out. */
static te__attn_kargs te__attn_problem(const te_op_attn_fwd_args *a) {
    const int seq = a->format == TE_BSHD ? 1 : 0;
    const int64_t s_q = a->q->shape[seq], s_kv = a->k->shape[seq], beyond = s_q + s_kv + 1;
    const int64_t diagonal = a->mask == TE_MASK_CAUSAL_BOTTOM_RIGHT ? s_kv - s_q : 0;
    int64_t lo = a->window.left < 0 || a->window.left > beyond ? -beyond : diagonal - a->window.left;
    int64_t hi = a->window.right < 0 || a->window.right > beyond ? beyond : diagonal + a->window.right;
    te__attn_kargs k = TE_ZERO;
    if (a->mask != TE_MASK_NONE) hi = te__min(hi, diagonal);
    k.q = te__attn_view_of(a->q, a->format);
    k.k = te__attn_view_of(a->k, a->format);
    k.v = te__attn_view_of(a->v, a->format);
    k.o = te__attn_view_of(a->o, a->format);
    k.lse = (float *)te__data(a->lse);
    k.batch = (int)a->q->shape[1 - seq];
    k.heads = (int)a->q->shape[2];
    k.groups = (int)a->k->shape[2];
    k.s_q = (int)s_q;
    k.s_kv = (int)s_kv;
    k.s_pad = (int)te__round_up(s_q, TE__ATTN_PAD);
    k.d = (int)a->q->shape[3];
    k.d_v = (int)a->v->shape[3];
    k.lo = (int)te__max(-s_q, te__min(lo, s_kv));
    k.hi = (int)te__max(-s_q - 1, te__min(hi, s_kv));
    k.scale = a->softmax_scale;
    k.scale2 = (float)(a->softmax_scale * 1.4426950408889634);
    k.dropout_p = a->dropout_p;
    k.keep_scale = a->dropout_p < 1.0f ? 1.0f / (1.0f - a->dropout_p) : 0.0f;
    k.seed = a->seed;
    k.offset = a->offset;
    k.rng = te__data(a->rng);
    return k;
}
static te__attn_kargs te__attn_problem_bwd(const te_op_attn_bwd_args *a) {
    te_op_attn_fwd_args f = te__attn_forward_of(a);
    te__attn_kargs k = te__attn_problem(&f);
    k.d_o = te__attn_view_of(a->d_o, a->format);
    k.dq = te__attn_view_of(a->dq, a->format);
    k.dk = te__attn_view_of(a->dk, a->format);
    k.dv = te__attn_view_of(a->dv, a->format);
    return k;
}
