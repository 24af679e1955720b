/* ops/cast/op.c: checks the calls of amax, scales, FP8 casts and transpose. This file must not depend on the
 * backend. */

static te_result te__cast_check_fp8_max(te_ctx *te, const char *op, float fp8_max) {
    if (fp8_max > 0.0f && fp8_max <= FLT_MAX) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: fp8_max is %g; 448 (E4M3) and 57344 (E5M2) are usual", op,
                    (double)fp8_max);
}

/* ---- amax, scales ---- */

static te_result te__check_amax(te_ctx *te, te_op_amax_args *a) {
    te_result result = a->groups ? te__want_groups(te, "amax", a->groups, te__rows(a->x), "amax", a->amax)
                                 : te__want_numel(te, "amax", "amax", a->amax, 1);
    if (result == TE_OK && a->groups && a->noop)
        result = te__fail(te, TE_ERR_INVALID, "amax: groups with noop; leave one of them out");
    return result;
}

static te_result te__check_scale_from_amax(te_ctx *te, te_op_scale_from_amax_args *a) {
    te_result result = te__want_numel(te, "scale_from_amax", "scale", a->scale, te__numel(a->amax));
    if (result == TE_OK) result = te__want_numel(te, "scale_from_amax", "scale_inv", a->scale_inv, te__numel(a->amax));
    return result == TE_OK ? te__cast_check_fp8_max(te, "scale_from_amax", a->fp8_max) : result;
}

/* ---- delayed scaling ---- */

/* Checks the amax histories history[0 .. count - 1], and sets *slots to the total number of their columns. */
static te_result te__cast_check_histories(te_ctx *te, const char *op, te_tensor *const *history, int count,
                                          int64_t *slots) {
    char text[TE__SHAPE_TEXT];
    int i;
    *slots = 0;
    for (i = 0; i < count; i++) {
        const te_tensor *x = history[i];
        if (x->ndim != 2 || x->shape[0] < 1 || x->shape[0] > INT32_MAX || x->shape[1] > INT32_MAX)
            return te__fail(te, TE_ERR_SHAPE, "%s: amax_history[%d] is %s; [L, n] with L of 1 or more is needed", op, i,
                            te__shape_text(x, text));
        *slots += x->shape[1];
    }
    return TE_OK;
}

static te_result te__check_delayed_update(te_ctx *te, te_op_delayed_update_args *a) {
    char text[TE__SHAPE_TEXT];
    int64_t slots;
    int i;
    te_result result = te__cast_check_histories(te, "delayed_update", a->amax_history, a->count, &slots);
    for (i = 0; i < a->count && result == TE_OK; i++)
        if (te__numel(a->scale[i]) != a->amax_history[i]->shape[1])
            result = te__fail(te, TE_ERR_SHAPE, "delayed_update: scale[%d] is %s, not [%lld]", i,
                              te__shape_text(a->scale[i], text), (long long)a->amax_history[i]->shape[1]);
    if (result == TE_OK) result = te__want_numel(te, "delayed_update", "reduced", a->reduced, slots);
    if (result == TE_OK) result = te__cast_check_fp8_max(te, "delayed_update", a->fp8_max);
    if (result != TE_OK) return result;
    if (a->algo != TE_AMAX_MAX && a->algo != TE_AMAX_MOST_RECENT)
        return te__fail(te, TE_ERR_INVALID, "delayed_update: %d is not a te_amax_algo", (int)a->algo);
    if (!(fabsf(a->margin) <= 64.0f))
        return te__fail(te, TE_ERR_INVALID, "delayed_update: margin is %g; -64 to 64 are possible", (double)a->margin);
    return TE_OK;
}

static te_result te__check_delayed_gather(te_ctx *te, te_op_delayed_gather_args *a) {
    int64_t slots;
    te_result result = te__cast_check_histories(te, "delayed_gather", a->amax_history, a->count, &slots);
    return result == TE_OK ? te__want_numel(te, "delayed_gather", "amaxes", a->amaxes, slots) : result;
}
/* Returns fp8_max / 2^margin. The host computes it, so that both backends use the same number for any margin. */
static float te__delayed_scaled_max(const te_op_delayed_update_args *a) { return a->fp8_max * powf(2.0f, -a->margin); }

/* ---- casts ---- */

/* Checks x_amax, one word of eight bytes: the amax of x, and the number of blocks that have read it. */
static te_result te__cast_check_x_amax(te_ctx *te, const te_op_fp8_quantize_args *a) {
    if (!a->current || a->noop)
        return te__fail(te, TE_ERR_INVALID, "fp8_quantize: x_amax %s",
                        a->current ? "with noop: what is not done would leave it as it is" : "belongs to `current`");
    if ((uintptr_t)te__data(a->x_amax) % 8)
        return te__fail(te, TE_ERR_INVALID, "fp8_quantize: x_amax is not at a multiple of 8 bytes");
    return te__want_numel(te, "fp8_quantize", "x_amax", a->x_amax, 2);
}
/* Checks the tensors of a cast with groups. `groups` names the group of each row. Each group has its own scale and
 * amax. */
static te_result te__cast_check_groups(te_ctx *te, const te_op_fp8_quantize_args *a) {
    const char *op = "fp8_quantize";
    te_result result;
    if (a->current || a->noop || a->dbias)
        return te__fail(te, TE_ERR_INVALID, "fp8_quantize: groups with %s",
                        a->current ? "`current`: te_op_amax and te_op_scale_from_amax make the groups' scales"
                        : a->noop  ? "noop; leave one of them out"
                                   : "dbias; te_op_grouped_column_sum sums the columns of each group");
    result = te__want_groups(te, op, a->groups, te__rows(a->x), "scale", a->scale);
    if (result == TE_OK) result = te__want_groups(te, op, a->groups, te__rows(a->x), "amax", a->amax);
    if (result == TE_OK) result = te__want_numel(te, op, "scale_inv", a->scale_inv, te__numel(a->scale));
    return result == TE_OK ? te__want_numel(te, op, "amax", a->amax, te__numel(a->scale)) : result;
}
static te_result te__check_fp8_quantize(te_ctx *te, te_op_fp8_quantize_args *a) {
    const char *op = "fp8_quantize";
    te_result result = TE_OK;
    if (!a->row && !a->col) return te__fail(te, TE_ERR_INVALID, "fp8_quantize: neither row nor col is given");
    if (a->row) result = te__want_codes(te, op, "row", a->row, te__rows(a->x), te__cols(a->x));
    if (result == TE_OK && a->col) result = te__want_codes(te, op, "col", a->col, te__cols(a->x), te__rows(a->x));
    if (result == TE_OK) result = te__want_one_format(te, op, "row", a->row, "col", a->col);
    if (result == TE_OK && a->current && a->scale)
        result = te__fail(te, TE_ERR_INVALID,
                          "fp8_quantize: scale is given, and with `current` the scale comes from x; leave it NULL");
    if (result == TE_OK && a->x_amax) result = te__cast_check_x_amax(te, a);
    if (result == TE_OK && a->groups) return te__cast_check_groups(te, a);
    if (result == TE_OK) result = te__want_numel(te, op, "scale", a->scale, 1);
    if (result == TE_OK) result = te__want_numel(te, op, "scale_inv", a->scale_inv, 1);
    if (result == TE_OK) result = te__want_numel(te, op, "amax", a->amax, 1);
    if (result == TE_OK) result = te__want_numel(te, op, "dbias", a->dbias, te__cols(a->x));
    if (result == TE_OK && a->dbias && a->noop)
        result = te__fail(te, TE_ERR_INVALID, "fp8_quantize: dbias with noop; sum the columns by te_op_column_sum");
    return result;
}

static te_result te__check_fp8_dequantize(te_ctx *te, te_op_fp8_dequantize_args *a) {
    te_result result = te__want_codes(te, "fp8_dequantize", "q", a->q, te__rows(a->y), te__cols(a->y));
    if (result != TE_OK) return result;
    return a->groups ? te__want_groups(te, "fp8_dequantize", a->groups, te__rows(a->y), "scale_inv", a->scale_inv)
                     : te__want_numel(te, "fp8_dequantize", "scale_inv", a->scale_inv, 1);
}

static te_result te__check_transpose(te_ctx *te, te_op_transpose_args *a) {
    char src[TE__SHAPE_TEXT], dst[TE__SHAPE_TEXT];
    if (a->src->dtype != a->dst->dtype)
        return te__fail(te, TE_ERR_DTYPE,
                        "transpose: src is %s and dst is %s; one format of 4, 8, 16 or 32 bits is needed",
                        te_dtype_name(a->src->dtype), te_dtype_name(a->dst->dtype));
    if (a->rows < 0 || a->columns < 0 || te__rows(a->src) != a->rows || te__cols(a->src) < a->columns ||
        te__rows(a->dst) != a->columns || te__cols(a->dst) < a->rows)
        return te__fail(te, TE_ERR_SHAPE,
                        "transpose: src %s to dst %s with rows %lld and columns %lld; [rows, >= columns] and [columns, "
                        ">= rows] are needed",
                        te__shape_text(a->src, src), te__shape_text(a->dst, dst), (long long)a->rows,
                        (long long)a->columns);
    return TE_OK;
}
