/* tape/access.c: views and conversions of tensors, and the functions that read properties of tensors. This file must
 * not depend on modules. */

/* ---- views with history ---- */

typedef struct te__view_state {
    int ndim;
    int64_t shape[TE_MAX_DIMS]; /* of the input */
    int dim, other;
    int64_t start;
} te__view_state;

static te_tensor *te__record_unary(const char *name, te_tensor *x, te_tensor *y, const te__view_state *state,
                                   te_backward_fn backward) {
    te_node_desc node = TE_ZERO;
    if (y) te__tell_read(x->te, x);
    if (!y || !te__wants_grad(x)) return y;
    node.name = name;
    node.inputs = &x;
    node.num_inputs = 1;
    node.outputs = &y;
    node.num_outputs = 1;
    node.state = state;
    node.state_size = sizeof(*state);
    node.backward = backward;
    return te__record_always(x->te, &node, false) == TE_OK ? y : NULL;
}

static te_result te__view_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te__view_state *s = (const te__view_state *)state;
    (void)te, (void)saved, (void)needs;
    dx[0] = te_tensor_view(te_tensor_contiguous(dy[0]), s->ndim, s->shape);
    return dx[0] ? TE_OK : te_error_code(te);
}

TE_API te_tensor *te_tensor_view(te_tensor *x, int ndim, const int64_t *shape) {
    te__view_state state = TE_ZERO;
    te_tensor *y;
    int64_t full[TE_MAX_DIMS], n = 1, nonzero = 1; /* n: the product of all sizes; nonzero: the product of the sizes
                                                    * that are not 0, for the overflow check */
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i, open = -1;
    bool fits = true;
    if (!x) return NULL;
    if (te__need_memory(x, "te_tensor_view") != TE_OK) return NULL;
    if (ndim < 0 || ndim > TE_MAX_DIMS || (ndim && !shape) || !x->buffer || !te__is_contiguous(x)) {
        te__fail(x->te, TE_ERR_SHAPE, "te_tensor_view: %s",
                 !x->buffer             ? "the tensor is quantized: te_dequantize it, or see te_quantized_view"
                 : te__is_contiguous(x) ? "0 to 8 dimensions with their sizes are needed"
                                        : "the tensor is strided: te_tensor_contiguous it first");
        return NULL;
    }
    for (i = 0; i < ndim && fits; i++) {
        full[i] = shape[i];
        if (shape[i] == -1 && open < 0) {
            open = i;
            continue;
        }
        fits = shape[i] >= 0 && (shape[i] == 0 || nonzero <= TE__MAX_ELEMENTS / shape[i]);
        if (!fits) break;
        n *= shape[i];
        if (shape[i]) nonzero *= shape[i];
    }
    if (fits && open >= 0) {
        fits = n > 0 && te__numel(x) % n == 0;
        full[open] = fits ? te__numel(x) / n : 0;
    } else if (n != te__numel(x)) {
        fits = false;
    }
    if (!fits) {
        te__fail(x->te, TE_ERR_SHAPE, "te_tensor_view: %s cannot be seen as %s: %lld elements", te__shape_text(x, a),
                 te__dims_text(ndim, shape, b), (long long)te__numel(x));
        return NULL;
    }
    if (te__shape_bytes(x->dtype, ndim, full) != te_tensor_bytes(x)) {
        te__fail(x->te, TE_ERR_SHAPE,
                 "te_tensor_view: %s of %s has %llu bytes and %s %llu: its rows begin at whole bytes, so a view keeps "
                 "the last size "
                 "if that is odd, and an even one even",
                 te__shape_text(x, a), te_dtype_name(x->dtype), (unsigned long long)te_tensor_bytes(x),
                 te__dims_text(ndim, full, b), (unsigned long long)te__shape_bytes(x->dtype, ndim, full));
        return NULL;
    }
    y = te__alias(x);
    if (!y) return NULL;
    y->ndim = ndim;
    for (n = 1, i = ndim - 1; i >= 0; i--) {
        y->shape[i] = full[i];
        y->stride[i] = n;
        n *= full[i];
    }
    state.ndim = x->ndim;
    memcpy(state.shape, x->shape, sizeof(state.shape));
    return te__record_unary("view", x, y, &state, te__view_backward);
}

/* Checks that x has plain memory, and that each element has a byte address of its own. Two elements of 4 bits share a
 * byte. */
static bool te__has_addresses(const te_tensor *x, const char *function) {
    if (!x->buffer) return te__no_plain_memory(x, function) == TE_OK;
    if (te_dtype_bits(x->dtype) >= 8) return true;
    te__fail(x->te, TE_ERR_DTYPE, "%s: %s has two elements a byte, which no view can take apart", function,
             te_dtype_name(x->dtype));
    return false;
}

/* The backward function of te_tensor_narrow. dx is dy inside the narrowed range, and zero elsewhere. */
static te_result te__narrow_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    const te__view_state *s = (const te__view_state *)state;
    te_tensor *whole = te_tensor_zeros(te, dy[0]->dtype, s->ndim, s->shape);
    te_tensor *part = te_tensor_narrow(whole, s->dim, s->start, dy[0]->shape[s->dim]);
    (void)saved, (void)needs;
    dx[0] = whole;
    return te_tensor_copy(part, dy[0]);
}

TE_API te_tensor *te_tensor_narrow(te_tensor *x, int dim, int64_t start, int64_t length) {
    te__view_state state = TE_ZERO;
    te_tensor *y;
    char a[TE__SHAPE_TEXT];
    if (!x) return NULL;
    if (!te__has_addresses(x, "te_tensor_narrow")) return NULL;
    if (dim < 0) dim += x->ndim;
    if (dim < 0 || dim >= x->ndim || start < 0 || length < 0 || start > x->shape[dim] - length) {
        te__fail(x->te, TE_ERR_SHAPE, "te_tensor_narrow: %lld elements from %lld on of dimension %d do not exist in %s",
                 (long long)length, (long long)start, dim, te__shape_text(x, a));
        return NULL;
    }
    y = te__alias(x);
    if (!y) return NULL;
    y->shape[dim] = length;
    y->offset += start * x->stride[dim] * te__dtype_size(x->dtype);
    state.ndim = x->ndim;
    memcpy(state.shape, x->shape, sizeof(state.shape));
    state.dim = dim;
    state.start = start;
    return te__record_unary("narrow", x, y, &state, te__narrow_backward);
}

static te_result te__swap_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te__view_state *s = (const te__view_state *)state;
    (void)saved, (void)needs;
    dx[0] = te_tensor_contiguous(te_tensor_transpose(dy[0], s->dim, s->other));
    return dx[0] ? TE_OK : te_error_code(te);
}

TE_API te_tensor *te_tensor_transpose(te_tensor *x, int a, int b) {
    te__view_state state = TE_ZERO;
    te_tensor *y;
    char text[TE__SHAPE_TEXT];
    if (!x) return NULL;
    if (!te__has_addresses(x, "te_tensor_transpose")) return NULL;
    if (a < 0) a += x->ndim;
    if (b < 0) b += x->ndim;
    if (a < 0 || b < 0 || a >= x->ndim || b >= x->ndim) {
        te__fail(x->te, TE_ERR_SHAPE, "te_tensor_transpose: dimensions %d and %d do not both exist in %s", a, b,
                 te__shape_text(x, text));
        return NULL;
    }
    y = te__alias(x);
    if (!y) return NULL;
    y->shape[a] = x->shape[b];
    y->shape[b] = x->shape[a];
    y->stride[a] = x->stride[b];
    y->stride[b] = x->stride[a];
    state.dim = a;
    state.other = b;
    return te__record_unary("transpose", x, y, &state, te__swap_backward);
}

static te_result te__cast_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te__view_state *s = (const te__view_state *)state;
    (void)te, (void)saved, (void)needs;
    dx[0] = te_tensor_cast(dy[0], (te_dtype)s->dim);
    return dx[0] ? TE_OK : te_error_code(te);
}

/* Returns a contiguous copy of x in `dtype`, with history. */
static te_tensor *te__converted(te_tensor *x, te_dtype dtype, const char *name) {
    te__view_state state = TE_ZERO;
    te_tensor *y;
    if (!x->buffer) {
        te__no_plain_memory(x, name);
        return NULL;
    }
    y = te__empty_like(x, dtype);
    if (!y) return NULL;
    if (te_tensor_copy(y, x) != TE_OK) return te__checked(y, TE_ERR_STATE);
    state.dim = (int)x->dtype;
    return te__record_unary(name, x, y, &state, te__cast_backward);
}
TE_API te_tensor *te_tensor_contiguous(te_tensor *x) {
    if (!x || (x->buffer && te__is_contiguous(x))) return x;
    return te__converted(x, x->dtype, "contiguous");
}
TE_API te_tensor *te_tensor_cast(te_tensor *x, te_dtype dtype) {
    if (!x || x->dtype == dtype) return x;
    if (!te__is_float(x->dtype) || !te__is_float(dtype)) {
        te__fail(x->te, TE_ERR_DTYPE,
                 "te_tensor_cast: %s to %s; f32, f16 and bf16 are possible (te_quantize makes FP8)",
                 te_dtype_name(x->dtype), te_dtype_name(dtype));
        return NULL;
    }
    return te__converted(x, dtype, "cast");
}
TE_API te_tensor *te_tensor_detach(te_tensor *x) {
    return x ? te__alias_any(x) : NULL;
}

/* ---- properties ---- */

TE_API te_ctx *te_tensor_ctx(const te_tensor *x) { return x ? x->te : NULL; }
TE_API te_dtype te_tensor_dtype(const te_tensor *x) { return x ? x->dtype : TE_DTYPE_NONE; }
TE_API int te_tensor_ndim(const te_tensor *x) { return x ? x->ndim : 0; }
TE_API const int64_t *te_tensor_shape(const te_tensor *x) { return x ? x->shape : NULL; }
TE_API const int64_t *te_tensor_strides(const te_tensor *x) { return x ? x->stride : NULL; }
TE_API int64_t te_tensor_numel(const te_tensor *x) { return x ? te__numel(x) : 0; }
TE_API bool te_tensor_is_contiguous(const te_tensor *x) { return x && te__is_contiguous(x); }
TE_API bool te_tensor_is_quantized(const te_tensor *x) { return x && x->form; }
TE_API void *te_tensor_data(const te_tensor *x) { return te__data(x); }
TE_API void te_tensor_touch(te_tensor *x) { te__touch(x); }
TE_API uint64_t te_tensor_version(const te_tensor *x) { return x && x->buffer ? te__buffer_version(x->buffer) : 0; }
TE_API te_tensor *te_tensor_set_name(te_tensor *x, const char *name) {
    if (!x) return NULL;
    te__free(x->te, x->name);
    x->name = name ? te__copy_string(x->te, name) : NULL;
    return x;
}
TE_API const char *te_tensor_name(const te_tensor *x) { return x && x->name ? x->name : ""; }
TE_API void te_tensor_set_sharded(te_tensor *x, bool sharded) {
    if (x) x->sharded = sharded;
}
TE_API bool te_tensor_is_sharded(const te_tensor *x) { return x && x->sharded; }
