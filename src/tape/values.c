/* tape/values.c: fills tensors, and copies between tensors and host memory. This file must not depend on the tape. */

/* ---- filling ---- */

TE_API te_result te_tensor_fill(te_tensor *x, double value) {
    te_op_fill_args args = TE_ZERO;
    if (!x) return TE_ERR_STATE;
    args.dst = x;
    args.value = value;
    return te_op_fill(x->te, &args);
}

/* Returns x if `result`, the result of the call that filled x, is TE_OK. Otherwise drops x and returns NULL. */
static te_tensor *te__checked(te_tensor *x, te_result result) {
    if (result == TE_OK) return x;
    te__drop(x);
    return NULL;
}

TE_API te_tensor *te_tensor_full(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, double value) {
    te_tensor *x = te_tensor_empty(te, dtype, ndim, shape);
    return x ? te__checked(x, te_tensor_fill(x, value)) : NULL;
}
TE_API te_tensor *te_tensor_zeros(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *x = te_tensor_empty(te, dtype, ndim, shape);
    return x ? te__checked(x, te->device->clear(te, te__data(x), x->buffer->bytes)) : NULL;
}

static te_tensor *te__random_tensor(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, te_random_kind kind,
                                    float a, float b) {
    te_op_random_args args = TE_ZERO;
    te_tensor *x = te_tensor_empty(te, dtype, ndim, shape);
    te__rng_state before;
    te__draw draw;
    if (!x) return NULL;
    before = te__rng_now(te);
    args.dst = x;
    args.kind = kind;
    args.a = a;
    args.b = b;
    draw = te__rng_draw(te, 1);
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    x = te__checked(x, te_op_random(te, &args));
    if (!x) te__rng_back(te, before);
    return x;
}
TE_API te_tensor *te_tensor_uniform(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float low, float high) {
    return te__random_tensor(te, dtype, ndim, shape, TE_RANDOM_UNIFORM, low, high);
}
TE_API te_tensor *te_tensor_normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float mean, float std) {
    return te__random_tensor(te, dtype, ndim, shape, TE_RANDOM_NORMAL, mean, std);
}

/* ---- host memory ---- */

static te_result te__need_host(const te_tensor *x, const void *host, const char *what) {
    if (host || te__numel(x) == 0) return TE_OK;
    return te__fail(x->te, TE_ERR_INVALID, "%s: host is NULL", what);
}

TE_API te_result te_tensor_copy_from_host(te_tensor *x, const void *host) {
    if (!x) return TE_ERR_STATE;
    if (!x->buffer) return te__no_plain_memory(x, "te_tensor_copy_from_host");
    if (!te__is_contiguous(x))
        return te__fail(x->te, TE_ERR_INVALID,
                        "te_tensor_copy_from_host: the tensor is strided; copy to a contiguous one");
    if (te__need_host(x, host, "te_tensor_copy_from_host") != TE_OK) return TE_ERR_INVALID;
    te__touch(x);
    return x->te->device->upload(x->te, te__data(x), host, te_tensor_bytes(x));
}
TE_API te_tensor *te_tensor_from_host(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const void *host) {
    te_tensor *x = te_tensor_empty(te, dtype, ndim, shape);
    return x ? te__checked(x, te_tensor_copy_from_host(x, host)) : NULL;
}
TE_API te_tensor *te_tensor_from_f32(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *host) {
    te_tensor *x = te_tensor_empty(te, dtype, ndim, shape);
    te_result result;
    void *bytes;
    size_t size;
    if (!x) return NULL;
    if (te_dtype_bits(dtype) < 8) {
        te__fail(te, TE_ERR_DTYPE, "te_tensor_from_f32: %s cannot be made from f32", te_dtype_name(dtype));
        return te__checked(x, TE_ERR_DTYPE);
    }
    if (te__need_host(x, host, "te_tensor_from_f32") != TE_OK) return te__checked(x, TE_ERR_INVALID);
    size = te_tensor_bytes(x);
    bytes = te__alloc(te, size);
    if (!bytes) return te__checked(x, TE_ERR_OUT_OF_MEMORY);
    te__store_row(bytes, dtype, 0, te__numel(x), host);
    result = te_tensor_copy_from_host(x, bytes);
    te__free(te, bytes);
    return te__checked(x, result);
}

TE_API te_result te_tensor_copy(te_tensor *dst, const te_tensor *src) {
    te_op_copy_args args = TE_ZERO;
    if (!dst || !src) return TE_ERR_STATE;
    args.src = src;
    args.dst = dst;
    return te_op_copy(dst->te, &args);
}

TE_API te_result te_tensor_to_host(const te_tensor *x, void *host) {
    te_result result;
    te_tensor *flat;
    if (!x) return TE_ERR_STATE;
    if (!x->buffer) return te__no_plain_memory(x, "te_tensor_to_host");
    if (te__need_host(x, host, "te_tensor_to_host") != TE_OK) return TE_ERR_INVALID;
    if (te__is_contiguous(x)) return x->te->device->download(x->te, host, te__data(x), te_tensor_bytes(x));
    te__frame_begin(x->te);
    flat = te__empty_like(x, x->dtype);
    result = flat ? te_tensor_copy(flat, x) : te_error_code(x->te);
    if (result == TE_OK) result = x->te->device->download(x->te, host, te__data(flat), te_tensor_bytes(flat));
    te__frame_end(x->te, NULL, 0);
    return result;
}

TE_API te_result te_tensor_to_f32(const te_tensor *x, float *host) {
    te_ctx *te;
    te_result result;
    const te_tensor *plain = x;
    void *bytes;
    size_t size;
    if (!x) return TE_ERR_STATE;
    te = x->te;
    if (te__need_host(x, host, "te_tensor_to_f32") != TE_OK) return TE_ERR_INVALID;
    te__frame_begin(te);
    te->tape.no_grad++;
    if (x->form) plain = x->form->decode(te__alias_any(x), TE_F32);
    te->tape.no_grad--;
    size = plain ? te_tensor_bytes(plain) : 0;
    bytes = plain ? te__alloc(te, size) : NULL;
    result = bytes ? te_tensor_to_host(plain, bytes) : te_error_code(te);
    if (result == TE_OK && te_dtype_bits(plain->dtype) < 8) { /* 4-bit elements: each row begins at a whole byte */
        int64_t rows = te__rows(plain), cols = te__cols(plain), i;
        for (i = 0; i < rows; i++)
            te__load_row((const char *)bytes + (size_t)i * te__row_bytes(plain->dtype, cols), plain->dtype, 0, cols,
                         host + i * cols);
    } else if (result == TE_OK)
        te__load_row(bytes, plain->dtype, 0, te__numel(plain), host);
    te__free(te, bytes);
    te__frame_end(te, NULL, 0);
    return result;
}

TE_API double te_tensor_item(const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    unsigned char raw[8];
    if (!x) return (double)NAN;
    if (te__numel(x) != 1 || x->form) {
        te__fail(x->te, TE_ERR_SHAPE, "te_tensor_item: the tensor is %s; exactly one plain element is needed",
                 te__shape_text(x, text));
        return (double)NAN;
    }
    if (te_tensor_to_host(x, raw) != TE_OK) return (double)NAN;
    if (te__is_index(x->dtype) || x->dtype == TE_I16) return (double)te__load_index(raw, x->dtype, 0);
    return (double)te__load_element(raw, x->dtype, 0);
}
