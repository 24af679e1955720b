/* functions/sparse_attention.c: differentiable attention in which each query has a list of keys. Also makes the lists
 * for windows and compressed keys. This file must not depend on modules. */

static te_result te__sparse_attention_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                               te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_op_sparse_attn_bwd_args a = TE_ZERO;
    a.q = saved[0];
    a.kv = saved[1];
    a.indices = saved[2];
    a.sinks = saved[3];
    a.o = saved[4];
    a.lse = saved[5];
    a.d_o = te_tensor_contiguous(dy[0]);
    a.softmax_scale = *(const float *)state;
    a.dq = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    a.dkv = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    if (needs[2]) a.dsinks = dx[2] = te__empty_like(saved[3], TE_F32);
    return a.d_o && dx[0] && dx[1] && (!needs[2] || dx[2]) ? te_op_sparse_attn_bwd(te, &a) : te_error_code(te);
}

TE_API te_tensor *te_sparse_attention(te_tensor *q, te_tensor *kv, te_tensor *indices,
                                      const te_sparse_attention_desc *desc) {
    static const char who[] = "te_sparse_attention";
    te_op_sparse_attn_fwd_args a = TE_ZERO;
    te_tensor *o = NULL;
    int64_t shape[4];
    char t[TE__SHAPE_TEXT];
    te_ctx *te;
    if (!q || !te__operand(q, kv, false, who) || !te__operand(q, indices, false, who) || !te__need_float(q, who))
        return NULL;
    te = q->te;
    if (q->ndim != 4 || (desc && desc->v_dim < 0))
        return te__no_tensor(
            te, TE_ERR_SHAPE,
            "te_sparse_attention: q is %s and v_dim %lld; [b, s_q, H, d] and at most d channels of a value are needed",
            te__shape_text(q, t), (long long)(desc ? desc->v_dim : 0));
    memcpy(shape, q->shape, sizeof(shape));
    if (desc && desc->v_dim) shape[3] = desc->v_dim;
    int64_t lse[3] = {q->shape[0], q->shape[2], q->shape[1]};
    te__frame_begin(te);
    a.q = q;
    a.kv = kv;
    a.indices = te_tensor_contiguous(indices);
    a.sinks = desc ? desc->sinks : NULL;
    a.softmax_scale = desc ? desc->softmax_scale : 0.0f;
    a.o = te_tensor_empty(te, q->dtype, 4, shape);
    a.lse = te_tensor_empty(te, TE_F32, 3, lse);
    te_tensor *sinks = (te_tensor *)a.sinks, *in[3] = {q, kv, sinks},
              *saved[6] = {q, kv, (te_tensor *)a.indices, sinks, a.o, a.lse};
    if (a.indices && a.o && a.lse && te_op_sparse_attn_fwd(te, &a) == TE_OK)
        o = te__record("sparse_attention", a.o, te__sparse_attention_backward, &a.softmax_scale,
                       sizeof(a.softmax_scale), in, 3, saved, 6);
    return te__frame_return(te, o);
}

TE_API te_tensor *te_sparse_window_indices(te_ctx *te, const te_sparse_window_desc *d) {
    te_tensor *out = NULL;
    int64_t first, in_window, row, i, k;
    int32_t *list;
    size_t bytes;
    if (!te || !te__has_desc(te, d, "te_sparse_window_indices")) return NULL;
    first = d->first_compressed ? d->first_compressed : d->seq_len;
    if (d->batch < 0 || d->seq_len < 0 || d->seq_len > INT_MAX || d->window < 0 || d->num_compressed < 0 || first < 0 ||
        d->num_compressed > INT_MAX - te__min(first, INT_MAX) || (d->num_compressed && d->ratio < 1))
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "te_sparse_window_indices: batch %lld, seq_len %lld, window %lld, num_compressed %lld from row %lld "
            "on, ratio %lld; none may be negative, rows are below 2^31, and "
            "compressed keys need a ratio from 1 on",
            (long long)d->batch, (long long)d->seq_len, (long long)d->window, (long long)d->num_compressed,
            (long long)first, (long long)d->ratio);
    in_window = te__min(d->window, te__max(d->seq_len, 1) - 1) + 1;
    int64_t shape[3] = {d->batch, d->seq_len, in_window + d->num_compressed};
    if (d->batch && d->seq_len && shape[2] > INT_MAX / d->batch / d->seq_len)
        return te__no_tensor(
            te, TE_ERR_UNSUPPORTED,
            "te_sparse_window_indices: a list of %lld keys for each of %lld queries in %lld sequences; at most "
            "2^31 - 1 slots are possible",
            (long long)shape[2], (long long)d->seq_len, (long long)d->batch);
    bytes = (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(int32_t) + 1;
    list = (int32_t *)te__alloc(te, bytes);
    if (!list) return NULL;
    for (row = 0; row < shape[0] * shape[1]; row++) {
        int32_t *at = list + row * shape[2];
        i = row % shape[1];
        for (k = 0; k < in_window; k++) at[k] = (int32_t)te__max(-1, i - in_window + 1 + k);
        for (k = 0; k < d->num_compressed; k++) at[in_window + k] = k < (i + 1) / d->ratio ? (int32_t)(first + k) : -1;
    }
    out = te_tensor_from_host(te, TE_I32, 3, shape, list);
    te__free(te, list);
    return out;
}
