/* ops/softmax/cuda.c: chooses the softmax kernels and their launches. This file must not call the driver. */

/* Returns the number of threads for a row of n elements: one for every 16 elements, rounded up to whole warps, at most
 * 512. */
static int te__softmax_threads(int64_t n) { return (int)te__min(512, te__round_up(te__max(1, te__div_up(n, 16)), 32)); }

static te_result te__cuda_plan_softmax_fwd(te__plan *p, const te_op_softmax_fwd_args *a) {
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    const te__eight_row rows[] = {{a->x, a->x->dtype, 16}, {a->y, a->x->dtype, 16}};
    const char *lacks = te__eight_lacks(p, rows, TE__COUNT(rows), n);
    te__launch *l;
    te__softmax_fwd_kargs *k;
    if (m == 0 || n == 0) return TE_OK;
    l = te__plan_launch(p, "softmax", "softmax_fwd");
    k = TE__KARGS(p, l, te__softmax_fwd_kargs);
    k->x = te__data(a->x);
    k->mask = te__u8_data(a->mask);
    k->y = te__data(a->y);
    k->m = m;
    k->n = n;
    k->s_q = te__softmax_rows(a->x);
    k->heads = a->mask ? a->x->shape[1] : 1;
    k->scale = a->scale;
    k->causal = a->causal;
    k->one_mask = a->mask && a->mask->shape[0] == 1;
    k->x_dt = a->x->dtype;
    k->y_dt = a->y->dtype;
    if (!lacks) te__launch_option(l, "X_DT", a->x->dtype);
    te__launch_size(l, te__min(m, INT_MAX), 1, 1, te__softmax_threads(n), 0);
    return te__plan_why(p, lacks ? lacks : "a block for each row, eight scores a thread");
}

static te_result te__cuda_plan_softmax_bwd(te__plan *p, const te_op_softmax_bwd_args *a) {
    int64_t m = te__rows(a->y), n = te__cols(a->y);
    const te_dtype dt = a->y->dtype;
    const te__eight_row rows[] = {{a->y, dt, 16}, {a->dy, dt, 16}, {a->dx, dt, 16}};
    const char *lacks = te__eight_lacks(p, rows, TE__COUNT(rows), n);
    te__launch *l;
    te__softmax_bwd_kargs *k;
    if (m == 0 || n == 0) return TE_OK;
    l = te__plan_launch(p, "softmax", "softmax_bwd");
    k = TE__KARGS(p, l, te__softmax_bwd_kargs);
    k->dy = te__data(a->dy);
    k->y = te__data(a->y);
    k->dx = te__data(a->dx);
    k->m = m;
    k->n = n;
    k->scale = a->scale;
    k->dy_dt = a->dy->dtype;
    k->y_dt = a->y->dtype;
    k->dx_dt = a->dx->dtype;
    if (!lacks) te__launch_option(l, "X_DT", dt);
    te__launch_size(l, te__min(m, INT_MAX), 1, 1, te__softmax_threads(n), 0);
    return te__plan_why(p, lacks ? lacks : "a block for each row, eight numbers a thread");
}
