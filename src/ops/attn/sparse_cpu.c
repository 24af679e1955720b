/* ops/attn/sparse_cpu.c: sparse attention on the CPU by the formulas of api/ops_model.h, with sums in double. It
 * converts number formats only through cpu/rows.c.
 *
 * The backward pass computes these gradients. The first line is for one query and head. kv_k is the key that entry k of
 * the query's list names.
 *
 *   dP_k = dO . kv_k      D = dO . O      dS_k = P_k (dP_k - D)      dQ = scale sum_k dS_k kv_k
 *   dKV_j = sum of scale dS_k q + P_k dO over all queries and heads, and over the entries k that name key j
 *   dsink = - sum over queries of e^(sink - lse) D
 *
 * te__sparse_queries runs the forward pass, or computes D and dQ of the backward pass. Each query is one task.
 * te__sparse_keys computes dKV. Each key is one task. Every sum has a fixed order, whichever thread computes it. */

typedef struct te__sparse_work {
    te__sparse_attn_kargs a;
    bool backward;
    float *memory;      /* [workers, n, d + 1]: the keys of a query's list, and their scores */
    int64_t workers;
} te__sparse_work;

static int te__sparse_key_of(const te__sparse_attn_kargs *a, const int *list, int64_t k) {
    return list[k] >= 0 && list[k] < a->s_kv ? list[k] : -1;
}

static double te__sparse_dot(const float *x, const float *y, int n) {
    double sum = 0.0;
    int c;
    for (c = 0; c < n; c++) sum += (double)x[c] * (double)y[c];
    return sum;
}
static void te__sparse_row(const te__attn_view *x, int64_t b, int64_t h, int64_t i, int n, float *out) {
    te__load_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, i), n, out);
}
static void te__sparse_store(const te__attn_view *x, int64_t b, int64_t h, int64_t i, int n, const double *in,
                             double scale) {
    float row[TE__SPARSE_MAX_D];
    int c;
    for (c = 0; c < n; c++) row[c] = (float)(in[c] * scale);
    te__store_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, i), n, row);
}

/* Runs the forward pass of one head of a query, whose keys are the first `seen` rows of `keys`. `scores` is scratch
 * memory of n floats. */
static void te__sparse_head_fwd(const te__sparse_attn_kargs *a, const float *keys, int64_t seen, float *scores,
                                int64_t b, int64_t i, int64_t h) {
    const double sink = a->sinks ? (double)a->sinks[h] : -HUGE_VAL;
    double o[TE__SPARSE_MAX_D] = TE_ZERO, sum = 0.0, top = -1e30, p;
    float q[TE__SPARSE_MAX_D];
    int64_t k;
    int c;
    te__sparse_row(&a->q, b, h, i, a->d, q);
    for (k = 0; k < seen; k++) {
        scores[k] = (float)(te__sparse_dot(q, keys + k * a->d, a->d) * (double)a->scale);
        if ((double)scores[k] > top) top = (double)scores[k];
    }
    for (k = 0; k < seen; k++) {
        p = exp((double)scores[k] - top);
        sum += p;
        for (c = 0; c < a->d_v; c++) o[c] += p * (double)keys[k * a->d + c];
    }
    if (sum != 0.0 && sink > top) { /* e^(sink - top) may be more than a double holds */
        p = exp(top - sink);
        for (c = 0; c < a->d_v; c++) o[c] *= p;
        sum = sum * p + 1.0;
        top = sink;
    } else if (sum != 0.0) {
        sum += exp(sink - top);
    }
    te__sparse_store(&a->o, b, h, i, a->d_v, o, sum == 0.0 ? 0.0 : 1.0 / sum);
    if (a->lse) a->lse[(b * a->heads + h) * a->s_q + i] = (float)(sum == 0.0 ? sink : top + log(sum));
}

/* Computes dQ and delta of one head of a query, whose keys are the first `seen` rows of `keys`. */
static void te__sparse_head_bwd(const te__sparse_attn_kargs *a, const float *keys, int64_t seen, int64_t b, int64_t i,
                                int64_t h) {
    const int64_t row = (b * a->heads + h) * a->s_q + i;
    double dq[TE__SPARSE_MAX_D] = TE_ZERO, ds;
    float q[TE__SPARSE_MAX_D], g[TE__SPARSE_MAX_D], o[TE__SPARSE_MAX_D];
    int64_t k;
    int c;
    te__sparse_row(&a->q, b, h, i, a->d, q);
    te__sparse_row(&a->d_o, b, h, i, a->d_v, g);
    te__sparse_row(&a->o, b, h, i, a->d_v, o);
    a->delta[row] = (float)te__sparse_dot(g, o, a->d_v);
    for (k = 0; k < seen && a->lse[row] != -HUGE_VALF; k++) {
        const float *key = keys + k * a->d;
        ds = exp(te__sparse_dot(q, key, a->d) * (double)a->scale - (double)a->lse[row]) *
             (te__sparse_dot(g, key, a->d_v) - (double)a->delta[row]);
        for (c = 0; c < a->d; c++) dq[c] += ds * (double)key[c];
    }
    te__sparse_store(&a->dq, b, h, i, a->d, dq, (double)a->scale);
}

static void te__sparse_queries(void *user, int64_t begin, int64_t end) {
    const te__sparse_work *w = (const te__sparse_work *)user;
    const te__sparse_attn_kargs *a = &w->a;
    const int64_t tasks = (int64_t)a->batch * a->s_q;
    int64_t worker, task, k, h, seen;
    for (worker = begin; worker < end; worker++) {
        float *keys = w->memory + worker * a->n * (a->d + 1), *scores = keys + (int64_t)a->n * a->d;
        for (task = worker; task < tasks; task += w->workers) {
            const int64_t b = task / a->s_q, i = task % a->s_q;
            const int *list = a->indices + task * a->n;
            for (k = 0, seen = 0; k < a->n; k++)
                if (te__sparse_key_of(a, list, k) >= 0)
                    te__sparse_row(&a->kv, b, 0, list[k], a->d, keys + a->d * seen++);
            for (h = 0; h < a->heads; h++) {
                if (w->backward) te__sparse_head_bwd(a, keys, seen, b, i, h);
                else te__sparse_head_fwd(a, keys, seen, scores, b, i, h);
            }
        }
    }
}

static void te__sparse_keys(void *user, int64_t begin, int64_t end) {
    const te__sparse_attn_kargs *a = &((te__sparse_work *)user)->a;
    int64_t task, h;
    int e, c;
    for (task = begin; task < end; task++) {
        const int64_t b = task / a->s_kv, j = task % a->s_kv;
        const int *start = a->start + b * (a->s_kv + 1) + j, *list = a->list + b * a->s_q * a->n;
        double sum[TE__SPARSE_MAX_D] = TE_ZERO;
        float key[TE__SPARSE_MAX_D], q[TE__SPARSE_MAX_D], g[TE__SPARSE_MAX_D];
        te__sparse_row(&a->kv, b, 0, j, a->d, key);
        for (e = start[0]; e < start[1]; e++)
            for (h = 0; h < a->heads; h++) {
                const int64_t row = (b * a->heads + h) * a->s_q + list[e];
                double p, ds;
                if (a->lse[row] == -HUGE_VALF) continue;
                te__sparse_row(&a->q, b, h, list[e], a->d, q);
                te__sparse_row(&a->d_o, b, h, list[e], a->d_v, g);
                p = exp(te__sparse_dot(q, key, a->d) * (double)a->scale - (double)a->lse[row]);
                ds = p * (te__sparse_dot(g, key, a->d_v) - (double)a->delta[row]) * (double)a->scale;
                for (c = 0; c < a->d; c++) sum[c] += ds * (double)q[c];
                for (c = 0; c < a->d_v; c++) sum[c] += p * (double)g[c];
            }
        te__sparse_store(&a->dkv, b, 0, j, a->d, sum, 1.0);
    }
}

/* Writes the fields start and list of te__sparse_attn_kargs: for each key, the list of the queries that read it. */
static void te__sparse_turn(const te__sparse_attn_kargs *a) {
    const int64_t slots = (int64_t)a->s_q * a->n;
    int64_t b, k;
    int j;
    for (b = 0; b < a->batch; b++) {
        const int *from = a->indices + b * slots;
        int *start = a->start + b * (a->s_kv + 1), *list = a->list + b * slots;
        memset(start, 0, (size_t)(a->s_kv + 1) * sizeof(int));
        for (k = 0; k < slots; k++)
            if ((j = te__sparse_key_of(a, from, k)) >= 0) start[j + 1]++;
        for (j = 0; j < a->s_kv; j++) start[j + 1] += start[j];
        for (k = 0; k < slots; k++)
            if ((j = te__sparse_key_of(a, from, k)) >= 0) list[start[j]++] = (int)(k / a->n);
        /* Now start[j] is the end of list j, so it is the start of list j + 1. */
        for (j = a->s_kv; j > 0; j--) start[j] = start[j - 1];
        start[0] = 0;
    }
}

static te_result te__sparse_attn_cpu(te_ctx *te, te__sparse_work *w) {
    size_t bytes;
    w->workers = te__min((int64_t)w->a.batch * w->a.s_q, te__max(1, te->cpu_threads));
    bytes = (size_t)(w->workers * w->a.n * (w->a.d + 1) + 1) * sizeof(float);
    w->memory = (float *)te__alloc(te, bytes);
    if (!w->memory) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, w->workers, 1, te__sparse_queries, w);
    te__free(te, w->memory);
    return TE_OK;
}
static te_result te__cpu_sparse_attn_fwd(te_ctx *te, const te_op_sparse_attn_fwd_args *args) {
    te__sparse_work w = TE_ZERO;
    w.a = te__sparse_attn_problem(args);
    return te__sparse_attn_cpu(te, &w);
}
static te_result te__cpu_sparse_attn_bwd(te_ctx *te, const te_op_sparse_attn_bwd_args *args) {
    te__sparse_work w = TE_ZERO;
    te__sparse_attn_kargs *a = &w.a;
    int64_t rows, starts, slots, b, h, i;
    size_t bytes;
    char *memory;
    te_result r;
    *a = te__sparse_attn_problem_bwd(args);
    w.backward = true;
    rows = (int64_t)a->batch * a->heads * a->s_q;
    starts = (int64_t)a->batch * (a->s_kv + 1);
    slots = (int64_t)a->batch * a->s_q * a->n;
    bytes = (size_t)rows * sizeof(float) + (size_t)(starts + slots + 1) * sizeof(int);
    memory = (char *)te__alloc(te, bytes);
    if (!memory) return TE_ERR_OUT_OF_MEMORY;
    a->delta = (float *)(void *)memory;
    a->start = (int *)(void *)(memory + (size_t)rows * sizeof(float));
    a->list = a->start + starts;
    te__sparse_turn(a);
    r = te__sparse_attn_cpu(te, &w);
    if (r == TE_OK) te__parallel_for(te, (int64_t)a->batch * a->s_kv, 1, te__sparse_keys, &w);
    for (h = 0; r == TE_OK && args->dsinks && h < a->heads; h++) {
        double sum = 0.0;
        for (b = 0; b < a->batch; b++)
            for (i = 0; i < a->s_q; i++) {
                const int64_t row = (b * a->heads + h) * a->s_q + i;
                if (a->lse[row] != -HUGE_VALF)
                    sum -= exp((double)a->sinks[h] - (double)a->lse[row]) * (double)a->delta[row];
            }
        te__f32_data(args->dsinks)[h] = (float)sum;
    }
    te__free(te, memory);
    return r;
}
