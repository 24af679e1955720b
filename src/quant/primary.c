/* quant/primary.c: makes weights that are stored quantized, preserves their initial values, and replaces their memory.
 * This file must not depend on modules. */

TE_API te_result te_quantized_model_init_begin(te_ctx *te, const te_quantized_model_init_desc *desc) {
    te__quantized_init *init;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (te__quant_of(te)->num_quantized_init == TE__MAX_AUTOCAST)
        return te__fail(te, TE_ERR_STATE,
                        "te_quantized_model_init_begin: %d regions are open; is a te_quantized_model_init_end missing?",
                        te__quant_of(te)->num_quantized_init);
    init = &te__quant_of(te)->quantized_init[te__quant_of(te)->num_quantized_init];
    init->recipe = desc && desc->recipe ? *desc->recipe : te_recipe_delayed_scaling();
    init->enabled = !(desc && desc->disabled);
    init->preserve = desc && desc->preserve_high_precision_init_val;
    result = te__recipe_check(te, &init->recipe);
    if (result == TE_OK) te__quant_of(te)->num_quantized_init++;
    return result;
}
TE_API te_result te_quantized_model_init_end(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te__quant_of(te)->num_quantized_init == 0)
        return te__fail(te, TE_ERR_STATE, "te_quantized_model_init_end without te_quantized_model_init_begin");
    te__quant_of(te)->num_quantized_init--;
    return TE_OK;
}
/* Returns the innermost region, or NULL outside of all. */
static const te__quantized_init *te__init_now(const te_ctx *te) {
    const int n = te__quant_of(te)->num_quantized_init;
    return n > 0 ? &te__quant_of(te)->quantized_init[n - 1] : NULL;
}
static bool te__quantizes_weights(const te_ctx *te) { return te__init_now(te) && te__init_now(te)->enabled; }

/* Returns the copies that a weight made now gets. Without gradients only the forward pass reads weights. */
static int te__weight_usage(const te_ctx *te) {
    return te->tape.no_grad > te->tape.hidden_no_grad ? TE_ROWWISE : TE_ROWWISE | TE_COLUMNWISE;
}

/* Returns a new quantizer for a weight. It follows the recipe of the innermost region of
 * te_quantized_model_init_begin. */
static te_quantizer *te__weight_quantizer(te_ctx *te, const char *module_type, const char *path, int gemm) {
    const te_recipe *r = &te__init_now(te)->recipe;
    te_quantizer_desc desc = TE_ZERO;
    te__quant_spec spec;
    te_quantizer *q;
    if (te__asks_factory(r)) {
        te_quantizer_role role = TE_ZERO;
        role.module_type = module_type;
        role.name = path;
        role.gemm = gemm;
        role.tensor_type = TE_TENSOR_WEIGHT;
        if (te__recipe_ask(te, r, &role, &desc) != TE_OK) return NULL;
        desc.usage = te__weight_usage(te);
        return te_quantizer_create(te, &desc);
    }
    spec = te__recipe_spec(r, false, TE__SLOT_WEIGHT, NULL);
    desc.kind = spec.cls->kind;
    q = te_quantizer_create(te, &desc);
    if (!q) return NULL;
    spec.usage = te__weight_usage(te);
    spec.scale = q->spec.scale;
    spec.amax = q->spec.amax;
    q->spec = spec;
    return q;
}

/* Quantizes the plain tensor `weight`, which has the initial value of a weight. Returns the quantized tensor, or
 * `weight` itself if the recipe keeps high precision. */
static te_tensor *te__primary_create(te_tensor *weight, const char *module_type, const char *path, int gemm) {
    te_ctx *te = weight->te;
    te_quantizer *q = te__weight_quantizer(te, module_type, path, gemm);
    te_tensor *y;
    if (!q) return NULL;
    if (q->spec.cls->form == TE__FORM_PLAIN) {
        te_quantizer_destroy(q);
        return weight;
    }
    y = te__quantize(weight, &q->spec);
    if (!y) {
        te_quantizer_destroy(q);
        return NULL;
    }
    y->quantized->quantizer = q;
    if (te__init_now(te)->preserve) {
        y->quantized->init_bytes = te_tensor_bytes(weight);
        y->quantized->init_value = te__alloc(te, y->quantized->init_bytes);
        if (!y->quantized->init_value || te_tensor_to_host(weight, y->quantized->init_value) != TE_OK) return NULL;
        y->quantized->init_version = te__quant_version(y);
    }
    return y;
}

TE_API te_result te_quantized_init_value(const te_tensor *x, void *host) {
    if (!x) return TE_ERR_STATE;
    if (!x->quantized || !x->quantized->init_value)
        return te__fail(x->te, TE_ERR_STATE,
                        "te_quantized_init_value: the tensor has none; set preserve_high_precision_init_val in "
                        "te_quantized_model_init_begin");
    if (!host) return te__fail(x->te, TE_ERR_INVALID, "te_quantized_init_value: host is NULL");
    memcpy(host, x->quantized->init_value, x->quantized->init_bytes);
    return TE_OK;
}
TE_API void te_quantized_clear_init_value(te_tensor *x) {
    if (!x || !x->quantized) return;
    te__free(x->te, x->quantized->init_value);
    x->quantized->init_value = NULL;
    x->quantized->init_bytes = 0;
}

/* Returns true if x has a preserved initial value and its codes have not been written since. */
static bool te__primary_has_start(const te_tensor *x) {
    return x->quantized->init_value && x->quantized->init_version == te__quant_version(x);
}

/* Writes an optimizer's value into a quantized weight. If `noop` (f32 [1] or NULL) holds 1, a weight with
 * TE__FORM_CODES stays unchanged. Other forms ignore `noop`. */
static te_result te__primary_assign(te_tensor *weight, te_tensor *value, const te_tensor *noop) {
    if (!weight->quantized->quantizer)
        return te__fail(weight->te, TE_ERR_STATE,
                        "a quantized weight without its quantizer cannot take a new value; make it by te_quantize or "
                        "te_quantized_model_init_begin");
    return te_quantize_into(weight->quantized->quantizer, value, weight,
                            weight->quantized->cls->form == TE__FORM_CODES ? noop : NULL);
}

/* Writes a new initial value into a quantized weight. The value comes from an initialisation, from a file, or from a
 * merge of LoRA adapters. If the weight preserves its initial value, replaces the preserved value too. */
static te_result te__primary_start(te_tensor *weight, te_tensor *value) {
    te__quantized *q = weight->quantized;
    const bool preserves = q->init_value && !weight->te->warming;
    te_tensor *first;
    te_result result;
    te__frame_begin(weight->te);
    first = preserves ? te_tensor_cast(value, weight->dtype) : value; /* this may fail, so it comes before the codes
                                                                       * change */
    result = first ? te__primary_assign(weight, value, NULL) : te_error_code(weight->te);
    if (result == TE_OK && preserves) result = te_tensor_to_host(first, q->init_value);
    if (result == TE_OK && preserves) q->init_version = te__quant_version(weight);
    te__frame_end(weight->te, NULL, 0);
    return result;
}
/* Returns the buffer that counts the writes of a parameter. */
static const te__buffer *te__param_buffer(const te_tensor *x) {
    const te_tensor *counted = x->quantized ? te__quant_counted(x) : x;
    return counted ? counted->buffer : NULL;
}
/* Returns the version of a parameter, plain or quantized: a number that grows whenever the value is written. */
static uint64_t te__param_version(const te_tensor *x) {
    return x->quantized ? te__quant_version(x) : x->buffer ? te__buffer_version(x->buffer) : 0;
}

TE_API te_result te_replace_raw_data(te_tensor *x, te_tensor *new_raw) {
    te__quant_copy *row;
    te_tensor *data, *from, *to;
    te_ctx *te;
    int64_t bytes;
    te_result result;
    bool warming;
    if (!x || !new_raw) return TE_ERR_STATE;
    te = x->te;
    if (!te__same_ctx(new_raw, te, "te_replace_raw_data")) return te_error_code(te);
    if (!x->quantized)
        return te__fail(te, TE_ERR_INVALID, "te_replace_raw_data: the tensor is plain %s; a quantized one is needed",
                        te_dtype_name(x->dtype));
    row = &x->quantized->row;
    if (row->cls && row->cls->facts & TE__BOTH_FROM_SLICES)
        return te__fail(
            te, TE_ERR_UNSUPPORTED,
            "te_replace_raw_data: %s; its row-wise codes do not give the column-wise ones: keep both where they are",
            row->cls->name);
    if (!row->data || te__is_opaque(row->cls))
        return te__fail(
            te, TE_ERR_STATE,
            "te_replace_raw_data: the tensor has no row-wise copy of a built-in kind (te_quantizer_set_usage)");
    bytes = (int64_t)te_tensor_bytes(row->data);
    if ((new_raw->dtype != TE_U8 && new_raw->dtype != row->data->dtype) || !new_raw->buffer ||
        !te__is_contiguous(new_raw) || (int64_t)te_tensor_bytes(new_raw) < bytes)
        return te__fail(te, TE_ERR_INVALID,
                        "te_replace_raw_data: the new memory is %s, %lld bytes, %s; u8 or %s, at least %lld bytes, "
                        "contiguous, is needed",
                        te_dtype_name(new_raw->dtype), (long long)te_tensor_bytes(new_raw),
                        new_raw->buffer && te__is_contiguous(new_raw) ? "contiguous" : "not contiguous",
                        te_dtype_name(row->data->dtype), (long long)bytes);
    if (te_dtype_bits(row->data->dtype) > 8 &&
        (uintptr_t)te__data(new_raw) % (uintptr_t)te__dtype_size(row->data->dtype) != 0)
        return te__fail(te, TE_ERR_INVALID,
                        "te_replace_raw_data: the new memory begins at an odd byte; %s needs a multiple of %d",
                        te_dtype_name(row->data->dtype), (int)te__dtype_size(row->data->dtype));
    if (te->capture) return te__refuse_capture(te, "te_replace_raw_data", "replace the memory before te_graph_begin");
    warming = te->warming;
    te->warming = false; /* a warm-up runs no kernels, but the codes must be copied even then */
    te__frame_begin(te);
    from = te__alias_1d(row->data, 0, TE_U8, bytes);
    to = te__alias_1d(new_raw, 0, TE_U8, bytes);
    data = te__alias_as(new_raw, 0, row->data->dtype, row->data->ndim, row->data->shape);
    result = from && to && data ? te_tensor_copy(to, from) : te_error_code(te);
    if (result == TE_OK) { /* the value is the same in its new memory, so its version stays the same too */
        uint64_t version = te__quant_version(x);
        te_tensor_release(row->data);
        row->data = te_tensor_retain(data);
        te__quant_set_version(x, version);
    }
    te__frame_end(te, NULL, 0);
    te->warming = warming;
    return result;
}
