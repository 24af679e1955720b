/* ops/act/cuda.c: the activations, which kernel and how it is launched. Knows plans; must not know the driver. */

static te_result te__cuda_plan_act_fwd(te__plan *p, const te_act_fwd_args *a) {
    bool gated = te_activation_is_gated(a->activation), vector;
    int64_t m = te__rows(a->x), n = gated ? te__cols(a->x) / 2 : te__cols(a->x), ld = te__cols(a->y);
    te__launch *l;
    te__act_fwd_kargs *k;
    if (m == 0 || n == 0) return TE_OK;
    if (!gated && ld == n) { /* one long row */
        n = ld = m * n;
        m = 1;
    }
    vector = !p->baseline && n % 8 == 0 && ld % 8 == 0 && te__is_aligned(a->x, 16) && te__is_aligned(a->y, te__is_fp8(a->y->dtype) ? 8 : 16);
    l = te__plan_launch(p, "act", "act_fwd");
    k = TE__KARGS(p, l, te__act_fwd_kargs);
    k->x = te__data(a->x);
    k->y = te__data(a->y);
    k->scale = (const float *)te__data(a->scale);
    k->scale_inv = (float *)te__data(a->scale_inv);
    k->amax = (float *)te__data(a->amax);
    k->m = m;
    k->n = n;
    k->ld = ld;
    k->limit = a->limit;
    k->alpha = a->alpha;
    k->x_dt = a->x->dtype;
    k->y_dt = a->y->dtype;
    k->act = a->activation;
    if (vector) {
        te__launch_option(l, "ACT", a->activation);
        te__launch_option(l, "X_DT", a->x->dtype);
        te__launch_option(l, "Y_DT", a->y->dtype);
    }
    te__launch_size(l, te__div_up(m * ld, 2048), 1, 1, 256, 0);
    te__plan_why(p, vector ? "eight elements a thread" : "general: one element at a time");
    return TE_OK;
}

static te_result te__cuda_plan_act_bwd(te__plan *p, const te_act_bwd_args *a) {
    bool gated = te_activation_is_gated(a->activation), vector;
    int64_t m = te__rows(a->dy), n = te__cols(a->dy);
    te__launch *l;
    te__act_bwd_kargs *k;
    if (m == 0 || n == 0) return TE_OK;
    if (!gated) {
        n *= m;
        m = 1;
    }
    vector = !p->baseline && n % 8 == 0 && te__is_aligned(a->dy, 16) && te__is_aligned(a->x, 16) && te__is_aligned(a->dx, 16);
    l = te__plan_launch(p, "act", "act_bwd");
    k = TE__KARGS(p, l, te__act_bwd_kargs);
    k->dy = te__data(a->dy);
    k->x = te__data(a->x);
    k->dx = te__data(a->dx);
    k->m = m;
    k->n = n;
    k->limit = a->limit;
    k->alpha = a->alpha;
    k->dy_dt = a->dy->dtype;
    k->x_dt = a->x->dtype;
    k->dx_dt = a->dx->dtype;
    k->act = a->activation;
    if (vector) {
        te__launch_option(l, "ACT", a->activation);
        te__launch_option(l, "DY_DT", a->dy->dtype);
        te__launch_option(l, "X_DT", a->x->dtype);
        te__launch_option(l, "DX_DT", a->dx->dtype);
    }
    te__launch_size(l, te__div_up(m * n, 2048), 1, 1, 256, 0);
    te__plan_why(p, vector ? "eight elements a thread" : "general: one element at a time");
    return TE_OK;
}
