/* ops/loss/op.c: fills in the default arguments of the loss operations and checks the calls of these operations. This
 * file must not depend on the backend. */

static te_result te__check_cross_entropy_target(te_ctx *te, const char *op, const te_tensor *logits,
                                                const te_tensor *target, const te_tensor *lse, float smoothing) {
    te_result r = te__want_numel(te, op, "target", target, te__rows(logits));
    if (r == TE_OK && !(smoothing >= 0.0f && smoothing <= 1.0f))
        r = te__fail(te, TE_ERR_INVALID, "%s: label_smoothing is %g; 0 to 1 is possible", op, (double)smoothing);
    return r == TE_OK ? te__want_numel(te, op, "lse", lse, te__rows(logits)) : r;
}

static te_result te__check_cross_entropy_fwd(te_ctx *te, te_op_cross_entropy_fwd_args *a) {
    const char *op = "cross_entropy_fwd";
    te_result r = te__check_cross_entropy_target(te, op, a->logits, a->target, a->lse, a->label_smoothing);
    if (r == TE_OK)
        r = te__want_vocabulary(te, op, "the logits have", te__cols(a->logits), "columns", &a->vocab_size,
                                a->vocab_start);
    if (r == TE_OK) r = te__want_numel(te, op, "parts", a->parts, 3 * te__rows(a->logits));
    if (r == TE_OK && a->parts && (a->loss || a->lse))
        r = te__fail(te, TE_ERR_INVALID, "%s: parts and %s are given; parts stand in place of loss and lse", op,
                     a->loss ? "loss" : "lse");
    return r == TE_OK ? te__want_numel(te, op, "loss", a->loss, te__rows(a->logits)) : r;
}

static te_result te__check_cross_entropy_merge(te_ctx *te, te_op_cross_entropy_merge_args *a) {
    const char *op = "cross_entropy_merge";
    char text[TE__SHAPE_TEXT];
    int64_t m = te__numel(a->target);
    te_result r = TE_OK;
    if (m == 0 ? te__numel(a->parts) != 0 : te__numel(a->parts) == 0 || te__numel(a->parts) % (3 * m) != 0)
        r = te__fail(
            te, TE_ERR_SHAPE,
            "%s: parts is %s; a multiple of 3 x %lld elements is needed, three numbers for each target and rank", op,
            te__shape_text(a->parts, text), (long long)m);
    if (r == TE_OK) r = te__want_numel(te, op, "loss", a->loss, m);
    if (r == TE_OK) r = te__want_numel(te, op, "lse", a->lse, m);
    if (r == TE_OK && (!(a->label_smoothing >= 0.0f && a->label_smoothing <= 1.0f) || a->vocab_size < 1))
        r = te__fail(te, TE_ERR_INVALID,
                     "%s: label_smoothing is %g and vocab_size %lld; 0 to 1 and 1 or more are possible", op,
                     (double)a->label_smoothing, (long long)a->vocab_size);
    return r;
}

static te_result te__check_cross_entropy_bwd(te_ctx *te, te_op_cross_entropy_bwd_args *a) {
    const char *op = "cross_entropy_bwd";
    char text[TE__SHAPE_TEXT];
    int64_t m = te__rows(a->logits);
    te_result r = te__check_cross_entropy_target(te, op, a->logits, a->target, a->lse, a->label_smoothing);
    if (a->scale == 0.0f) a->scale = 1.0f;
    if (r == TE_OK)
        r = te__want_vocabulary(te, op, "the logits have", te__cols(a->logits), "columns", &a->vocab_size,
                                a->vocab_start);
    if (r == TE_OK && te__numel(a->dloss) != 1 && te__numel(a->dloss) != m)
        r = te__fail(te, TE_ERR_SHAPE, "%s: dloss is %s; %lld elements are needed, or one for all rows", op,
                     te__shape_text(a->dloss, text), (long long)m);
    return r == TE_OK ? te__want_like(te, op, "dlogits", a->dlogits, "logits", a->logits) : r;
}

static te_result te__check_mse_fwd(te_ctx *te, te_op_mse_fwd_args *a) {
    return te__want_like(te, "mse_fwd", "target", a->target, "x", a->x);
}

static te_result te__check_mse_bwd(te_ctx *te, te_op_mse_bwd_args *a) {
    te_result r = te__want_like(te, "mse_bwd", "target", a->target, "x", a->x);
    return r == TE_OK ? te__want_like(te, "mse_bwd", "dx", a->dx, "x", a->x) : r;
}
