/* ops/norm/op.c: sets the default values of LayerNorm and RMSNorm and checks their calls. This file must not depend on
 * the backend. */

/* Checks that the options suit the operation, and fills in default values. */
static te_result te__check_norm_options(te_ctx *te, const char *op, te_norm_options *o, bool layernorm) {
    const te_normalization own = layernorm ? TE_LAYERNORM : TE_RMSNORM;
    if (o->normalization && o->normalization != own)
        return te__fail(te, TE_ERR_INVALID, "%s: norm.normalization is %d; this operation's own is %d: leave it 0", op,
                        (int)o->normalization, (int)own);
    o->normalization = own;
    if (o->eps == 0.0f) o->eps = 1e-5f;
    if (o->eps > 0.0f) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: eps is %g; it must be positive", op, (double)o->eps);
}

static te_result te__check_norm_fwd(te_ctx *te, te_norm_fwd_args *a, bool layernorm) {
    const char *op = layernorm ? "layernorm_fwd" : "rmsnorm_fwd";
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    te_result r = te__check_norm_options(te, op, &a->norm, layernorm);
    if (r != TE_OK) return r;
    if (!layernorm && (a->beta || a->mean))
        return te__fail(te, TE_ERR_INVALID, "%s: RMSNorm has no %s", op, a->beta ? "beta" : "mean");
    if (layernorm && a->rounded)
        return te__fail(te, TE_ERR_INVALID, "%s: rounded is an option of rmsnorm_fwd; leave it false", op);
    if (a->y_amax && te__is_fp8(a->y->dtype))
        return te__fail(te, TE_ERR_INVALID, "%s: y_amax belongs to a float y, and y is %s; it has amax", op,
                        te_dtype_name(a->y->dtype));
    if (a->y_amax && a->amax) return te__fail(te, TE_ERR_INVALID, "%s: amax and y_amax; one of them is possible", op);
    r = te__want_numel(te, op, "gamma", a->gamma, n);
    if (r == TE_OK) r = te__want_numel(te, op, "beta", a->beta, n);
    if (r == TE_OK) r = te__want_output(te, op, "y", a->y, a->y_col, "y_col", a->scale, a->scale_inv, m, n, a->x);
    if (r == TE_OK) r = te__want_numel(te, op, "mean", a->mean, m);
    return r == TE_OK ? te__want_numel(te, op, "rstd", a->rstd, m) : r;
}

static te_result te__check_norm_bwd(te_ctx *te, te_norm_bwd_args *a, bool layernorm) {
    const char *op = layernorm ? "layernorm_bwd" : "rmsnorm_bwd";
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    te_result r = te__check_norm_options(te, op, &a->norm, layernorm);
    if (r != TE_OK) return r;
    if (!layernorm && (a->dbeta || a->mean))
        return te__fail(te, TE_ERR_INVALID, "%s: RMSNorm has no %s", op, a->dbeta ? "dbeta" : "mean");
    r = te__want_like(te, op, "dy", a->dy, "x", a->x);
    if (r == TE_OK) r = te__want_like(te, op, "dx", a->dx, "x", a->x);
    if (r == TE_OK) r = te__want_like(te, op, "add", a->add, "x", a->x);
    if (r == TE_OK) r = te__want_numel(te, op, "gamma", a->gamma, n);
    if (r == TE_OK) r = te__want_numel(te, op, "dgamma", a->dgamma, n);
    if (r == TE_OK) r = te__want_numel(te, op, "dbeta", a->dbeta, n);
    if (r == TE_OK) r = te__want_numel(te, op, "mean", a->mean, m);
    return r == TE_OK ? te__want_numel(te, op, "rstd", a->rstd, m) : r;
}

static te_result te__check_l2normalize_fwd(te_ctx *te, te_op_l2normalize_fwd_args *a) {
    te_result r = te__want_like(te, "l2normalize_fwd", "y", a->y, "x", a->x);
    if (a->eps == 0.0f) a->eps = 1e-6f;
    if (r == TE_OK && !(a->eps > 0.0f))
        r = te__fail(te, TE_ERR_INVALID, "l2normalize_fwd: eps is %g; it must be positive", (double)a->eps);
    return r == TE_OK ? te__want_numel(te, "l2normalize_fwd", "rnorm", a->rnorm, te__rows(a->x)) : r;
}
static te_result te__check_l2normalize_bwd(te_ctx *te, te_op_l2normalize_bwd_args *a) {
    te_result r = te__want_like(te, "l2normalize_bwd", "dy", a->dy, "x", a->x);
    if (r == TE_OK) r = te__want_like(te, "l2normalize_bwd", "dx", a->dx, "x", a->x);
    return r == TE_OK ? te__want_numel(te, "l2normalize_bwd", "rnorm", a->rnorm, te__rows(a->x)) : r;
}

/* Returns the arguments of the transpose that makes y_col. */
static te_op_transpose_args te__norm_transpose_args(const te_norm_fwd_args *a) {
    te_op_transpose_args t = TE_ZERO;
    t.src = a->y;
    t.dst = a->y_col;
    t.rows = te__rows(a->x);
    t.columns = te__cols(a->x);
    return t;
}

static te_result te__check_layernorm_fwd(te_ctx *te, te_op_layernorm_fwd_args *a) {
    return te__check_norm_fwd(te, a, true);
}
static te_result te__check_rmsnorm_fwd(te_ctx *te, te_op_rmsnorm_fwd_args *a) {
    return te__check_norm_fwd(te, a, false);
}
static te_result te__check_layernorm_bwd(te_ctx *te, te_op_layernorm_bwd_args *a) {
    return te__check_norm_bwd(te, a, true);
}
static te_result te__check_rmsnorm_bwd(te_ctx *te, te_op_rmsnorm_bwd_args *a) {
    return te__check_norm_bwd(te, a, false);
}
