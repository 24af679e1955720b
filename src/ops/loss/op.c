/* ops/loss/op.c: the front door of the losses: defaults and checks. Knows tensors; must not know which backend runs. */

static te_result te__check_cross_entropy_target(te_ctx *te, const char *op, const te_tensor *logits, const te_tensor *target, float smoothing) {
    te_result r = te__want_float(te, op, "logits", logits);
    if (r == TE_OK) r = te__want(te, op, "target", target);
    if (r == TE_OK && !te__is_index(target->dtype))
        r = te__fail(te, TE_ERR_DTYPE, "%s: target is %s; i32 or i64 is needed", op, te_dtype_name(target->dtype));
    if (r == TE_OK) r = te__want_numel(te, op, "target", target, te__rows(logits));
    if (r == TE_OK && !(smoothing >= 0.0f && smoothing <= 1.0f))
        r = te__fail(te, TE_ERR_INVALID, "%s: label_smoothing is %g; 0 to 1 is possible", op, (double)smoothing);
    return r;
}

static te_result te__check_cross_entropy_fwd(te_ctx *te, te_op_cross_entropy_fwd_args *a) {
    const char *op = "cross_entropy_fwd";
    te_result r = te__check_cross_entropy_target(te, op, a->logits, a->target, a->label_smoothing);
    if (r == TE_OK) r = te__want_f32(te, op, "loss", a->loss, te__rows(a->logits));
    if (r == TE_OK) r = te__want_f32(te, op, "lse", a->lse, te__rows(a->logits));
    if (r == TE_OK && a->count) r = te__want_f32(te, op, "count", a->count, 1);
    return r;
}

static te_result te__check_cross_entropy_bwd(te_ctx *te, te_op_cross_entropy_bwd_args *a) {
    const char *op = "cross_entropy_bwd";
    char text[TE__SHAPE_TEXT];
    te_result r = te__check_cross_entropy_target(te, op, a->logits, a->target, a->label_smoothing);
    int64_t m;
    if (r != TE_OK) return r;
    m = te__rows(a->logits);
    if (a->scale == 0.0f) a->scale = 1.0f;
    r = te__want_f32(te, op, "lse", a->lse, m);
    if (r == TE_OK) r = te__want(te, op, "dloss", a->dloss);
    if (r == TE_OK && te__numel(a->dloss) != 1 && te__numel(a->dloss) != m)
        r = te__fail(te, TE_ERR_SHAPE, "%s: dloss is %s; %lld elements are needed, or one for all rows", op, te__shape_text(a->dloss, text), (long long)m);
    if (r == TE_OK) r = te__want_f32(te, op, "dloss", a->dloss, te__numel(a->dloss));
    if (r == TE_OK && a->count) r = te__want_f32(te, op, "count", a->count, 1);
    if (r == TE_OK) r = te__want_like(te, op, "dlogits", a->dlogits, "logits", a->logits);
    return r;
}

static te_result te__check_mse_fwd(te_ctx *te, te_op_mse_fwd_args *a) {
    te_result r = te__want_float(te, "mse_fwd", "x", a->x);
    if (r == TE_OK) r = te__want_like(te, "mse_fwd", "target", a->target, "x", a->x);
    if (r == TE_OK) r = te__want_f32(te, "mse_fwd", "loss", a->loss, 1);
    return r;
}

static te_result te__check_mse_bwd(te_ctx *te, te_op_mse_bwd_args *a) {
    te_result r = te__want_float(te, "mse_bwd", "x", a->x);
    if (r == TE_OK) r = te__want_like(te, "mse_bwd", "target", a->target, "x", a->x);
    if (r == TE_OK) r = te__want_f32(te, "mse_bwd", "dloss", a->dloss, 1);
    if (r == TE_OK) r = te__want_like(te, "mse_bwd", "dx", a->dx, "x", a->x);
    return r;
}
