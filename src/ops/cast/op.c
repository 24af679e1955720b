/* ops/cast/op.c: amax, scales, FP8 casts, transpose: the checks of each call, and the scale arithmetic of the recipes. Knows tensors;
 * must not know which backend runs. */

/* A plain contiguous tensor of this context. */
static te_result te__cast_check(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s is NULL", op, name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s belongs to another context", op, name);
    if (x->quantized) return te__fail(te, TE_ERR_INVALID, "%s: %s is quantized; its copies are what this takes (te_quantized_view)", op, name);
    if (!te__is_contiguous(x)) return te__fail(te, TE_ERR_INVALID, "%s: %s is strided: te_tensor_contiguous it first", op, name);
    return TE_OK;
}
static te_result te__cast_check_float(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    te_result result = te__cast_check(te, op, name, x);
    if (result != TE_OK) return result;
    if (!te__is_float(x->dtype)) return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; f32, f16 and bf16 are possible", op, name, te_dtype_name(x->dtype));
    return TE_OK;
}
/* f32 with n elements. NULL is fine where `optional`. */
static te_result te__cast_check_f32(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n, bool optional) {
    char text[TE__SHAPE_TEXT];
    te_result result;
    if (!x && optional) return TE_OK;
    result = te__cast_check(te, op, name, x);
    if (result != TE_OK) return result;
    if (x->dtype != TE_F32) return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s, not f32", op, name, te_dtype_name(x->dtype));
    if (te__numel(x) != n) return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s, not [%lld]", op, name, te__shape_text(x, text), (long long)n);
    return TE_OK;
}
static te_result te__cast_check_fp8_max(te_ctx *te, const char *op, float fp8_max) {
    if (fp8_max > 0.0f && fp8_max <= FLT_MAX) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: fp8_max is %g; 448 (E4M3) and 57344 (E5M2) are usual", op, (double)fp8_max);
}

/* ---- amax, scales ---- */

static te_result te__check_amax(te_ctx *te, te_op_amax_args *a) {
    te_result result = te__cast_check_float(te, "amax", "x", a->x);
    if (result == TE_OK) result = te__cast_check_f32(te, "amax", "amax", a->amax, 1, false);
    if (result == TE_OK) result = te__cast_check_f32(te, "amax", "noop", a->noop, 1, true);
    return result;
}

static te_result te__check_scale_from_amax(te_ctx *te, te_op_scale_from_amax_args *a) {
    te_result result = te__cast_check(te, "scale_from_amax", "amax", a->amax);
    if (result == TE_OK) result = te__cast_check_f32(te, "scale_from_amax", "amax", a->amax, te__numel(a->amax), false);
    if (result == TE_OK) result = te__cast_check_f32(te, "scale_from_amax", "scale", a->scale, te__numel(a->amax), false);
    if (result == TE_OK) result = te__cast_check_f32(te, "scale_from_amax", "scale_inv", a->scale_inv, te__numel(a->amax), true);
    if (result == TE_OK) result = te__cast_check_fp8_max(te, "scale_from_amax", a->fp8_max);
    return result;
}

/* ---- delayed scaling ---- */

/* The histories of a list, and the number of all their slots. */
static te_result te__cast_check_histories(te_ctx *te, const char *op, te_tensor *const *history, int count, int64_t *slots) {
    char name[48], text[TE__SHAPE_TEXT];
    int i;
    *slots = 0;
    if (count < 0) return te__fail(te, TE_ERR_INVALID, "%s: count is %d", op, count);
    if (count > 0 && !history) return te__fail(te, TE_ERR_INVALID, "%s: the list of %d amax_history is NULL", op, count);
    for (i = 0; i < count; i++) {
        const te_tensor *x = history[i];
        te_result result;
        snprintf(name, sizeof(name), "amax_history[%d]", i);
        result = te__cast_check(te, op, name, x);
        if (result != TE_OK) return result;
        if (x->dtype != TE_F32) return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s, not f32", op, name, te_dtype_name(x->dtype));
        if (x->ndim != 2 || x->shape[0] < 1 || x->shape[0] > INT32_MAX || x->shape[1] > INT32_MAX)
            return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; [L, n] with L of 1 or more is needed", op, name, te__shape_text(x, text));
        *slots += x->shape[1];
    }
    return TE_OK;
}

static te_result te__check_delayed_update(te_ctx *te, te_op_delayed_update_args *a) {
    char name[48];
    int64_t slots;
    int i;
    te_result result = te__cast_check_histories(te, "delayed_update", a->amax_history, a->count, &slots);
    if (result == TE_OK && a->count > 0 && !a->scale)
        result = te__fail(te, TE_ERR_INVALID, "delayed_update: the list of %d scale is NULL", a->count);
    for (i = 0; i < a->count && result == TE_OK; i++) {
        snprintf(name, sizeof(name), "scale[%d]", i);
        result = te__cast_check_f32(te, "delayed_update", name, a->scale[i], a->amax_history[i]->shape[1], false);
    }
    if (result == TE_OK) result = te__cast_check_f32(te, "delayed_update", "reduced", a->reduced, slots, true);
    if (result == TE_OK) result = te__cast_check_fp8_max(te, "delayed_update", a->fp8_max);
    if (result != TE_OK) return result;
    if (a->algo != TE_AMAX_MAX && a->algo != TE_AMAX_MOST_RECENT)
        return te__fail(te, TE_ERR_INVALID, "delayed_update: %d is not a te_amax_algo", (int)a->algo);
    if (!(fabsf(a->margin) < 64.0f)) return te__fail(te, TE_ERR_INVALID, "delayed_update: margin is %g; -64 to 64 are possible", (double)a->margin);
    return TE_OK;
}

static te_result te__check_delayed_gather(te_ctx *te, te_op_delayed_gather_args *a) {
    int64_t slots;
    te_result result = te__cast_check_histories(te, "delayed_gather", a->amax_history, a->count, &slots);
    if (result == TE_OK) result = te__cast_check_f32(te, "delayed_gather", "amaxes", a->amaxes, slots, false);
    return result;
}
/* fp8_max / 2^margin, once on the host for both backends: a fractional margin then gives one number. */
static float te__delayed_scaled_max(const te_op_delayed_update_args *a) { return a->fp8_max * powf(2.0f, -a->margin); }

/* ---- casts ---- */

/* One copy of codes: [rows, ld] with ld >= cols. */
static te_result te__cast_check_codes(te_ctx *te, const char *op, const char *name, const te_tensor *q, int64_t rows, int64_t cols) {
    char text[TE__SHAPE_TEXT];
    te_result result = te__cast_check(te, op, name, q);
    if (result != TE_OK) return result;
    if (!te__is_fp8(q->dtype)) return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; e4m3 and e5m2 are possible", op, name, te_dtype_name(q->dtype));
    if (te__rows(q) != rows || te__cols(q) < cols)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %lld rows of at least %lld columns are needed", op, name, te__shape_text(q, text),
                        (long long)rows, (long long)cols);
    return TE_OK;
}
/* The largest of x from its producer, and a count of the blocks that have read it: one word of eight bytes. */
static te_result te__cast_check_x_amax(te_ctx *te, const te_op_fp8_quantize_args *a) {
    if (!a->current || a->noop)
        return te__fail(te, TE_ERR_INVALID, "fp8_quantize: x_amax %s", a->current ? "with noop: what is not done would leave it as it is" : "belongs to `current`");
    if ((uintptr_t)te__data(a->x_amax) % 8) return te__fail(te, TE_ERR_INVALID, "fp8_quantize: x_amax is not at a multiple of 8 bytes");
    return te__cast_check_f32(te, "fp8_quantize", "x_amax", a->x_amax, 2, false);
}
static te_result te__check_fp8_quantize(te_ctx *te, te_op_fp8_quantize_args *a) {
    te_result result = te__cast_check_float(te, "fp8_quantize", "x", a->x);
    if (result != TE_OK) return result;
    if (!a->row && !a->col) return te__fail(te, TE_ERR_INVALID, "fp8_quantize: neither row nor col is given");
    if (a->row) result = te__cast_check_codes(te, "fp8_quantize", "row", a->row, te__rows(a->x), te__cols(a->x));
    if (result == TE_OK && a->col) result = te__cast_check_codes(te, "fp8_quantize", "col", a->col, te__cols(a->x), te__rows(a->x));
    if (result == TE_OK && a->row && a->col && a->row->dtype != a->col->dtype)
        result = te__fail(te, TE_ERR_DTYPE, "fp8_quantize: row is %s and col is %s; both hold the same codes", te_dtype_name(a->row->dtype),
                          te_dtype_name(a->col->dtype));
    if (result == TE_OK && a->current && a->scale)
        result = te__fail(te, TE_ERR_INVALID, "fp8_quantize: scale is given, and with `current` the scale comes from x; leave it NULL");
    if (result == TE_OK && a->x_amax) result = te__cast_check_x_amax(te, a);
    if (result == TE_OK) result = te__cast_check_f32(te, "fp8_quantize", "scale", a->scale, 1, a->current);
    if (result == TE_OK) result = te__cast_check_f32(te, "fp8_quantize", "scale_inv", a->scale_inv, 1, true);
    if (result == TE_OK) result = te__cast_check_f32(te, "fp8_quantize", "amax", a->amax, 1, true);
    if (result == TE_OK) result = te__cast_check_f32(te, "fp8_quantize", "noop", a->noop, 1, true);
    if (result == TE_OK && a->dbias) result = te__want_vector(te, "fp8_quantize", "dbias", a->dbias, te__cols(a->x));
    if (result == TE_OK && a->dbias && a->noop) result = te__fail(te, TE_ERR_INVALID, "fp8_quantize: dbias with noop; sum the columns by te_op_column_sum");
    return result;
}

static te_result te__check_fp8_dequantize(te_ctx *te, te_op_fp8_dequantize_args *a) {
    te_result result = te__cast_check_float(te, "fp8_dequantize", "y", a->y);
    if (result == TE_OK) result = te__cast_check_codes(te, "fp8_dequantize", "q", a->q, te__rows(a->y), te__cols(a->y));
    if (result == TE_OK) result = te__cast_check_f32(te, "fp8_dequantize", "scale_inv", a->scale_inv, 1, false);
    return result;
}

static te_result te__check_transpose(te_ctx *te, te_op_transpose_args *a) {
    char src[TE__SHAPE_TEXT], dst[TE__SHAPE_TEXT];
    te_result result = te__cast_check(te, "transpose", "src", a->src);
    if (result == TE_OK) result = te__cast_check(te, "transpose", "dst", a->dst);
    if (result != TE_OK) return result;
    if (a->src->dtype != a->dst->dtype || te_dtype_bits(a->src->dtype) > 32)
        return te__fail(te, TE_ERR_DTYPE, "transpose: src is %s and dst is %s; one format of 4, 8, 16 or 32 bits is needed",
                        te_dtype_name(a->src->dtype), te_dtype_name(a->dst->dtype));
    if (a->rows < 0 || a->columns < 0 || te__rows(a->src) != a->rows || te__cols(a->src) < a->columns || te__rows(a->dst) != a->columns ||
        te__cols(a->dst) < a->rows)
        return te__fail(te, TE_ERR_SHAPE, "transpose: src %s to dst %s with rows %lld and columns %lld; [rows, >= columns] and [columns, >= rows] are needed",
                        te__shape_text(a->src, src), te__shape_text(a->dst, dst), (long long)a->rows, (long long)a->columns);
    return TE_OK;
}
