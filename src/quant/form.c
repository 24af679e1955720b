/* quant/form.c: decodes, shares and releases quantized tensors. This file must not depend on how the copies of a
 * quantized tensor are made. */

/* ---- releasing quantizers ---- */

static void te__spec_close(te__quant_spec *spec) {
    te_tensor_release(spec->scale);
    te_tensor_release(spec->amax);
    spec->scale = spec->amax = NULL;
}

static void te__spec_close_whole(te__quant_spec *spec, te__quant_spec child[2]) {
    te__spec_close(spec);
    te__spec_close(&child[0]);
    te__spec_close(&child[1]);
}
TE_API void te_quantizer_destroy(te_quantizer *q) {
    if (!q || --q->refs > 0) return; /* tensors that q made hold references to q */
    te__spec_close_whole(&q->spec, q->child);
    te__free(q->te, q);
}

/* ---- values ---- */

/* Decodes one copy of x. Returns a plain tensor with the shape of x. The tape does not record the decoding. */
static te_tensor *te__copy_dequantize(const te_tensor *x, int which, te_dtype dtype) {
    const te__quant_copy *c = te__copy_of(x, which);
    te_tensor *y, *apart;
    te__frame_begin(x->te);
    if (!x->quantized->sizes || !te__copy_is_padded(c, which))
        return te__frame_return(x->te, c->cls->decode(x, c, which, dtype));
    apart = te__padded_shell(x, c);
    y = te__empty_like(x, dtype);
    apart = apart && y ? c->cls->decode(apart, c, which, dtype) : NULL;
    return te__frame_return(
        x->te, apart && te__unpad_groups(apart, x->quantized->sizes, c->cls->group_rows, y) == TE_OK ? y : NULL);
}

/* Returns the decoded row-wise copy. If there is none, returns the decoded column-wise copy. */
static te_tensor *te__quant_value(const te_tensor *x, te_dtype dtype) {
    return te__copy_dequantize(x, x->quantized->row.data ? TE_ROWWISE : TE_COLUMNWISE, dtype);
}

static te_result te__same_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)needs;
    dx[0] = dy[0];
    return TE_OK;
}
/* Records y as another representation of x's value: gradients pass unchanged. */
static te_tensor *te__record_same(const char *name, te_tensor *x, te_tensor *y) {
    te__view_state none = TE_ZERO;
    return te__record_unary(name, x, y, &none, te__same_backward);
}


TE_API te_tensor *te_dequantize(te_tensor *x, te_dtype dtype) {
    te_tensor *y;
    if (!x) return NULL;
    if (!x->quantized) return te_tensor_cast(x, dtype ? dtype : x->dtype);
    if (dtype != TE_DTYPE_NONE && !te__is_float(dtype))
        return te__no_tensor(x->te, TE_ERR_DTYPE, "te_dequantize: %s; f32, f16 and bf16 are possible",
                             te_dtype_name(dtype));
    y = te__quant_value(x, dtype ? dtype : x->dtype);
    return y ? te__record_same("dequantize", x, y) : NULL;
}

/* ---- the form ---- */

static int te__quantized_parts(te_tensor *x, te_tensor **slot[TE__MAX_PARTS]) {
    te__quantized *q = x->quantized;
    slot[0] = &q->row.data;
    slot[1] = &q->row.scale;
    slot[2] = &q->row.amax;
    slot[3] = &q->col.data;
    slot[4] = &q->col.scale;
    slot[5] = &q->col.amax;
    return TE__MAX_PARTS;
}
static void te__quantized_release(te_tensor *x) {
    te__quantized *q = x->quantized;
    te__copy_release(&q->row);
    te__copy_release(&q->col);
    te_tensor_release(q->sizes);
    te_quantizer_destroy(q->quantizer);
    te__free(x->te, q->init_value);
    te__free(x->te, q);
}
static bool te__quantized_share(const te_tensor *x, te_tensor *y) {
    te__quantized *q = (te__quantized *)te__alloc_zero(x->te, sizeof(te__quantized));
    if (!q) return false;
    *q = *x->quantized;
    te__copy_retain(&q->row);
    te__copy_retain(&q->col);
    te_tensor_retain(q->sizes);
    if (q->quantizer) q->quantizer->refs++;
    q->init_value = NULL; /* only the weight itself has the preserved value */
    q->init_bytes = 0;
    y->quantized = q;
    y->form = x->form;
    return true;
}
static const te__form te__quantized_form = {te__quantized_parts, te_dequantize, te__quantized_share,
                                            te__quantized_release};
