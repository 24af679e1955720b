/* ops/stats/op.c: the checks of calls that measure the error of a quantization. This file must not depend on how a
 * tensor was quantized. */

static te_result te__check_quant_error(te_ctx *te, te_op_quant_error_args *a) {
    const char *op = "quant_error";
    te_result result = te__want_numel(te, op, "y", a->y, te__numel(a->x));
    if (result == TE_OK) result = te__want_numel(te, op, "limit", a->limit, te__numel(a->x));
    if (result == TE_OK) result = te__want_numel(te, op, "counts", a->counts, 6);
    return result == TE_OK ? te__want_numel(te, op, "sums", a->sums, 5) : result;
}
