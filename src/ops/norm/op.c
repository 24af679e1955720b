/* ops/norm/op.c: the front door of LayerNorm and RMSNorm: defaults and checks. Knows tensors; must not know which backend runs. */

static te_result te__check_norm_fwd(te_ctx *te, te_norm_fwd_args *a, bool layernorm) {
    const char *op = layernorm ? "layernorm_fwd" : "rmsnorm_fwd";
    te_result r = te__want_float(te, op, "x", a->x);
    int64_t m, n;
    if (r != TE_OK) return r;
    m = te__rows(a->x);
    n = te__cols(a->x);
    if (a->eps == 0.0f) a->eps = 1e-5f;
    if (!(a->eps > 0.0f)) return te__fail(te, TE_ERR_INVALID, "%s: eps is %g; it must be positive", op, (double)a->eps);
    if (!layernorm && (a->beta || a->mean)) return te__fail(te, TE_ERR_INVALID, "%s: RMSNorm has no %s", op, a->beta ? "beta" : "mean");
    r = te__want_vector(te, op, "gamma", a->gamma, n);
    if (r == TE_OK && a->beta) r = te__want_vector(te, op, "beta", a->beta, n);
    if (r == TE_OK) r = te__want_output(te, op, a->y, a->scale, a->scale_inv, a->amax, m, n, a->x);
    if (r == TE_OK && a->mean) r = te__want_f32(te, op, "mean", a->mean, m);
    if (r == TE_OK && a->rstd) r = te__want_f32(te, op, "rstd", a->rstd, m);
    return r;
}

static te_result te__check_norm_bwd(te_ctx *te, te_norm_bwd_args *a, bool layernorm) {
    const char *op = layernorm ? "layernorm_bwd" : "rmsnorm_bwd";
    te_result r = te__want_float(te, op, "x", a->x);
    int64_t m, n;
    if (r != TE_OK) return r;
    m = te__rows(a->x);
    n = te__cols(a->x);
    if (!layernorm && (a->dbeta || a->mean)) return te__fail(te, TE_ERR_INVALID, "%s: RMSNorm has no %s", op, a->dbeta ? "dbeta" : "mean");
    r = te__want_like(te, op, "dy", a->dy, "x", a->x);
    if (r == TE_OK) r = te__want_like(te, op, "dx", a->dx, "x", a->x);
    if (r == TE_OK && a->add) r = te__want_like(te, op, "add", a->add, "x", a->x);
    if (r == TE_OK) r = te__want_vector(te, op, "gamma", a->gamma, n);
    if (r == TE_OK && a->dgamma) r = te__want_vector(te, op, "dgamma", a->dgamma, n);
    if (r == TE_OK && a->dbeta) r = te__want_vector(te, op, "dbeta", a->dbeta, n);
    if (r == TE_OK && layernorm) r = te__want_f32(te, op, "mean", a->mean, m);
    if (r == TE_OK) r = te__want_f32(te, op, "rstd", a->rstd, m);
    return r;
}

static te_result te__check_layernorm_fwd(te_ctx *te, te_layernorm_fwd_args *a) { return te__check_norm_fwd(te, a, true); }
static te_result te__check_rmsnorm_fwd(te_ctx *te, te_rmsnorm_fwd_args *a) { return te__check_norm_fwd(te, a, false); }
static te_result te__check_layernorm_bwd(te_ctx *te, te_layernorm_bwd_args *a) { return te__check_norm_bwd(te, a, true); }
static te_result te__check_rmsnorm_bwd(te_ctx *te, te_rmsnorm_bwd_args *a) { return te__check_norm_bwd(te, a, false); }
