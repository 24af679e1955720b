/* model/lm_head.c: the logits of a language model, of all positions or some. Knows tensors and one module, which computes them. */

static const char te__param_dtype_key[] = "fsdp_param_dtype";

TE_API te_result te_module_set_param_dtype(te_module *m, te_dtype dtype) {
    if (!m) return TE_ERR_STATE;
    if (!dtype) {
        te_module_remove_attribute(m, te__param_dtype_key);
        return TE_OK;
    }
    if (te__want_floating(m->te, dtype, "te_module_set_param_dtype", "dtype") != TE_OK) return TE_ERR_DTYPE;
    return te_module_set_attribute(m, te__param_dtype_key, (void *)(uintptr_t)dtype, NULL);
}
TE_API te_dtype te_module_param_dtype(const te_module *m) {
    void *value;
    te_module_attribute(m, te__param_dtype_key, &value);
    return (uintptr_t)value < (uintptr_t)TE_DTYPE_COUNT ? (te_dtype)(uintptr_t)value : TE_DTYPE_NONE;
}

/* The rows of x [b, s, h] at these positions of s. */
static te_tensor *te__take_positions(te_tensor *x, te_tensor *positions) {
    const int64_t b = x->shape[0], s = x->shape[1], h = x->shape[2], n = te__numel(positions);
    int64_t shape[3];
    te_tensor *rows;
    shape[0] = s;
    shape[1] = b * h;
    rows = te_tensor_contiguous(b == 1 ? x : te_tensor_transpose(x, 0, 1));
    rows = te_embedding_lookup(te_tensor_view(rows, 2, shape), positions); /* [n, b * h] */
    if (b == 1) {
        shape[0] = 1;
        shape[1] = n;
        shape[2] = h;
        return te_tensor_view(rows, 3, shape);
    }
    shape[0] = n;
    shape[1] = b;
    shape[2] = h;
    return te_tensor_contiguous(te_tensor_transpose(te_tensor_view(rows, 3, shape), 0, 1));
}
static te_tensor *te__keep_positions(te_tensor *x, const te_lm_head_options *o) {
    const int axis = x->ndim == 2 ? 0 : 1;
    const int64_t size = x->shape[axis], n = o->logits_to_keep;
    if (o->positions) return axis == 0 ? te_embedding_lookup(te_tensor_contiguous(x), o->positions) : te__take_positions(x, o->positions);
    if (n == 0 || n >= size) return x; /* no view at all: one of a whole sharded tensor is more than its shard knows */
    if (n > 0) return te_tensor_narrow(x, axis, size - n, n);
    return n <= -size ? te_tensor_narrow(x, axis, size, 0) : te_tensor_narrow(x, axis, -n, size + n);
}
static te_result te__lm_head_ok(te_module *head, const te_tensor *hidden, const te_lm_head_options *o) {
    static const char who[] = "te_compute_lm_head_logits";
    char text[TE__SHAPE_TEXT];
    te_ctx *te = hidden->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (!head) return TE_OK;
    if (head->te != te) return te__fail(te, TE_ERR_INVALID, "%s: hidden is of another context (%s) than the head (%s)", who, te->device_name, head->te->device_name);
    if (hidden->ndim < 2 || hidden->ndim > 3 || !te__is_floating(hidden))
        return te__fail(te, hidden->ndim < 2 || hidden->ndim > 3 ? TE_ERR_SHAPE : TE_ERR_DTYPE, "%s: hidden is %s %s; [batch, positions, size] or [tokens, size] in f32, f16 or bf16 is needed", who,
                        te_dtype_name(hidden->dtype), te__shape_text(hidden, text));
    if (o->logits_to_keep < 0 && !o->negative_skips)
        return te__fail(te, TE_ERR_INVALID, "%s: logits_to_keep is %lld; a number of last positions, or 0 for all, is needed (negative_skips: all but the first %llu)", who,
                        (long long)o->logits_to_keep, 0ULL - (unsigned long long)o->logits_to_keep);
    if (o->positions && (o->logits_to_keep || o->positions->ndim != 1 || !te__is_index(o->positions->dtype)))
        return te__fail(te, TE_ERR_INVALID, "%s: positions are %s %s beside logits_to_keep %lld; i32 or i64 of one dimension, and logits_to_keep 0, are needed", who,
                        te_dtype_name(o->positions->dtype), te__shape_text(o->positions, text), (long long)o->logits_to_keep);
    return TE_OK;
}
static te_tensor *te__as_batch(te_tensor *x) {
    int64_t shape[3];
    if (!x || x->ndim != 2) return x;
    shape[0] = 1;
    shape[1] = x->shape[0];
    shape[2] = x->shape[1];
    return te_tensor_view(x, 3, shape);
}

TE_API te_lm_head_result te_compute_lm_head_logits(te_module *lm_head, te_tensor *hidden, const te_lm_head_options *options) {
    te_lm_head_options o = TE_ZERO;
    te_lm_head_result out = TE_ZERO;
    te_tensor *x, *keep[2];
    te_dtype dtype;
    if (!hidden) {
        if (lm_head) te__fail(lm_head->te, TE_ERR_INVALID, "te_compute_lm_head_logits: hidden is NULL");
        return out;
    }
    if (options) o = *options;
    if (te__lm_head_ok(lm_head, hidden, &o) != TE_OK) return out;
    te__frame_begin(hidden->te);
    x = hidden;
    if (lm_head) {
        const te_tensor *weight = te_module_parameter(lm_head, "weight");
        dtype = o.fp32_lm_head ? TE_F32 : te_module_param_dtype(lm_head) ? te_module_param_dtype(lm_head) : weight && te__is_floating(weight) ? weight->dtype : hidden->dtype;
        x = te__keep_positions(x, &o);
        x = te_forward(lm_head, te_tensor_cast(x, dtype));
        if (o.fp32_lm_head) x = te_tensor_cast(x, hidden->dtype);
    }
    keep[0] = o.is_thd ? te__as_batch(x) : x;
    keep[1] = !o.output_hidden_states ? NULL : o.is_thd ? te__as_batch(hidden) : hidden;
    if (keep[0] && (keep[1] || !o.output_hidden_states)) {
        out.logits = keep[0];
        out.hidden_states = keep[1];
    }
    te__frame_end(hidden->te, keep, 2);
    return out;
}
