/* model/eager.c: the attention backend "eager": GEMM, softmax and GEMM, with the scores in memory. This file must not
 * depend on modules.
 *
 * q is [b, H, s_q, d], k [b, G, s_kv, d], v [b, G, s_kv, d_v], all contiguous. The H / G query heads of one k/v head
 * are adjacent. So each product is one grouped GEMM with b G groups of (H / G) s_q rows. */

/* Computes d = a b for each group. The groups split dimension k of the product if `along_k` is true, otherwise
 * dimension m. */
static te_result te__eager_product(te_tensor *sizes, te_tensor *a, te_tensor *b, bool b_transposed, te_tensor *d,
                                   bool along_k) {
    te_op_grouped_gemm_args g = TE_ZERO;
    g.a = a;
    g.b = b;
    g.d = d;
    g.sizes = sizes;
    g.groups = te__numel(sizes);
    g.along_k = along_k;
    g.a_transposed = along_k;
    g.b_transposed = b_transposed;
    g.m = along_k ? te__cols(a) : te__rows(a);
    g.n = te__cols(d);
    g.k = along_k ? te__rows(a) : te__cols(a);
    return te_op_grouped_gemm(d->te, &g);
}
/* Returns the group sizes, i32 [b G], each (H / G) s_q. */
static te_tensor *te__eager_sizes(const te_tensor *q, const te_tensor *k) {
    const int64_t groups = k->shape[0] * k->shape[1];
    return te_tensor_full(q->te, TE_I32, 1, &groups,
                          groups ? (double)(q->shape[0] * q->shape[1] * q->shape[2] / groups) : 0.0);
}
static te_tensor *te__eager_scores(const te_tensor *q, const te_tensor *k, te_dtype dtype) {
    const int64_t shape[4] = {q->shape[0], q->shape[1], q->shape[2], k->shape[2]};
    return te_tensor_empty(q->te, dtype, 4, shape);
}

static te_result te__eager_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                    te_tensor **dx, const bool *needs) {
    te_tensor *q = saved[0], *k = saved[1], *v = saved[2], *p = saved[3], *d_o = te_tensor_contiguous(dy[0]),
              *sizes = te__eager_sizes(q, k);
    te_tensor *dp = te__eager_scores(q, k, TE_F32), *ds = te__eager_scores(q, k, q->dtype);
    te_op_softmax_bwd_args back = TE_ZERO;
    te_result r;
    (void)needs;
    dx[0] = te__empty_like(q, q->dtype);
    dx[1] = te__empty_like(k, k->dtype);
    dx[2] = te__empty_like(v, v->dtype);
    if (!d_o || !sizes || !dp || !ds || !dx[0] || !dx[1] || !dx[2]) return te_error_code(te);
    r = te__eager_product(sizes, d_o, v, true, dp, false);
    back.y = p;
    back.dy = dp;
    back.dx = ds;
    back.scale = *(const float *)state;
    if (r == TE_OK) r = te_op_softmax_bwd(te, &back);
    if (r == TE_OK) r = te__eager_product(sizes, ds, k, false, dx[0], false);
    if (r == TE_OK) r = te__eager_product(sizes, ds, q, false, dx[1], true);
    return r == TE_OK ? te__eager_product(sizes, p, d_o, false, dx[2], true) : r;
}

/* Broadcasts x into y and casts it to y's dtype. Each size of x is 1 or that of y. */
static te_result te__eager_repeat(te_tensor *x, te_tensor *y) {
    te_tensor *all = te_tensor_detach(x);
    int i;
    if (!all) return te_error_code(y->te);
    for (i = 0; i < y->ndim; i++)
        if (all->shape[i] != y->shape[i]) {
            all->shape[i] = y->shape[i];
            all->stride[i] = 0;
        }
    return te_tensor_copy(y, all);
}
/* Returns `masked` expanded to one row for each query, as the softmax kernel needs it. */
static te_tensor *te__eager_mask(te_tensor *masked, int64_t s_q) {
    int64_t shape[4];
    te_tensor *y;
    if (!masked || masked->shape[2] == s_q) return masked;
    memcpy(shape, masked->shape, sizeof(shape));
    shape[2] = s_q;
    y = te_tensor_empty(masked->te, TE_U8, 4, shape);
    return y && te__eager_repeat(masked, y) == TE_OK ? y : NULL;
}

/* Computes attention with the mask and the bias of the rule x. The mask is causal, or u8 [b or 1, 1, s_q or 1,
 * s_kv]. */
static te_tensor *te__eager_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attn_rule *x) {
    const int64_t shape[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    const float scale = te__attn_scale(x->softmax_scale, q->shape[3]);
    te_tensor *const added = x->core_attention_bias;
    te_tensor *scores, *p, *o, *sizes;
    te_op_softmax_fwd_args a = TE_ZERO;
    te_ctx *te = q->te;
    te_result r;
    te__frame_begin(te);
    q = te_tensor_contiguous(q);
    k = te_tensor_contiguous(k);
    v = te_tensor_contiguous(v);
    if (!q || !k || !v) return te__frame_return(te, NULL);
    sizes = te__eager_sizes(q, k);
    a.x = scores = te__eager_scores(q, k, TE_F32);
    a.y = p = te__eager_scores(q, k, q->dtype);
    a.mask = te__eager_mask(x->attention_mask, q->shape[2]);
    a.scale = added ? 1.0f : scale;
    a.causal = x->mask == TE_MASK_CAUSAL;
    o = te_tensor_empty(te, q->dtype, 4, shape);
    r = sizes && scores && p && o && !x->attention_mask == !a.mask ? TE_OK : te_error_code(te);
    if (r == TE_OK) r = te__eager_product(sizes, q, k, true, scores, false);
    if (r == TE_OK && added) { /* Applies the scale to `scores` here. The softmax kernel would scale `added` too, and
                                * added / scale could be -inf. */
        te_tensor *all = te__eager_scores(q, k, TE_F32);
        r = all ? te__eager_repeat(added, all) : te_error_code(te);
        if (r == TE_OK) r = te__axpby_into(scores, scores, all, scale, 1.0f);
    }
    if (r == TE_OK) r = te_op_softmax_fwd(te, &a);
    if (r == TE_OK) r = te__eager_product(sizes, p, v, false, o, false);
    te_tensor *in[3] = {q, k, v}, *saved[4] = {q, k, v, p};
    return te__frame_return(
        te, r == TE_OK ? te__record("eager_attention", o, te__eager_backward, &scale, sizeof(scale), in, 3, saved, 4)
                       : NULL);
}
