/* model/lm_head.c: te_compute_lm_head_logits. Its lm_head module may compute in another dtype than that of its
 * parameters. */

/* ---- the compute dtype of a module ---- */

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
    const uintptr_t value = (uintptr_t)te__attribute_of(m, te__param_dtype_key);
    return value < (uintptr_t)TE_DTYPE_COUNT ? (te_dtype)value : TE_DTYPE_NONE;
}

/* A parameter, and the cast tensor that replaces it during one forward pass. */
typedef struct te__stand_in {
    te_tensor *x; /* retained */
    te_tensor *cast; /* retained */
} te__stand_in;
typedef struct te__param_cast {
    te_module *m;
    te_dtype dtype;
    te__stand_in *item;
    int num, cap;
} te__param_cast;

/* Casts x to `dtype`, recorded on the tape. For a quantized x only the nominal dtype changes; its codes stay. */
static te_tensor *te__cast_param(te_tensor *x, te_dtype dtype) {
    te_tensor *y;
    te__view_state from = TE_ZERO;
    if (!x->quantized) return te_tensor_cast(x, dtype);
    y = te__alias_any(x);
    if (!y) return NULL;
    y->dtype = dtype;
    from.dim = (int)x->dtype;
    return te__record_unary("cast", x, y, &from, te__cast_backward);
}
/* Replaces the floating parameters of m, and of the modules below m, by casts. */
static te_result te__param_cast_begin(te__param_cast *c, te_module *m) {
    int i, k;
    for (i = 0; i < m->num_entries; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (m->entries[i].kind != TE_ENTRY_PARAMETER || !te__is_floating(x) || x->dtype == c->dtype ||
            (!x->buffer && !x->quantized))
            continue;
        for (k = 0; k < c->num && c->item[k].x != x; k++) {}
        if (k == c->num) {
            te_tensor *y = te__cast_param(x, c->dtype);
            if (!y || !te__grow(m->te, (void **)&c->item, &c->cap, c->num, sizeof(te__stand_in)))
                return te_error_code(m->te);
            c->item[c->num].x = te_tensor_retain(x);
            c->item[c->num++].cast = te_tensor_retain(y);
        }
        m->entries[i].tensor = te_tensor_retain(c->item[k].cast);
        te_tensor_release(x);
    }
    for (i = 0; i < m->num_children; i++)
        if (te__param_cast_begin(c, m->children[i]) != TE_OK) return te_error_code(m->te);
    return TE_OK;
}
static void te__param_cast_back(te__param_cast *c, te_module *m) {
    int i, k;
    for (i = 0; i < m->num_entries; i++) {
        for (k = 0; k < c->num && c->item[k].cast != m->entries[i].tensor; k++) {}
        if (k == c->num) continue;
        m->entries[i].tensor = te_tensor_retain(c->item[k].x);
        te_tensor_release(c->item[k].cast);
    }
    for (i = 0; i < m->num_children; i++) te__param_cast_back(c, m->children[i]);
}
static te_tensor *te__forward_cast(te_module *m, te_tensor *x, te_dtype dtype) {
    te__param_cast c = TE_ZERO;
    const bool checkpoint = m->checkpoint;
    te_tensor *y = NULL;
    int i;
    c.m = m;
    c.dtype = dtype;
    te__frame_begin(m->te);
    if (te__param_cast_begin(&c, m) == TE_OK) {
        m->checkpoint = false; /* te__forward_in checkpoints this whole function, so that the recomputation casts too */
        y = te_forward(m, x);
        m->checkpoint = checkpoint;
    }
    te__param_cast_back(&c, m);
    for (i = 0; i < c.num; i++) {
        te_tensor_release(c.item[i].x);
        te_tensor_release(c.item[i].cast);
    }
    te__free(m->te, c.item);
    return te__frame_return(m->te, y);
}

typedef struct te__forward_cast_call {
    te_module *m;
    te_dtype dtype;
} te__forward_cast_call;
static te_result te__forward_cast_again(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                        te_tensor **outputs, int num_outputs) {
    const te__forward_cast_call *c = (const te__forward_cast_call *)user;
    (void)num_inputs, (void)num_outputs;
    outputs[0] = te__forward_cast(c->m, inputs[0], c->dtype);
    return te_error_code(te);
}
/* Returns m(x), computed with the floating parameters cast to `dtype`, as in FSDP's mixed precision. The gradient of
 * each parameter has the parameter's own dtype. */
static te_tensor *te__forward_in(te_module *m, te_tensor *x, te_dtype dtype) {
    te__forward_cast_call call = TE_ZERO;
    te_checkpoint_desc d = TE_ZERO;
    te_tensor *y = NULL;
    const int one = 1;
    if (!x || te__runs_graphs(m)) return te_forward(m, x); /* graphs replay with the parameters of their capture */
    if (!m->checkpoint || !te_grad_enabled(m->te)) return te__forward_cast(m, x, dtype);
    call.m = m;
    call.dtype = dtype;
    d.fn = te__forward_cast_again;
    d.user = &call;
    d.user_size = sizeof(call);
    d.inputs = &x;
    d.outputs = &y;
    d.num_inputs = d.num_outputs = 1;
    return te__checkpoint_run(m->te, &d, m, &one) == TE_OK ? y : NULL;
}

/* ---- logits ---- */

/* Gathers the rows of x [n, size] at `positions`. */
static te_tensor *te__take_rows(te_tensor *x, te_tensor *positions) {
    return te__embedding(x, positions, 0, 0, true, "te_compute_lm_head_logits");
}
/* Gathers x [b, s, h] at `positions` of s: returns [b, number of positions, h]. */
static te_tensor *te__take_positions(te_tensor *x, te_tensor *positions) {
    const int64_t b = x->shape[0], s = x->shape[1], h = x->shape[2], n = te__numel(positions);
    const int64_t one[3] = {1, n, h}, shape[3] = {n, b, h};
    te_tensor *rows = te_tensor_contiguous(b == 1 ? x : te_tensor_transpose(x, 0, 1));
    rows = te__take_rows(te__view_2d(rows, s, b * h), positions); /* [n, b * h] */
    if (b == 1) return te_tensor_view(rows, 3, one);
    return te_tensor_contiguous(te_tensor_transpose(te_tensor_view(rows, 3, shape), 0, 1));
}
static te_tensor *te__keep_positions(te_tensor *x, const te_lm_head_options *o) {
    const int axis = x->ndim == 2 ? 0 : 1;
    const int64_t size = x->shape[axis], n = o->logits_to_keep;
    if (o->positions)
        return axis == 0 ? te__take_rows(te_tensor_contiguous(x), o->positions) : te__take_positions(x, o->positions);
    if (n == 0 || n >= size) return x; /* x itself, not a view: a sharded tensor must stay one */
    if (n > 0) return te_tensor_narrow(x, axis, size - n, n);
    return n <= -size ? te_tensor_narrow(x, axis, size, 0) : te_tensor_narrow(x, axis, -n, size + n);
}
/* Checks the positions on a CPU context. On a CUDA context, kernels report positions out of range (core/outside.c). */
static te_result te__positions_ok(te_tensor *positions, int64_t size) {
    te_ctx *te = positions->te;
    int64_t i, n = te__numel(positions);
    te_result result = TE_OK;
    if (te_ctx_is_cuda(te) || !positions->buffer) return TE_OK;
    te__frame_begin(te);
    positions = te_tensor_contiguous(positions);
    if (!positions) result = te_error_code(te);
    for (i = 0; i < n && result == TE_OK; i++) {
        const int64_t at = te__load_index(te__data(positions), positions->dtype, i);
        if (at < -size || at >= size)
            result = te__fail(te, TE_ERR_INVALID,
                              "te_compute_lm_head_logits: positions[%lld] is %lld, and hidden has %lld: 0 to %lld are "
                              "possible, or %lld to -1, from the end",
                              (long long)i, (long long)at, (long long)size, (long long)size - 1, -(long long)size);
    }
    te__frame_end(te, NULL, 0);
    return result;
}
static te_result te__lm_head_ok(te_module *head, const te_tensor *hidden, const te_lm_head_options *o) {
    static const char who[] = "te_compute_lm_head_logits";
    char text[TE__SHAPE_TEXT];
    te_ctx *te = hidden->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (!head) return TE_OK;
    if (head->te != te)
        return te__fail(te, TE_ERR_INVALID, "%s: hidden is of another context (%s) than the head (%s)", who,
                        te->device_name, head->te->device_name);
    if (hidden->ndim < 2 || hidden->ndim > 3 || !te__is_floating(hidden))
        return te__fail(te, hidden->ndim < 2 || hidden->ndim > 3 ? TE_ERR_SHAPE : TE_ERR_DTYPE,
                        "%s: hidden is %s %s; [batch, positions, size] or [tokens, size] in f32, f16 or bf16 is needed",
                        who, te_dtype_name(hidden->dtype), te__shape_text(hidden, text));
    if (o->logits_to_keep < 0 && !o->negative_skips)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: logits_to_keep is %lld; a number of last positions, or 0 for all, is needed "
                        "(negative_skips: all but the first %llu)",
                        who, (long long)o->logits_to_keep, 0ULL - (unsigned long long)o->logits_to_keep);
    if (o->positions && (o->logits_to_keep || o->positions->ndim != 1 || !te__is_index(o->positions->dtype)))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: positions are %s %s beside logits_to_keep %lld; i32 or i64 of one dimension, and "
                        "logits_to_keep 0, are needed",
                        who, te_dtype_name(o->positions->dtype), te__shape_text(o->positions, text),
                        (long long)o->logits_to_keep);
    return o->positions ? te__positions_ok(o->positions, hidden->shape[hidden->ndim - 2]) : TE_OK;
}
static te_tensor *te__as_batch(te_tensor *x) {
    if (!x || x->ndim != 2) return x;
    const int64_t shape[3] = {1, x->shape[0], x->shape[1]};
    return te_tensor_view(x, 3, shape);
}

TE_API te_lm_head_result te_compute_lm_head_logits(te_module *lm_head, te_tensor *hidden,
                                                   const te_lm_head_options *options) {
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
        const te_dtype computes = o.fp32_lm_head ? TE_DTYPE_NONE : te_module_param_dtype(lm_head);
        dtype = o.fp32_lm_head                      ? TE_F32
                : computes                          ? computes
                : weight && te__is_floating(weight) ? weight->dtype
                                                    : hidden->dtype;
        x = te_tensor_cast(te__keep_positions(x, &o), dtype);
        x = computes ? te__forward_in(lm_head, x, computes) : te_forward(lm_head, x);
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
