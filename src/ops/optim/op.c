/* ops/optim/op.c: Adam, gradient norm, scaling over lists of tensors: the checks of each call. Knows tensors; must not know which backend
 * runs. */

/* A plain contiguous float tensor of this context; `i`: its place in the list. */
static te_result te__optim_check(te_ctx *te, const char *op, const char *name, int i, const te_tensor *x) {
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s[%d] is NULL", op, name, i);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s[%d] belongs to another context", op, name, i);
    if (x->quantized) return te__fail(te, TE_ERR_INVALID, "%s: %s[%d] is quantized", op, name, i);
    if (!te__is_contiguous(x)) return te__fail(te, TE_ERR_INVALID, "%s: %s[%d] is strided: te_tensor_contiguous it first", op, name, i);
    if (!te__is_float(x->dtype))
        return te__fail(te, TE_ERR_DTYPE, "%s: %s[%d] is %s; f32, f16 and bf16 are possible", op, name, i, te_dtype_name(x->dtype));
    return TE_OK;
}
/* The same, with as many elements as `with`, and f32 if it is a state of the optimizer. */
static te_result te__optim_check_like(te_ctx *te, const char *op, const char *name, int i, const te_tensor *x, const char *with_name,
                                      const te_tensor *with, bool f32) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te_result result = te__optim_check(te, op, name, i, x);
    if (result != TE_OK) return result;
    if (te__numel(x) != te__numel(with))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s[%d] is %s and %s[%d] is %s; their sizes must be equal", op, name, i, te__shape_text(x, a), with_name, i,
                        te__shape_text(with, b));
    if (f32 && x->dtype != TE_F32) return te__fail(te, TE_ERR_DTYPE, "%s: %s[%d] is %s, not f32", op, name, i, te_dtype_name(x->dtype));
    return TE_OK;
}
/* f32 with n elements, or NULL where `optional`. */
static te_result te__optim_check_f32(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n, bool optional) {
    char text[TE__SHAPE_TEXT];
    if (!x && optional) return TE_OK;
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s is NULL", op, name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s belongs to another context", op, name);
    if (x->dtype != TE_F32 || x->quantized) return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s, not plain f32", op, name, te_dtype_name(x->dtype));
    if (te__numel(x) != n || !te__is_contiguous(x))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s, not a contiguous [%lld]", op, name, te__shape_text(x, text), (long long)n);
    return TE_OK;
}
static te_result te__optim_check_list(te_ctx *te, const char *op, int num_tensors, bool given) {
    if (num_tensors >= 0 && (given || num_tensors == 0)) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, given ? "%s: num_tensors is %d" : "%s: the list of %d tensors is NULL", op, num_tensors);
}

static te_result te__check_adam(te_ctx *te, te_op_adam_args *a) {
    te_result result = te__optim_check_list(te, "adam", a->num_tensors, a->tensors != NULL);
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) {
        const te_adam_tensor *t = &a->tensors[i];
        result = te__optim_check(te, "adam", "param", i, t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "grad", i, t->grad, "param", t->param, false);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "m", i, t->m, "param", t->param, true);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "v", i, t->v, "param", t->param, true);
        if (result == TE_OK && t->master) result = te__optim_check_like(te, "adam", "master", i, t->master, "param", t->param, true);
    }
    if (result == TE_OK) result = te__optim_check_f32(te, "adam", "grad_scale", a->grad_scale, 1, true);
    if (result == TE_OK) result = te__optim_check_f32(te, "adam", "found_inf", a->found_inf, 1, true);
    if (result == TE_OK) result = te__optim_check_f32(te, "adam", "lr_device", a->lr_device, 1, true);
    if (result == TE_OK) result = te__optim_check_f32(te, "adam", "bias_correction", a->bias_correction, 2, true);
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
    te_result result = te__optim_check_list(te, "l2norm", a->num_tensors, a->tensors != NULL);
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) result = te__optim_check(te, "l2norm", "tensors", i, a->tensors[i]);
    if (result == TE_OK) result = te__optim_check_f32(te, "l2norm", "norm", a->norm, 1, false);
    if (result == TE_OK) result = te__optim_check_f32(te, "l2norm", "per_tensor", a->per_tensor, a->num_tensors, true);
    if (result == TE_OK) result = te__optim_check_f32(te, "l2norm", "clip", a->clip, 1, true);
    if (result != TE_OK) return result;
    if (a->clip && !(a->max_norm > 0.0f)) return te__fail(te, TE_ERR_INVALID, "l2norm: clip is asked for with max_norm %g", (double)a->max_norm);
    return TE_OK;
}

static te_result te__check_multi_scale(te_ctx *te, te_op_multi_scale_args *a) {
    te_result result = te__optim_check_list(te, "multi_scale", a->num_tensors, a->in && a->out);
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) {
        result = te__optim_check(te, "multi_scale", "in", i, a->in[i]);
        if (result == TE_OK) result = te__optim_check_like(te, "multi_scale", "out", i, a->out[i], "in", a->in[i], false);
    }
    if (result == TE_OK) result = te__optim_check_f32(te, "multi_scale", "scale_device", a->scale_device, 1, true);
    if (result == TE_OK) result = te__optim_check_f32(te, "multi_scale", "found_inf", a->found_inf, 1, true);
    return result;
}
