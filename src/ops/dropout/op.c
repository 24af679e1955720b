/* ops/dropout/op.c: checks the calls of dropout. This file must not depend on the backend. */

static te_result te__check_dropout_p(te_ctx *te, const char *op, float p, int64_t *run) {
    if (!(p >= 0.0f && p <= 1.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: p is %g; it is a probability, 0 to 1", op, (double)p);
    if (*run < 0)
        return te__fail(te, TE_ERR_INVALID, "%s: run is %lld; it counts elements, at least 1 (0 => 1)", op,
                        (long long)*run);
    if (*run == 0) *run = 1;
    return TE_OK;
}

static te_result te__check_dropout_add_fwd(te_ctx *te, te_op_dropout_add_fwd_args *a) {
    te_result r = te__check_dropout_p(te, "dropout_add_fwd", a->p, &a->run);
    if (r == TE_OK) r = te__want_numel(te, "dropout_add_fwd", "bias", a->bias, te__cols(a->x));
    if (r == TE_OK) r = te__want_like(te, "dropout_add_fwd", "residual", a->residual, "x", a->x);
    if (r == TE_OK) r = te__want_like(te, "dropout_add_fwd", "y", a->y, "x", a->x);
    if (r == TE_OK) r = te__want_rng(te, "dropout_add_fwd", a->rng);
    return r;
}

static te_result te__check_dropout_add_bwd(te_ctx *te, te_op_dropout_add_bwd_args *a) {
    te_result r = te__check_dropout_p(te, "dropout_add_bwd", a->p, &a->run);
    if (r == TE_OK) r = te__want_like(te, "dropout_add_bwd", "dx", a->dx, "dy", a->dy);
    if (r == TE_OK) r = te__want_rng(te, "dropout_add_bwd", a->rng);
    return r;
}

/* Returns the arguments of the backward pass: a forward pass on dy without bias and residual. */
static te_op_dropout_add_fwd_args te__dropout_backward_args(const te_op_dropout_add_bwd_args *a) {
    te_op_dropout_add_fwd_args forward = TE_ZERO;
    forward.x = a->dy;
    forward.y = a->dx;
    forward.p = a->p;
    forward.run = a->run;
    forward.seed = a->seed;
    forward.offset = a->offset;
    forward.rng = a->rng;
    return forward;
}
