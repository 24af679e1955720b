/* ops/softcap/cpu.c: capped numbers, and the softmax of capped scores, the reference. Knows rows of numbers; must not know CUDA. */

enum { TE__SOFTCAP_RUN = 512 };

static void te__softcap_runs(void *user, int64_t begin, int64_t end) {
    const te__softcap_kargs *a = (const te__softcap_kargs *)user;
    float x[TE__SOFTCAP_RUN], dy[TE__SOFTCAP_RUN];
    int64_t run, i;
    for (run = begin; run < end; run++) {
        const int64_t at = run * TE__SOFTCAP_RUN, n = te__min(TE__SOFTCAP_RUN, a->count - at);
        te__load_row(a->x, (te_dtype)a->x_dt, at, n, x);
        if (a->dy) te__load_row(a->dy, (te_dtype)a->dy_dt, at, n, dy);
        for (i = 0; i < n; i++) {
            const float t = tanhf(x[i] / a->cap);
            x[i] = a->dy ? dy[i] * (1.0f - t * t) : a->cap * t;
        }
        te__store_row(a->y, (te_dtype)a->y_dt, at, n, x);
    }
}
static te_result te__cpu_softcap(te_ctx *te, const te_op_softcap_args *args) {
    te__softcap_kargs a = te__softcap_problem(args);
    te__parallel_for(te, te__div_up(a.count, TE__SOFTCAP_RUN), 4, te__softcap_runs, &a);
    return TE_OK;
}

/* Scores of a run of one row, capped: score[i], and with `slope` their derivatives by x. */
static void te__capped_scores(const te__capped_softmax_kargs *a, int64_t at, int64_t n, float *score, float *slope) {
    int64_t i;
    te__load_row(a->x, (te_dtype)a->x_dt, at, n, score);
    for (i = 0; i < n; i++) {
        const float t = a->cap > 0.0f ? tanhf(a->scale * score[i] / a->cap) : 0.0f;
        score[i] = a->cap > 0.0f ? a->cap * t : a->scale * score[i];
        if (slope) slope[i] = a->scale * (1.0f - t * t);
    }
}

static void te__capped_zeros(const te__capped_softmax_kargs *a, int64_t at, int64_t end) {
    float zeros[TE__SOFTCAP_RUN] = TE_ZERO;
    for (; at < end; at += TE__SOFTCAP_RUN) te__store_row(a->y, (te_dtype)a->y_dt, at, te__min(TE__SOFTCAP_RUN, end - at), zeros);
}

static void te__capped_row(const te__capped_softmax_kargs *a, int64_t row) {
    float score[TE__SOFTCAP_RUN], slope[TE__SOFTCAP_RUN], dy[TE__SOFTCAP_RUN], most = -INFINITY;
    const int64_t start = row * a->s_kv;
    double sum = 0, mean = 0;
    long long first, end;
    int64_t at, i;
    te__capped_keys(a, row, &first, &end);
    if (end < first) end = first;
    te__capped_zeros(a, start, start + te__min(first, a->s_kv));
    te__capped_zeros(a, start + end, start + a->s_kv);
    for (at = first; at < end; at += TE__SOFTCAP_RUN) {
        const int64_t n = te__min(TE__SOFTCAP_RUN, end - at);
        te__capped_scores(a, start + at, n, score, NULL);
        for (i = 0; i < n; i++) most = score[i] > most || score[i] != score[i] ? score[i] : most;
    }
    for (at = first; at < end; at += TE__SOFTCAP_RUN) {
        const int64_t n = te__min(TE__SOFTCAP_RUN, end - at);
        te__capped_scores(a, start + at, n, score, NULL);
        if (a->dy) te__load_row(a->dy, (te_dtype)a->dy_dt, start + at, n, dy);
        for (i = 0; i < n; i++) {
            const double e = (double)expf(score[i] - most);
            sum += e;
            if (a->dy) mean += e * (double)dy[i];
        }
    }
    for (at = first; at < end; at += TE__SOFTCAP_RUN) {
        const int64_t n = te__min(TE__SOFTCAP_RUN, end - at);
        te__capped_scores(a, start + at, n, score, slope);
        if (a->dy) te__load_row(a->dy, (te_dtype)a->dy_dt, start + at, n, dy);
        for (i = 0; i < n; i++) {
            const float p = expf(score[i] - most) / (float)sum;
            score[i] = a->dy ? p * (dy[i] - (float)(mean / sum)) * slope[i] : p;
        }
        te__store_row(a->y, (te_dtype)a->y_dt, start + at, n, score);
    }
}
static void te__capped_rows(void *user, int64_t begin, int64_t end) {
    for (; begin < end; begin++) te__capped_row((const te__capped_softmax_kargs *)user, begin);
}
static te_result te__cpu_capped_softmax_fwd(te_ctx *te, const te_op_capped_softmax_fwd_args *args) {
    te__capped_softmax_kargs a = te__capped_softmax_forward(args);
    te__parallel_for(te, a.s_kv ? a.rows : 0, 8, te__capped_rows, &a);
    return TE_OK;
}
static te_result te__cpu_capped_softmax_bwd(te_ctx *te, const te_op_capped_softmax_bwd_args *args) {
    te__capped_softmax_kargs a = te__capped_softmax_backward(args);
    te__parallel_for(te, a.s_kv ? a.rows : 0, 8, te__capped_rows, &a);
    return TE_OK;
}
