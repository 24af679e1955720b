/* quant/inspect.c: measures the quantization error of each operand of a module. This file must not depend on what a
 * module computes. */

/* Returns, for each element, the largest magnitude that the element's scale allows. Decodes the largest code with each
 * scale. Returns NULL if the copy has no codes, or if it is Hadamard-transformed. */
static te_tensor *te__quant_limit(const te_tensor *xq, int which) {
    te_tensor *y = te__alias_any(xq), *codes, *bytes;
    te__quant_copy *c = y ? te__copy_of(y, which) : NULL;
    if (!c || c->cls->form != TE__FORM_CODES || c->rht) return NULL;
    codes = te__empty_2d(xq->te, c->data->dtype, c->data->shape[0], c->data->shape[1]);
    bytes = codes ? te__alias_1d(codes, 0, TE_U8, (int64_t)te_tensor_bytes(codes)) : NULL;
    if (!bytes || te_tensor_fill(bytes, c->data->dtype == TE_F8E4M3   ? 0x7e
                                        : c->data->dtype == TE_F8E5M2 ? 0x7b
                                                                      : 0x77) != TE_OK)
        return NULL;
    te_tensor_release(c->data);
    c->data = te_tensor_retain(codes);
    return te__copy_dequantize(y, which, TE_F32);
}

/* Measures the error of xq, the quantized x. x is operand `type` of the product `gemm`. Replaces the operand's last
 * measurement. Does nothing while inspection is off. */
static void te__inspect(te__scaling *s, int gemm, te_tensor_type type, te_tensor *x, const te_tensor *xq) {
    te_ctx *te = x->te;
    te_op_quant_error_args error = TE_ZERO;
    te_op_amax_args amax = TE_ZERO;
    te__measured *slot, fresh;
    const te__quant_copy *copy;
    /* a custom recipe may leave an operand as it is */
    if (!te__quant_of(te)->inspecting || te->warming || !x->buffer || !xq->quantized) return;
    if (!s->inspection) {
        s->inspection = (te__inspection *)te__alloc_zero(te, te__inspection_bytes(s));
        if (!s->inspection) return;
    }
    /* In the backward pass te->module_path is empty, and the path from the forward pass stays. */
    if (te->module_path[0]) memcpy(s->inspection->path, te->module_path, sizeof(s->inspection->path));
    s->inspection->module_type = s->module_type;
    slot = &s->inspection->slot[gemm * TE__INSPECTED_TYPES + (type == TE_TENSOR_INPUT    ? 0
                                                              : type == TE_TENSOR_WEIGHT ? 1
                                                                                         : 2)];
    memset(&fresh, 0, sizeof(fresh));
    te__frame_begin(te);
    te->tape.no_grad++;
    fresh.which = xq->quantized->row.data ? TE_ROWWISE : TE_COLUMNWISE;
    copy = te__copy_of(xq, fresh.which);
    fresh.cls = copy->cls;
    fresh.e4m3_max_256 = copy->e4m3_max_256;
    fresh.counts = te_tensor_retain(te__empty_1d(te, TE_I64, 6));
    fresh.sums = te_tensor_retain(te__empty_1d(te, TE_F32, 5));
    fresh.amax = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
    fresh.scale =
        te_tensor_retain(!copy->cls->tensor_factor || te__numel(copy->amax ? copy->amax : copy->scale) != 1 ? NULL
                         : copy->amax ? copy->amax
                                      : copy->scale);
    error.x = te_tensor_contiguous(x);
    error.y = te__copy_dequantize(xq, fresh.which, TE_F32);
    error.limit = te__quant_limit(xq, fresh.which);
    error.counts = fresh.counts;
    error.sums = fresh.sums;
    amax.x = error.x;
    amax.amax = fresh.amax;
    if (error.x && error.y && fresh.amax && te_op_quant_error(te, &error) == TE_OK && te_op_amax(te, &amax) == TE_OK) {
        te__measured_close(slot);
        *slot = fresh;
    } else
        te__measured_close(&fresh);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
}

TE_API te_result te_quant_inspect(te_ctx *te, bool on) {
    te__scaling *s;
    if (!te) return TE_ERR_STATE;
    te__quant_of(te)->inspecting = on;
    for (s = te__quant_of(te)->scaling; s && on; s = s->next) te__inspection_close(s); /* drops earlier measurements */
    return TE_OK;
}

static te_result te__measured_read(const te__measured *slot, te_quant_stats *out) {
    int64_t counts[6];
    float sums[5], scale = 0.0f;
    te__floats floats;
    te_result result = te_tensor_to_host(slot->counts, counts);
    if (result == TE_OK) result = te_tensor_to_host(slot->sums, sums);
    if (result == TE_OK) result = te_tensor_to_host(slot->amax, &out->amax);
    if (result == TE_OK && slot->scale) result = te_tensor_to_host(slot->scale, &scale);
    if (result != TE_OK) return result;
    floats = te__floats_begin();
    out->kind = slot->cls->kind;
    out->which = slot->which;
    out->elements = counts[0];
    out->nan_count = counts[3];
    out->inf_count = counts[4];
    out->zeros = counts[5];
    out->underflow = counts[0] ? (float)((double)counts[1] / (double)counts[0]) : 0.0f;
    out->saturated = counts[0] ? (float)((double)counts[2] / (double)counts[0]) : 0.0f;
    out->scale = slot->scale ? slot->cls->tensor_factor(scale, slot->e4m3_max_256) : 0.0f;
    out->cosine = sums[0] > 0.0f && sums[1] > 0.0f ? (float)(sums[2] / sqrt((double)sums[0] * sums[1]))
                  : sums[0] == sums[1]             ? 1.0f
                                                   : 0.0f;
    out->snr_db = sums[3] > 0.0f ? (float)(10.0 * log10((double)sums[0] / sums[3])) : INFINITY;
    out->max_error = sums[4];
    te__floats_end(&floats);
    return TE_OK;
}

TE_API te_result te_quant_stats_visit(te_ctx *te, te_quant_stats_fn visit, void *user) {
    static const te_tensor_type types[TE__INSPECTED_TYPES] = {TE_TENSOR_INPUT, TE_TENSOR_WEIGHT, TE_TENSOR_GRAD_OUTPUT};
    te__scaling *s, **order;
    te_result result = TE_OK;
    size_t bytes;
    int n = 0, i, k;
    if (!te || !visit) return TE_ERR_STATE;
    for (s = te__quant_of(te)->scaling; s; s = s->next) n += s->inspection != NULL;
    bytes = (size_t)(n + 1) * sizeof(*order);
    order = (te__scaling **)te__alloc(te, bytes);
    if (!order) return TE_ERR_OUT_OF_MEMORY;
    i = n;
    for (s = te__quant_of(te)->scaling; s; s = s->next) /* the list begins with the module made last */
        if (s->inspection) order[--i] = s;
    for (i = 0; i < n && result == TE_OK; i++) /* the callback may call te_quant_inspect, which frees `inspection` */
        for (k = 0; order[i]->inspection && k < order[i]->num_gemms * TE__INSPECTED_TYPES && result == TE_OK; k++) {
            const te__measured *slot = &order[i]->inspection->slot[k];
            te_quantizer_role role = TE_ZERO;
            te_quant_stats stats = TE_ZERO;
            if (!slot->cls) continue;
            result = te__measured_read(slot, &stats);
            role.module_type = order[i]->inspection->module_type;
            role.name = order[i]->inspection->path;
            role.gemm = k / TE__INSPECTED_TYPES;
            role.tensor_type = types[k % TE__INSPECTED_TYPES];
            if (result == TE_OK && !visit(user, &role, &stats)) break;
        }
    te__free(te, order);
    return result;
}
