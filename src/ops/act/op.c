/* ops/act/op.c: the front door of the activations: defaults and checks. Knows tensors; must not know which backend
 * runs. */

TE_API bool te_activation_is_gated(te_activation activation) {
    return activation >= TE_GEGLU && activation <= TE_CLAMPED_SWIGLU;
}

static te_result te__check_activation(te_ctx *te, const char *op, te_activation act, float *limit, float *alpha,
                                      bool no_offset) {
    if ((int)act < (int)TE_GELU || (int)act > (int)TE_CLAMPED_SWIGLU)
        return te__fail(te, TE_ERR_INVALID, "%s: activation is %d; TE_GELU (1) to TE_CLAMPED_SWIGLU (12) are possible",
                        op, (int)act);
    if (no_offset && act != TE_CLAMPED_SWIGLU)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: no_glu_linear_offset with activation %d; TE_CLAMPED_SWIGLU (%d) alone has an offset: leave it false",
            op, (int)act, (int)TE_CLAMPED_SWIGLU);
    if (*limit == 0.0f) *limit = 7.0f;
    if (*alpha == 0.0f) *alpha = 1.702f;
    if (!(*limit > 0.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: limit is %g; it must be positive", op, (double)*limit);
    return TE_OK;
}

/* Checks the size of interleaved blocks, for n columns of y or dy. Fills in the default, one block of all columns,
 * which passes here a second time too. */
static te_result te__check_interleave(te_ctx *te, const char *op, te_activation act, int64_t n, int64_t *size,
                                      const char *with) {
    const int64_t given = *size, whole = te__max(n, 1);
    if (given == 0) *size = whole;
    if (given == 0 || given == whole) return TE_OK;
    if (!te_activation_is_gated(act))
        return te__fail(te, TE_ERR_INVALID, "%s: glu_interleave_size is %lld; it belongs to gated activations", op,
                        (long long)given);
    if (given < 0 || n % given)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: glu_interleave_size is %lld and a half has %lld columns; it must divide them", op,
                        (long long)given, (long long)n);
    if (with)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: glu_interleave_size is %lld and %s is given; one of them is possible", op,
                        (long long)given, with);
    return TE_OK;
}

/* Returns the format of the numbers that the backward pass's amax is of. */
static te_dtype te__act_amax_dtype(const te_op_act_bwd_args *a) {
    return a->rounded && !a->unrounded_amax ? a->x->dtype : TE_F32;
}

static te_result te__check_act_fwd(te_ctx *te, te_op_act_fwd_args *a) {
    char text[TE__SHAPE_TEXT];
    int64_t n = te__cols(a->x);
    te_result r = te__check_activation(te, "act_fwd", a->activation, &a->limit, &a->alpha, a->no_glu_linear_offset);
    if (r != TE_OK) return r;
    if (te_activation_is_gated(a->activation)) {
        if (n % 2)
            return te__fail(te, TE_ERR_SHAPE,
                            "act_fwd: x is %s; a gated activation needs an even last size: two halves",
                            te__shape_text(a->x, text));
        n /= 2;
    }
    r = te__check_interleave(te, "act_fwd", a->activation, n, &a->glu_interleave_size, a->col ? "col" : NULL);
    if (r != TE_OK) return r;
    return te__want_output(te, "act_fwd", "y", a->y, a->col, "col", a->scale, a->scale_inv, a->amax, te__rows(a->x), n,
                           a->x);
}

static te_result te__check_act_bwd(te_ctx *te, te_op_act_bwd_args *a) {
    int64_t n = te__cols(a->dy);
    te_result r = te__check_activation(te, "act_bwd", a->activation, &a->limit, &a->alpha, a->no_glu_linear_offset);
    if (r == TE_OK)
        r = te__want_matrix(te, "act_bwd", "x", a->x, te__rows(a->dy),
                            te_activation_is_gated(a->activation) ? 2 * n : n, "dy", a->dy);
    if (r == TE_OK)
        r = te__check_interleave(te, "act_bwd", a->activation, n, &a->glu_interleave_size,
                                 a->col                              ? "col"
                                 : a->dbias                          ? "dbias"
                                 : a->rounded                        ? "rounded"
                                 : te__cols(a->dx) != te__cols(a->x) ? "a padded dx"
                                                                     : NULL);
    if (r == TE_OK) r = te__want_numel(te, "act_bwd", "dbias", a->dbias, te__cols(a->x));
    if (r == TE_OK)
        r = te__want_output(te, "act_bwd", "dx", a->dx, a->col, "col", a->scale, a->scale_inv, a->amax, te__rows(a->x),
                            te__cols(a->x), a->x);
    return r;
}

/* Checks the arguments that both directions have; n: columns of y or dy. */
static te_result te__check_scaled_act(te_ctx *te, const char *op, const te_tensor *x, const te_tensor *act_scales,
                                      te_activation act, float *limit, float *alpha, bool no_offset,
                                      int64_t *interleave, int64_t n) {
    te_result r = te__check_activation(te, op, act, limit, alpha, no_offset);
    if (r == TE_OK) r = te__check_interleave(te, op, act, n, interleave, NULL);
    return r == TE_OK ? te__want_numel(te, op, "act_scales", act_scales, te__rows(x)) : r;
}
static te_result te__check_scaled_act_fwd(te_ctx *te, te_op_scaled_act_fwd_args *a) {
    const bool gated = te_activation_is_gated(a->activation);
    char text[TE__SHAPE_TEXT];
    int64_t n = te__cols(a->x);
    te_result r;
    if (gated && n % 2)
        return te__fail(te, TE_ERR_SHAPE,
                        "scaled_act_fwd: x is %s; a gated activation needs an even last size: two halves",
                        te__shape_text(a->x, text));
    n = gated ? n / 2 : n;
    r = te__check_scaled_act(te, "scaled_act_fwd", a->x, a->act_scales, a->activation, &a->limit, &a->alpha,
                             a->no_glu_linear_offset, &a->glu_interleave_size, n);
    return r == TE_OK ? te__want_matrix(te, "scaled_act_fwd", "y", a->y, te__rows(a->x), n, "x", a->x) : r;
}
static te_result te__check_scaled_act_bwd(te_ctx *te, te_op_scaled_act_bwd_args *a) {
    int64_t n = te__cols(a->dy);
    te_result r = te__check_scaled_act(te, "scaled_act_bwd", a->x, a->act_scales, a->activation, &a->limit, &a->alpha,
                                       a->no_glu_linear_offset, &a->glu_interleave_size, n);
    if (r == TE_OK)
        r = te__want_matrix(te, "scaled_act_bwd", "x", a->x, te__rows(a->dy),
                            te_activation_is_gated(a->activation) ? 2 * n : n, "dy", a->dy);
    if (r == TE_OK) r = te__want_like(te, "scaled_act_bwd", "dx", a->dx, "x", a->x);
    return r == TE_OK ? te__want_numel(te, "scaled_act_bwd", "dact_scales", a->dact_scales, te__rows(a->x)) : r;
}
