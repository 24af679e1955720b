/* ops/optim/op.c: Adam, gradient norm, scaling over lists of tensors: the checks of each call. Knows tensors; must not know which backend
 * runs. */

/* As many elements as another one of entry `i`; NULL is fine. */
static te_result te__optim_check_like(te_ctx *te, const char *op, const char *name, int i, const te_tensor *x, const char *with_name, const te_tensor *with) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x || te__numel(x) == te__numel(with)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s[%d] is %s and %s[%d] is %s; their sizes must be equal", op, name, i, te__shape_text(x, a), with_name, i,
                    te__shape_text(with, b));
}

static te_result te__check_adam(te_ctx *te, te_op_adam_args *a) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) {
        const te_adam_tensor *t = &a->tensors[i];
        result = te__optim_check_like(te, "adam", "grad", i, t->grad, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "m", i, t->m, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "v", i, t->v, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "master", i, t->master, "param", t->param);
    }
    if (result == TE_OK) result = te__want_numel(te, "adam", "grad_scale", a->grad_scale, 1);
    if (result == TE_OK) result = te__want_numel(te, "adam", "found_inf", a->found_inf, 1);
    if (result == TE_OK) result = te__want_numel(te, "adam", "lr_device", a->lr_device, 1);
    if (result == TE_OK) result = te__want_numel(te, "adam", "bias_correction", a->bias_correction, 2);
    if (result != TE_OK) return result;
    if (!(a->beta1 >= 0.0f && a->beta1 < 1.0f) || !(a->beta2 >= 0.0f && a->beta2 < 1.0f) || !(a->eps >= 0.0f))
        return te__fail(te, TE_ERR_INVALID, "adam: beta1 %g, beta2 %g, eps %g; 0 <= beta < 1 and eps >= 0 are needed", (double)a->beta1,
                        (double)a->beta2, (double)a->eps);
    if (a->num_undecayed < 0 || a->num_undecayed > a->num_tensors)
        return te__fail(te, TE_ERR_INVALID, "adam: num_undecayed is %d of %d tensors", a->num_undecayed, a->num_tensors);
    if (a->step < 1) return te__fail(te, TE_ERR_INVALID, "adam: step is %lld; the first one is 1", (long long)a->step);
    return TE_OK;
}
/* 1 / (1 - beta^step), once on the host for both backends. */
static float te__adam_unbias(bool no_bias_correction, float beta, int64_t step) {
    return no_bias_correction ? 1.0f : (float)(1.0 / (1.0 - pow((double)beta, (double)step)));
}

static te_result te__check_l2norm(te_ctx *te, te_op_l2norm_args *a) {
    te_result result = te__want_numel(te, "l2norm", "norm", a->norm, 1);
    if (result == TE_OK) result = te__want_numel(te, "l2norm", "per_tensor", a->per_tensor, a->num_tensors);
    if (result == TE_OK) result = te__want_numel(te, "l2norm", "clip", a->clip, 1);
    if (result == TE_OK && a->clip && !(a->max_norm > 0.0f))
        result = te__fail(te, TE_ERR_INVALID, "l2norm: clip is asked for with max_norm %g", (double)a->max_norm);
    return result;
}

static te_result te__check_multi_scale(te_ctx *te, te_op_multi_scale_args *a) {
    te_result result = te__want_numel(te, "multi_scale", "scale_device", a->scale_device, 1);
    int i;
    if (result == TE_OK) result = te__want_numel(te, "multi_scale", "found_inf", a->found_inf, 1);
    for (i = 0; i < a->num_tensors && result == TE_OK; i++)
        result = te__optim_check_like(te, "multi_scale", "out", i, a->out[i], "in", a->in[i]);
    return result;
}
