/* ops/softcap/op.c: checks a call of softcap, and describes the problem for both backends. This file must not depend on
 * the backend. */

static te_result te__check_softcap(te_ctx *te, te_op_softcap_args *a) {
    te_result r;
    if (!(a->cap > 0.0f && a->cap <= FLT_MAX))
        return te__fail(te, TE_ERR_INVALID, "softcap: cap is %g; it is positive", (double)a->cap);
    r = te__want_like(te, "softcap", "dy", a->dy, "x", a->x);
    return r == TE_OK ? te__want_like(te, "softcap", "y", a->y, "x", a->x) : r;
}

/* ---- the description ---- */

static te__softcap_kargs te__softcap_problem(const te_op_softcap_args *a) {
    te__softcap_kargs k = TE_ZERO;
    k.x = te__data(a->x);
    k.dy = te__data(a->dy);
    k.y = te__data(a->y);
    k.count = te__numel(a->x);
    k.cap = a->cap;
    k.x_dt = (int)a->x->dtype;
    k.dy_dt = te__dtype_of(a->dy);
    k.y_dt = (int)a->y->dtype;
    return k;
}
