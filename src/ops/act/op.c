/* ops/act/op.c: the front door of the activations: defaults and checks. Knows tensors; must not know which backend runs. */

TE_API bool te_activation_is_gated(te_activation activation) { return activation >= TE_GEGLU && activation <= TE_CLAMPED_SWIGLU; }

static te_result te__check_activation(te_ctx *te, const char *op, te_activation act, float *limit, float *alpha) {
    if ((int)act < (int)TE_GELU || (int)act > (int)TE_CLAMPED_SWIGLU)
        return te__fail(te, TE_ERR_INVALID, "%s: activation is %d; TE_GELU (1) to TE_CLAMPED_SWIGLU (12) are possible", op, (int)act);
    if (*limit == 0.0f) *limit = 7.0f;
    if (*alpha == 0.0f) *alpha = 1.702f;
    if (!(*limit > 0.0f)) return te__fail(te, TE_ERR_INVALID, "%s: limit is %g; it must be positive", op, (double)*limit);
    return TE_OK;
}

/* The outputs for x [m, n]: `out` of floats [m, n], or codes [m, ld]; of codes, `col` [n, ldc] beside or in place of it. */
static te_result te__act_check_output(te_ctx *te, const char *op, const char *name, te_tensor *out, te_tensor *col, const te_tensor *scale,
                                      te_tensor *scale_inv, te_tensor *amax, int64_t m, int64_t n, const te_tensor *x) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te_result r = TE_OK;
    if (out || !col) r = te__want(te, op, name, out);
    if (r == TE_OK && amax) r = te__want_f32(te, op, "amax", amax, 1);
    if (r != TE_OK) return r;
    if (out && te__is_float(out->dtype)) {
        if (scale || scale_inv || col)
            return te__fail(te, TE_ERR_INVALID, "%s: scale, scale_inv and col belong to an e4m3 or e5m2 %s, and %s is %s", op, name, name, te_dtype_name(out->dtype));
        r = te__want_matrix(te, op, name, out, m, n, "x", x);
    } else {
        if (out && !te__is_fp8(out->dtype))
            return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; f32, f16, bf16, e4m3 or e5m2 is needed", op, name, te_dtype_name(out->dtype));
        if (out && (te__rows(out) != m || te__cols(out) < n))
            return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s and x is %s; %s must be [%lld, %lld or more]", op, name, te__shape_text(out, a),
                            te__shape_text(x, b), name, (long long)m, (long long)n);
        if (col) r = te__want(te, op, "col", col);
        if (r == TE_OK && col && !te__is_fp8(col->dtype))
            r = te__fail(te, TE_ERR_DTYPE, "%s: col is %s; e4m3 or e5m2 is needed", op, te_dtype_name(col->dtype));
        if (r == TE_OK && col && out && col->dtype != out->dtype)
            r = te__fail(te, TE_ERR_DTYPE, "%s: %s is %s and col is %s; both hold the same codes", op, name, te_dtype_name(out->dtype), te_dtype_name(col->dtype));
        if (r == TE_OK && col && (te__rows(col) != n || te__cols(col) < m))
            r = te__fail(te, TE_ERR_SHAPE, "%s: col is %s and x is %s; col must be [%lld, %lld or more]", op, te__shape_text(col, a), te__shape_text(x, b),
                         (long long)n, (long long)m);
        if (r == TE_OK) r = te__want_f32(te, op, "scale", scale, 1);
        if (r == TE_OK && scale_inv) r = te__want_f32(te, op, "scale_inv", scale_inv, 1);
    }
    return r;
}

static te_result te__check_act_fwd(te_ctx *te, te_op_act_fwd_args *a) {
    char text[TE__SHAPE_TEXT];
    int64_t n;
    te_result r = te__check_activation(te, "act_fwd", a->activation, &a->limit, &a->alpha);
    if (r == TE_OK) r = te__want_float(te, "act_fwd", "x", a->x);
    if (r != TE_OK) return r;
    n = te__cols(a->x);
    if (te_activation_is_gated(a->activation)) {
        if (n % 2)
            return te__fail(te, TE_ERR_SHAPE, "act_fwd: x is %s; a gated activation needs an even last size: two halves", te__shape_text(a->x, text));
        n /= 2;
    }
    return te__act_check_output(te, "act_fwd", "y", a->y, a->col, a->scale, a->scale_inv, a->amax, te__rows(a->x), n, a->x);
}

static te_result te__check_act_bwd(te_ctx *te, te_op_act_bwd_args *a) {
    te_result r = te__check_activation(te, "act_bwd", a->activation, &a->limit, &a->alpha);
    int64_t n;
    if (r == TE_OK) r = te__want_float(te, "act_bwd", "dy", a->dy);
    if (r == TE_OK) r = te__want_float(te, "act_bwd", "x", a->x);
    if (r != TE_OK) return r;
    n = te__cols(a->dy);
    r = te__want_matrix(te, "act_bwd", "x", a->x, te__rows(a->dy), te_activation_is_gated(a->activation) ? 2 * n : n, "dy", a->dy);
    if (r == TE_OK && a->dbias) r = te__want_vector(te, "act_bwd", "dbias", a->dbias, te__cols(a->x));
    if (r == TE_OK) r = te__act_check_output(te, "act_bwd", "dx", a->dx, a->col, a->scale, a->scale_inv, a->amax, te__rows(a->x), te__cols(a->x), a->x);
    return r;
}
