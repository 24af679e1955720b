/* ops/norm/l2normalize.c: the reference of the L2 normalization of rows, and the plan of its kernel. */

enum { TE__L2_RUN = 512 };

typedef struct te__l2_job {
    const te_tensor *x, *dy; /* dy: NULL in the forward pass */
    te_tensor *y;
    float *rnorm; /* the forward pass writes it unless it is NULL; the backward pass reads it */
    float eps;
} te__l2_job;

static void te__l2_rows(void *user, int64_t begin, int64_t end) {
    const te__l2_job *j = (const te__l2_job *)user;
    float x[TE__L2_RUN], dy[TE__L2_RUN];
    int64_t n = te__cols(j->x), row, i, k, count;
    for (row = begin; row < end; row++) {
        double sum = 0.0;
        float rnorm, along;
        for (i = 0; i < n; i += count) {
            count = te__min(TE__L2_RUN, n - i);
            te__load_row(te__data(j->x), j->x->dtype, row * n + i, count, x);
            if (j->dy) te__load_row(te__data(j->dy), j->dy->dtype, row * n + i, count, dy);
            for (k = 0; k < count; k++) sum += (double)x[k] * (double)(j->dy ? dy[k] : x[k]);
        }
        rnorm = j->dy ? j->rnorm[row] : 1.0f / sqrtf((float)sum + j->eps);
        along = rnorm * rnorm * (float)sum;
        for (i = 0; i < n; i += count) {
            count = te__min(TE__L2_RUN, n - i);
            te__load_row(te__data(j->x), j->x->dtype, row * n + i, count, x);
            if (j->dy) te__load_row(te__data(j->dy), j->dy->dtype, row * n + i, count, dy);
            for (k = 0; k < count; k++) x[k] = rnorm * (j->dy ? dy[k] - x[k] * along : x[k]);
            te__store_row(te__data(j->y), j->y->dtype, row * n + i, count, x);
        }
        if (!j->dy && j->rnorm) j->rnorm[row] = rnorm;
    }
}
static te_result te__cpu_l2normalize(te_ctx *te, te__l2_job *j) {
    te__parallel_for(te, te__rows(j->x), te__max(1, 4096 / te__max(1, te__cols(j->x))), te__l2_rows, j);
    return TE_OK;
}
static te_result te__cuda_plan_l2normalize(te__plan *p, const te__l2_job *j) {
    te__l2normalize_kargs k = TE_ZERO;
    int64_t m = te__rows(j->x), n = te__cols(j->x);
    if (m == 0) return TE_OK; /* also if rows have no elements: rnorm is written */
    k.x = te__data(j->x);
    k.dy = te__data(j->dy);
    k.y = te__data(j->y);
    k.rnorm = j->rnorm;
    k.m = m;
    k.n = n;
    k.eps = j->eps;
    k.x_dt = j->x->dtype;
    k.dy_dt = te__dtype_of(j->dy);
    k.y_dt = j->y->dtype;
    te__plan_with(p, "norm", "l2normalize", te__min(te__div_up(m, 4), INT_MAX), 128, &k, sizeof(k));
    return te__plan_why(p, "a warp for each row");
}

static te__l2_job te__l2_forward(const te_op_l2normalize_fwd_args *a) {
    te__l2_job j = TE_ZERO;
    j.x = a->x;
    j.y = a->y;
    j.rnorm = te__f32_data(a->rnorm);
    j.eps = a->eps;
    return j;
}
static te__l2_job te__l2_backward(const te_op_l2normalize_bwd_args *a) {
    te__l2_job j = TE_ZERO;
    j.x = a->x;
    j.dy = a->dy;
    j.y = a->dx;
    j.rnorm = te__f32_data(a->rnorm);
    return j;
}
static te_result te__cpu_l2normalize_fwd(te_ctx *te, const te_op_l2normalize_fwd_args *a) {
    te__l2_job j = te__l2_forward(a);
    return te__cpu_l2normalize(te, &j);
}
static te_result te__cpu_l2normalize_bwd(te_ctx *te, const te_op_l2normalize_bwd_args *a) {
    te__l2_job j = te__l2_backward(a);
    return te__cpu_l2normalize(te, &j);
}
static te_result te__cuda_plan_l2normalize_fwd(te__plan *p, const te_op_l2normalize_fwd_args *a) {
    te__l2_job j = te__l2_forward(a);
    return te__cuda_plan_l2normalize(p, &j);
}
static te_result te__cuda_plan_l2normalize_bwd(te__plan *p, const te_op_l2normalize_bwd_args *a) {
    te__l2_job j = te__l2_backward(a);
    return te__cuda_plan_l2normalize(p, &j);
}
