/* ops/act/op.c: the checks and defaults of the activation operations. It must not depend on which backend runs. */

/* The entry of one activation in the host's table. The formulas are in cpu.c and act.cuh. */
typedef struct te__activation_row {
    te__act_form form;
    te__act_f f;
    te_epilogue epilogue; /* the GEMM epilogue that multiplies by f', or TE_EPILOGUE_NONE */
    bool one_kernel;      /* true: in TransformerEngine's te.ops one kernel computes dx and the gradient of the bias
                           * that is added before the activation */
} te__activation_row;
#define TE__ACT_ROW(name, form, f, epilogue, one_kernel)                                                               \
    {TE__ACT_##form, TE__F_##f, TE_EPILOGUE_##epilogue, one_kernel},
static const te__activation_row te__activations[TE_ACTIVATION_COUNT] = {
    {TE__ACT_PLAIN, TE__F_COUNT, TE_EPILOGUE_NONE, false}, /* TE_ACTIVATION_DEFAULT */
    TE__ACTIVATIONS(TE__ACT_ROW)};
#undef TE__ACT_ROW
/* Asserts that the activations in ops/act/list.h are complete and in the order of te_activation. */
#define TE__ACT_ROW(name, form, f, epilogue, one_kernel) TE__ACT_ROW_##name,
enum { TE__ACT_ROW_DEFAULT, TE__ACTIVATIONS(TE__ACT_ROW) TE__ACT_ROWS };
#undef TE__ACT_ROW
#define TE__ACT_ROW(name, form, f, epilogue, one_kernel)                                                               \
    TE__STATIC_ASSERT((int)TE__ACT_ROW_##name == (int)TE_##name, "te_activation and ops/act/list.h have one order");
TE__ACTIVATIONS(TE__ACT_ROW)
#undef TE__ACT_ROW
TE__STATIC_ASSERT((int)TE__ACT_ROWS == (int)TE_ACTIVATION_COUNT, "an activation has no row in ops/act/list.h");

/* Returns true if `a` is a value of te_activation other than TE_ACTIVATION_DEFAULT. */
static bool te__activation_known(te_activation a) {
    return (int)a > (int)TE_ACTIVATION_DEFAULT && (int)a < (int)TE_ACTIVATION_COUNT;
}
static const te__activation_row *te__activation_row_of(te_activation a) {
    return &te__activations[te__activation_known(a) ? a : TE_ACTIVATION_DEFAULT];
}
TE_API bool te_activation_is_gated(te_activation activation) {
    return te__activation_row_of(activation)->form != TE__ACT_PLAIN;
}

/* te__activation_named returns the activation of form `form` whose nonlinearity has the name `name` in Hugging Face
 * transformers, or TE_ACTIVATION_DEFAULT. */
#define TE__ACT_ROW(f, s, value, slope, name, also) {name, also},
static const char *const te__nonlinearity_names[TE__F_COUNT][2] = {TE__NONLINEARITIES(TE__ACT_ROW)};
#undef TE__ACT_ROW
static te_activation te__activation_named(const char *name, te__act_form form) {
    int a;
    for (a = TE_ACTIVATION_DEFAULT + 1; *name && a < TE_ACTIVATION_COUNT; a++) {
        const char *const *names = te__nonlinearity_names[te__activations[a].f];
        if (te__activations[a].form == form && (strcmp(name, names[0]) == 0 || strcmp(name, names[1]) == 0))
            return (te_activation)a;
    }
    return TE_ACTIVATION_DEFAULT;
}
/* Writes the names of all activations of form `form` to `text`, and returns `text`. If transformers has two names for
 * an activation, writes the first one. */
static const char *te__activation_names(te__act_form form, char *text, size_t size) {
    size_t used = 0;
    int a;
    text[0] = '\0';
    for (a = TE_ACTIVATION_DEFAULT + 1; a < TE_ACTIVATION_COUNT && used < size; a++)
        if (te__activations[a].form == form)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "",
                                     te__nonlinearity_names[te__activations[a].f][0]);
    return text;
}

static te_result te__check_activation(te_ctx *te, const char *op, te_activation act, te_activation_params *p) {
    if (!te__activation_known(act))
        return te__fail(te, TE_ERR_INVALID, "%s: activation is %d; %d to %d are possible: see te_activation", op,
                        (int)act, TE_ACTIVATION_DEFAULT + 1, TE_ACTIVATION_COUNT - 1);
    if (p->no_glu_linear_offset && te__activations[act].form != TE__ACT_CLAMPED)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: no_glu_linear_offset with activation %d; TE_CLAMPED_SWIGLU (%d) alone has an offset: leave it false",
            op, (int)act, (int)TE_CLAMPED_SWIGLU);
    if (p->limit == 0.0f) p->limit = 7.0f;
    if (p->alpha == 0.0f) p->alpha = 1.702f;
    if (!(p->limit > 0.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: limit is %g; it must be positive", op, (double)p->limit);
    return TE_OK;
}

/* Checks *size, the call's glu_interleave_size. The two halves of a gated x alternate in blocks of this many columns.
 * Changes 0 to max(n, 1): each half is then one block. n is the number of columns of y or dy. `with` names an option of
 * the call that needs each half in one block, or is NULL. */
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

/* Returns the format to which the backward pass rounds the amax. */
static te_dtype te__act_amax_dtype(const te_op_act_bwd_args *a) {
    return a->rounded && !a->unrounded_amax ? a->x->dtype : TE_F32;
}

static te_result te__check_act_fwd(te_ctx *te, te_op_act_fwd_args *a) {
    char text[TE__SHAPE_TEXT];
    int64_t n = te__cols(a->x);
    te_result r = te__check_activation(te, "act_fwd", a->activation, &a->activation_params);
    if (r != TE_OK) return r;
    if (te_activation_is_gated(a->activation)) {
        if (n % 2)
            return te__fail(te, TE_ERR_SHAPE,
                            "act_fwd: x is %s; a gated activation needs an even last size: two halves",
                            te__shape_text(a->x, text));
        n /= 2;
    }
    r = te__check_interleave(te, "act_fwd", a->activation, n, &a->activation_params.glu_interleave_size,
                             a->col ? "col" : NULL);
    if (r != TE_OK) return r;
    return te__want_output(te, "act_fwd", "y", a->y, a->col, "col", a->scale, a->scale_inv, te__rows(a->x), n, a->x);
}

static te_result te__check_act_bwd(te_ctx *te, te_op_act_bwd_args *a) {
    int64_t n = te__cols(a->dy);
    te_result r = te__check_activation(te, "act_bwd", a->activation, &a->activation_params);
    if (r == TE_OK)
        r = te__want_matrix(te, "act_bwd", "x", a->x, te__rows(a->dy),
                            te_activation_is_gated(a->activation) ? 2 * n : n, "dy", a->dy);
    if (r == TE_OK)
        r = te__check_interleave(te, "act_bwd", a->activation, n, &a->activation_params.glu_interleave_size,
                                 a->col                              ? "col"
                                 : a->dbias                          ? "dbias"
                                 : a->rounded                        ? "rounded"
                                 : te__cols(a->dx) != te__cols(a->x) ? "a padded dx"
                                                                     : NULL);
    if (r == TE_OK) r = te__want_numel(te, "act_bwd", "dbias", a->dbias, te__cols(a->x));
    if (r == TE_OK)
        r = te__want_output(te, "act_bwd", "dx", a->dx, a->col, "col", a->scale, a->scale_inv, te__rows(a->x),
                            te__cols(a->x), a->x);
    return r;
}

/* Checks the arguments that scaled_act_fwd and scaled_act_bwd have in common. n is the number of columns of y or dy. */
static te_result te__check_scaled_act(te_ctx *te, const char *op, const te_tensor *x, const te_tensor *act_scales,
                                      te_activation act, te_activation_params *p, int64_t n) {
    te_result r = te__check_activation(te, op, act, p);
    if (r == TE_OK) r = te__check_interleave(te, op, act, n, &p->glu_interleave_size, NULL);
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
    r = te__check_scaled_act(te, "scaled_act_fwd", a->x, a->act_scales, a->activation, &a->activation_params, n);
    return r == TE_OK ? te__want_matrix(te, "scaled_act_fwd", "y", a->y, te__rows(a->x), n, "x", a->x) : r;
}
static te_result te__check_scaled_act_bwd(te_ctx *te, te_op_scaled_act_bwd_args *a) {
    int64_t n = te__cols(a->dy);
    te_result r = te__check_scaled_act(te, "scaled_act_bwd", a->x, a->act_scales, a->activation,
                                       &a->activation_params, n);
    if (r == TE_OK)
        r = te__want_matrix(te, "scaled_act_bwd", "x", a->x, te__rows(a->dy),
                            te_activation_is_gated(a->activation) ? 2 * n : n, "dy", a->dy);
    if (r == TE_OK) r = te__want_like(te, "scaled_act_bwd", "dx", a->dx, "x", a->x);
    return r == TE_OK ? te__want_numel(te, "scaled_act_bwd", "dact_scales", a->dact_scales, te__rows(a->x)) : r;
}
