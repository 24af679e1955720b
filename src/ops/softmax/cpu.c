/* ops/softmax/cpu.c: the CPU's reference of softmax over rows. This file must not depend on CUDA. */

enum { TE__SOFTMAX_RUN = 512 };

/* Returns how many columns of a row take part in the softmax. These are all columns, or, with `causal`, those up to the
 * diagonal. */
static int64_t te__softmax_visible(const te_op_softmax_fwd_args *a, int64_t row) {
    int64_t s_q = te__softmax_rows(a->x), n = te__cols(a->x);
    return a->causal ? te__min(n, te__max(0, row % s_q + 1 + n - s_q)) : n;
}
/* Computes the scaled and masked scores begin .. begin + count - 1 of a row. */
static void te__softmax_scores(const te_op_softmax_fwd_args *a, int64_t row, int64_t begin, int64_t count, float *out) {
    int64_t n = te__cols(a->x), s_q = te__softmax_rows(a->x), k;
    te__load_row(te__data(a->x), a->x->dtype, row * n + begin, count, out);
    for (k = 0; k < count; k++) out[k] *= a->scale;
    if (a->mask) {
        int64_t batch = a->mask->shape[0] == 1 ? 0 : row / (s_q * a->x->shape[1]);
        const uint8_t *mask = te__u8_data(a->mask) + (batch * s_q + row % s_q) * n + begin;
        for (k = 0; k < count; k++)
            if (mask[k]) out[k] = TE__SOFTMAX_MASKED;
    }
}
static void te__softmax_fwd_rows(void *user, int64_t begin, int64_t end) {
    const te_op_softmax_fwd_args *a = (const te_op_softmax_fwd_args *)user;
    float run[TE__SOFTMAX_RUN];
    int64_t n = te__cols(a->x), row, i, k, count;
    for (row = begin; row < end; row++) {
        int64_t visible = te__softmax_visible(a, row);
        float m = -INFINITY, inverse;
        double s = 0.0;
        for (i = 0; i < visible; i += count) {
            count = te__min(TE__SOFTMAX_RUN, visible - i);
            te__softmax_scores(a, row, i, count, run);
            for (k = 0; k < count; k++) m = run[k] > m ? run[k] : m;
        }
        for (i = 0; i < visible; i += count) {
            count = te__min(TE__SOFTMAX_RUN, visible - i);
            te__softmax_scores(a, row, i, count, run);
            for (k = 0; k < count; k++) s += (double)expf(run[k] - m);
        }
        inverse = a->mask && m == TE__SOFTMAX_MASKED ? 0.0f : (float)(1.0 / s);
        for (i = 0; i < n; i += count) { /* y may be x: element i is read before it is written */
            count = te__min(TE__SOFTMAX_RUN, (i < visible ? visible : n) - i);
            if (i < visible) te__softmax_scores(a, row, i, count, run);
            for (k = 0; k < count; k++) run[k] = i < visible ? expf(run[k] - m) * inverse : 0.0f;
            te__store_row(te__data(a->y), a->y->dtype, row * n + i, count, run);
        }
    }
}
static te_result te__cpu_softmax_fwd(te_ctx *te, const te_op_softmax_fwd_args *a) {
    te_op_softmax_fwd_args args = *a;
    te__parallel_for(te, te__rows(a->x), te__max(1, 4096 / te__max(1, te__cols(a->x))), te__softmax_fwd_rows, &args);
    return TE_OK;
}

static void te__softmax_bwd_rows(void *user, int64_t begin, int64_t end) {
    const te_op_softmax_bwd_args *a = (const te_op_softmax_bwd_args *)user;
    float y[TE__SOFTMAX_RUN], dy[TE__SOFTMAX_RUN];
    int64_t n = te__cols(a->y), row, i, k, count;
    for (row = begin; row < end; row++) {
        double s = 0.0;
        float sum;
        for (i = 0; i < n; i += count) {
            count = te__min(TE__SOFTMAX_RUN, n - i);
            te__load_row(te__data(a->y), a->y->dtype, row * n + i, count, y);
            te__load_row(te__data(a->dy), a->dy->dtype, row * n + i, count, dy);
            for (k = 0; k < count; k++) s += (double)y[k] * (double)dy[k];
        }
        sum = (float)s;
        for (i = 0; i < n; i += count) {
            count = te__min(TE__SOFTMAX_RUN, n - i);
            te__load_row(te__data(a->y), a->y->dtype, row * n + i, count, y);
            te__load_row(te__data(a->dy), a->dy->dtype, row * n + i, count, dy);
            for (k = 0; k < count; k++) dy[k] = a->scale * (y[k] * dy[k] - y[k] * sum);
            te__store_row(te__data(a->dx), a->dx->dtype, row * n + i, count, dy);
        }
    }
}
static te_result te__cpu_softmax_bwd(te_ctx *te, const te_op_softmax_bwd_args *a) {
    te_op_softmax_bwd_args args = *a;
    te__parallel_for(te, te__rows(a->y), te__max(1, 4096 / te__max(1, te__cols(a->y))), te__softmax_bwd_rows, &args);
    return TE_OK;
}
