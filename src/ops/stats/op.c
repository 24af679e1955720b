/* ops/stats/op.c: the error of a quantization: the checks of the call. Knows tensors; must not know how anything was quantized. */

static te_result te__check_quant_error(te_ctx *te, te_op_quant_error_args *a) {
    const char *op = "quant_error";
    te_result result = te__want_float(te, op, "x", a->x);
    if (result == TE_OK) result = te__want_f32(te, op, "y", a->y, te__numel(a->x));
    if (result == TE_OK && a->limit) result = te__want_f32(te, op, "limit", a->limit, te__numel(a->x));
    if (result == TE_OK) result = te__want(te, op, "counts", a->counts);
    if (result == TE_OK && a->counts->dtype != TE_I64)
        result = te__fail(te, TE_ERR_DTYPE, "quant_error: counts is %s; i64 is needed", te_dtype_name(a->counts->dtype));
    if (result == TE_OK) result = te__want_numel(te, op, "counts", a->counts, 6);
    if (result == TE_OK) result = te__want_f32(te, op, "sums", a->sums, 5);
    return result;
}
